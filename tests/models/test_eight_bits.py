"""Eight bits in a layer of experts: under the engine as without it, near what more bits give, and split in I and W."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dualpipe_jax import PipelineModel, pipeline_value_and_grad
from dualpipe_jax.functional import pure_nnx
from dualpipe_jax.parallel import make_mesh
from dualpipe_jax.schedule import dualpipe
from dualpipe_jax.split import split_backward
from models.config import tiny
from models.kernels import Kernels
from models.moe import Dispatch, MoE
from tests.engine.models import quick
from tests.engine.plain import plain_value_and_grad
from tests.jaxprs import applied

CONFIG = tiny(dim=16, expert_hidden=8, num_experts=4, top_k=2, num_groups=1, top_groups=1, init_std=0.4)
WIDE = tiny(
    dim=128, expert_hidden=64, num_experts=4, top_k=2, num_groups=1, top_groups=1, num_shared_experts=0, init_std=0.2,
)  # fmt: skip

VOCAB, SEQ, STAGES = 11, 8, 2


def layer(config, dispatch, axis_name=None, eight=True):
    """A layer of experts, with payloads and matmuls in eight bits or without."""
    payload, matmul = ("float8", "float8") if eight else ("plain", "plain")
    tokens = Dispatch(dispatch, axis_name=axis_name, payload=payload)
    pure = pure_nnx(lambda rngs: MoE(config, tokens, rngs, Kernels(matmul=matmul).multiply("cpu")))
    # Far apart, so that rounding does not change the choice.
    bias = 10 * jnp.arange(float(config.num_experts)) % 7
    return pure.init, lambda params, x: pure.apply(params, x, bias)[0]


def floats(tree):
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def model(dispatch, axis_name=None):
    init, apply = layer(CONFIG, dispatch, axis_name)

    def head_loss(kernel, x, targets):
        log_probs = jax.nn.log_softmax(x @ kernel)
        return -jnp.mean(jnp.take_along_axis(log_probs, targets[..., None], -1))

    def normal(*shape):
        return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)

    stages = jax.vmap(init)(jax.random.split(jax.random.key(0), STAGES))
    params = {"embed": normal(VOCAB, CONFIG.dim), "stages": stages, "head": normal(CONFIG.dim, VOCAB)}
    return PipelineModel(lambda table, tokens: table[tokens], lambda p, x: x + apply(p, x), head_loss), params


@pytest.mark.slow
def test_pairs_over_devices_give_what_one_device_does():
    """DualPipe, whose pairs run one microbatch's forward between another's backward; experts over two devices. What
    is rounded together lies on one device in the one case, on two in the other."""
    tokens = jax.random.randint(jax.random.key(1), (2, 4, 2, SEQ), 0, VOCAB)
    alone, params = model("dropless")
    wanted, wanted_grads = jax.device_get(quick(plain_value_and_grad(alone))(params, *tokens))
    specs = {"stages": {name: P() for name in params["stages"]} | {"experts": P("ep")}}
    over, mesh = model("dropless", "ep")[0], make_mesh(2, 2)
    step = pipeline_value_and_grad(over, dualpipe(2, 4), mesh, param_specs=specs)
    loss, grads = jax.device_get(quick(step)(params, *tokens))
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    expected = floats(wanted_grads)
    for name, leaf in floats(grads).items():
        scale = np.abs(expected[name]).max()
        assert scale > 0, name
        np.testing.assert_allclose(leaf, expected[name], rtol=0, atol=2e-6 * scale, err_msg=name)


@pytest.mark.parametrize("dispatch", [pytest.param("capacity", marks=pytest.mark.slow), "dropless"])
def test_gradients_point_where_those_of_more_bits_do(dispatch):
    """Every leaf, and the input: neither sign, nor scale, nor a tile's place may be wrong."""
    rng = np.random.default_rng(0)
    x, target = (jnp.asarray(rng.normal(size=(2, 50, WIDE.dim)) * np.exp(rng.normal(size=(2, 50, 1))), jnp.float32)
                 for _ in range(2))  # fmt: skip

    def gradients(eight):
        init, apply = layer(WIDE, dispatch, eight=eight)
        run = quick(jax.grad(lambda params, x: jnp.sum(apply(params, x) * target), (0, 1)))
        return floats(run(init(jax.random.key(0)), x))

    ours, expected = gradients(True), gradients(False)
    for name, leaf in ours.items():
        size = np.linalg.norm(expected[name])
        cosine = np.vdot(leaf, expected[name]) / (np.linalg.norm(leaf) * size)
        assert 0.99 < cosine < 0.99999, (name, cosine)
        assert 0.97 < np.linalg.norm(leaf) / size < 1.03, name


# ---------------------------------------------------------------------------------------------- split


@functools.cache
def split_plan(dispatch, eight):
    """Of a layer of experts over two devices, in bfloat16."""
    init, apply = layer(WIDE, dispatch, "ep", eight)
    plans = []

    def body(params, x):
        plans.append(split_backward(apply).trace(params, x))
        return x

    whole = jax.eval_shape(init, jax.random.key(0))
    spec = {name: P() for name in whole} | {"experts": P("ep")}
    mesh = make_mesh(1, 2)
    run = jax.shard_map(body, mesh=mesh, in_specs=(spec, P("ep")), out_specs=P("ep"), check_vma=False)
    jax.eval_shape(run, whole, jax.ShapeDtypeStruct((2, 32, WIDE.dim), jnp.bfloat16))
    return plans[0]


def test_weight_gradients_stay_in_w_and_exchanges_in_i():
    ours, plain = split_plan("capacity", True), split_plan("capacity", False)
    for plan, more in ((ours, 0), (plain, 2)):  # weights to experts, and their gradients back
        exchanges = [applied(plan, part)["all_to_all"] for part in ("forward", "input", "weight")]
        assert exchanges == [2, 2 + more, 0]
    assert ours.flops == plain.flops
    rows, tokens = 2 * 2 * 32, 32  # two experts with room for two devices' tokens
    experts = 3 * 2 * rows * WIDE.dim * WIDE.expert_hidden
    assert ours.flops.weight == experts + 2 * tokens * WIDE.dim * WIDE.num_experts
    walked = split_plan("dropless", True)
    assert walked.flops == split_plan("dropless", False).flops
    assert [applied(walked, part)["all_to_all"] for part in ("forward", "input", "weight")] == [3, 2, 0]
    assert applied(walked, "weight")["while"] == applied(walked, "input")["while"] > 0


@pytest.mark.parametrize("dispatch", ["capacity", "dropless"])
def test_what_waits_for_the_weights_gradients_waits_in_eight_bits(dispatch):
    """Inputs of the three matmuls, of which two have the same, and gradients of their outputs."""
    rows = 2 * 2 * 32
    numbers = rows * (WIDE.dim + WIDE.expert_hidden) + rows * (WIDE.dim + 2 * WIDE.expert_hidden)

    def waiting(plan):
        kinds = (*plan.residuals_w, *plan.stash)
        large = [kind for kind in kinds if kind.size >= rows * WIDE.expert_hidden]
        return sum(kind.size * kind.dtype.itemsize for kind in large), {kind.dtype for kind in large}

    ours, plain = waiting(split_plan(dispatch, True)), waiting(split_plan(dispatch, False))
    assert ours == (numbers, {jnp.dtype(jnp.float8_e4m3fn)})
    assert plain == (2 * numbers, {jnp.dtype(jnp.bfloat16)})
