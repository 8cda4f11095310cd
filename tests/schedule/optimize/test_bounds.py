"""The lower bound and the optimum against each other, against every recipe and against brute force."""

import dataclasses
import itertools
import math
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpipe_jax.schedule import ALL_SCHEDULES, CostModel, MemoryModel, simulate, validate
from dualpipe_jax.schedule.ir import Action, Op, Placement, Schedule
from dualpipe_jax.schedule.optimize.bounds import lower_bound
from dualpipe_jax.schedule.optimize.optimum import optimum
from dualpipe_jax.schedule.recipes import dualpipe, dualpipe_v, gpipe, one_f_one_b, zb_h1

TINY = (
    (Placement.linear(2), 2),
    (Placement.v(2), 1),
    (Placement.bidirectional(2), 2),
    (Placement.linear(1), 2),
    pytest.param(Placement.linear(1), 3, marks=pytest.mark.slow),
)


def seeded_costs(random, wild=False):
    """Small whole costs; FB between max(F, B) and F + B, or anything at all."""
    f, i, w = (random.randint(1, 3) for _ in range(3))
    fb = random.randint(1, 12) if wild else random.randint(max(f, i + w), f + i + w)
    extra = {stage: tuple(random.randint(0, 2) for _ in "FIW") for stage in (0, -1) if random.random() < 0.3}
    return CostModel(f, i, w, fb, send=random.choice((0, 0, 1, 2)), extra=extra)


def whole_rank(schedule, costs, memory=None):
    """Makespan and most memory of a schedule, with costs and sizes of a rank's share."""
    timeline = simulate(schedule, costs.for_schedule(schedule))
    sizes = (MemoryModel() if memory is None else memory).for_schedule(schedule)
    return timeline.makespan, max(timeline.memory(sizes))


def taken(recipe, counts):
    """The recipe's schedules for the counts that it takes."""
    for num_ranks, num_microbatches in counts:
        try:
            yield recipe(num_ranks, num_microbatches)
        except ValueError as error:
            assert "try" in str(error)


# ---- the lower bound ----


def test_no_schedule_beats_the_bound():
    for recipe in ALL_SCHEDULES:
        chance = random.Random(recipe.__name__)
        counts = [(chance.randint(1, 8), chance.choice((1, 2, 4, 6, 8, 12, 16))) for _ in range(24)]
        schedules = list(taken(recipe, counts))
        assert len(schedules) > 5
        for schedule in schedules:
            sizes = MemoryModel(*(chance.choice((0, 0.5, 1)) for _ in range(5)))
            for memory, wild in ((None, False), (sizes, True)):
                costs = seeded_costs(chance, wild)
                makespan, kept = whole_rank(schedule, costs, memory)
                counts = schedule.num_ranks, schedule.num_microbatches, costs
                for limit in (math.inf, kept):
                    near = lower_bound(*counts, limit, placement=schedule.placement, memory=memory)
                    anywhere = lower_bound(*counts, limit, memory=memory)
                    assert anywhere <= near * (1 + 1e-9), (schedule.name, counts, limit, memory)
                    assert near <= makespan * (1 + 1e-9), (schedule.name, counts, limit, memory)


def test_a_transfer_that_blocks_only_adds():
    costs = CostModel(1, 2, 1, send=0.5, blocking=True)
    for schedule in (zb_h1(4, 6), dualpipe(4, 8), dualpipe_v(3, 6)):
        counts = schedule.num_ranks, schedule.num_microbatches
        assert lower_bound(*counts, costs, placement=schedule.placement) <= whole_rank(schedule, costs)[0]


def test_bounds_that_are_known_to_be_met():
    """On a line the last rank waits for its first forward and works from then on: ZB-H1 does just that."""
    for ranks in (2, 3, 4, 8):
        line, microbatches = Placement.linear(ranks), 2 * ranks
        assert lower_bound(ranks, microbatches, placement=line) == 3 * microbatches + ranks - 1
        assert simulate(zb_h1(ranks, microbatches)).makespan == 3 * microbatches + ranks - 1
        # Where a pair gains 1: what the first rank runs while it waits for its first backward has no partner left.
        gaining = CostModel(FB=2)
        assert lower_bound(ranks, microbatches, gaining, placement=line) == 3 * microbatches - 1


def test_too_few_weights_to_fill_the_way_of_the_last_backward():
    for placement, costs, known in (
        (Placement.linear(2), CostModel(4, 4, 3, FB=11), 27),
        (Placement.v(2), CostModel(2, 4, 1, FB=5), 16.5),
    ):
        assert lower_bound(2, 2, costs, placement=placement) == optimum(placement, 2, costs).makespan == known


def test_one_microbatch_goes_there_and_back():
    costs = CostModel(1, 2, 3, send=0.5, extra={0: (0.25, 0, 0.5), -1: (1, 1, 1)})
    # forwards 4 + 1.25, three hops, backwards 8 + 1, three hops, and the W of the first stage
    assert lower_bound(4, 1, costs, placement=Placement.linear(4)) == 5.25 + 1.5 + 9 + 1.5 + 3.5
    (order,) = (tuple((Action(0, op, 0),) for op in (Op.F, Op.B)),)
    alone = Schedule("alone", Placement.linear(1), 1, (order,))
    assert simulate(alone, costs).makespan == lower_bound(1, 1, costs, placement=Placement.linear(1))


def test_little_memory_binds():
    line = Placement.linear(4)
    # one live activation: each microbatch there and back before the next, then the first stage's W
    assert lower_bound(4, 5, CostModel(1, 2, 1), memory_limit=1, placement=line) == 5 * 4 * 3 + 1
    bounds = [lower_bound(4, 16, memory_limit=limit, placement=line) for limit in (1, 2, 3, 4, 5, 8)]
    assert bounds == sorted(bounds, reverse=True) and bounds[0] > bounds[2] > bounds[-1]
    assert bounds[-1] == lower_bound(4, 16, placement=line)
    assert lower_bound(4, 16, memory_limit=1) == 16 * 2 * 4 / 2  # half a turn for the average activation


@pytest.mark.parametrize("limit", [1e19, 1e300, 1.7e308, 10**30], ids=str)
def test_a_limit_beyond_what_numpy_counts_is_none(limit):
    line = Placement.linear(2)
    assert lower_bound(2, 4, memory_limit=limit, placement=line) == 13
    assert optimum(line, 2, memory_limit=limit).makespan == 7


def test_no_bound_where_not_even_one_microbatch_fits():
    v = Placement.v(2)
    assert lower_bound(2, 4, memory_limit=1, placement=v) < math.inf
    assert lower_bound(2, 4, memory_limit=0.9, placement=v) == math.inf
    assert lower_bound(2, 4, memory_limit=0.9) == math.inf
    heavy = MemoryModel(parameters=2)
    for limit in (1.9, 2.9):  # no room for the parameters, none beside them
        assert lower_bound(2, 4, memory_limit=limit, memory=heavy, placement=v) == math.inf
    assert lower_bound(2, 4, memory_limit=3, memory=heavy, placement=v) < math.inf
    # two copies of the parameters
    assert lower_bound(2, 4, memory_limit=4.9, memory=heavy, placement=Placement.bidirectional(2)) == math.inf


# ---- the optimum ----


def chains_of(stage, microbatch):
    """The two ways to run a microbatch at a stage."""
    return [[Action(stage, Op(op), microbatch) for op in ops] for ops in ("FB", "FIW")]


def interleavings(chains):
    chains = [chain for chain in chains if chain]
    if not chains:
        yield []
    for n, chain in enumerate(chains):
        for rest in interleavings([*chains[:n], chain[1:], *chains[n + 1 :]]):
            yield [chain[0], *rest]


def with_pairs(placement, order):
    """An order of actions, and all ways to make neighbours in it a pair."""
    if not order:
        yield ()
        return
    for rest in with_pairs(placement, order[1:]):
        yield ((order[0],), *rest)
    if len(order) > 1 and (order[0].op, order[1].op) == (Op.F, Op.B):
        same = placement.pipe_of(order[0].stage) == placement.pipe_of(order[1].stage)
        if not same or order[0].microbatch != order[1].microbatch:
            for rest in with_pairs(placement, order[2:]):
                yield (tuple(order[:2]), *rest)


def every_order(placement, num_microbatches, rank):
    each = num_microbatches // placement.num_pipes
    work = itertools.product(placement.stages_on[rank], range(each))
    for chains in itertools.product(*itertools.starmap(chains_of, work)):
        for order in interleavings(chains):
            yield from with_pairs(placement, order)


def every_schedule(placement, num_microbatches):
    orders = [list(every_order(placement, num_microbatches, rank)) for rank in range(placement.num_ranks)]
    for some in itertools.product(*orders):
        try:
            yield simulate(Schedule("any", placement, num_microbatches, some)).schedule
        except ValueError:  # it hangs
            continue


@pytest.mark.parametrize("placement, num_microbatches", TINY, ids=str)
def test_optimum_is_that_of_all_schedules(placement, num_microbatches):
    schedules = list(every_schedule(placement, num_microbatches))
    chance = random.Random(1)
    for memory, send in ((MemoryModel(), 1), (MemoryModel(1, 1, 2, 0.5, 1), 0)):
        costs = [dataclasses.replace(seeded_costs(chance, wild), send=send) for wild in (False, True)]
        for cost in costs[: 1 if len(schedules) > 5000 else 2]:
            outcomes = [whole_rank(schedule, cost, memory) for schedule in schedules]
            for limit in {min(kept for _, kept in outcomes), min(outcomes)[1], math.inf}:
                found = optimum(placement, num_microbatches, cost, limit, memory=memory)
                expected = min(makespan for makespan, kept in outcomes if kept <= limit)
                assert found.proven and found.makespan == pytest.approx(expected), (cost, limit, memory)
                makespan, kept = whole_rank(validate(found.schedule), cost, memory)
                assert makespan == pytest.approx(found.makespan) and kept <= limit + 1e-9


@settings(max_examples=25)
@given(st.randoms(use_true_random=False))
def test_bound_optimum_and_recipes_stand_in_that_order(chance):
    recipe, num_ranks = chance.choice(ALL_SCHEDULES), chance.randint(2, 3)
    named = next(taken(recipe, ((n, m) for m in range(2, 9) for n in (num_ranks, 5 - num_ranks))))
    if named.placement.num_stages > 2 * named.num_ranks:
        return  # more stages a rank: more seconds than a test should take
    f, i, w = (chance.randint(1, 2) for _ in "FIW")
    costs = CostModel(f, i, w, chance.choice((f + i + w, max(f, i + w))), send=chance.choice((0, 1)))
    makespan, kept = whole_rank(named, costs)
    for limit in (math.inf, kept):
        found = optimum(
            named.placement, named.num_microbatches, costs, limit, incumbents=[named], time_limit=2
        )
        low = lower_bound(named.num_ranks, named.num_microbatches, costs, limit, placement=named.placement)
        assert low <= found.lower_bound * (1 + 1e-9) <= found.makespan * (1 + 2e-9) <= makespan * (1 + 3e-9)
        assert whole_rank(validate(found.schedule), costs)[1] <= limit * (1 + 1e-9)


def test_what_is_optimal_and_what_is_not():
    line, v, both = Placement.linear(3), Placement.v(2), Placement.bidirectional(4)
    assert optimum(line, 4).makespan == simulate(zb_h1(3, 4)).makespan == 14
    assert simulate(one_f_one_b(3, 4)).makespan == 18
    assert optimum(v, 4).makespan == 12.5
    assert whole_rank(dualpipe_v(2, 4), CostModel())[0] == 13
    assert optimum(both, 8).makespan == 25
    assert simulate(dualpipe(4, 8)).makespan == 26


def test_pairs_are_found_where_they_gain():
    found = optimum(Placement.bidirectional(2), 4, CostModel(FB=2))
    assert found.proven and found.makespan == 10
    assert any(len(slot) == 2 for order in found.schedule.orders for slot in order)


def test_a_full_backward_is_kept_where_a_stash_does_not_fit():
    stashing = MemoryModel(1, 0, 1)
    found = [optimum(Placement.linear(2), 2, memory_limit=limit, memory=stashing) for limit in (1, 2, 3)]
    assert {a.op for order in found[0].schedule.orders for slot in order for a in slot} == {Op.F, Op.B}
    assert [best.makespan for best in found] == [12, 8, 7] and all(best.proven for best in found)


def test_an_incumbent_at_the_bound_needs_no_search(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    found = optimum(
        Placement.linear(4), 8, incumbents=[gpipe(4, 8), zb_h1(4, 8), zb_h1(4, 7), dualpipe(4, 8)]
    )
    assert found.schedule == zb_h1(4, 8) and found.proven
    with pytest.raises(ImportError, match="optimum needs SciPy: .*python.* install scipy$"):
        optimum(Placement.linear(4), 8)
    with pytest.raises(ImportError):  # zb_h1 keeps 4
        optimum(Placement.linear(4), 8, memory_limit=3, incumbents=[zb_h1(4, 8)])


def test_time_that_runs_out_is_said():
    found = optimum(Placement.v(4), 8, CostModel(FB=2), incumbents=[dualpipe_v(4, 8)], time_limit=0)
    assert not found.proven
    assert (found.lower_bound, found.makespan, found.schedule.name) == (21.5, 22, "dualpipe_v")


# ---- messages ----


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: lower_bound(0, 4),
            "lower_bound: got 0 ranks and 4 microbatches; .* at least one of each, try 1 ranks and 4 microbatches",
        ),
        (
            lambda: lower_bound(3, 4, placement=Placement.v(2)),
            "lower_bound: got 3 ranks and 4 microbatches, but a placement of 2 ranks; give num_ranks=2",
        ),
        (
            lambda: lower_bound(2, 5, placement=Placement.bidirectional(2)),
            r"the placement's 2 pipe\(s\) share .* must be a positive multiple of 2; try 4 or 6",
        ),
        (lambda: optimum(Placement.bidirectional(2), 1), "got 2 ranks and 1 microbatches.*; try 2$"),
        (
            lambda: optimum(Placement.v(3), 2, memory_limit=0.5),
            "optimum: got 3 .*, but not even one microbatch fits memory_limit=0.5; give at least 1$",
        ),
        (lambda: optimum(Placement.linear(2), 2, CostModel(W=0)), "F=1, I=1, W=0, .*it needs costs above 0"),
        (
            lambda: optimum(Placement.v(2), 2, CostModel(2, 2, 2, extra={2: (-1, -1, -1)})),
            "optimum: the F of stage 2 takes no time; it needs costs above 0 at all stages",
        ),
        (lambda: optimum(Placement.linear(2), 2, CostModel(blocking=True)), "sends that do not block"),
        (  # it found 13, and 12 is possible
            lambda: optimum(Placement.linear(2), 4, CostModel(extra={-1: (0, -1, 0)})),
            "the I of stage 1 takes no time",
        ),
        (  # a pair of the first stage's forward and the last one's backward
            lambda: optimum(
                Placement.v(2), 2, CostModel(2, 2, 2, 3, extra={0: (-0.5, 0, 0), -1: (0, -0.5, -0.5)})
            ),
            "the F of stage 0 and the B of stage 3 takes no time",
        ),
        (
            lambda: optimum(Placement.linear(2), 2, CostModel(F=math.pi)),
            "have no common unit, or one far below 1; give multiples of one, such as F=2, I=3, W=2",
        ),
        (lambda: optimum(Placement.linear(2), 2, CostModel(1e-10, 1e-10, 1e-10)), "or one far below 1"),
        (lambda: optimum(Placement.linear(2), 2, CostModel(W=1e-10)), "or one far below 1"),
        (
            lambda: optimum(Placement.v(4), 8, CostModel(1, 1.64, 0.97)),
            "variables, more than 50000; give fewer, or costs with a greater common unit",
        ),
    ],
)
def test_messages(call, message):
    with pytest.raises(ValueError, match=message):
        call()
