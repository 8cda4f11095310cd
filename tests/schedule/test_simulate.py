"""The simulator against a slow one written by hand and against the closed forms of the papers."""

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpipe_jax.schedule import ALL_SCHEDULES, CostModel, Op, Placement, parse_grid, simulate
from dualpipe_jax.schedule.dataflow import execution_order
from dualpipe_jax.schedule.recipes import chimera, dualpipe, dualpipe_v, gpipe, one_f_one_b, zb_h1
from dualpipe_jax.schedule.simulate import clock, jittered

times = st.floats(0.1, 4.0)


@st.composite
def cost_models(draw, longest_send=0.0):
    f, i, w = draw(times), draw(times), draw(times)
    least = max(f, i + w)
    fb = least + draw(st.floats(0, 1)) * (f + i + w - least)
    return CostModel(f, i, w, fb, send=draw(st.floats(0, longest_send)))


@st.composite
def schedules(draw):
    recipe, ranks = draw(st.sampled_from(ALL_SCHEDULES)), draw(st.integers(1, 6))
    more = draw(st.integers(0, 8))
    return recipe(2 * ranks, 2 + 2 * more) if recipe in (chimera, dualpipe) else recipe(ranks, 1 + more)


def slow_ends(schedule, costs):
    """When each action ends, by relaxing until nothing moves; no worklist, no shared code."""
    rank_of, depth = schedule.placement.rank_of, schedule.placement.num_model_stages
    ends = {action: 0.0 for order in schedule.orders for slot in order for action in slot}

    def backward(stage, microbatch):
        return next(a for op in (Op.B, Op.I) if (a := (stage, op, microbatch)) in ends)

    def needs(stage, op, microbatch):
        if op is Op.W:
            return [(stage, Op.I, microbatch)]
        if op is Op.F:
            return [(stage - 1, Op.F, microbatch)] if stage % depth else []
        last = stage % depth == depth - 1
        return [(stage, Op.F, microbatch)] + ([] if last else [backward(stage + 1, microbatch)])

    cost = {Op.F: costs.F, Op.B: costs.I + costs.W, Op.I: costs.I, Op.W: costs.W}
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            clock = 0.0
            for slot in order:
                for action in slot:
                    for need in needs(*action):
                        clock = max(clock, ends[need] + costs.send * (rank_of[need[0]] != rank))
                clock += costs.FB if len(slot) == 2 else cost[slot[0].op]
                moved |= any(ends[action] != clock for action in slot)
                ends.update(dict.fromkeys(slot, clock))
    return ends


@settings(max_examples=60)
@given(schedules(), cost_models(longest_send=2.0))
def test_equals_relaxation_by_hand_and_idle_is_what_is_left(schedule, costs):
    timeline, expected = simulate(schedule, costs), slow_ends(schedule, costs)
    assert timeline.makespan == pytest.approx(max(expected.values()))
    for rank, order in enumerate(schedule.orders):
        starts, ends = timeline.starts[rank], timeline.ends[rank]
        assert [end for slot, end in zip(order, ends, strict=True) for _ in slot] == pytest.approx(
            [expected[action] for slot in order for action in slot]
        )
        assert len(starts) == len(ends) == len(order)
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
        assert [end - start for start, end in zip(starts, ends, strict=True)] == pytest.approx(
            [costs.of(slot, schedule.placement) for slot in order]
        )
        gaps = sum(starts) - sum(ends[:-1]) + timeline.makespan - ends[-1]
        assert timeline.idle[rank] == pytest.approx(gaps, abs=1e-6)
        assert timeline.busy[rank] + timeline.idle[rank] == pytest.approx(timeline.makespan)


@pytest.mark.parametrize("recipe", [gpipe, one_f_one_b])
def test_the_bubble_is_the_idle_fraction(recipe):
    assert simulate(recipe(4, 12)).bubble == pytest.approx((4 - 1) / (12 + 4 - 1))


def most(spans):
    """How many of those spans overlap at once; a hair apart counts as touching, not as overlapping."""
    tiny = 1e-9
    return max((sum(s <= at + tiny and at + tiny < e for s, e in spans) for at, _ in spans), default=0)


@settings(max_examples=60)
@given(schedules(), cost_models())
def test_peaks_equal_a_count_over_time(schedule, costs):
    timeline = simulate(schedule, costs)
    for rank, order in enumerate(schedule.orders):
        runs = zip(order, timeline.starts[rank], timeline.ends[rank], strict=True)
        when = {action: (start, end) for slot, start, end in runs for action in slot}
        live, owed, inputs = [], [], []
        for (stage, op, microbatch), (start, end) in when.items():
            if op is Op.F:
                live.append((start, next(when[a][1] for o in "BI" if (a := (stage, o, microbatch)) in when)))
                inputs.append(
                    (start, next(when[a][1] for o in "BW" if (a := (stage, o, microbatch)) in when))
                )
            if op is Op.I:
                owed.append((end, when[stage, Op.W, microbatch][1]))
        assert timeline.peak_activations[rank] == most(live)
        assert timeline.peak_weight_stashes[rank] == most(owed)
        assert timeline.peak_inputs[rank] == most(inputs)


@settings(max_examples=40)
@given(st.integers(2, 6), st.integers(0, 8), cost_models())
def test_dualpipe_closed_forms(h, more, c):
    ranks, pairs = 2 * h, 2 * h - 1 + more  # of microbatches; the fewest is 2 * ranks - 2
    m = 2 * pairs
    makespan = (m - h - 2) * c.FB + ranks * c.F + (h + 2) * c.I + 3 * c.W
    makespan += max(h * c.F, (h - 1) * c.I) + (h - 1) * max(c.I, c.W)
    idle = (h - 1) * (c.FB + max(0, c.W - c.I) - 2 * c.W + max(c.F, c.I))
    idle -= min(c.F, (h - 1) * max(0, c.I - c.F))
    for schedule in (dualpipe(ranks, m), dualpipe_v(h, pairs)):
        timeline = simulate(schedule, c)
        assert timeline.makespan == pytest.approx(makespan)
        assert max(timeline.idle) == pytest.approx(idle, abs=1e-6)
        assert max(timeline.peak_activations) == ranks + 1
        assert min(timeline.peak_activations) == ranks + 1 or more == 0


def test_zb_h1_with_few_microbatches_still_beats_1f1b():
    for counts in ((4, 1), (6, 3), (8, 7)):
        assert simulate(zb_h1(*counts)).makespan < simulate(one_f_one_b(*counts)).makespan


def test_figures_for_16_ranks_and_64_microbatches():
    """The table that decides between schedules: F = I = W = 1, PP 16, M 64."""
    assert simulate(one_f_one_b(16, 64)).makespan == 237
    assert simulate(zb_h1(16, 64)).makespan == 207
    assert simulate(dualpipe(16, 64)).makespan == 206
    assert simulate(dualpipe(16, 64), CostModel(FB=2.25)).makespan == 165.5
    assert simulate(dualpipe_v(16, 64), CostModel(0.5, 0.5, 0.5)).makespan == 207
    uneven = simulate(dualpipe(16, 64), CostModel(FB=2)).idle
    assert (uneven[0], uneven[7]) == (1, 7)
    assert simulate(dualpipe(8, 20)).peak_weight_stashes == (1, 2, 3, 4, 4, 3, 2, 1)
    assert simulate(dualpipe_v(4, 10)).peak_weight_stashes == (1, 2, 3, 4)


def test_sends_delay_the_receiver_and_nobody_else():
    c = CostModel(send=10)
    assert simulate(parse_grid("0F0 1F0 1B0 0B0", Placement(((0, 0),))), c).makespan == 6
    timeline = simulate(gpipe(2, 2), c)
    assert timeline.starts[0][:2] == (0, 1)
    assert timeline.starts[1] == (11, 12, 13, 15)
    assert timeline.starts[0][2:] == (25, 27)


def test_costs():
    assert simulate(dualpipe(4, 8)) == simulate(dualpipe(4, 8), CostModel(1, 1, 1, 3, 0)), "all one"
    assert (CostModel(F=1, I=2, W=3).FB, CostModel(F=1, I=2, W=3).B) == (6, 5)
    assert CostModel(F=1, I=2, W=3, FB=4.5).FB == 4.5


def test_costs_that_are_no_durations_are_all_named():
    for wrong in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"finite and at least 0, got I={wrong}, FB=.*, send={wrong}"):
            CostModel(I=wrong, send=wrong, FB=wrong)


def test_a_schedule_that_hangs():
    with pytest.raises(ValueError, match=r"parsed never ends; call validate\(schedule\)"):
        simulate(parse_grid("0F0 0B0\n1B0 1F0", Placement.linear(2)))


def test_many_ranks_and_microbatches():
    timeline = simulate(dualpipe(32, 256))
    assert (timeline.makespan, max(timeline.idle)) == (768 + 30, 30)


def test_longer_costs_never_shorten_the_step():
    rng = random.Random(0)
    for recipe in ALL_SCHEDULES:
        schedule = recipe(4, rng.choice([8, 10]))
        f, i, w, more = (rng.uniform(0.1, 2) for _ in range(4))
        base = simulate(schedule, CostModel(f, i, w, FB=f + i + w)).makespan
        assert base <= simulate(schedule, CostModel(f + more, i, w, FB=f + i + w)).makespan
        assert base <= simulate(schedule, CostModel(f, i, w, FB=f + i + w, send=more)).makespan


def test_jitter_of_nothing_changes_nothing_and_the_same_factor_for_all_scales_all():
    costs, three = CostModel(1, 1.5, 0.5, FB=2.25, send=0.25, blocking=True), np.array([1, 2, 3])
    for recipe in ALL_SCHEDULES:
        schedule = recipe(4, 8)
        plain = simulate(schedule, costs)
        assert jittered(schedule, costs, 0.0, runs=3).tolist() == pytest.approx([plain.makespan] * 3)
        ran = execution_order(schedule.placement, schedule.orders)
        free = dataclasses.replace(costs, send=0)
        told = {"vary": lambda cost: cost * three, "latest": np.maximum}
        _, ends = clock(schedule.placement, schedule.orders, ran, free, **told)
        last = np.max([end[-1] for end in ends], axis=0)
        assert last == pytest.approx(simulate(schedule, free).makespan * three)


def test_jitter_has_the_mean_and_the_spread_that_it_says():
    """One rank, one microbatch: the sum of a forward of 1 and a backward of 2, each with a spread of 30 %."""
    spread = jittered(gpipe(1, 1), CostModel(), 0.3, runs=20_000)
    assert spread.mean() == pytest.approx(3, rel=0.01)
    assert spread.std() == pytest.approx(0.3 * math.sqrt(1 + 4), rel=0.03)
    assert (np.diff(spread) >= 0).all()
    assert (jittered(gpipe(1, 1), CostModel(), 0.3, runs=20_000) == spread).all()


def test_of_a_huge_jitter_whose_square_overflows_the_median_is_the_log_normals():
    """The median of a factor with mean 1 and deviation s is 1 / sqrt(1 + s^2)."""
    for huge in (1e8, 1e200):
        median = np.median(jittered(gpipe(1, 1), CostModel(F=1, I=0, W=0), huge, runs=20_001))
        assert math.log(median) == pytest.approx(-math.log(huge), rel=0.01)


def test_waiting_for_each_other_makes_jitter_cost_time():
    schedule = one_f_one_b(4, 16)
    assert np.median(jittered(schedule)) > simulate(schedule).makespan * 1.02


def test_jitter_that_makes_no_sense():
    for jitter, runs in ((-0.1, 10), (math.nan, 10), (math.inf, 10), (0.1, 0)):
        with pytest.raises(ValueError, match=rf"got jitter={jitter}, runs={runs}; jitter is a share"):
            jittered(gpipe(1, 1), jitter=jitter, runs=runs)
