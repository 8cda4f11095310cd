"""Dispatch in two hops: against loops in NumPy, against one hop and against the plain layer."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from dualpipe_jax.parallel import (
    combine,
    dispatch,
    expert_axes,
    make_mesh,
    plan_capacity,
    plan_dropless,
    plan_two_hops,
)
from tests.parallel.expert_layers import layer, layer_by_copies

T, K, E, D, F = 12, 3, 16, 6, 5  # T tokens per device
AXES = expert_axes(2)
METHODS = ("capacity", "dropless")


def plan_of(method, node_capacity=None, bound=None):
    """Two hops, with the second one's capacity or buffer factor."""

    def second(topk, experts):
        if method == "capacity":
            return plan_capacity(topk, experts, bound, "ep")
        return plan_dropless(topk, experts, "ep", bound)

    return lambda topk: plan_two_hops(topk, E, AXES, second, node_capacity)


def one_hop(method):
    """Over both axes as if they were one."""
    plan = plan_capacity if method == "capacity" else plan_dropless
    return lambda topk: plan(topk, E, axis_name=AXES)


def choices(num_tokens, *, skew=0.0, seed=0):
    """Distinct random experts for each token; skew makes the low ones popular."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(num_tokens, E)) - skew * np.arange(E)
    return np.argsort(-logits, axis=1)[:, :K].astype(np.int32)


def on_devices(shape, fn, num_out, check_vma=True):
    """Run fn(*args) on nodes x devices, every argument and result split along its first dim."""
    mesh, spec = make_mesh(1, shape), P(AXES)
    run = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=(spec,) * num_out, check_vma=check_vma)
    return jax.jit(run)


def by_loops(topk, shape, method, node_capacity, bound):
    """Who gets what, token by token: [expert] -> (sender's node, token) in order, and drops of each device."""
    nodes, size = shape
    room, here, local = node_capacity or T, E // nodes, E // (nodes * size)
    dropped, got = np.zeros((nodes, size), int), [[] for _ in range(E)]
    for n in range(nodes):
        for i in range(size):
            arrived = []
            for source in range(nodes):
                sent = 0
                start = (source * size + i) * T
                for t in range(start, start + T):
                    mine = [e for e in topk[t] if e // here == n]
                    if not mine:
                        continue
                    if sent < room:
                        arrived.append((t, mine))
                    else:
                        dropped[source, i] += len(mine)
                    sent += bool(mine)
            width = nodes * room * min(K, local)
            if method == "dropless" and bound is not None:
                width = min(width, int(np.ceil(bound * nodes * room * K / size)))
            used = [0] * size
            for expert in range(n * here, n * here + here):
                tokens = [t for t, mine in arrived if expert in mine]
                to = expert % here // local
                free = (bound or nodes * room) if method == "capacity" else width - used[to]
                dropped[n, i] += max(0, len(tokens) - free)
                used[to] += min(len(tokens), free)
                got[expert] += [((n, i), t) for t in tokens[:free]]
    return got, dropped.reshape(-1)


@pytest.mark.parametrize(
    "shape, method, node_capacity, bound",
    [
        ((2, 2), "capacity", None, None),
        ((2, 4), "capacity", 5, 4),
        ((2, 2), "dropless", None, None),
        ((4, 2), "dropless", 4, 0.5),
        ((2, 4), "dropless", 7, None),
    ],
)
def test_every_expert_gets_its_tokens_and_drops_are_counted(shape, method, node_capacity, bound):
    num = shape[0] * shape[1]
    x = np.random.default_rng(1).normal(size=(num * T, D)).astype(np.float32)
    make = plan_of(method, node_capacity, bound)

    def run(x, topk):
        handle = make(topk)
        sizes = jnp.zeros(1, jnp.int32) if handle.group_sizes_L is None else handle.group_sizes_L
        return dispatch(x, handle), sizes, handle.dropped[None]

    run = on_devices(shape, run, 3)
    for skew in (0.0, 0.5):
        topk = choices(num * T, skew=skew)
        rows, sizes, dropped = map(np.asarray, run(x, topk))
        wanted, dropped_wanted = by_loops(topk, shape, method, node_capacity, bound)
        np.testing.assert_array_equal(dropped, dropped_wanted)
        assert (dropped.sum() == 0) == (node_capacity is None and bound is None)
        for expert in range(E):
            found = x[[t for _, t in wanted[expert]]]
            if method == "capacity":
                got = rows[expert].reshape(-1, D)
                assert len(found) == np.any(got, axis=-1).sum()
            else:
                local = E // num
                mine = np.split(rows, num)[expert // local]
                start = sizes[expert // local * local : expert].sum()
                got = mine[start : start + sizes[expert]]
                assert sizes[expert] == len(found)
            got = got[np.any(got, axis=-1)]
            np.testing.assert_array_equal(got[np.lexsort(got.T)], found[np.lexsort(found.T)])


@functools.cache
def layer_case(skew=0.1):
    rng = np.random.default_rng(3)
    num_tokens = 8 * 4
    shapes = ((num_tokens, D), (E, D, F), (E, F, D), (num_tokens, K), (num_tokens, D))
    *args, target = (rng.normal(size=s).astype(np.float32) for s in shapes)
    return args, target, choices(num_tokens, skew=skew)


def value_and_grad(function, args, target, topk):
    def loss(*args):
        return jnp.sum(function(*args, topk) * target)

    return jax.device_get(jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*args))


def close(got, want):
    """To 1e-6 of each leaf's largest entry."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-6 * max(1, np.abs(w).max()))


@pytest.mark.parametrize(
    "shape, method, check_vma",
    [
        ((2, 2), "capacity", True),
        ((4, 2), "capacity", False),
        ((1, 4), "capacity", True),
        pytest.param((4, 1), "capacity", True, marks=pytest.mark.slow),
        ((2, 2), "dropless", True),
    ],
)
def test_results_and_gradients_are_the_plain_layers(shape, method, check_vma):
    args, target, topk = layer_case()
    run = on_devices(shape, lambda *args: (layer(*args, plan_of(method)),), 1, check_vma)
    got = value_and_grad(lambda *args: run(*args)[0], args, target, topk)
    close(got, value_and_grad(layer_by_copies, args, target, topk))


@pytest.mark.parametrize("method", METHODS)
def test_results_are_one_hops(method):
    args, _, topk = layer_case()

    def both(*args):
        return layer(*args, plan_of(method)), layer(*args, one_hop(method))

    close(*on_devices((2, 2), both, 2)(*args, topk))


def test_any_physical_experts_will_do():
    """Two of each expert, tokens to either: the gradients of copies add up to the expert's."""
    (x, w_in, w_out, weights), target, _ = layer_case()
    rng = np.random.default_rng(9)
    logical = E // 2
    of_slot = rng.permutation(np.repeat(np.arange(logical), 2))
    slots = np.stack([np.flatnonzero(of_slot == e) for e in range(logical)])
    topk = np.argsort(rng.normal(size=(len(x), logical)), axis=1)[:, :K]
    physical = slots[topk, rng.integers(2, size=topk.shape)].astype(np.int32)
    args = x, w_in[:logical], w_out[:logical], weights
    want = value_and_grad(layer_by_copies, args, target, topk)
    run = on_devices((2, 4), lambda *args: (layer(*args, plan_of("capacity")),), 1)

    def placed(x, w_in, w_out, weights, physical):
        return run(x, w_in[of_slot], w_out[of_slot], weights, physical)[0]

    close(value_and_grad(placed, args, target, physical), want)


def test_dropped_copies_add_nothing_and_have_no_gradient():
    (x, w_in, w_out, weights), target, topk = layer_case(skew=0.2)
    tokens = len(x) // 4

    def run(*args):
        handle = plan_of("capacity", 2)(args[-1])
        kept = handle.outer.slot_TK < handle.outer.assignment_S.shape[0]
        return layer(*args, lambda topk: handle), kept

    run = on_devices((2, 2), run, 2)
    kept = np.asarray(run(x, w_in, w_out, weights, topk)[1])
    nodes = topk // (E // 2)
    for device in range(4):
        for node in range(2):
            rows = slice(device * tokens, (device + 1) * tokens)
            wants = np.flatnonzero(np.any(nodes[rows] == node, axis=1))
            np.testing.assert_array_equal(np.flatnonzero(kept[rows, node]), wants[:2])
    alive = np.take_along_axis(kept, nodes, axis=1)
    assert 0 < alive.sum() < alive.size

    def by_copies(x, w_in, w_out, weights, topk):
        return layer_by_copies(x, w_in, w_out, jnp.where(alive, weights, 0), topk)

    args = x, w_in, w_out, weights
    got = value_and_grad(lambda *args: run(*args)[0], args, target, topk)
    close(got, value_and_grad(by_copies, args, target, topk))
    np.testing.assert_array_equal(got[1][3][~alive], 0)


@pytest.mark.parametrize("method, forward, more", [("capacity", 6, 5), ("dropless", 7, 5)])
def test_all_to_alls_over_one_axis_are_the_only_collectives(method, forward, more):
    args, _, topk = layer_case()
    run = on_devices((2, 2), lambda *args: (layer(*args, plan_of(method)),), 1)
    grad = jax.grad(lambda *args: jnp.sum(run(*args, topk)[0]), argnums=(0, 1, 2, 3))
    for text, exchanges in (
        (str(jax.make_jaxpr(run)(*args, topk)), forward),
        (str(jax.make_jaxpr(grad)(*args)), forward + more),
    ):
        axes = re.findall(r"all_to_all\[\s*axis_index_groups=None\s*axis_name=(\S+)", text)
        assert len(axes) == exchanges and set(axes) == {"node", "ep"}
        for name in ("ppermute", "psum", "all_gather", "scatter-add", "scatter_add"):
            assert name not in text


def test_works_in_branches_that_only_some_ranks_take():
    """The engine's way: one pipeline rank works, others pass, inside a loop."""
    args, _, topk = layer_case()
    spec = P(AXES)

    def body(x, *rest):
        def step(i, x):
            mine = lax.axis_index("pp") == i % 2
            return lax.cond(mine, lambda x: layer(x, *rest, plan_of("capacity")), lambda x: x, x)

        return lax.fori_loop(0, 3, step, lax.pcast(x, "pp", to="varying"))[None]

    run = jax.shard_map(body, mesh=make_mesh(2, (2, 2)), in_specs=spec, out_specs=P("pp", AXES))
    out = jax.jit(run)(*args, topk)
    x, *rest = args
    once = layer_by_copies(x, *rest, topk)
    np.testing.assert_allclose(out[1], once, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(out[0], layer_by_copies(once, *rest, topk), rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused():
    def plan(topk, **changes):
        options = {"num_experts": E, "axis_names": AXES, "plan": lambda topk, here: plan_capacity(topk, here)}
        return plan_two_hops(topk, **(options | changes)).dropped[None]

    cases = {
        r"two mesh axes, \(nodes, devices of a node\), got 'ep'": {"axis_names": "ep"},
        "15 experts do not divide over the 2 nodes of axis 'node': 15 % 2 = 1": {"num_experts": 15},
        "node_capacity must be at least 1, got 0": {"node_capacity": 0},
    }
    for message, changes in cases.items():
        with pytest.raises(ValueError, match=message):
            on_devices((2, 2), lambda topk, changes=changes: (plan(topk, **changes),), 1)(choices(8))
    x, weights = np.ones((8, D), np.float32), np.ones((8, K + 1), np.float32)

    def wrong(x, weights, topk):
        handle = plan_of("capacity")(topk)
        return (combine(dispatch(x, handle), weights, handle),)

    with pytest.raises(ValueError, match=r"combine: the handle was planned for \(2, 3\) assignments"):
        on_devices((2, 2), wrong, 1)(x, weights, choices(8))
