"""Eight bits in the model: under the engine as without it, near what more bits give, and split in I and W."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dualpipe_jax import Pipeline
from dualpipe_jax.engine.reference import reference_value_and_grad
from dualpipe_jax.functional import pure_nnx
from dualpipe_jax.parallel import Payload, make_mesh
from dualpipe_jax.schedule import dualpipe
from dualpipe_jax.split import split_backward
from models.config import tiny
from models.kernels import Kernels
from models.moe import Dispatch, MoE
from models.transformer import deepseek

CONFIG = tiny(
    dim=16,
    num_layers=2,
    num_heads=2,
    q_lora_rank=0,
    kv_lora_rank=8,
    dense_hidden=16,
    expert_hidden=8,
    num_experts=4,
    top_k=2,
    num_groups=1,
    top_groups=1,
    vocab=32,
    init_std=0.3,
)
EIGHT = {"payload": "float8", "kernels": Kernels(matmul="float8")}


def quick(function):
    """Compiled in half the time."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def batch():
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab, (2, 4, 2, 8)).astype(np.int32)
    return {"inputs": tokens[0], "targets": tokens[1]}


@functools.cache
def plain_gradients(dispatch, eight):
    """Of the model in one piece; what eight bits round together lies on one device."""
    model = deepseek(CONFIG, (1, 1), dispatch=dispatch, **(EIGHT if eight else {}))
    step = quick(reference_value_and_grad(model.staged))
    return jax.device_get(step(model.init(jax.random.key(0)), batch()))


def floats(tree):
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if leaf.dtype != jax.dtypes.float0
    }


@pytest.mark.parametrize("dispatch", ["dropless", pytest.param("capacity", marks=pytest.mark.slow)])
def test_pairs_over_devices_give_what_one_device_does(dispatch):
    """DualPipe, whose pairs run one microbatch's forward between another's backward; experts over two devices."""
    model = deepseek(CONFIG, (1, 1), dispatch=dispatch, ep_axis="ep", **EIGHT)
    pipeline = Pipeline(model.staged, dualpipe(2, 4), make_mesh(2, 2), param_specs=model.param_specs)
    params = model.init(jax.random.key(0))
    (loss, _), grads = quick(lambda *args: pipeline.value_and_grad(*args))(params, batch())
    (wanted, _), wanted_grads = plain_gradients(dispatch, True)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    found, expected = floats(grads), floats(wanted_grads)
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, rtol=0, atol=2e-6 * max(np.abs(leaf).max(), 1e-3), err_msg=name)


def test_gradients_point_where_those_of_more_bits_do():
    """Every leaf: neither sign, nor scale, nor a transposed tile may be wrong."""
    (loss, _), grads = plain_gradients("dropless", True)
    (wanted, _), wanted_grads = plain_gradients("dropless", False)
    assert 0 < abs(loss - wanted) < 0.02 * wanted
    expected = floats(wanted_grads)
    for name, leaf in floats(grads).items():
        size = np.linalg.norm(expected[name])
        if size > 0:
            cosine = np.vdot(leaf, expected[name]) / (np.linalg.norm(leaf) * size)
            assert cosine > 0.99, (name, cosine)
            assert 0.93 < np.linalg.norm(leaf) / size < 1.07, name
    experts = [leaf for name, leaf in floats(grads).items() if "experts" in name and np.any(leaf)]
    assert experts


# ---------------------------------------------------------------------------------------------- split

WIDE = tiny(dim=128, expert_hidden=64, num_experts=4, top_k=2, num_groups=1, top_groups=1, num_shared_experts=0)


def split_plan(payload: Payload, matmul, dispatch):
    """Of a layer of experts over two devices, in bfloat16."""
    pure = pure_nnx(
        lambda rngs: MoE(
            WIDE, Dispatch(dispatch, axis_name="ep", payload=payload), rngs, Kernels(matmul=matmul).multiply("cpu")
        )
    )
    plans = []

    def body(params, x):
        function = lambda params, x: pure.apply(params, x, jnp.zeros(4))[0]  # noqa: E731
        plans.append(split_backward(function).trace(params, x))
        return x

    whole = jax.eval_shape(pure.init, jax.random.key(0))
    spec = {name: P() for name in whole} | {"experts": P("ep")}
    run = jax.shard_map(
        body, mesh=make_mesh(1, 2), in_specs=(spec, P("ep")), out_specs=P("ep"), check_vma=False
    )
    jax.eval_shape(run, whole, jax.ShapeDtypeStruct((2, 32, WIDE.dim), jnp.bfloat16))
    return plans[0]


def test_weight_gradients_stay_in_w_and_exchanges_in_i():
    """And half the bytes wait for them: rows as they came, in eight bits, and gradients likewise."""
    ours, plain = split_plan("float8", "float8", "capacity"), split_plan("plain", "plain", "capacity")
    for plan in (ours, plain):
        assert [plan.counts(part)["all_to_all"] for part in ("forward", "input", "weight")] == [2, 2, 0]
    assert ours.flops == plain.flops
    tokens, experts = 32, 2
    expert_flops = 3 * 2 * (experts * 2 * tokens) * WIDE.dim * WIDE.expert_hidden
    router_flops = 2 * tokens * WIDE.dim * WIDE.num_experts
    assert ours.flops.weight == expert_flops + router_flops
    assert not any(kind.shape[-1] == WIDE.dim and kind.size == 4 * tokens * WIDE.dim and kind.dtype == jnp.bfloat16
                   for kind in (*ours.residuals_w, *ours.stash))

    def waiting(plan):
        kinds = (*plan.residuals_w, *plan.stash)
        return sum(kind.size * kind.dtype.itemsize for kind in kinds)

    assert waiting(ours) < 0.62 * waiting(plain)


def test_walked_blocks_split_too():
    plan = split_plan("float8", "float8", "dropless")
    assert plan.counts("weight")["all_to_all"] == 0 and plan.counts("input")["all_to_all"] == 2
    assert plan.counts("weight")["while"] == plan.counts("input")["while"] > 0
