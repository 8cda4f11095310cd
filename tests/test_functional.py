"""Anyone's modules as a pipeline's plain functions."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from dualpipe_jax.functional import Functions, from_linen, from_nnx, num_params, pure_nnx

VOCAB, DIM = 11, 8
TOKENS = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)


class Stage(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(DIM, DIM, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x, {"seen": jnp.int32(x.shape[0])}


class Head(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, x, targets):
        return loss_of(self.out(x), targets)


def loss_of(logits, targets):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1))


class LinenStage(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + jnp.tanh(linen.Dense(DIM)(x))


def nnx_case(num_stages=3):
    return from_nnx(lambda rngs: nnx.Embed(VOCAB, DIM, rngs=rngs), Stage, Head, num_stages)


def linen_case(num_stages=3, stage=None):
    spec = jax.ShapeDtypeStruct(TOKENS.shape, TOKENS.dtype)
    parts = linen.Embed(VOCAB, DIM), stage or LinenStage(), linen.Dense(VOCAB)
    return from_linen(*parts, num_stages, spec, spec, loss=loss_of)


@pytest.mark.parametrize("case", [nnx_case, linen_case])
def test_stages_are_stacked_and_differ(case):
    functions, init = case()
    params = init(jax.random.key(0))
    assert isinstance(functions, Functions) and set(params) == {"embed", "stages", "head"}
    for leaf in jax.tree.leaves(params["stages"]):
        assert leaf.shape[0] == 3
        if leaf.ndim > 2:
            assert not np.allclose(leaf[0], leaf[1])
    assert all(type(leaf) is not nnx.Param for leaf in jax.tree.leaves(params))
    chex.assert_trees_all_equal_shapes_and_dtypes(params, jax.eval_shape(init, jax.random.key(0)))


@pytest.mark.parametrize("case", [nnx_case, linen_case])
def test_the_whole_model_has_gradients_everywhere(case):
    functions, init = case()
    params = init(jax.random.key(0))

    def loss(params):
        def stage(x, own):
            out = functions.stage(own, x)
            return out if isinstance(out, tuple) else (out, None)

        x, aux = jax.lax.scan(stage, functions.embed(params["embed"], TOKENS), params["stages"])
        return functions.head_loss(params["head"], x, TOKENS + 1), jax.tree.map(jnp.sum, aux)

    (value, aux), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert value.shape == () and 1 < value < 4
    chex.assert_trees_all_equal_shapes_and_dtypes(grads, params)
    assert all(np.any(np.asarray(g)) for g in jax.tree.leaves(grads))
    assert aux is None if case is linen_case else int(aux["seen"]) == 3 * 2


def test_nnx_functions_equal_the_modules():
    functions, init = nnx_case(1)
    params = init(jax.random.key(0))
    stage = Stage(nnx.Rngs(1))
    nnx.update(stage, nnx.State(jax.tree.map(lambda a: a[0], params["stages"])))
    x = jnp.ones((2, DIM))
    np.testing.assert_array_equal(
        functions.stage(jax.tree.map(lambda p: p[0], params["stages"]), x)[0], stage(x)[0]
    )


def test_num_params_counts_floats_of_shapes_and_arrays():
    params = {"w": jnp.ones((3, 4)), "index": jnp.arange(7), "low": jnp.ones(2, jnp.bfloat16)}
    assert num_params(params) == num_params(jax.eval_shape(lambda: params)) == 14


def test_modules_that_remember_are_refused():
    with pytest.raises(ValueError, match=r"module also holds mean: BatchStat, var: BatchStat\. Pass such"):
        pure_nnx(lambda rngs: nnx.BatchNorm(4, rngs=rngs))
    _, init = linen_case(stage=linen.BatchNorm(use_running_average=False))
    with pytest.raises(ValueError, match=r"BatchNorm has collections \['batch_stats'\] beside 'params'"):
        init(jax.random.key(0))


def test_no_stages_is_refused():
    with pytest.raises(ValueError, match="num_stages must be at least 1, got 0"):
        nnx_case(0)


def test_dropout_without_a_key_is_refused_unless_asked_for():
    """It would train without dropout, and say nothing."""

    class Layer(nnx.Module):
        def __init__(self, rngs, rate):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.parts = nnx.List([nnx.Dropout(rate, rngs=rngs)])

        def __call__(self, x):
            return self.parts[0](self.linear(x))

    key, x = jax.random.key(0), jnp.ones((2, 4))
    live = pure_nnx(lambda rngs: Layer(rngs, 0.5))
    params = live.init(key)
    with pytest.raises(
        ValueError, match=r"has dropout \(parts.0.rate=0.5\) but was given no key.*apply\(params, x, key="
    ):
        jax.eval_shape(live.apply, params, x)
    assert np.any(live.apply(params, x, key=key) == 0)  # some of it is dropped
    for quiet in (
        pure_nnx(lambda rngs: Layer(rngs, 0.5), evaluate=True),
        pure_nnx(lambda rngs: Layer(rngs, 0.0)),
    ):
        np.testing.assert_allclose(quiet.apply(params, x), x @ params["linear"]["kernel"], rtol=1e-6)

    def attention(rngs):
        return nnx.MultiHeadAttention(2, 4, dropout_rate=0.1, decode=False, rngs=rngs)

    ends = [lambda rngs: nnx.Linear(4, 4, rngs=rngs)] * 2
    functions, init = from_nnx(ends[0], attention, ends[1], 1, jnp.subtract)
    with pytest.raises(ValueError, match=r"has dropout \(dropout_rate=0.1\)"):
        jax.eval_shape(
            lambda key: functions.stage(jax.tree.map(lambda leaf: leaf[0], init(key)["stages"]), x), key
        )
