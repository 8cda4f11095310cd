"""Dispatch in two hops: against loops in NumPy, against one hop and against the plain layer."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from dualpipe_jax.parallel import combine, dispatch, make_mesh, plan_capacity, plan_two_hops
from dualpipe_jax.parallel.mesh import expert_axes
from tests.parallel import expert_layers
from tests.parallel.expert_layers import (
    METHODS,
    TOKENS,
    D,
    K,
    check_dropped,
    close,
    layer,
    layer_by_copies,
    layer_case,
    on_devices,
    plain_layer,
    with_gradients,
)

T, E = 12, 16  # T tokens per device
AXES = expert_axes(2)
choices = functools.partial(expert_layers.choices, num_experts=E)
TOPK = choices(TOKENS, skew=0.1)


def plan_of(method, node_capacity=None, bound=None):
    """Two hops, with the second one's capacity or buffer factor."""

    def second(topk, experts):
        return expert_layers.plan_of(method, experts, bound=bound)(topk)

    return lambda topk: plan_two_hops(topk, E, AXES, second, node_capacity)


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
        pytest.param((2, 2), "capacity", None, None, marks=pytest.mark.slow),
        ((2, 4), "capacity", 5, 4),
        ((2, 2), "dropless", None, None),
        ((4, 2), "dropless", 4, 0.5),
        pytest.param((2, 4), "dropless", 7, None, marks=pytest.mark.slow),
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

    run = on_devices(shape, run)
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


@pytest.mark.parametrize(
    "shape, method, check_vma",
    [
        ((2, 2), "capacity", True),
        ((4, 2), "dropless", False),
        pytest.param((1, 4), "capacity", True, marks=pytest.mark.slow),
        pytest.param((4, 1), "dropless", True, marks=pytest.mark.slow),
    ],
)
def test_results_and_gradients_are_the_plain_layers(shape, method, check_vma):
    args, target = layer_case(E)
    run = on_devices(shape, functools.partial(layer, make=plan_of(method)), check_vma)
    close(with_gradients(run, target)(args, TOPK), plain_layer(E)(args, TOPK))


@pytest.mark.parametrize("method", [METHODS[0], pytest.param(METHODS[1], marks=pytest.mark.slow)])
def test_results_are_one_hops(method):
    def both(*args):
        one_hop = expert_layers.plan_of(method, E, AXES)  # over both axes as if they were one
        return layer(*args, plan_of(method)), layer(*args, one_hop)

    close(*on_devices((2, 2), both)(*layer_case(E)[0], TOPK))


def test_any_physical_experts_will_do():
    """Two of each expert, tokens to either: the gradients of copies add up to the expert's."""
    (x, w_in, w_out, weights), target = layer_case(E)
    rng = np.random.default_rng(9)
    logical = E // 2
    of_slot = rng.permutation(np.repeat(np.arange(logical), 2))
    slots = np.stack([np.flatnonzero(of_slot == e) for e in range(logical)])
    topk = np.argsort(rng.normal(size=(len(x), logical)), axis=1)[:, :K]
    physical = slots[topk, rng.integers(2, size=topk.shape)].astype(np.int32)
    args = x, w_in[:logical], w_out[:logical], weights
    run = on_devices((2, 4), functools.partial(layer, make=plan_of("capacity")))

    def placed(x, w_in, w_out, weights, physical):
        return run(x, w_in[of_slot], w_out[of_slot], weights, physical)

    close(with_gradients(placed, target)(args, physical), plain_layer(E)(args, topk))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_experts_of_a_node_may_be_more_than_the_dtype_of_choices_can_count(dtype):
    def there_and_back(x, topk):
        handle = plan_two_hops(topk, 512, AXES, lambda topk, here: plan_capacity(topk, here, axis_name="ep"))
        return combine(dispatch(x, handle), jnp.ones(topk.shape), handle)

    x = np.arange(1.0, TOKENS + 1, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(on_devices((2, 2), there_and_back)(x, TOPK.astype(dtype)), K * x)


def test_dropped_copies_add_nothing_and_have_no_gradient():
    topk, tokens = choices(TOKENS, skew=0.2), TOKENS // 4

    def kept(topk):
        outer = plan_of("capacity", 2)(topk).outer
        return outer.slot_TK < outer.assignment_S.shape[0]

    kept = np.asarray(on_devices((2, 2), kept)(topk))
    nodes = topk // (E // 2)
    for device in range(4):
        for node in range(2):
            rows = slice(device * tokens, (device + 1) * tokens)
            wants = np.flatnonzero(np.any(nodes[rows] == node, axis=1))
            np.testing.assert_array_equal(np.flatnonzero(kept[rows, node]), wants[:2])
    alive = np.take_along_axis(kept, nodes, axis=1)
    assert 0 < alive.sum() < alive.size
    check_dropped(on_devices((2, 2), functools.partial(layer, make=plan_of("capacity", 2))), E, topk, alive)


@pytest.mark.parametrize("method, forward, more", [("capacity", 6, 5), ("dropless", 7, 5)])
def test_all_to_alls_over_one_axis_are_the_only_collectives(method, forward, more):
    (args, _), topk = layer_case(E), TOPK
    run = on_devices((2, 2), functools.partial(layer, make=plan_of(method)))
    grad = jax.grad(lambda *args: jnp.sum(run(*args, topk)), argnums=(0, 1, 2, 3))
    for text, exchanges in (
        (str(jax.make_jaxpr(run)(*args, topk)), forward),
        (str(jax.make_jaxpr(grad)(*args)), forward + more),
    ):
        axes = re.findall(r"all_to_all\[\s*axis_index_groups=None\s*axis_name=(\S+)", text)
        assert len(axes) == exchanges and set(axes) == {"node", "ep"}
        for name in ("ppermute", "psum", "all_gather", "scatter-add", "scatter_add"):
            assert name not in text


@pytest.mark.parametrize(
    "ep, make",
    [
        (2, expert_layers.plan_of("capacity", E)),
        ((2, 2), plan_of("capacity")),
        pytest.param(2, expert_layers.plan_of("dropless", E), marks=pytest.mark.slow),
    ],
)
def test_works_in_branches_that_only_some_ranks_take(ep, make):
    """The engine's way: one pipeline rank works, others pass, inside a loop."""
    (args, _), axes = layer_case(E), "ep" if ep == 2 else AXES

    def body(x, *rest):
        def step(i, x):
            mine = lax.axis_index("pp") == i % 2
            return lax.cond(mine, lambda x: layer(x, *rest, make), lambda x: x, x)

        return lax.fori_loop(0, 3, step, lax.pcast(x, "pp", to="varying"))[None]

    run = jax.shard_map(body, mesh=make_mesh(2, ep), in_specs=P(axes), out_specs=P("pp", axes))
    out = jax.jit(run)(*args, TOPK)
    x, *rest = args
    plain = jax.jit(layer_by_copies)
    once = plain(x, *rest, TOPK)
    np.testing.assert_allclose(out[1], once, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(out[0], plain(once, *rest, TOPK), rtol=1e-4, atol=1e-4)


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
            on_devices((2, 2), lambda topk, changes=changes: plan(topk, **changes))(choices(8))
    with pytest.raises(TypeError, match="topk_TK must be integers, numbers of experts, got float32"):
        on_devices((2, 2), plan)(choices(8).astype(np.float32))
    x, weights = np.ones((8, D), np.float32), np.ones((8, K + 1), np.float32)

    def wrong(x, weights, topk):
        handle = plan_of("capacity")(topk)
        return combine(dispatch(x, handle), weights, handle)

    with pytest.raises(ValueError, match=r"combine: the handle was planned for \(2, 3\) assignments"):
        on_devices((2, 2), wrong)(x, weights, choices(8))
