"""From one placement to the next: what moves, what it gains, and when to look."""

import itertools
import json

import numpy as np
import pytest

from dualpipe_jax.balance import Layout, LoadTracker, Placement, balance, is_due, outlook, rebalance_experts
from dualpipe_jax.balance.outlook import worst_imbalance
from dualpipe_jax.balance.placement import count_moves
from dualpipe_jax.balance.steps import improve


def moved(before, after):
    """By hand: experts that a device did not hold."""
    pairs = zip(before.experts.tolist(), after.experts.tolist(), strict=True)
    return sum(len(set(new) - set(old)) for olds, news in pairs for old, new in zip(olds, news, strict=True))


LAYOUT = Layout(8, 6)


def test_an_expert_that_lies_twice_on_a_device_is_fetched_once():
    """DeepSeek's algorithm puts copies beside each other; what it asks a device to fetch, counted by sets."""
    loads = np.exp(np.random.default_rng(2).normal(size=(3, 16)))
    before = Placement.in_order(3, 16, 8, 2).experts
    after = rebalance_experts(loads, 32, 1, 1, 8)[0].reshape(3, 8, 4)
    assert any(len({*row}) < 4 for layer in after.tolist() for row in layer)
    pairs = zip(before.tolist(), after.tolist(), strict=True)
    fetched = [sum(len({*new} - {*old}) for old, new in zip(*pair, strict=True)) for pair in pairs]
    assert count_moves(before, after).tolist() == fetched


@pytest.fixture(scope="module")
def drifted():
    """A placement in force, and loads that have drifted away from it."""
    random = np.random.default_rng(0)
    loads = np.exp(random.normal(size=(6, 40)))
    return balance(loads, LAYOUT), loads * np.exp(0.3 * random.normal(size=loads.shape))


def test_more_moves_never_make_it_worse_and_few_go_far(drifted):
    previous, loads = drifted
    limits = [0, 1, 2, 5, 10, 20, 40, 80, 160]
    placed = [balance(loads, LAYOUT, previous, max_moves=limit, effort=0.3) for limit in limits]
    peaks = [worst_imbalance(loads, p).sum() for p in placed]
    assert all(moved(previous, p) <= limit for p, limit in zip(placed, limits, strict=True))
    assert placed[0] == previous
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(peaks))
    assert peaks[-1] < 1.01 * len(loads)
    assert peaks[0] - peaks[5] > 0.6 * (peaks[0] - peaks[-1])  # 20 of 288 slots
    fresh = balance(loads, LAYOUT, effort=0.3)
    assert moved(previous, fresh) > 5 * moved(previous, placed[-1]) / 4


def test_a_move_that_costs_more_than_it_gains_is_not_made(drifted):
    previous, loads = drifted
    before = worst_imbalance(loads, previous).sum()
    for limit in (None, 60):
        counts = []
        for cost in (0.0, 0.002, 0.02, 0.2, 10.0):
            placed = balance(loads, LAYOUT, previous, max_moves=limit, move_cost=cost, effort=0.3)
            counts.append(moved(previous, placed))
            assert before - worst_imbalance(loads, placed).sum() >= cost * counts[-1] - 1e-9
        assert counts == sorted(counts, reverse=True) and counts[0] > counts[2] > counts[-1] == 0


def test_what_stays_keeps_its_slot(drifted):
    previous, loads = drifted
    placed = balance(loads, LAYOUT, previous, max_moves=30, effort=0.3)
    same, found = (placed.experts == previous.experts).sum(), outlook(loads, placed, previous, LAYOUT)
    assert same == previous.experts.size - moved(previous, placed)
    assert moved(previous, placed) == placed.moves_from(previous).sum() == found.moves.sum()


def test_the_first_copies_leave_devices_their_names():
    loads = np.random.default_rng(3).random((2, 24))
    plain = Placement.in_order(2, 24, 8, 3)
    named, other = balance(loads, Layout(8, 4), plain), balance(loads, Layout(8, 4))
    np.testing.assert_allclose(named.imbalance(loads), other.imbalance(loads))
    assert moved(plain, named) < moved(plain, other)
    with pytest.raises(ValueError, match="or fewer if moves are not limited"):
        balance(loads, Layout(8, 4), plain, max_moves=3)


def test_nothing_moves_where_nothing_is_gained():
    loads = np.random.default_rng(1).random((3, 24))
    layout = Layout(4, 8)
    placed = balance(loads, layout)
    assert balance(loads, layout, placed) == placed
    assert balance(np.zeros((3, 24)), layout, placed) == placed


def test_every_step_keeps_a_placement_and_lowers_the_heaviest_device(drifted):
    previous, loads = drifted
    relative = (loads * 8 / loads.sum(-1, keepdims=True))[None]
    last, steps = worst_imbalance(loads, previous), 0
    for held in improve(previous.experts, relative, np.ones(6), 25):
        now = worst_imbalance(loads, Placement(held, 40))
        assert (now <= last + 1e-9).all()
        last, steps = now, steps + 1
    assert steps > 10


def test_groups_stay_on_the_nodes_where_they_are():
    random = np.random.default_rng(2)
    layout = Layout(8, 6, num_nodes=2, num_groups=4)
    loads = np.exp(random.normal(size=(3, 32)))
    previous = balance(loads, layout)
    later = loads * np.exp(0.3 * random.normal(size=loads.shape))
    placed = balance(later, layout, previous, max_moves=10)
    for old, new in zip(previous.experts.reshape(3, 2, -1), placed.experts.reshape(3, 2, -1), strict=True):
        assert [set((x // 8).tolist()) for x in old] == [set((x // 8).tolist()) for x in new]
    assert moved(previous, placed) <= 10
    assert worst_imbalance(later, placed).sum() < worst_imbalance(later, previous).sum()
    with pytest.raises(ValueError, match="has copies of group 0 of layer 0 on 2 nodes; leave previous out"):
        balance(loads, layout, Placement.in_order(3, 32, 8, 6))
    lopsided = Placement(np.array([[[0, 1, 2], [3, 4, 5], [6, 7, 6 - 6], [7, 6, 5]]]), 8)
    with pytest.raises(ValueError, match="group 0 of layer 0 on 2 nodes"):
        balance(np.ones((1, 8)), Layout(4, 3, 2, 4), lopsided)


def test_a_node_that_is_not_the_slowest_of_its_layer_stays_as_it_is():
    layout = Layout(4, 2, num_nodes=2, num_groups=2)
    previous = Placement.in_order(1, 8, 4, 2)
    loads = [
        [8, 0, 0, 0, 3, 3, 1, 1]
    ]  # devices have 8, 0, 6, 2: the second node could be even, the first cannot
    assert balance(loads, layout, previous) == previous
    placed = balance([[8, 0, 0, 0, 9, 3, 1, 1]], layout, previous)  # 12 and 2, which 10 and 4 is better than
    assert worst_imbalance([[8, 0, 0, 0, 9, 3, 1, 1]], placed) == pytest.approx(10 / (22 / 4))
    assert moved(previous, placed) == 2 and (placed.experts[0, :2] == previous.experts[0, :2]).all()


@pytest.mark.parametrize("limit", [None, 20])
def test_with_groups_too_a_move_that_costs_more_than_it_gains_is_not_made(limit):
    random, layout = np.random.default_rng(1), Layout(8, 5, num_nodes=4, num_groups=8)
    loads = np.exp(random.normal(size=(3, 32)))
    previous, later = (
        balance(loads, layout, effort=0.1),
        loads * np.exp(0.5 * random.normal(size=loads.shape)),
    )
    for cost in (0.002, 0.02, 0.05, 0.1):
        placed = balance(later, layout, previous, max_moves=limit, move_cost=cost, effort=0.1)
        gain = worst_imbalance(later, previous) - worst_imbalance(later, placed)
        assert (gain >= cost * placed.moves_from(previous) - 1e-9).all()


def test_an_outlook_says_what_is_gained_before_anything_moves(drifted):
    previous, loads = drifted
    placed = balance(loads, LAYOUT, previous, max_moves=20, effort=0.3)
    found = outlook(loads, placed, previous, LAYOUT)
    before, after = worst_imbalance(loads, previous), worst_imbalance(loads, placed)
    assert found.gain == pytest.approx(1 - after.sum() / before.sum())
    assert found.utilisation == pytest.approx((6 / before.sum(), 6 / after.sum()))
    assert str(found) == (
        f"max/mean {before.mean():.4f} -> {after.mean():.4f}, bound {found.bound.mean():.4f}; "
        f"{found.gain:.1%} less for the busiest devices, {moved(previous, placed)} experts move"
    )
    assert found.to_json()["moves"] == found.moves.tolist()


def test_a_layer_without_load_has_no_bound_above_what_it_is():
    """Five equal experts cannot be even on three devices of two slots; without any load they are."""
    layout, loads = Layout(3, 2), [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
    placed = balance(loads, layout)
    found = outlook(loads, placed, placed, layout)
    assert found.after.tolist() == [1, pytest.approx(6 / 5)] and found.bound == pytest.approx([1, 6 / 5])
    grouped = Layout(2, 2, num_nodes=2, num_groups=2)
    assert outlook([[0, 0, 0, 0]], Placement.in_order(1, 4, 2, 2), HELD, grouped).bound.tolist() == [1]


@pytest.mark.parametrize("load", [np.nan, np.inf, -1])
def test_loads_that_are_none_have_no_imbalance(load):
    with pytest.raises(ValueError, match="loads must be finite and at least 0"):
        HELD.imbalance([[load, 1, 1, 1]])


def test_due_below_a_threshold_of_utilisation():
    placement = Placement.in_order(1, 4, 2, 2)
    loads = [[3, 3, 2, 2]]  # devices have 6 and 4: they work for 5/6 of their time
    assert is_due(loads, placement, 0.84) and not is_due(loads, placement, 0.83)
    assert not is_due([[0, 0, 0, 0]], placement, 1.0)
    with pytest.raises(ValueError, match="threshold=1.5; give a share"):
        is_due(loads, placement, 1.5)


HELD = Placement.in_order(1, 4, 2, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_moves": 3}, "of moves from a placement; give previous too"),
        ({"move_cost": 0.1}, "of moves from a placement; give previous too"),
        ({"max_moves": -1, "previous": HELD}, "max_moves=-1; give an integer of at least 0"),
        ({"move_cost": np.nan, "previous": HELD}, "move_cost=nan; give a number"),
        ({"effort": -1.0}, "effort=-1.0; give a number of at least 0"),
        ({"previous": Placement.in_order(1, 4, 2, 3)}, "wanted are 1 layers x 4 .* on 2 devices of 2 slots"),
        ({"previous": Placement.in_order(1, 4, 4, 1)}, "wanted are 1 layers x 4 .* on 2 devices of 2 slots"),
    ],
)
def test_limits_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        balance(np.ones((1, 4)), Layout(2, 2), **options)


def test_a_tracker_is_a_moving_average_and_goes_on_from_a_checkpoint_to_the_last_bit():
    counts = np.random.default_rng(6).integers(0, 1000, (30, 2, 5))
    tracker = LoadTracker.start(2, 5, half_life=4.0)
    for number, step in enumerate(counts):
        if number == 20:
            text = json.dumps({name: np.asarray(value).tolist() for name, value in tracker.state().items()})
        tracker = tracker.add(step)
    weights = 0.5 ** (np.arange(30)[::-1] / 4.0)
    np.testing.assert_allclose(tracker.loads, np.average(counts, 0, weights), rtol=1e-12)
    again = LoadTracker.restore(json.loads(text))
    for step in counts[20:]:
        again = again.add(step)
    np.testing.assert_array_equal(tracker.loads, again.loads)
    assert (again.steps, again.weight, again.half_life) == (tracker.steps, tracker.weight, 4.0)
    assert tracker.steps == 30
    np.testing.assert_array_equal(LoadTracker.start(2, 5).add(counts[0]).loads, counts[0])


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda t: t.add([[1.0, 2.0]]), "counts are float64; give integers"),
        (lambda t: t.add([[1, 2, 3]]), r"counts are \[1, 3\]; give \[1, 2\]"),
        (lambda t: t.add([[1, -2]]), "a count is -2; counts are at least 0"),
        (lambda t: t.loads, "no step was added yet"),
        (lambda t: LoadTracker.start(0, 2), "0 layers x 2 experts"),
        (lambda t: LoadTracker.start(1, 2, 0.0), "half_life=0.0; give steps, above 0"),
        (lambda t: LoadTracker.restore({"sums": [[1.0]]}), "the state has no half_life, weight, steps"),
        (lambda t: LoadTracker.restore(t.state() | {"sums": [1.0]}), r"sums of the state are \[1\]"),
    ],
)
def test_what_a_tracker_refuses(work, message):
    with pytest.raises(ValueError, match=message):
        work(LoadTracker.start(1, 2))
