"""Experts in any slots, some more than once: against plain loops, and over 2, 4 and 8 devices."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dualpipe_jax.parallel import choose_copies, make_mesh, move_experts, plan_moves, share_copies, sum_copies
from dualpipe_jax.parallel.placement import first_copies

T, K = 24, 2
SIZES = [(6, 2, 3), (6, 2, 5), (8, 4, 2), (8, 4, 3), (12, 4, 8), (5, 8, 2), (1, 2, 1)]
"""Experts, devices, slots of a device."""


def random_table(rng, num_experts, num_devices, num_slots):
    """Every expert somewhere, none twice on a device, the rest at random; experts in no order."""
    while True:
        held = [[] for _ in range(num_devices)]
        for expert in rng.permutation(num_experts):
            room = min(len(slots) for slots in held)
            choice = [d for d in range(num_devices) if len(held[d]) == room]
            held[rng.choice(choice)].append(expert)
        for slots in held:
            others = [e for e in range(num_experts) if e not in slots]
            slots.extend(rng.permutation(others)[: num_slots - len(slots)])
        table = np.array([rng.permutation(slots) for slots in held])
        if table.shape == (num_devices, num_slots):
            return table


def tables(num_layers, *sizes, seed=0):
    rng = np.random.default_rng(seed)
    return np.stack([random_table(rng, *sizes) for _ in range(num_layers)])


def places(held):
    """Expert -> its (device, number of the slot over all devices)."""
    found = collections.defaultdict(list)
    for device, slots in enumerate(held.tolist()):
        for slot, expert in enumerate(slots):
            found[expert].append((device, device * held.shape[1] + slot))
    return found


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_all_copies_get_the_same_share_and_near_ones_come_first(sizes, near):
    num_experts, num_devices, _ = sizes
    held = tables(3, *sizes)
    for nodes in {1, 2, num_devices}:
        copies = share_copies(held, num_experts, num_nodes=nodes, near=near)
        assert copies.dtype == np.int32 and copies.shape[:3] == (3, num_devices, num_experts)
        node_of = np.arange(num_devices) // (num_devices // nodes)
        for table, lists in zip(held, copies, strict=True):
            for expert, there in places(table).items():
                turns = [[slot for slot in row if slot >= 0] for row in lists[:, expert].tolist()]
                assert all(len(row) == len(there) for row in turns)
                used = collections.Counter(slot for row in turns for slot in row)
                assert used == {slot: num_devices for _, slot in there}
                if not near:
                    assert all(len(set(row)) == len(there) for row in turns)
                    continue
                own = dict(there)
                for device, row in enumerate(turns):
                    if device in own:
                        assert set(row) == {own[device]}
                for node in range(nodes):
                    # Of all that tokens of a node ask for, as much stays there as its copies' share allows.
                    here = {slot for device, slot in there if node_of[device] == node}
                    rows = [row for device, row in enumerate(turns) if node_of[device] == node]
                    stays = sum(slot in here for row in rows for slot in row)
                    assert stays == min(len(here) * num_devices, len(rows) * len(there))


def test_of_few_tokens_not_all_devices_take_the_same_copy_first():
    held = np.array([[0, 1], [0, 2], [3, 4], [5, 6]])
    for near in (True, False):
        firsts = share_copies(held, 7, near=near)[:, 0, 0]
        assert collections.Counter(firsts.tolist()) == {0: 2, 2: 2}
    # Three devices, three experts; each device wants the one it has not, of which both others have a copy.
    ring = share_copies([[0, 1], [0, 2], [1, 2]], 3)
    wanted = np.array([2, 1, 0])
    assert sorted(ring[np.arange(3), wanted, 0] // 2) == [0, 1, 2], "a device is asked by one other"


@pytest.mark.parametrize(
    "sizes, near",
    [(SIZES[0], True), (SIZES[1], False), (SIZES[2], False), (SIZES[3], True), (SIZES[4], True)],
)
def test_tokens_take_copies_in_turn(sizes, near):
    num_experts, num_devices, num_slots = sizes
    held = tables(1, *sizes, seed=1)[0]
    copies = share_copies(held, num_experts, near=near)
    rng = np.random.default_rng(2)
    skewed = rng.normal(size=(T, num_experts)) - 0.5 * np.arange(num_experts)
    topk = np.argsort(-skewed, axis=1)[:, :K].astype(np.int32)
    found = np.asarray(jax.jit(jax.vmap(choose_copies, in_axes=(None, 0)))(topk, copies))
    assert found.dtype == jnp.int32
    for device in range(num_devices):
        seen = collections.Counter()
        for token in range(T):
            for k in range(K):
                expert = int(topk[token, k])
                turns = [slot for slot in copies[device, expert] if slot >= 0]
                assert found[device, token, k] == turns[seen[expert] % len(turns)]
                assert held.reshape(-1)[found[device, token, k]] == expert
                seen[expert] += 1
    counts = np.bincount(topk.reshape(-1), minlength=num_experts) * num_devices
    loads = np.bincount(found.reshape(-1), minlength=num_devices * num_slots)
    for expert, there in places(held).items():
        share = counts[expert] / len(there)
        # A device's tokens differ by one at most between turns.
        assert all(abs(loads[slot] - share) <= num_devices for _, slot in there)


def on_devices(num_devices, function):
    """A function of this device's part, every argument and result split along its first dim."""
    mapped = jax.shard_map(
        lambda *args: function(*(a[0] for a in args))[None],
        mesh=make_mesh(1, num_devices),
        in_specs=P("ep"),
        out_specs=P("ep"),
    )
    return jax.jit(mapped)


@pytest.mark.parametrize("sizes", [(6, 2, 5), (5, 8, 2)], ids=str)
def test_every_copy_gets_the_sum_of_all_copies(sizes):
    num_experts, num_devices, num_slots = sizes
    held = tables(1, *sizes, seed=3)[0]
    gradient = np.random.default_rng(4).normal(size=(num_devices, num_slots, 3, 2)).astype(np.float32)
    summed = on_devices(num_devices, lambda g: sum_copies(g, jnp.asarray(held, jnp.int32), num_experts, "ep"))
    found = np.asarray(summed(gradient))
    for expert in range(num_experts):
        where = np.argwhere(held == expert)
        wanted = sum(gradient[device, slot].astype(np.float64) for device, slot in where)
        for device, slot in where:
            np.testing.assert_allclose(found[device, slot], wanted, rtol=1e-6, atol=1e-6)
            np.testing.assert_array_equal(found[device, slot], found[tuple(where[0])])
    first = np.asarray(first_copies(jnp.asarray(held), num_experts))
    assert first.sum() == num_experts
    for expert, there in places(held).items():
        assert first.reshape(-1)[there[0][1]], expert


def test_without_redundant_experts_there_is_nothing_to_sum():
    held, gradient = tables(1, 6, 2, 3)[0], np.ones((3, 2))
    assert sum_copies(gradient, held, 6, "no such axis") is gradient


@pytest.mark.parametrize(
    "before, after",
    [((6, 2, 3), (6, 2, 3)), ((6, 2, 3), (6, 2, 5)), ((8, 4, 3), (8, 4, 2)), ((5, 8, 2), (5, 8, 2))],
    ids=str,
)
def test_experts_move_from_any_table_to_any_other(before, after):
    num_experts, num_devices, _ = before
    old, new = tables(2, *before, seed=5), tables(2, *after, seed=6)
    moves = plan_moves(old, new, num_experts)
    value = np.random.default_rng(7).normal(size=(num_experts, 4)).astype(np.float32)
    move = on_devices(num_devices, functools.partial(move_experts, axis_name="ep"))
    for layer in range(2):
        found = move(value[old[layer]], moves.send[layer], moves.take[layer])
        np.testing.assert_array_equal(found, value[new[layer]])
    lacking = sum(
        np.isin(wanted, had, invert=True).sum()
        for wanted, had in zip(np.vstack(new), np.vstack(old), strict=True)
    )
    width = moves.send.shape[-1]
    assert moves.moved == lacking > 0 and width & (width - 1) == 0 < width


def test_what_stays_on_its_device_is_not_sent():
    held = tables(1, 8, 4, 3)
    moves = plan_moves(held, held[..., ::-1], 8)
    assert moves.moved == 0 and moves.send.shape == (1, 4, 4, 0)
    move = on_devices(4, functools.partial(move_experts, axis_name="ep"))
    text = move.lower(np.zeros((4, 3, 2), np.float32), moves.send[0], moves.take[0]).as_text()
    assert "all_to_all" not in text


def test_a_copy_is_fetched_from_those_least_asked():
    """Two devices have it, four ask: two ask each."""
    before = np.array([[0, 1], [0, 2], [3, 4], [5, 6], [7, 8], [9, 10]])
    wanted = np.array([[0, 1, 3, 5], [0, 2, 7, 9], [3, 4, 0, 1], [5, 6, 0, 2], [7, 8, 0, 1], [9, 10, 0, 2]])
    moves = plan_moves(before, wanted, 11)
    asked = collections.Counter((moves.take[2:, 2] // moves.send.shape[-1]).tolist())
    assert asked == {0: 2, 1: 2}


@pytest.mark.parametrize(
    "held, num_experts, told",
    [
        ([[0, 1], [2, 2]], 3, "held has expert 2 twice on device 1; give it one copy there"),
        ([[0, 1], [1, 0]], 3, "held has no copy of expert 2; every expert needs one"),
        ([[0, 1], [2, 3]], 3, "held has expert 3; there are experts 0 to 2"),
        ([[0, 1], [2, -1]], 3, "held has expert -1; there are experts 0 to 2"),
        ([[0, 1], [2, 3]], 5, "2 devices of 2 slots have no room for 5 experts; give at least 3 slots"),
        ([0, 1], 2, r"held is int64 \[2\]; give integers \[..., devices, slots\]"),
        ([[0.0, 1.0]], 2, r"held is float64 \[1, 2\]; give integers"),
    ],
)
def test_tables_that_are_none_are_refused(held, num_experts, told):
    for function in (share_copies, lambda *args: plan_moves(args[0], *args)):
        with pytest.raises(ValueError, match=told):
            function(np.array(held), num_experts)


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="4 devices do not divide over 3 nodes of equal size"):
        share_copies(tables(1, 8, 4, 3), 8, num_nodes=3)
    with pytest.raises(ValueError, match=r"before is \[1, 4, 3\] and after \[1, 2, 4\]; both need the same"):
        plan_moves(tables(1, 8, 4, 3), tables(1, 8, 2, 4), 8)
