"""Any number of layers on any number of stages: the same model as on one."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpipe_jax import PipelineModel, make_mesh, pipeline_value_and_grad
from dualpipe_jax.schedule import dualpipe, one_f_one_b
from models import deepseek, model_loss, num_padding, num_params, share_layers, tiny, v3
from models.sharing import places_of

TINY = dict(dim=16, num_heads=2, q_lora_rank=0, kv_lora_rank=8, dense_hidden=16, expert_hidden=8, vocab=32)
SEQ = 4


def config_of(num_layers):
    experts = dict(num_experts=4, top_k=2, num_groups=1, top_groups=1)
    return tiny(num_layers=1 + num_layers, init_std=0.2, **TINY, **experts)


def batch(*shape):
    return np.random.default_rng(0).integers(0, 32, (2, *shape, SEQ)).astype(np.int32)


@given(st.integers(1, 70), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_shares_add_up_differ_by_one_and_are_smaller_at_the_ends(num_layers, num_stages):
    shares = share_layers(num_layers, num_stages)
    assert len(shares) == num_stages and sum(shares) == num_layers
    assert max(shares) - min(shares) <= 1
    short = [share < max(shares) for share in shares]
    assert short == sorted(short[: -(-num_stages // 2)], reverse=True) + sorted(short[-(-num_stages // 2) :])
    assert 0 <= sum(short[: -(-num_stages // 2)]) - sum(short[num_stages // 2 :]) <= 1
    places = places_of(shares)
    np.testing.assert_array_equal(places[places >= 0], np.arange(num_layers))
    np.testing.assert_array_equal((places >= 0).sum(1), shares)


def test_671_billion_on_16_stages():
    model = deepseek(v3(), 16)
    assert (model.places >= 0).sum(1).tolist() == [3] * 3 + [4] * 10 + [3] * 3
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert params["stages"]["layers"]["mlp"]["gate"].shape[:2] == (16, 4)
    layer = num_params(params["stages"]["layers"]) / 64
    assert num_padding(model) == 6 * layer
    assert abs((num_params(params) - num_padding(model)) / 1e9 - 671.03) < 0.005
    assert num_padding(deepseek(v3(), 29)) == 0


def to_places(params, places):
    """Parameters of one stage, as those of many; the empty places filled with what must not matter."""
    layers, bias = params["stages"]["layers"], params["stages"]["routing"]["bias"]
    moved = jax.tree.map(lambda w: w[0][np.maximum(places, 0)], (layers, bias))
    routing = {"bias": moved[1], "stage": jnp.arange(len(places), dtype=jnp.int32)}
    return params | {"stages": {"layers": moved[0], "routing": routing}}


def from_places(tree, places):
    return jax.tree.map(lambda w: w[places >= 0][None], tree)


@functools.cache
def on_one_stage(num_layers, num_microbatches):
    model = deepseek(config_of(num_layers), 1)
    params = jax.jit(model.init)(jax.random.key(0, impl="rbg"))
    bias = params["stages"]["routing"]["bias"]
    params["stages"]["routing"]["bias"] = jax.random.normal(jax.random.key(1), bias.shape) / 8
    tokens, targets = (tokens.reshape(-1, SEQ) for tokens in batch(num_microbatches, 2))
    loss = functools.partial(model_loss, model.functions)
    run = jax.jit(jax.value_and_grad(loss, has_aux=True, allow_int=True))
    return params, *run(params, tokens, targets)


def same_gradients(grads, wanted, places):
    layers = grads["stages"]["layers"]
    chex.assert_trees_all_close(from_places(layers, places), wanted["stages"]["layers"], rtol=1e-3, atol=1e-5)
    for end in ("embed", "head"):
        chex.assert_trees_all_close(grads[end], wanted[end], rtol=1e-3, atol=1e-5)
    assert not any(np.any(leaf[places < 0]) for leaf in jax.tree.leaves(layers))


CASES = [
    pytest.param(3, 2, None, True, marks=pytest.mark.slow),
    (3, 4, None, None),
    pytest.param(3, 2, (3, 0), False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("num_layers, num_stages, shares, unroll", CASES)
def test_gradients_are_those_of_one_stage(num_layers, num_stages, shares, unroll):
    params, (wanted_loss, wanted_aux), wanted = on_one_stage(num_layers, 1)
    model = deepseek(config_of(num_layers), num_stages, layers_per_stage=shares, unroll=unroll)
    run = jax.jit(
        jax.value_and_grad(functools.partial(model_loss, model.functions), has_aux=True, allow_int=True)
    )
    (loss, aux), grads = run(to_places(params, model.places), *batch(1, 2)[:, 0])
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    same_gradients(grads, wanted, model.places)
    np.testing.assert_array_equal(from_places(aux["counts"], model.places), wanted_aux["counts"])
    assert not np.any(aux["counts"][model.places < 0]) and aux["dropped"] == 0


@pytest.mark.parametrize(
    "schedule, check_vma", [pytest.param(dualpipe, False, marks=pytest.mark.slow), (one_f_one_b, True)]
)
def test_the_engine_runs_stages_of_unequal_depth(schedule, check_vma):
    """In the fused pair too: the layers of an empty place are thrown away, forwards and backwards."""
    params, (wanted_loss, wanted_aux), wanted = on_one_stage(3, 4)
    model = deepseek(config_of(3), 2, ep_axis="ep", dispatch="capacity", unroll=True)
    step = pipeline_value_and_grad(
        PipelineModel(*model.functions),
        schedule(2, 4),
        make_mesh(2, 2),
        param_specs=model.param_specs,
        has_aux=True,
        check_vma=check_vma,
        fuse_pairs=True,
    )
    (loss, aux), grads = jax.jit(step)(to_places(params, model.places), *batch(4, 2))
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    same_gradients(grads, wanted, model.places)
    np.testing.assert_array_equal(from_places(aux["counts"], model.places), wanted_aux["counts"])


def test_init_is_zero_in_empty_places_and_elsewhere_that_of_one_stage():
    config, places, key = config_of(3), places_of((1, 2)), jax.random.key(0, impl="rbg")
    two = jax.jit(lambda key: deepseek(config, 2).init(key)["stages"]["layers"])(key)
    one = on_one_stage(3, 1)[0]["stages"]["layers"]
    chex.assert_trees_all_equal(from_places(two, places), one)
    assert not any(np.any(leaf[places < 0]) for leaf in jax.tree.leaves(two))


@pytest.mark.parametrize(
    "unroll, platform, scanned", [(None, "cpu", 1), (None, "tpu", 0), (False, "gpu", 1), (True, "cpu", 0)]
)
def test_layers_are_scanned_on_cpu_or_where_asked(unroll, platform, scanned):
    model = deepseek(config_of(3), 1, unroll=unroll, platform=platform)
    stage = jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype),
        jax.eval_shape(model.init, jax.random.key(0))["stages"],
    )
    jaxpr = jax.make_jaxpr(model.functions.stage)(stage, jnp.ones((1, SEQ, 16)))
    assert sum(eqn.primitive.name == "scan" and eqn.params["length"] == 3 for eqn in jaxpr.eqns) == scanned


@pytest.mark.parametrize(
    "shares, message",
    [
        ((4, 4), r"its sum is 8, the layers with experts are 5. Equal shares are \(2, 3\)"),
        ((5,), "it names 1 stages of 2"),
        ((6, -1), "fewer than 0 layers"),
    ],
)
def test_shares_that_do_not_add_up_are_refused(shares, message):
    with pytest.raises(ValueError, match=message):
        deepseek(config_of(5), 2, layers_per_stage=shares)
