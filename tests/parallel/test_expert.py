"""Expert dispatch: against loops in NumPy, against its own transpose, and over 1, 2, 4 and 8 devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from dualpipe_jax.parallel import (
    capacity_for,
    combine,
    count,
    dispatch,
    make_mesh,
    plan_capacity,
    plan_dropless,
)
from tests.parallel.expert_layers import layer, layer_by_copies

T, K, E, D, F = 16, 3, 8, 6, 5  # T tokens per device
METHODS = ("capacity", "dropless")


def plan_of(method, axis_name=None, bound=None):
    """A plan with one number that bounds it: the capacity, or the buffer factor."""
    if method == "capacity":
        return lambda topk: plan_capacity(topk, E, bound, axis_name)
    return lambda topk: plan_dropless(topk, E, axis_name, bound)


def choices(num_tokens, *, skew=0.0, seed=0):
    """Distinct random experts for each token; skew makes the low ones popular."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(num_tokens, E)) - skew * np.arange(E)
    return np.argsort(-logits, axis=1)[:, :K].astype(np.int32)


def on_devices(num_ep, fn, num_out, check_vma=True):
    """Run fn(*args) on num_ep devices, every argument and result split along its first dim."""
    mesh = make_mesh(1, num_ep)
    run = jax.shard_map(fn, mesh=mesh, in_specs=P("ep"), out_specs=(P("ep"),) * num_out, check_vma=check_vma)
    return jax.jit(run)


def dispatched_by_loops(x, topk, num_ep, method, bound):
    """What each expert should receive, in order, and how many choices of each device fit nowhere."""
    rows, dropped = [[] for _ in range(E)], [0] * num_ep
    local = E // num_ep
    width = T * min(K, local)
    if method == "dropless" and bound is not None:
        width = min(width, int(np.ceil(bound * T * K / num_ep)))
    for source in range(num_ep):
        sent = [0] * num_ep
        for expert in range(E):
            mine = [t for t in range(source * T, source * T + T) if expert in topk[t]]
            room = (bound or T) if method == "capacity" else width - sent[expert // local]
            kept = mine[:room]
            sent[expert // local] += len(kept)
            dropped[source] += len(mine) - len(kept)
            rows[expert].append(x[kept])
    return rows, dropped


@pytest.mark.parametrize("num_ep", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "method, bound", [("capacity", None), ("capacity", 5), ("dropless", None), ("dropless", 0.7)]
)
def test_every_expert_gets_its_tokens_in_order(num_ep, method, bound):
    x = np.random.default_rng(1).normal(size=(num_ep * T, D)).astype(np.float32)
    make = plan_of(method, "ep", bound)

    def run(x, topk):
        handle = make(topk)
        sizes = jnp.zeros(1, jnp.int32) if handle.group_sizes_L is None else handle.group_sizes_L
        return dispatch(x, handle), sizes, handle.dropped[None]

    run = on_devices(num_ep, run, 3)
    for skew in (0.0, 0.7, 3.0):
        topk = choices(num_ep * T, skew=skew)
        check_rows(*map(np.asarray, run(x, topk)), x, topk, num_ep, method, bound)


def check_rows(rows, sizes, dropped, x, topk, num_ep, method, bound):
    wanted, dropped_wanted = dispatched_by_loops(x, topk, num_ep, method, bound)
    np.testing.assert_array_equal(dropped, dropped_wanted)
    if method == "capacity":
        capacity = bound or T
        padded = [np.stack([np.pad(r, ((0, capacity - len(r)), (0, 0))) for r in per]) for per in wanted]
        np.testing.assert_array_equal(rows, np.stack(padded))
        return
    np.testing.assert_array_equal(sizes, [sum(map(len, per)) for per in wanted])
    for device, got in enumerate(np.split(rows, num_ep)):
        local = wanted[device * E // num_ep : (device + 1) * E // num_ep]
        flat = np.concatenate([r for per in local for r in per])
        np.testing.assert_array_equal(got, np.pad(flat, ((0, len(got) - len(flat)), (0, 0))))


@pytest.mark.parametrize("num_ep", [1, 4])
@pytest.mark.parametrize(
    "method, bound", [("capacity", None), ("capacity", 3), ("dropless", None), ("dropless", 0.6)]
)
def test_dispatch_and_combine_are_each_others_transposes(num_ep, method, bound):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(num_ep * T, D)).astype(np.float32)
    weights = rng.normal(size=(num_ep * T, K)).astype(np.float32)
    make = plan_of(method, "ep", bound)

    def run(x, weights, topk):
        handle = make(topk)
        rows, back = jax.vjp(lambda x: dispatch(x, handle), x)
        y = jnp.sin(jnp.arange(rows.size, dtype=x.dtype)).reshape(rows.shape) + rows
        out, d_combine = jax.vjp(lambda y: combine(y, weights, handle), y)
        weighted_rows = d_combine(x)[0]
        ones = jnp.ones_like(weights)
        inner = jnp.stack([jnp.vdot(rows, y), jnp.vdot(out, x), jnp.vdot(y, weighted_rows)])
        return back(y)[0], combine(y, ones, handle), inner[None], d_combine(x)[0], rows

    back, combined, inner, d_rows, rows = on_devices(num_ep, run, 5)(x, weights, choices(num_ep * T))
    np.testing.assert_array_equal(back, combined)
    rows_y, out_x, y_drows = np.asarray(inner).sum(0)
    np.testing.assert_allclose(rows_y, np.vdot(combined, x), rtol=1e-5)
    np.testing.assert_allclose(out_x, y_drows, rtol=1e-5)
    assert d_rows.shape == rows.shape


@functools.cache
def layer_case():
    rng = np.random.default_rng(3)
    num_tokens = 8 * 4
    shapes = ((num_tokens, D), (E, D, F), (E, F, D), (num_tokens, K), (num_tokens, D))
    *args, target = (rng.normal(size=s).astype(np.float32) for s in shapes)
    topk = choices(num_tokens, skew=0.5)

    def loss(*args):
        return jnp.sum(layer_by_copies(*args, topk) * target)

    wanted = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*args)
    return args, target, topk, wanted


@pytest.mark.parametrize("num_ep, check_vma", [(1, True), (2, False), (2, True), (4, True), (8, False)])
@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_the_same_however_many_devices(num_ep, method, check_vma):
    args, target, topk, wanted = layer_case()
    make = plan_of(method, "ep")
    run = on_devices(num_ep, lambda *args: (layer(*args, make),), 1, check_vma)

    def loss(*args):
        return jnp.sum(run(*args, topk)[0] * target)

    got = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), got, wanted)


@pytest.mark.parametrize("method", METHODS)
def test_without_an_axis_nothing_is_communicated_and_nothing_scatter_added(method):
    args, target, topk, (_, wanted) = layer_case()
    make = plan_of(method)
    grad = jax.grad(lambda *args: jnp.sum(layer(*args, topk, make) * target), argnums=(0, 1, 2, 3))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), jax.jit(grad)(*args), wanted
    )
    text = str(jax.make_jaxpr(grad)(*args))
    assert "scatter-add" not in text and "scatter_add" not in text
    assert "all_to_all" not in text


@pytest.mark.parametrize("method, exchanges", [("capacity", 2), ("dropless", 3)])
def test_all_to_all_is_the_only_collective(method, exchanges):
    args, _, topk, _ = layer_case()
    run = on_devices(2, lambda *args: (layer(*args, plan_of(method, "ep")),), 1)
    forward = str(jax.make_jaxpr(run)(*args, topk))
    both = str(jax.make_jaxpr(jax.grad(lambda *args: jnp.sum(run(*args, topk)[0])))(*args))
    assert forward.count("all_to_all[") == exchanges  # the dropless plan exchanges its counts
    assert both.count("all_to_all[") == exchanges + 2
    for name in ("ppermute", "psum", "all_gather", "scatter-add"):
        assert name not in both


@pytest.mark.parametrize("method, bound", [("capacity", 2), ("dropless", 0.5)])
def test_dropped_assignments_add_nothing_and_have_no_gradient(method, bound):
    args, target, topk, _ = layer_case()
    handle = plan_of(method, None, bound)(topk)
    kept = np.asarray(handle.slot_TK) < handle.assignment_S.size
    assert int(handle.dropped) == np.sum(~kept) > 0
    weights_kept = np.where(kept, args[3], 0)

    def loss(*args):
        return jnp.sum(layer(*args, topk, plan_of(method, None, bound)) * target)

    def loss_by_copies(x, w_in, w_out, weights):
        return jnp.sum(layer_by_copies(x, w_in, w_out, jnp.where(kept, weights, 0), topk) * target)

    got, wanted = (
        jax.jit(jax.value_and_grad(fn, argnums=(0, 1, 2, 3)))(*args) for fn in (loss, loss_by_copies)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), got, wanted)
    np.testing.assert_array_equal(np.asarray(got[1][3])[~kept], 0)
    np.testing.assert_allclose(loss(*args[:3], weights_kept), got[0], rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_works_in_branches_that_only_some_ranks_take(method):
    """The engine's way: one pipeline rank works, others pass, inside a loop."""
    args, _, topk, _ = layer_case()
    make = plan_of(method, "ep")
    spec = P("ep")

    def body(x, *rest):
        def step(i, x):
            mine = lax.axis_index("pp") == i % 2
            return lax.cond(mine, lambda x: layer(x, *rest, make), lambda x: x, x)

        return lax.fori_loop(0, 3, step, lax.pcast(x, "pp", to="varying"))[None]

    run = jax.shard_map(body, mesh=make_mesh(2, 2), in_specs=spec, out_specs=P("pp", "ep"))
    out = jax.jit(run)(*args, topk)
    x, *rest = args
    once = layer_by_copies(x, *rest, topk)
    np.testing.assert_allclose(out[1], once, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(out[0], layer_by_copies(once, *rest, topk), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_rows_are_summed_in_float32(method):
    topk = choices(T)
    handle = plan_of(method)(topk)
    x = np.random.default_rng(4).normal(size=(T, D))
    low = jnp.asarray(x, jnp.bfloat16)
    weights = jnp.asarray(np.random.default_rng(5).uniform(size=(T, K)), jnp.float32)
    out = combine(dispatch(low, handle), weights, handle)
    assert out.dtype == jnp.bfloat16
    wanted = (low.astype(jnp.float32) * weights.sum(1, keepdims=True)).astype(jnp.bfloat16)
    np.testing.assert_allclose(out.astype(jnp.float32), wanted.astype(jnp.float32), rtol=1e-2)


def test_count_is_exact_and_integer():
    topk = choices(1000)
    counts = count(topk, E)
    assert counts.dtype == jnp.int32
    np.testing.assert_array_equal(counts, np.bincount(topk.ravel(), minlength=E))


@pytest.mark.parametrize("factor, wanted", [(1.0, 32), (1.25, 40), (0.001, 1), (100.0, 128)])
def test_capacity_for(factor, wanted):
    assert capacity_for(128, 4, 16, factor) == wanted


def test_handles_survive_jit_boundaries():
    topk = choices(T)
    handle = jax.jit(plan_of("capacity"))(topk)
    x = jnp.ones((T, D))
    np.testing.assert_array_equal(
        jax.jit(dispatch)(x, handle), dispatch(x, plan_of("capacity")(jnp.asarray(topk)))
    )


def test_errors_say_what_does_not_fit():
    topk = jnp.asarray(choices(T))
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        plan_capacity(topk, E, 0)
    with pytest.raises(ValueError, match=r"buffer_factor must be positive, got -1\.0"):
        plan_dropless(topk, E, buffer_factor=-1.0)
    handle = plan_capacity(topk, E)
    with pytest.raises(ValueError, match=r"planned for 16 tokens, x has shape \(4, 6\)"):
        dispatch(jnp.ones((4, D)), handle)
    with pytest.raises(ValueError, match=r"\(16, 3\) assignments, weights have shape \(16, 2\)"):
        combine(dispatch(jnp.ones((T, D)), handle), jnp.ones((T, 2)), handle)
    run = on_devices(8, lambda topk: (plan_capacity(topk, 12, None, "ep").slot_TK,), 1)
    with pytest.raises(ValueError, match=r"12 experts do not divide over the 8 devices.*12 % 8 = 4"):
        run(topk)
