"""DeepSeek's model: its size, its stages, its experts on several devices, its routing state."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dualpipe_jax.parallel import make_mesh
from models import deepseek, model_loss, moe_67b, num_params, small, tiny, update_routing, v2, v2_lite, v3
from models.functional import unstack
from models.transformer import cross_entropy

CONFIG = tiny(
    dim=32,
    num_layers=5,
    num_heads=2,
    dense_hidden=48,
    expert_hidden=16,
    num_experts=8,
    top_k=3,
    vocab=64,
    init_std=0.1,
)
BATCH, SEQ = 8, 6
TOKENS, TARGETS = np.random.default_rng(0).integers(0, 64, (2, BATCH, SEQ)).astype(np.int32)


@functools.cache
def made_once():
    params = jax.jit(deepseek(CONFIG, 4).init)(jax.random.key(0, impl="rbg"))  # compiles twice as fast
    # Biases that matter.
    params["stages"]["routing"]["bias"] = jax.random.normal(jax.random.key(1), (4, 1, 8)) / 8
    return params


def init_params(num_stages=4):
    """Parameters of CONFIG for so many stages: the same weights in all."""
    stages = made_once()["stages"]
    layers, bias = jax.tree.map(
        lambda w: w.reshape(num_stages, -1, *w.shape[2:]), (stages["layers"], stages["routing"]["bias"])
    )
    routing = {"bias": bias, "stage": jnp.arange(num_stages, dtype=jnp.int32)}
    return made_once() | {"stages": {"layers": layers, "routing": routing}}


@functools.cache
def compiled(num_stages, config, **options):
    model = deepseek(config, num_stages, **options)

    def loss(params):
        return model_loss(model.functions, params, TOKENS, TARGETS)

    return model, jax.jit(jax.value_and_grad(loss, has_aux=True, allow_int=True))


@functools.cache
def value_and_grad(num_stages=4, config=CONFIG, **options):
    _, run = compiled(num_stages, config, **options)
    return run(init_params(num_stages))


def without_routing(tree):
    """The parameters, or gradients, that an optimizer sees."""
    return tree | {"stages": {"layers": tree["stages"]["layers"]}}


@pytest.mark.parametrize(
    "config, billions, tolerance",
    [
        (v3(), 671.03, 0.005),
        (v2(), 235.7, 0.05),
        (v2_lite(), 15.71, 0.005),
        (moe_67b(), 67, 0.7),
        (small(), 0.0199, 5e-5),
    ],
)
def test_parameter_counts_are_the_published_ones(config, billions, tolerance):
    model = deepseek(config, 1)
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert abs(num_params(params) / 1e9 - billions) <= tolerance


def test_2_of_67_billion_parameters_are_active():
    config = moe_67b()
    experts = jax.eval_shape(deepseek(config, 8).init, jax.random.key(0))
    total, routed = num_params(experts), num_params(experts["stages"]["layers"]["mlp"]["experts"])
    active = total - routed * (1 - config.top_k / config.num_experts)
    assert abs(active / 1e9 - 2) < 0.05


def test_v3_layers_have_the_published_sizes():
    layers = jax.eval_shape(deepseek(v3(), 29).init, jax.random.key(0))["stages"]["layers"]
    assert layers["mlp"]["experts"]["gate_proj"].shape == (29, 2, 256, 7168, 2048)
    attention, experts = (num_params(layers[name]) / 58 for name in ("self_attn", "mlp"))
    assert round(attention / 1e6, 1) == 187.1 and round(experts / 1e9, 2) == 11.32
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(layers))


@pytest.mark.parametrize("name", ["gate", "experts"])
def test_init_makes_the_same_weights_for_every_number_of_stages(name):
    def weights(num_stages):
        init = deepseek(CONFIG, num_stages).init
        made = jax.jit(lambda key: init(key)["stages"]["layers"]["mlp"][name])(jax.random.key(0))
        return made["gate_proj"] if name == "experts" else made

    one, four = weights(1), weights(4)
    assert one.shape[:2] == (1, 4) and four.shape[:2] == (4, 1)
    np.testing.assert_array_equal(one.reshape(four.shape), four)
    np.testing.assert_allclose(one.std(), CONFIG.init_std, rtol=0.05)


def test_init_starts_norms_at_one_and_routing_at_zero():
    init = deepseek(CONFIG, 2).init

    def picked(key):
        params = init(key)
        return params["stages"]["routing"], params["stages"]["layers"]["input_layernorm"]["weight"]

    routing, norm = jax.jit(picked)(jax.random.key(0))
    np.testing.assert_array_equal(routing["bias"], np.zeros((2, 2, 8)))
    np.testing.assert_array_equal(routing["stage"], [0, 1])
    np.testing.assert_array_equal(norm, np.ones((2, 2, CONFIG.dim)))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_number_of_stages_changes_nothing(num_stages):
    """Layers scanned (one stage of four), unrolled (two of two) and single ones: the same weights."""
    model = deepseek(CONFIG, num_stages)
    loss, aux = jax.jit(lambda p: model_loss(model.functions, p, TOKENS, TARGETS))(init_params(num_stages))
    (wanted_loss, wanted_aux), _ = value_and_grad()
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    np.testing.assert_array_equal(aux["counts"].reshape(4, 8), wanted_aux["counts"].reshape(4, 8))


def test_neither_scanning_nor_remat_changes_gradients_or_counts():
    """Counts of a rematerialised layer are an output, so nothing is counted twice."""
    (loss, aux), grads = value_and_grad(1, remat=jax.checkpoint_policies.nothing_saveable)
    (wanted_loss, wanted_aux), wanted = value_and_grad()
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    np.testing.assert_array_equal(aux["counts"].reshape(4, 8), wanted_aux["counts"].reshape(4, 8))
    grads, wanted = (
        without_routing(g)
        | {"stages": jax.tree.map(lambda a: a.reshape(4, *a.shape[2:]), g["stages"]["layers"])}
        for g in (grads, wanted)
    )
    chex.assert_trees_all_close(grads, wanted, rtol=1e-3, atol=1e-5)


def test_gradients_against_finite_differences():
    _, run = compiled(4, CONFIG)
    params = init_params()
    # Far apart, the biases alone choose: no small step changes the choice.
    bias = params["stages"]["routing"]["bias"]
    params["stages"]["routing"]["bias"] = jnp.broadcast_to(10 * jnp.arange(8.0), bias.shape)
    grads = without_routing(run(params)[1])
    norm = np.sqrt(sum(float(jnp.vdot(g, g)) for g in jax.tree.leaves(grads)))
    eps = 1e-3

    def moved(sign):
        new = jax.tree.map(lambda p, g: p + sign * eps / norm * g, without_routing(params), grads)
        new["stages"]["routing"] = params["stages"]["routing"]
        return float(run(new)[0][0])

    np.testing.assert_allclose((moved(1) - moved(-1)) / (2 * eps), norm, rtol=1e-2)


def test_aux_has_every_stages_counts_in_its_own_row():
    model = deepseek(CONFIG, 2)
    params = init_params(2)
    x = jax.random.normal(jax.random.key(2), (2, SEQ, CONFIG.dim))
    for stage, own in enumerate(unstack(params["stages"])):
        x, aux = jax.jit(model.functions.stage)(own, x)
        assert aux["counts"].shape == (2, 2, 8) and aux["counts"].dtype == jnp.int32
        np.testing.assert_array_equal(aux["counts"].sum(-1)[stage], 2 * SEQ * CONFIG.top_k)
        assert not np.any(aux["counts"][1 - stage])
        assert aux["dropped"].shape == () and aux["dropped"].dtype == jnp.int32


def test_saving_what_was_dispatched_spares_the_recomputation_its_exchange():
    def exchanges(policy):
        model = deepseek(CONFIG, 4, ep_axis="ep", remat=policy, dispatch="capacity")
        params = jax.eval_shape(model.init, jax.random.key(0))
        stage = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["stages"])
        x = jax.ShapeDtypeStruct((BATCH, SEQ, CONFIG.dim), jnp.float32)
        specs = (model.param_specs["stages"], P("ep"))
        grad = jax.grad(lambda p, x: jnp.sum(model.functions.stage(p, x)[0]), argnums=1)
        run = jax.shard_map(grad, mesh=make_mesh(1, 2), in_specs=specs, out_specs=P("ep"), check_vma=False)
        return str(jax.make_jaxpr(run)(stage, x)).count("all_to_all[")

    policies = jax.checkpoint_policies
    assert exchanges(policies.everything_saveable) == 4
    assert exchanges(policies.nothing_saveable) == 6
    assert exchanges(policies.save_only_these_names("dispatched")) == 5


@pytest.mark.parametrize("num_ep, dispatch, check_vma", [(2, "capacity", False), (4, "dropless", True)])
def test_gradients_are_the_same_however_many_devices_share_the_experts(num_ep, dispatch, check_vma):
    model = deepseek(CONFIG, 4, ep_axis="ep", dispatch=dispatch)
    params = init_params()
    specs = with_stage_dim(model.param_specs)

    def local(params, tokens, targets):
        # Each device: experts E / N, tokens [BATCH / N, SEQ]; the loss is the mean over its own tokens.
        def loss(params):
            value, aux = model_loss(model.functions, params, tokens, targets)
            return value / num_ep, aux

        (value, aux), grads = jax.value_and_grad(loss, has_aux=True, allow_int=True)(params)
        grads = without_routing(grads)
        if not check_vma:  # else the casts of unvarying parameters have done it
            grads = jax.tree.map(lambda g, s: g if "ep" in s else jax.lax.psum(g, "ep"), grads, own_specs)
        return jax.lax.psum(value, "ep"), jax.lax.psum(aux, "ep"), grads

    own_specs = without_routing(specs)
    run = jax.shard_map(
        local,
        mesh=make_mesh(1, num_ep),
        in_specs=(specs, P("ep"), P("ep")),
        out_specs=(P(), P(), own_specs),
        check_vma=check_vma,
    )
    loss, aux, grads = jax.jit(run)(params, TOKENS, TARGETS)
    (wanted_loss, wanted_aux), wanted = value_and_grad(4)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    chex.assert_trees_all_equal(aux, wanted_aux)
    chex.assert_trees_all_close(grads, without_routing(wanted), rtol=1e-3, atol=1e-5)


def with_stage_dim(specs):
    stages = jax.tree.map(lambda spec: P(None, *spec), specs["stages"], is_leaf=lambda s: isinstance(s, P))
    return specs | {"stages": stages}


def test_only_experts_are_sharded():
    specs = deepseek(CONFIG, 4, ep_axis="ep").param_specs
    flat = jax.tree_util.tree_flatten_with_path(specs, is_leaf=lambda s: isinstance(s, P))[0]
    sharded = {jax.tree_util.keystr(path): spec for path, spec in flat if spec != P()}
    assert sharded == {
        f"['stages']['layers']['mlp']['experts']['{name}_proj']": P(None, "ep")
        for name in ("gate", "up", "down")
    }
    alone = jax.tree.leaves(deepseek(CONFIG, 4).param_specs, is_leaf=lambda s: isinstance(s, P))
    assert all(spec == P() for spec in alone)


def test_bfloat16_compute_follows_float32_and_keeps_parameters_wide():
    model, run = compiled(4, dataclasses.replace(CONFIG, compute_dtype=jnp.bfloat16))
    params = init_params()
    loss, _ = jax.jit(lambda p: model_loss(model.functions, p, TOKENS, TARGETS))(params)
    (wanted, _), wanted_grads = value_and_grad()
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, wanted, rtol=1e-2)
    chex.assert_trees_all_equal_dtypes(jax.eval_shape(run, params)[1], wanted_grads)


def test_update_routing_moves_only_the_biases():
    params = init_params()
    (_, aux), grads = value_and_grad()
    routing = grads["stages"]["routing"]
    assert not np.any(routing["bias"]) and routing["stage"].dtype == jax.dtypes.float0
    new = update_routing(params, aux, 0.5)
    step = np.asarray(new["stages"]["routing"]["bias"] - params["stages"]["routing"]["bias"])
    counts = np.asarray(aux["counts"])
    np.testing.assert_allclose(step, 0.5 * np.sign(counts.mean(-1, keepdims=True) - counts), atol=1e-6)
    new["stages"]["routing"]["bias"] = params["stages"]["routing"]["bias"]
    chex.assert_trees_all_equal(new, params)
    centred = update_routing(params, aux, 0.5, center=True)["stages"]["routing"]["bias"]
    moved = centred - params["stages"]["routing"]["bias"]
    np.testing.assert_allclose(moved.sum(-1), 0, atol=1e-5)


def test_cross_entropy_is_in_nats_per_token():
    logits = np.random.default_rng(4).normal(size=(2, 3, 5)).astype(np.float32)
    targets = np.array([[0, 1, 2], [3, 4, 0]], np.int32)
    exp = np.exp(logits)
    wanted = -np.mean(
        [np.log(exp[b, s, targets[b, s]] / exp[b, s].sum()) for b in range(2) for s in range(3)]
    )
    np.testing.assert_allclose(cross_entropy(jnp.asarray(logits), targets), wanted, rtol=1e-6)
    np.testing.assert_allclose(
        cross_entropy(jnp.zeros((1, 4, 32)), np.zeros((1, 4), int)), np.log(32), rtol=1e-6
    )


def test_stages_without_a_layer_to_share_are_refused():
    with pytest.raises(ValueError, match="leave 0 with experts for 1 stages; at least one of each"):
        deepseek(tiny(num_layers=1), 1)
    with pytest.raises(ValueError, match="8 with experts for 0 stages"):
        deepseek(tiny(), 0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_groups": 5}, "num_experts 16 does not divide into num_groups 5"),
        ({"top_groups": 9}, "top_groups 9 must lie between 1 and num_groups 4"),
        ({"top_k": 9}, "top_k 9 must lie between 1 and the 8 experts that top_groups leaves"),
        ({"qk_rope_dim": 7, "num_dense_layers": 10}, "num_dense_layers 10 .*; qk_rope_dim 7 must be even"),
        ({"score": "tanh"}, "score 'tanh' must be"),
        ({"num_groups": 0}, "num_groups is 0, must be at least 1"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changes)
