"""Placements against brute force, integer programming and DeepSeek's algorithm as a plain loop."""

import itertools
import pathlib
import runpy

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpipe_jax.balance import Layout, Placement, balance, bound_of
from dualpipe_jax.balance.bounds import packing_bound
from dualpipe_jax.balance.copies import add_copies
from dualpipe_jax.balance.outlook import worst_imbalance

BENCHMARK = pathlib.Path(__file__).parents[2] / "benchmarks" / "balance.py"


def peak(loads, devices):
    """The busiest device's load over the mean, in the worst window, by hand: loads [windows][experts]."""
    copies = [expert for device in devices for expert in device]
    peaks = []
    for row in loads:
        on = [sum(row[expert] / copies.count(expert) for expert in device) for device in devices]
        peaks.append(max(on) * len(devices) / sum(row) if sum(row) else 1.0)
    return max(peaks)


def best(loads, num_experts, num_devices, num_slots):
    """The least peak of all placements without two copies on a device."""
    choices = list(itertools.combinations(range(num_experts), num_slots))
    placements = itertools.combinations_with_replacement(choices, num_devices)
    return min(peak(loads, p) for p in placements if len({e for device in p for e in device}) == num_experts)


TINY = st.sampled_from(
    [(3, 2, 2), (4, 3, 2), (4, 2, 3), (5, 3, 2), (5, 2, 4), (5, 4, 2), (6, 3, 3), (6, 2, 3), (6, 6, 1)]
)


@settings(max_examples=30, derandomize=True)
@given(TINY, st.integers(0, 2**32 - 1), st.integers(1, 2), st.floats(0.1, 1.5))
def test_the_bound_the_optimum_and_what_is_found(counts, seed, windows, spread):
    experts, devices, slots = counts
    loads = np.exp(spread * np.random.default_rng(seed).normal(size=(windows, 1, experts)))
    layout = Layout(devices, slots)
    found = balance(loads, layout, effort=0.2)
    optimum = best(loads[:, 0].tolist(), *counts)
    ours = peak(loads[:, 0].tolist(), found.experts[0].tolist())
    np.testing.assert_allclose(worst_imbalance(loads, found), [ours], rtol=1e-9)
    assert bound_of(loads, layout)[0] <= optimum * (1 + 1e-9)
    assert optimum <= ours * (1 + 1e-9)
    assert ours <= optimum * 1.05


def least_of_pairs(loads, num_devices):
    """Between which values the least peak of two slots a device lies, two copies on one device allowed: a proof.

    An integer programme: counts of copies such that for every value v above half of the limit no more copies weigh
    more than v than weigh at most what v leaves. Then, and only then, heaviest with lightest makes pairs within it.
    """
    mean = loads.sum() / num_devices
    low, high = 1.0, 2.0
    while high - low > 1e-3:
        limit = (low + high) / 2 * mean
        options = [(e, c, loads[e] / c) for e in range(len(loads)) for c in range(1, num_devices + 1)]
        expert, count, share = (np.array(column) for column in zip(*options, strict=True))
        cuts = np.unique([*share[share > limit / 2] - 1e-9, limit / 2])
        over = [count * (share > v) - count * (share <= limit - v) for v in cuts]
        fits = scipy.optimize.Bounds(0, (share <= limit).astype(float))
        rules = [
            scipy.optimize.LinearConstraint(np.array(over, float), -np.inf, 0),
            scipy.optimize.LinearConstraint((expert == np.arange(len(loads))[:, None]).astype(float), 1, 1),
            scipy.optimize.LinearConstraint(count[None].astype(float), 2 * num_devices, 2 * num_devices),
        ]
        result = scipy.optimize.milp(
            np.zeros(len(share)), constraints=rules, integrality=np.ones(len(share)), bounds=fits
        )
        assert result.status in (0, 2)
        low, high = (low, limit / mean) if result.status == 0 else (limit / mean, high)
    return low, high


@pytest.mark.parametrize("seed", range(2))
def test_two_slots_a_device_against_integer_programming(seed):
    loads = np.random.default_rng(seed).random((1, 24))
    layout = Layout(14, 2)
    low, high = least_of_pairs(loads[0], 14)
    ours = balance(loads, layout).imbalance(loads)[0]
    assert bound_of(loads, layout)[0] <= high
    assert low <= ours * (1 + 1e-9)
    assert ours <= high * 1.01


@pytest.mark.parametrize(
    ("slots", "devices", "most"), [(288, 32, 1.0008), (320, 64, 1.001), (256, 32, 1.001), (288, 288, None)]
)
def test_58_layers_of_256_uniform_experts(slots, devices, most):
    loads = np.random.default_rng(0).random((58, 256))
    layout = Layout(devices, slots // devices)
    found, bound = balance(loads, layout).imbalance(loads), bound_of(loads, layout)
    assert (found >= bound * (1 - 1e-9)).all()
    if most is None:  # one slot a device: the heaviest copy decides, and it cannot be lighter
        np.testing.assert_allclose(found, bound, rtol=1e-6)
    else:
        assert found.mean() < most


def test_never_worse_than_deepseeks():
    """With few experts, all in all or on a node, its double copies may share better: the benchmark counts those too."""
    random, gains, benchmark = np.random.default_rng(5), [], runpy.run_path(str(BENCHMARK))
    for _ in range(12):
        loads, layout = benchmark["random_case"](random, 32)
        groups, nodes = layout.num_groups or 1, layout.num_nodes
        given = layout.num_replicas, groups, nodes, layout.num_devices
        theirs, ours = np.array(benchmark["deepseek"](loads, *given)), balance(loads, layout, effort=0.3)
        before, after = benchmark["imbalance"](loads, theirs), benchmark["imbalance"](loads, ours.experts)
        few = loads.shape[1] < 32 * (nodes if groups > 1 else 1)
        fair = ~benchmark["doubles"](theirs) if few else np.ones(len(loads), bool)
        assert (after <= before * (1 + 1e-9))[fair].all(), (loads.shape, layout)
        gains += (before - after).tolist()
    assert np.mean(gains) > 0.005


shapes = st.tuples(st.integers(1, 12), st.integers(1, 8), st.integers(1, 5)).filter(
    lambda t: t[1] * t[2] >= t[0] and t[2] <= t[0]
)


@settings(max_examples=40, derandomize=True)
@given(shapes, st.integers(0, 2**32 - 1), st.sampled_from(["counts", "zeros", "huge", "tiny", "one"]))
def test_every_input_gets_a_placement_above_the_bound(shape, seed, kind):
    experts, devices, slots = shape
    random = np.random.default_rng(seed)
    loads = {
        "counts": random.integers(0, 5, (2, experts)),
        "zeros": np.zeros((2, experts)),
        "huge": random.random((2, experts)) * 1e300,
        "tiny": random.random((2, experts)) * 1e-300,
        "one": np.eye(2, experts),
    }[kind]
    layout = Layout(devices, slots)
    # A Placement checks itself: every expert there, none twice on a device.
    found = balance(loads, layout, effort=0.2)
    assert found.experts.shape == (2, devices, slots)
    if kind == "zeros":
        loads = np.ones((2, experts))  # nothing is known: as good as equal
    assert (found.imbalance(loads) >= bound_of(loads, layout) * (1 - 1e-9)).all()
    assert found == balance(loads, layout, effort=0.2)


def test_the_worst_window_counts():
    random = np.random.default_rng(3)
    loads = random.random((3, 2, 32))
    layout = Layout(8, 6)
    for_all, for_mean = balance(loads, layout, effort=0.1), balance(loads.mean(0), layout, effort=0.1)
    assert (worst_imbalance(loads, for_all) < worst_imbalance(loads, for_mean) - 0.03).all()
    scaled = loads * np.array([1.0, 100.0, 0.01])[:, None, None]  # each window counts by its own mean
    alike = worst_imbalance(scaled, balance(scaled, layout, effort=0.1))
    np.testing.assert_allclose(alike, worst_imbalance(loads, for_all), rtol=0.03)
    silent = np.concatenate([loads, np.zeros((1, 2, 32))])  # a window without load asks for nothing
    assert balance(silent, layout, effort=0.1) == for_all


def test_groups_stay_on_their_nodes():
    loads = np.exp(np.random.default_rng(4).normal(size=(5, 32)))
    layout = Layout(8, 6, num_nodes=4, num_groups=8)
    found = balance(loads, layout)
    group = found.experts.reshape(5, 4, 12) // 4
    for layer in range(5):
        nodes = [set(group[layer, node].tolist()) for node in range(4)]
        assert [len(own) for own in nodes] == [2] * 4 and set.union(*nodes) == set(range(8))
    assert (found.imbalance(loads) >= bound_of(loads, layout) * (1 - 1e-9)).all()
    assert found.imbalance(loads).mean() > balance(loads, Layout(8, 6)).imbalance(loads).mean()


def test_a_group_that_must_stay_on_its_node_bounds_the_node():
    """Of eight tokens six are of the first group's experts, and four would be even."""
    loads = [[3, 3, 1, 1]]
    assert bound_of(loads, Layout(2, 2)) == pytest.approx([1])
    assert bound_of(loads, Layout(2, 2, num_nodes=2, num_groups=2)) == pytest.approx([1.5])


def test_unequal_nodes_are_fine_where_groups_are_free():
    loads = np.random.default_rng(1).random((1, 12))
    assert balance(loads, Layout(6, 3, num_nodes=4)) == balance(loads, Layout(6, 3))


def test_of_three_heavy_copies_two_meet_on_one_of_two_devices():
    assert packing_bound(np.array([[4.0, 4, 4, 1, 1, 1]]), 2) == [4 + 4 + 1]


def test_greedy_counts_are_the_best_for_the_heaviest_copy():
    loads = np.random.default_rng(2).random((20, 4))
    found = (loads / add_copies(loads, np.ones((20, 4), int), 9, 5)).max(-1)
    counts = [c for c in itertools.product(range(1, 6), repeat=4) if sum(c) == 9]
    np.testing.assert_allclose(found, np.min([(loads / c).max(-1) for c in counts], 0))


@pytest.mark.parametrize(
    ("loads", "layout", "message"),
    [
        (np.ones(4), Layout(2, 2), r"loads are float64 \[4\]; give numbers \[layers, experts\]"),
        ([[1, 2], [1]], Layout(2, 2), r"loads are object \[0\]"),
        ([[1, np.nan]], Layout(2, 1), "the load of layer 0, expert 1 is nan; loads are counts of tokens"),
        ([[[1, 2]], [[1, -2]]], Layout(2, 1), "the load of window 1, layer 0, expert 1 is -2.0"),
        ([[1, np.inf]], Layout(2, 1), "expert 1 is inf"),
        (
            np.ones((1, 9)),
            Layout(4, 2),
            "4 devices of 2 slots have no room for the loads. 9 .*; give at least 3 slots",
        ),
        (
            np.ones((1, 3)),
            Layout(2, 4),
            "twice on one device, for the loads are of 3 experts; give at most 3 slots",
        ),
        (np.ones((1, 6)), Layout(4, 2, 4, 4), "6 experts are no multiple of 4 groups"),
        (np.ones((1, 8)), Layout(4, 3, 4, 4), "a node has 2 experts; give at most that many slots"),
    ],
)
def test_what_cannot_be_placed(loads, layout, message):
    with pytest.raises(ValueError, match=message):
        balance(loads, layout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2), "num_devices=0; it must be at least 1"),
        ((2, 1.5), "num_slots=1.5 .*int"),
        (
            (6, 2, 4, 4),
            "num_devices=6 is no multiple of num_nodes=4; .* num_nodes that divides num_devices, or",
        ),
        (
            (8, 2, 4, 6),
            "num_groups=6 is no multiple of num_nodes=4; .* num_nodes that divides num_groups, or",
        ),
    ],
)
def test_layouts_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        Layout(*arguments)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ([[[0, 1], [0, 0]]], "layer 0, device 1 holds expert 0 twice; give it one copy there"),
        ([[[0, 1], [1, 0]]], "expert 2 has no copy in layer 0"),
        ([[[0, 1], [2, 3]]], "layer 0, device 1, slot 1 holds expert 3; there are experts 0 to 2"),
        ([[0, 1, 2]], r"experts are int64 \[1, 3\]; give integers \[layers, devices, slots\]"),
    ],
)
def test_placements_that_cannot_be(experts, message):
    with pytest.raises(ValueError, match=message):
        Placement(np.array(experts), 3)


def test_a_placement_says_where_experts_are():
    found = Placement(np.array([[[0, 1], [2, 0]], [[2, 1], [0, 1]]]), 3)
    assert found.counts.tolist() == [[2, 1, 1], [1, 2, 1]]
    assert found.slots_of.tolist() == [[[0, 3], [1, -1], [2, -1]], [[2, -1], [1, 3], [0, -1]]]
    assert found.device_loads([[4, 1, 2], [3, 2, 6]]).tolist() == [[3, 4], [7, 4]]
    assert Placement.from_json(found.to_json()) == found
    with pytest.raises(ValueError, match=r'needs "num_experts" and "experts"'):
        Placement.from_json({"experts": []})
    with pytest.raises(ValueError, match=r"loads are \[2, 4\]; give \[..., 2, 3\]"):
        found.device_loads(np.ones((2, 4)))
    with pytest.raises(ValueError, match="of other layers, devices or experts"):
        found.moves_from(Placement.in_order(2, 4, 2, 2))
