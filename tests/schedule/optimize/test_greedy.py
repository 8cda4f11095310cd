"""The list scheduler: whatever costs, memory and policy, its schedules are valid, fit, and lower."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpipe_jax.schedule import CostModel, MemoryModel, Op, Placement, Schedule, lower, simulate, validate
from dualpipe_jax.schedule.optimize.greedy import Policy, play_greedily
from dualpipe_jax.schedule.optimize.problem import Problem
from dualpipe_jax.schedule.optimize.terms import least_memory, make_terms
from dualpipe_jax.schedule.recipes import one_f_one_b, zb_v

PLACEMENTS = (
    Placement.linear,
    Placement.v,
    lambda ranks: Placement.wave(ranks, 2),
    lambda ranks: Placement.interleaved(ranks, 3),
    lambda ranks: Placement.bidirectional(max(ranks, 2)),
    lambda ranks: Placement((Placement.v(ranks).pipes[0], Placement.v(ranks).pipes[0][::-1])),
)

SIZES = (
    MemoryModel(),
    MemoryModel(residual_i=0.5, residual_w=0.7, stash=0.4, boundary=0.1, parameters=2),
    MemoryModel(residual_i=0, residual_w=1, stash=2),
)

placements = st.builds(lambda make, ranks: make(ranks), st.sampled_from(PLACEMENTS), st.integers(1, 5))

policies = st.builds(
    Policy,
    pair=st.booleans(),
    match=st.booleans(),
    patience=st.sampled_from((0.0, 1.0, 5.0)),
    forward_first=st.booleans(),
    deep_backward=st.booleans(),
    split=st.sampled_from(("always", "never", "ends")),
    owed=st.sampled_from((0, 1, 3, math.inf)),
    fill=st.sampled_from((0.0, 0.5, 1.0)),
    ahead=st.sampled_from((0, 1, 2, math.inf)),
    burst=st.sampled_from((0, 2, 5)),
    pace=st.sampled_from((0.0, 1.0, 2.0)),
)


def greedy(placement, problem, policy=None):
    """The schedule of a policy, all costs and sizes those of one stage."""
    orders, _ = play_greedily(make_terms(placement, problem), policy or Policy())
    return Schedule("greedy", placement, problem.num_microbatches, orders)


@st.composite
def cost_models(draw):
    f, i, w = (draw(st.sampled_from((0.0, 0.5, 1.0, 1.64, 3.0))) for _ in range(3))
    most = min(f, i + w)
    return CostModel(
        f,
        i,
        w,
        FB=f + i + w - draw(st.floats(0, 1)) * most,
        send=draw(st.sampled_from((0.0, 0.3, 2.0))),
        extra=draw(st.sampled_from(({}, {0: (0.5, 0, 0.2), -1: (1, 1, 1)}))),
        blocking=draw(st.booleans()),
    )


@settings(max_examples=120)
@given(placements, st.integers(1, 7), cost_models(), st.sampled_from(SIZES), st.data(), policies)
def test_any_policy_ends_within_any_memory(placement, per_pipe, costs, sizes, data, policy):
    limit = least_memory(placement, sizes) * data.draw(st.sampled_from((1, 1, 1.3, 2, 5, math.inf)))
    microbatches = per_pipe * placement.num_pipes
    problem = Problem(microbatches, costs, sizes, limit)
    _, makespan = play_greedily(make_terms(placement, problem), policy)
    schedule = validate(greedy(placement, problem, policy))
    timeline = simulate(schedule, costs)
    assert lower(schedule, CostModel()).num_ticks > 0
    assert max(timeline.memory(sizes)) <= limit * (1 + 1e-8)
    assert timeline.makespan <= makespan * (1 + 1e-8)


def test_zb_v_is_found_anew():
    ours, papers = simulate(greedy(Placement.v(8), Problem(20))), simulate(zb_v(8, 20))
    assert ours.makespan == papers.makespan
    assert ours.peak_activations == papers.peak_activations


def test_with_the_memory_of_1f1b_and_whole_backwards_it_takes_as_long():
    policy = Policy(pair=False, split="never")
    for ranks in (2, 4, 7):
        ours = greedy(Placement.linear(ranks), Problem(3 * ranks, limit=ranks), policy)
        assert simulate(ours).makespan == simulate(one_f_one_b(ranks, 3 * ranks)).makespan
    made = greedy(Placement.v(3), Problem(9), policy)
    assert {action.op for order in made.orders for slot in order for action in slot} == {Op.F, Op.B}


def test_pairs_are_made_when_they_gain_and_not_otherwise():
    def pairs(costs):
        made = greedy(Placement.v(4), Problem(16, costs))
        return sum(len(slot) == 2 for order in made.orders for slot in order)

    assert pairs(CostModel(FB=2)) > 60
    assert pairs(CostModel(FB=3)) == pairs(CostModel(FB=3.5)) == 0


def test_pace_keeps_memory_low():
    made = (greedy(Placement.v(8), Problem(32), Policy(pace=pace)) for pace in (0.0, 1.0))
    hasty, paced = (max(simulate(schedule).memory()) for schedule in made)
    assert paced < hasty / 2


@pytest.mark.parametrize(
    ("placement", "microbatches", "costs", "limit", "policy"),
    [
        (Placement.linear(2), 2, (0.1, 0, 1), math.inf, Policy(patience=4.0, owed=2, fill=0.2, pace=1.05)),
        (Placement.v(2), 4, (0, 1.64, 0.97), math.inf, Policy(patience=4.0, split="never", burst=3)),
        (Placement.interleaved(2, 2), 8, (0, 1.64, 0.97), 5.3, Policy(patience=4.0, match=True, pace=1)),
        (Placement.v(3), 6, (0, 0, 0), math.inf, Policy()),
    ],
)
def test_slots_of_no_time_are_all_run(placement, microbatches, costs, limit, policy):
    problem = Problem(microbatches, CostModel(*costs, FB=0), limit=limit)
    for knobs in itertools.product((True, False), (True, False), ("always", "never", "ends")):
        names = dict(zip(("forward_first", "deep_backward", "split"), knobs, strict=True))
        varied = dataclasses.replace(policy, **names)
        validate(greedy(placement, problem, varied))
