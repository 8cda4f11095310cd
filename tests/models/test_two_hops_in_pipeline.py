"""Dispatch in two hops in the engine: gradients leaf by leaf against ``jax.value_and_grad`` of the plain model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dualpipe_jax import Out, Pipeline, StagedModel
from dualpipe_jax.engine.reference import reference_value_and_grad
from dualpipe_jax.parallel import combine, dispatch, expert_matmul, make_mesh
from dualpipe_jax.parallel.float8 import decode, encode
from dualpipe_jax.parallel.mesh import expert_axes
from dualpipe_jax.schedule import dualpipe, dualpipe_v, one_f_one_b
from models.config import tiny
from models.moe import Dispatch, route
from models.transformer import deepseek
from tests.engine.models import quick
from tests.models.decode.small_models import random_params

NUM, SIZE, SEQ, D, E = 4, 8, 3, 6, 8
CONFIG = tiny(
    dim=16, num_layers=2, num_dense_layers=0, num_heads=2, q_lora_rank=0, kv_lora_rank=8, dense_hidden=16,
    expert_hidden=8, num_experts=E, top_k=3, num_groups=4, top_groups=2, vocab=32, num_mtp_layers=0,
)  # fmt: skip
AXES = expert_axes(2)
SPECS = {"router": None, "experts": PartitionSpec(AXES)}


@jax.custom_vjp
def rounded_back(y):
    """Its gradient goes through eight bits once more."""
    return y


rounded_back.defvjp(lambda y: (y, None), lambda _, d: (decode(encode(d), d.shape[-1], d.dtype),))


def experts_alone(num_stages, axis=None, payload="plain", back=lambda y: y):
    """Stages of nothing but experts; the loss is the distance from random numbers."""
    sending = Dispatch("capacity", axis_name=axis, payload=payload)

    def stage(own, shared, x, at):
        x_TD = (at.batch["x"] + shared["shift"] if x is None else x).reshape(-1, D)
        topk, weights = route(x_TD @ own["router"], jnp.zeros(E), CONFIG)
        handle = sending.plan(topk, E, (CONFIG.num_groups, CONFIG.top_groups))
        made = jnp.tanh(expert_matmul(dispatch(x_TD, handle), own["experts"], handle))
        y_TD = combine(made, weights, handle)
        return (x_TD + back(y_TD)).reshape(-1, SEQ, D), handle.dropped

    def first(own, shared, x, at):
        x, dropped = stage(own, shared, x, at)
        return Out(x, metrics={"dropped": dropped})

    def last(own, shared, x, at):
        x, dropped = stage(own, shared, x, at)
        return Out(x, {"distance": jnp.mean((x - at.batch["y"]) ** 2)}, {"dropped": dropped})

    kinds = ("usual",) * (num_stages - 1) + ("last",)
    return StagedModel({"usual": first, "last": last}, kinds)


@functools.cache
def case(num_stages, *eight):
    """Parameters and a batch; what the plain model makes of them, each device holding all experts."""
    rng = np.random.default_rng(1)
    shapes = {"router": (num_stages, D, E), "experts": (num_stages, E, D, D)}
    stages = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    params = {"stages": stages, "shared": {"shift": np.ones(D, np.float32)}}
    batch = {name: rng.normal(size=(NUM, SIZE, SEQ, D)).astype(np.float32) for name in ("x", "y")}
    step = quick(reference_value_and_grad(experts_alone(num_stages, None, *eight), num_parts=4))
    return params, batch, jax.device_get(step(params, batch))


def same(got, wanted):
    ((loss, report), grads), ((loss_wanted, _), grads_wanted) = got, wanted
    np.testing.assert_allclose(loss, loss_wanted, rtol=1e-6)
    assert report.metrics["dropped"] == 0
    pairs = zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(grads_wanted), strict=True)
    for (path, g), w in pairs:
        if g.dtype != jax.dtypes.float0:
            name = jax.tree_util.keystr(path)
            np.testing.assert_allclose(g, w, rtol=0, atol=2e-6 * np.abs(w).max(), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule, options",
    [(one_f_one_b(2, NUM), {}), (dualpipe(2, NUM), {"fuse_pairs": True, "check_vma": True})],
    ids=["1f1b", "dualpipe, fused, checked"],
)
def test_gradients_are_the_plain_models(schedule, options):
    num_stages = schedule.placement.num_model_stages
    params, batch, wanted = case(num_stages)
    specs = {"stages": SPECS, "shared": None}
    model, mesh = experts_alone(num_stages, AXES), make_mesh(2, (2, 2))
    pipeline = Pipeline(model, schedule, mesh, param_specs=specs, **options)
    same(jax.device_get(quick(pipeline.value_and_grad)(params, batch)), wanted)


@pytest.mark.slow
def test_eight_bits():
    """Tokens are rounded once for both hops; gradients of sums twice, for weights multiply them in between."""
    params, batch, wanted = case(4, "float8", rounded_back)
    once = case(4, "float8")[2]
    np.testing.assert_allclose(wanted[0][0], once[0][0], rtol=1e-7, err_msg="forward they are the same")
    for unlike in (once, case(4)[2]):
        off = [abs(tree[1]["stages"]["experts"]) for tree in (wanted, unlike)]
        assert np.abs(off[0] - off[1]).max() > 1e-3 * off[1].max(), "rounding changes what is compared"
    model, specs = experts_alone(4, AXES, "float8"), {"stages": SPECS, "shared": None}
    pipeline = Pipeline(model, dualpipe_v(2, NUM), make_mesh(2, (2, 2)), param_specs=specs)
    same(jax.device_get(quick(pipeline.value_and_grad)(params, batch)), wanted)


@pytest.mark.slow
def test_words_and_embedding_over_both_axes():
    """All of DeepSeek's model."""
    tokens = np.random.default_rng(0).integers(0, 32, (2, NUM, 4, 6)).astype(np.int32)
    batch = {"inputs": tokens[0], "targets": tokens[1]}
    how = dict(dispatch="capacity", balance_factor=0.05)
    plain, model = (deepseek(CONFIG, (1, 1), ep_axis=axis, **how) for axis in (None, AXES))
    params = random_params(CONFIG, 1, 0.25, (1, 1))
    wanted = quick(reference_value_and_grad(plain.staged, num_parts=4))(params, batch)
    mesh = make_mesh(2, (2, 2))
    pipeline = Pipeline(model.staged, one_f_one_b(2, NUM), mesh, param_specs=model.param_specs)
    got = quick(pipeline.value_and_grad)(params, batch)
    np.testing.assert_array_equal(got[0][1].metrics["counts"], wanted[0][1].metrics["counts"])
    same(jax.device_get(got), jax.device_get(wanted))


def test_room_for_nodes_is_what_groups_leave_open():
    """Groups on whole nodes: a token's experts of one group of four are on one of two nodes."""
    topk = jnp.zeros((16, 3), jnp.int32)

    def room(factor, groups, method="capacity"):
        found = []

        def run(topk):
            handle = Dispatch(method, factor, AXES).plan(topk, E, groups)
            found.append([handle.outer.capacity, handle.capacity or handle.assignment_S.size])
            return topk

        spec = PartitionSpec(AXES)
        jax.eval_shape(jax.shard_map(run, mesh=make_mesh(1, (2, 2)), in_specs=spec, out_specs=spec), topk)
        return found[0]

    tokens = 4  # of each device; 3 experts each, so 12 assignments, and 8 experts
    assert room(None, (4, 1)) == [tokens, 2 * tokens]
    assert room(1.0, (4, 1)) == [tokens // 2, 3]  # half of the tokens to each node; 2 * 12 / 8 rows an expert
    assert room(1.0, (4, 2)) == [tokens, 3]
    assert room(1.0, (3, 1)) == [tokens, 3]  # a group that lies on two nodes bounds nothing
    assert room(1.5, (4, 1)) == [3, 5]
    # Rows of a device, in place of an expert's: from each of two, as many as a device's tokens need by an even load.
    assert room(1.0, (4, 1), "dropless") == [2, 2 * 6] and room(1.5, (4, 1), "dropless") == [3, 2 * 9]
