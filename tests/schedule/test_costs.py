"""Costs of stages and what they keep: extras, division into finer stages, transfers, memory over time."""

import itertools
import math
import random

import numpy as np
import pytest

from dualpipe_jax.schedule import (
    ALL_SCHEDULES,
    CostModel,
    MemoryModel,
    Op,
    Placement,
    choose,
    lower_bound,
    simulate,
)
from dualpipe_jax.schedule.lowering.lower import lower
from dualpipe_jax.schedule.recipes import chimera, dualpipe, dualpipe_v, gpipe, one_f_one_b, zb_h1


def test_extras_are_added_wherever_their_stage_works():
    costs = CostModel(F=1, I=2, W=3, FB=4, extra={0: (0.1, 0.2, 0.3), -1: (10, 20, 30)})
    for schedule in (gpipe(3, 2), zb_h1(3, 4), dualpipe(4, 8), dualpipe_v(2, 4)):
        placement = schedule.placement
        for order in schedule.orders:
            for slot in order:
                expected = 4 if len(slot) == 2 else {Op.F: 1, Op.B: 5, Op.I: 2, Op.W: 3}[slot[0].op]
                for stage, op, _ in slot:
                    if placement.is_first(stage):
                        expected += {Op.F: 0.1, Op.B: 0.5, Op.I: 0.2, Op.W: 0.3}[op]
                    if placement.is_last(stage):
                        expected += {Op.F: 10, Op.B: 50, Op.I: 20, Op.W: 30}[op]
                assert costs.of(slot, placement) == pytest.approx(expected)


def test_a_stage_that_is_first_and_last_has_both_extras():
    costs = CostModel(extra={0: (1, 0, 0), -1: (10, 0, 0)})
    assert simulate(gpipe(1, 1), costs).makespan == 1 + 11 + 2


def test_the_table_takes_as_long_as_its_slots_where_ranks_do_not_wait():
    """One rank, or two for DualPipe: extras count the same in the lowered table."""
    costs = CostModel(F=1, I=1.5, W=0.5, FB=2.5, extra={0: (0.1, 0.2, 0.3), -1: (0.7, 0.5, 0.2)})
    for make in ALL_SCHEDULES:
        schedule = make(2 if make in (chimera, dualpipe) else 1, 4)
        busy, takes = simulate(schedule, costs).busy, lower(schedule, costs).makespan(costs)
        assert takes >= max(busy) - 1e-9, schedule.name
        if schedule.num_ranks == 1:
            assert takes == pytest.approx(busy[0]), schedule.name


def test_a_heavy_last_stage_sets_the_pace():
    even, heavy = CostModel(), CostModel(extra={-1: (0.5, 0.5, 0.5)})
    timeline = simulate(one_f_one_b(4, 16), heavy)
    assert timeline.makespan == pytest.approx(simulate(one_f_one_b(4, 16), even).makespan + 16 * 1.5)
    assert timeline.idle[3] == pytest.approx(min(timeline.idle))


def test_finer_stages_with_their_share_of_the_costs_are_the_same_work():
    costs = CostModel(F=1, I=1.64, W=0.97, FB=3)
    for make in ALL_SCHEDULES:
        schedule = make(4, 8)
        halves = costs.for_schedule(schedule)
        for order in schedule.orders:
            work = sum(halves.of(slot, schedule.placement) for slot in order)
            assert work <= 8 * (costs.F + costs.B) + 1e-9, schedule.name
    assert costs.divided(2) == CostModel(F=0.5, I=0.82, W=0.485, FB=1.5)
    assert CostModel(send=1, extra={0: (1, 1, 1)}).divided(4).send == 1
    assert CostModel(send=1, extra={0: (1, 1, 1)}).divided(4).extra == {0: (1, 1, 1)}


def test_a_blocking_transfer_keeps_the_sender():
    """With sends that are waited for, each of DualPipe's steps pays for one: M + 2 PP - 3 of them."""
    for ranks, microbatches in ((4, 8), (4, 12), (8, 16), (8, 20), (8, 32)):
        schedule = dualpipe(ranks, microbatches)
        without, send = simulate(schedule).makespan, 0.01
        waited = simulate(schedule, CostModel(send=send, blocking=True)).makespan
        assert (waited - without) / send == pytest.approx(microbatches + 2 * ranks - 3)
        assert simulate(schedule, CostModel(send=send)).makespan < waited
    waited = CostModel(send=5, blocking=True)
    for make in (gpipe, one_f_one_b, zb_h1, dualpipe_v):
        assert simulate(make(1, 4), waited).makespan == simulate(make(1, 4)).makespan, "nobody to send to"


def test_memory_counts_activations_unless_told_otherwise():
    for make in ALL_SCHEDULES:
        timeline = simulate(make(4, 8), CostModel(F=1, I=1.3, W=0.7, FB=2.5))
        assert timeline.memory() == timeline.peak_activations
        assert timeline.memory(MemoryModel(residual_i=0, boundary=1)) == timeline.peak_inputs
        owed = timeline.memory(MemoryModel(residual_i=0, stash=1))
        for at_ends, most in zip(timeline.peak_weight_stashes, owed, strict=True):
            assert at_ends <= most <= at_ends + 1, "while an I runs, the stash it fills is there already"


@pytest.mark.parametrize("make", ALL_SCHEDULES, ids=lambda make: make.__name__)
def test_memory_over_time_equals_a_count_of_what_is_there(make):
    rng = random.Random(make.__name__)
    schedule = make(4, 8)
    timeline = simulate(schedule, CostModel(F=1, I=rng.uniform(1, 2), W=rng.uniform(0.5, 1), FB=3))
    sizes = MemoryModel(residual_i=3, residual_w=5, stash=7, boundary=11, parameters=100)
    for rank, order in enumerate(schedule.orders):
        runs = zip(order, timeline.starts[rank], timeline.ends[rank], strict=True)
        when = {action: (start, end) for slot, start, end in runs for action in slot}
        times, kept = timeline.memory_over_time(rank, sizes)
        assert times[0] == 0 and list(times) == sorted(times)
        assert kept[0] == kept[-1] == 100 * len(schedule.placement.stages_on[rank])
        for k in rng.sample(range(len(times) - 1), min(20, len(times) - 1)):
            now = (times[k] + times[k + 1]) / 2
            if now in (times[k], times[k + 1]):
                continue
            expected = 100 * len(schedule.placement.stages_on[rank])
            for (stage, op, microbatch), (start, _) in when.items():
                if op is not Op.F or start > now:
                    continue
                g = next(when[a] for o in "BI" if (a := (stage, o, microbatch)) in when)
                w = next(when[a] for o in "BW" if (a := (stage, o, microbatch)) in when)
                expected += 3 * (now < g[1]) + 16 * (now < w[1]) + 7 * (g != w and g[0] < now < w[1])
            assert kept[k] == expected
        assert max(kept) == timeline.memory(sizes)[rank]


def test_sizes_divide_but_for_the_boundary():
    sizes = MemoryModel(residual_i=4, residual_w=2, stash=6, boundary=8, parameters=10)
    assert sizes.divided(2) == MemoryModel(2, 1, 3, 8, 5)
    assert sizes.for_schedule(dualpipe(4, 8)) == sizes
    assert sizes.for_schedule(dualpipe_v(4, 8)) == sizes.divided(2)


def test_numpys_numbers_are_summed_as_pythons_are():
    size, extra = np.int32(1_500_000_000), {0: np.int32(2_000_000_000)}
    sizes = MemoryModel(residual_i=size, residual_w=size, parameters=size, extra=extra)
    extra.clear()
    assert simulate(gpipe(2, 3)).memory(sizes) == (12.5e9, 10.5e9)
    assert CostModel(np.int8(100), np.int8(100), np.int8(100)).FB == 300
    costs = CostModel(*np.full(3, 0.1, np.float32), extra={-1: tuple(np.ones(3, np.float32))})
    assert costs == CostModel(*[float(np.float32(0.1))] * 3, extra={-1: (1.0, 1.0, 1.0)})


def less_at_both_ends(less):
    return CostModel(extra={0: (less,) * 3, -1: (less,) * 3})


def test_a_stage_that_is_both_ends_may_cost_next_to_nothing():
    assert simulate(gpipe(1, 2), less_at_both_ends(-0.5).for_schedule(gpipe(1, 2))).makespan == 0
    assert simulate(gpipe(2, 1), less_at_both_ends(-0.6).for_schedule(gpipe(2, 1))).makespan == pytest.approx(
        2.4
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CostModel(F=-1, send=float("inf")), r"CostModel: costs.*at least 0, got F=-1, send=inf"),
        (lambda: CostModel(extra={-1: (1, 2)}), r"extra\[-1\]=\(1, 2\); a stage's extra is \(F, I, W\)"),
        (lambda: CostModel(extra={0: (1, -2, 0)}), r"extra\[0\]=\(1, -2, 0\) takes more away than"),
        (lambda: CostModel(FB=0.5, extra={0: (-0.2,) * 3}), r"FB = 0.5; cut the model into fewer stages"),
        (lambda: CostModel(extra={0: (-0.6, 0, 0)}).divided(2), r"F, I, W = \(0.5, 0.5, 0.5\)"),
        (lambda: less_at_both_ends(-0.6).for_schedule(gpipe(1, 2)), r"extra\[0\]=\(-1.2, .* takes more away"),
        (
            lambda: lower_bound(1, 2, less_at_both_ends(-0.6), placement=Placement.linear(1)),
            "takes more away",
        ),
        (lambda: CostModel(send_inside=-1), r"CostModel: costs.*at least 0, got send_inside=-1"),
        (lambda: CostModel(ranks_per_node=0), r"ranks_per_node=0; a node has at least one rank"),
        (lambda: MemoryModel(extra={0: float("inf")}), r"MemoryModel: extra\[0\]=inf"),
        (lambda: MemoryModel(stash=float("nan")), r"MemoryModel: sizes must be finite.*got stash=nan"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_links_inside_a_node_are_their_own_kind():
    """Four ranks in two nodes: a microbatch crosses three links there and three back, the middle one between nodes."""
    costs = CostModel(send=1, send_inside=0.25, ranks_per_node=2)
    assert simulate(gpipe(4, 1), costs).makespan == 4 * 3 + 2 * (0.25 + 1 + 0.25)
    assert [costs.transfer(1, there) for there in range(4)] == [0.25, 0, 1, 1]
    assert costs.divided(2).send_inside == 0.25
    blocked = simulate(gpipe(2, 2), CostModel(send=9, send_inside=0.5, ranks_per_node=2, blocking=True))
    assert blocked.starts == ((0, 1.5, 6.5, 9), (1.5, 3, 4, 6.5))
    assert CostModel(send=1, ranks_per_node=8) != CostModel(send=1)
    same = (simulate(gpipe(4, 3), CostModel(send=0.5, ranks_per_node=n)).makespan for n in (1, 4))
    assert len({*same}) == 1, "one kind of link, however many ranks a node has"


def test_a_stage_may_cost_less_than_the_others():
    costs = CostModel(extra={-1: (-0.5, -0.25, -0.25)})
    timeline = simulate(gpipe(2, 3), costs)
    assert timeline.busy == (9, 6)
    assert timeline.starts == ((0, 1, 2, 5, 7, 9), (1, 2, 3, 3.5, 5, 6.5))


def test_bounds_hold_where_stages_cost_less_and_links_differ():
    less = {-1: (-0.2, -0.2, -0.1)}
    for make, extra in itertools.product(
        ALL_SCHEDULES, (less, {0: (-0.2, 0.1, -0.1), -1: (0.5, -0.2, 0.3)}, {1: (-0.1, -0.2, -0.2)})
    ):
        schedule = make(4, 8)
        costs = CostModel(1, 1.2, 0.9, FB=2.2, send=0.3, extra=extra, send_inside=0.1, ranks_per_node=2)
        makespan = simulate(schedule, costs.for_schedule(schedule)).makespan
        assert lower_bound(4, 8, costs, placement=schedule.placement) <= makespan + 1e-9, extra
        assert lower_bound(4, 8, costs) <= makespan + 1e-9, (schedule.name, extra)


def test_what_a_rank_keeps_at_rest():
    sizes = MemoryModel(parameters=10, extra={0: 3, -1: 5}, fixed=2)
    for schedule, expected in (
        (gpipe(3, 2), (15, 12, 17)),
        (dualpipe(2, 4), (30, 30)),  # both ends of the model on each rank, and a copy of the stages
        (dualpipe_v(3, 6), (20, 12, 12)),  # halves, and both ends on rank 0
    ):
        own = sizes.for_schedule(schedule)
        timeline = simulate(schedule)
        ranks = range(schedule.num_ranks)
        assert tuple(own.at_rest(schedule.placement, rank) for rank in ranks) == expected
        assert tuple(timeline.memory_over_time(rank, own)[1][0] for rank in ranks) == expected
    kept = max(simulate(gpipe(3, 2)).memory(sizes))
    assert kept == 17 + 2
    fits = choose(3, 2, memory=sizes, memory_limit=kept, schedules=[gpipe])[0]
    assert fits.fits and not choose(3, 2, memory=sizes, memory_limit=kept - 1, schedules=[gpipe])[0].fits
    # no activation beside the head
    assert lower_bound(3, 2, memory_limit=17.5, memory=sizes, placement=gpipe(3, 2).placement) == math.inf
