"""The router, the experts and the balancing bias, against loops over tokens."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax.functional import pure_nnx
from models.config import tiny
from models.moe import Dispatch, MoE, gated, route, update_bias
from tests.jaxprs import named

CONFIGS = {
    "v3": tiny(),
    "one group": tiny(num_groups=1, top_groups=1),
    "groups of two": tiny(num_groups=8, top_groups=3),
    "v2": tiny(score="softmax", normalize_top_k=False, routed_scale=16.0),
    "v2, one group": tiny(score="softmax", num_groups=1, top_groups=1, num_experts=6),
}


def route_by_loops(scores_TE, bias_E, config):
    """Token by token; of equal scores the lower index wins."""
    experts, weights = [], []
    size = config.num_experts // config.num_groups
    for scores in scores_TE:
        biased = scores + bias_E
        groups = biased.reshape(config.num_groups, size)
        best = np.sort(groups, axis=1)[:, ::-1]
        group_score = best[:, 0] + best[:, 1] if config.score == "sigmoid" else best[:, 0]
        kept = sorted(range(config.num_groups), key=lambda g: (-group_score[g], g))[: config.top_groups]
        allowed = [e for e in range(config.num_experts) if e // size in kept]
        chosen = sorted(allowed, key=lambda e: (-biased[e], e))[: config.top_k]
        weight = scores[chosen].astype(np.float64)
        if config.normalize_top_k:
            weight = weight / (weight.sum() + 1e-20)
        experts.append(chosen)
        weights.append(weight * config.routed_scale)
    return np.array(experts), np.array(weights)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_route_equals_a_loop_over_tokens(name):
    """Coarse logits tie often; with a bias of -3 every score is negative, so a mask of 0 would win."""
    config, rng = CONFIGS[name], np.random.default_rng(0)
    run = jax.jit(functools.partial(route, config=config))
    score = jax.jit(jax.nn.sigmoid if config.score == "sigmoid" else jax.nn.softmax)
    for step, shift in itertools.product((0.0, 0.5, 2.0), (-3.0, 0.0, 1.0)):
        logits = rng.normal(size=(20, config.num_experts)) * 2
        logits = (np.round(logits / step) * step if step else logits).astype(np.float32)
        bias = (shift + np.round(rng.normal(size=config.num_experts))).astype(np.float32)
        topk, weights = run(logits, bias)
        # By JAX too, or sums of groups would tie in the one and not in the other.
        scores = np.asarray(score(logits))
        wanted_topk, wanted_weights = route_by_loops(scores, bias, config)
        # Two programs may round a score differently: nearly equal experts may change places.
        chosen, wanted = (
            np.take_along_axis(scores + bias, np.asarray(k), axis=1) for k in (topk, wanted_topk)
        )
        gap = np.abs(chosen - wanted)[topk != wanted_topk]
        assert (gap < 1e-6).all(), (step, shift, topk, wanted_topk)
        np.testing.assert_allclose(weights, wanted_weights, rtol=1e-5, err_msg=f"{step} {shift}")
        assert (topk.dtype, weights.dtype) == (jnp.int32, jnp.float32)
    topk, _ = run(np.zeros((2, config.num_experts), np.float32), np.zeros(config.num_experts, np.float32))
    np.testing.assert_array_equal(topk, [range(config.top_k)] * 2, err_msg="of equal scores the lower index")


def test_the_bias_chooses_but_does_not_weigh():
    config = CONFIGS["one group"]
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(5, 16)), jnp.float32)
    bias = jnp.zeros(16).at[3].set(10.0)
    topk, weights = route(logits, bias, config)
    assert np.all(topk[:, 0] == 3)
    scores = np.asarray(jax.nn.sigmoid(logits))
    chosen = np.take_along_axis(scores, np.asarray(topk), axis=1)
    np.testing.assert_allclose(weights, 2.5 * chosen / chosen.sum(1, keepdims=True), rtol=1e-5)
    d_logits, d_bias = jax.grad(lambda *a: jnp.sum(route(*a, config)[1][:, 0]), argnums=(0, 1))(logits, bias)
    np.testing.assert_array_equal(d_bias, 0)
    assert np.all(np.count_nonzero(d_logits, axis=1) == config.top_k)


def test_gated_is_silu_times_up_and_keeps_two_arrays():
    gate, up = jax.random.normal(jax.random.key(3), (2, 6, 5)) * 3
    d = jnp.cos(jnp.arange(30.0)).reshape(6, 5)
    wanted, vjp = jax.vjp(lambda g, u: jax.nn.silu(g) * u, gate, up)
    got, our_vjp = jax.vjp(gated, gate, up)
    chex.assert_trees_all_close((got, our_vjp(d)), (wanted, vjp(d)), rtol=1e-5, atol=1e-6)
    assert sum(leaf.size for leaf in jax.tree.leaves(our_vjp)) == gate.size + up.size


def moe_by_loops(p, x_BSD, bias_E, config):
    """Each expert in turn, on every token, counted where it was chosen."""
    x = x_BSD.reshape(-1, x_BSD.shape[-1])
    topk, weights = route(x @ p["gate"], bias_E, config)

    def swiglu(x, gate, up, down):
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down

    shared = [p["shared_experts"][name]["kernel"] for name in ("gate_proj", "up_proj", "down_proj")]
    out = swiglu(x, *shared)
    for e in range(config.num_experts):
        gate_up, down = p["experts"]["gate_up_proj"][e], p["experts"]["down_proj"][e]
        y = swiglu(x, *jnp.split(gate_up, 2, axis=-1), down)
        out = out + jnp.where(topk == e, weights, 0).sum(1, keepdims=True) * y
    return out.reshape(x_BSD.shape)


SMALL = tiny(dim=16, expert_hidden=8, num_experts=8, top_k=3, init_std=0.4)


@pytest.mark.parametrize("dispatch", [Dispatch("capacity"), Dispatch("dropless")])
def test_moe_equals_a_loop_over_experts_gradients_too(dispatch):
    pure = pure_nnx(lambda rngs: MoE(SMALL, dispatch, rngs))
    params = pure.init(jax.random.key(0))
    rng = np.random.default_rng(1)
    x, target = (jnp.asarray(rng.normal(size=(2, 9, SMALL.dim)), jnp.float32) for _ in range(2))
    bias = jnp.asarray(rng.normal(size=8) / 4, jnp.float32)

    def loss(params, x, bias):
        y, (counts, dropped, *_) = pure.apply(params, x, bias)
        return jnp.sum(y * target), (y, counts, dropped)

    def loss_by_loops(params, x, bias):
        y = moe_by_loops(params, x, bias, SMALL)
        return jnp.sum(y * target), y

    ours, loops = (jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True)) for f in (loss, loss_by_loops))
    (_, (y, counts, dropped)), grads = ours(params, x, bias)
    (_, wanted_y), wanted = loops(params, x, bias)
    np.testing.assert_allclose(y, wanted_y, rtol=1e-4, atol=1e-4)
    chex.assert_trees_all_close(grads, wanted, rtol=1e-4, atol=2e-4)
    topk, _ = route(x.reshape(-1, SMALL.dim) @ params["gate"], bias, SMALL)
    np.testing.assert_array_equal(counts, np.bincount(np.asarray(topk).ravel(), minlength=8))
    assert int(dropped) == 0 and counts.dtype == jnp.int32


def test_gradients_in_bfloat16_follow_those_in_float32():
    rng = np.random.default_rng(5)
    x, target = (jnp.asarray(rng.normal(size=(2, 9, SMALL.dim)), jnp.float32) for _ in range(2))
    bias = 10 * jnp.arange(8.0)  # far apart, so that rounding does not change the choice

    def gradients(dtype):
        config = dataclasses.replace(SMALL, compute_dtype=dtype)
        pure = pure_nnx(lambda rngs: MoE(config, Dispatch(), rngs))

        def loss(params, x):
            y, _ = pure.apply(params, x.astype(dtype), bias)
            assert y.dtype == dtype
            return jnp.sum(y.astype(jnp.float32) * target)

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(pure.init(jax.random.key(0)), x)

    got, wanted = map(jax.tree.leaves, (gradients(jnp.bfloat16), gradients(jnp.float32)))
    for g, w in zip(got, wanted, strict=True):
        assert g.dtype == jnp.float32
        assert np.linalg.norm(g - w) < 0.03 * np.linalg.norm(w)


def test_the_router_multiplies_at_the_highest_precision():
    """Else TPUs multiply float32 in bfloat16 and GPUs in TF32, and tokens change experts. Backward too."""
    config = dataclasses.replace(SMALL, num_experts=7, num_groups=1, top_groups=1)
    pure = pure_nnx(lambda rngs: MoE(config, Dispatch(), rngs))

    def loss(params, x):
        return jnp.sum(pure.apply(params, x, jnp.zeros(7))[0])

    shapes = jax.eval_shape(pure.init, jax.random.key(0)), jax.ShapeDtypeStruct((1, 5, 16), jnp.float32)
    found = {}
    for eqn in named(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*shapes).jaxpr, "dot_general"):
        sides = {tuple(sorted(v.aval.shape)) for v in (*eqn.invars, *eqn.outvars)}
        if sides == {(5, 16), (7, 16), (5, 7)}:
            found[eqn.outvars[0].aval.shape] = eqn.params["precision"]
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert len(found) == 3 and set(found.values()) == {highest}  # logits, gradients of x and of the gate


@pytest.mark.parametrize("method, most", [("capacity", 6), ("dropless", 48)])
def test_drops_are_reported_and_counts_are_not_reduced_by_them(method, most):
    """Half of an even load: of 96 choices over 8 experts, 6 for each of them, or 48 for the one device."""
    pure = pure_nnx(lambda rngs: MoE(SMALL, Dispatch(method, 0.5), rngs))
    x = jax.random.normal(jax.random.key(1), (2, 16, SMALL.dim))
    _, (counts, dropped, *_) = jax.jit(pure.apply)(
        pure.init(jax.random.key(0)), x, jnp.linspace(-0.3, 0.3, 8)
    )
    assert int(counts.sum()) == 32 * SMALL.top_k == 96 and counts.min() < 6
    found = np.maximum(counts - most, 0).sum() if method == "capacity" else counts.sum() - most
    assert int(dropped) == found


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_balance_is_the_papers_of_a_sequences_live_tokens(score):
    """Equations 17 to 20; the bias has no part in it, and a sequence without tokens none."""
    config = dataclasses.replace(SMALL, score=score, normalize_top_k=score == "sigmoid")
    pure = pure_nnx(lambda rngs: MoE(config, Dispatch(), rngs))
    params, rng = pure.init(jax.random.key(0)), np.random.default_rng(6)
    x = rng.normal(size=(3, 9, SMALL.dim)).astype(np.float32)
    live = np.arange(9) < np.asarray([[9], [4], [0]])
    _, load = jax.jit(pure.apply)(params, x, rng.normal(size=8).astype(np.float32), live)
    logits = x.astype(np.float64) @ np.asarray(params["gate"], np.float64)
    scores = 1 / (1 + np.exp(-logits)) if score == "sigmoid" else np.exp(logits)
    shares = scores / scores.sum(-1, keepdims=True)
    for b, number in enumerate(live.sum(1)):
        best = np.argsort(-scores[b, :number], axis=-1)[:, : config.top_k]
        often = np.bincount(best.ravel(), minlength=8) * 8 / config.top_k / max(number, 1)
        wanted = np.sum(often * shares[b, :number].sum(0) / max(number, 1))
        np.testing.assert_allclose(load.balance[b], wanted, rtol=1e-5, err_msg=b)


@pytest.mark.parametrize("center", [False, True])
def test_update_bias_moves_against_the_load(center):
    bias = np.asarray([[0.1, 0.2, 0.3, 0.4]] * 3, np.float32)
    counts = np.asarray([[10, 0, 4, 6], [5, 5, 5, 5], [9, 1, 1, 1]], np.int32)
    step = np.asarray(update_bias(bias, counts, 0.01, center=center)) - bias
    wanted = np.array([[-1, 1, 1, -1], [0, 0, 0, 0], [-1, 1, 1, 1]]) * 0.01
    wanted[2] -= 0.005 if center else 0
    np.testing.assert_allclose(step, wanted, atol=1e-7)


def test_update_bias_takes_exact_signs_of_large_counts():
    """Counts times experts would overflow int32; as floats, counts that differ by one would be equal."""
    rng = np.random.default_rng(0)
    counts = np.concatenate(
        [rng.integers(0, 500_000_000, (50, 4)), 499_999_998 + rng.integers(0, 3, (50, 4))]
    )
    step = update_bias(np.zeros((100, 4), np.float32), jnp.asarray(counts, jnp.int32), 1.0)
    np.testing.assert_array_equal(step, np.sign(counts.sum(1, keepdims=True) - 4 * counts))


def test_repeated_updates_balance_the_load():
    config = CONFIGS["one group"]
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.normal(size=(2048, 16)) + np.linspace(-1, 1, 16), jnp.float32)

    @jax.jit
    def step(bias):
        counts = jnp.bincount(route(logits, bias, config)[0].reshape(-1), length=16)
        return update_bias(bias, counts, 0.01), jnp.max(counts / counts.sum()) * 16

    bias, first = step(jnp.zeros(16))
    for _ in range(100):
        bias, last = step(bias)
    assert first > 1.7 and last < 1.1


def test_errors():
    with pytest.raises(TypeError, match="counts must be integers, got float32"):
        update_bias(jnp.zeros(4), jnp.ones(4), 0.1)
    with pytest.raises(ValueError, match="method='ragged' .*'capacity', 'dropless'"):
        Dispatch("ragged")
    for factor in (0, np.inf, np.nan):
        with pytest.raises(ValueError, match=f"factor must be positive and finite, or None, got {factor}"):
            Dispatch("capacity", factor)
