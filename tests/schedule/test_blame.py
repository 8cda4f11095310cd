"""Chains of waiting by hand, and slack against the simulator: later by the slack is no longer, by more it is."""

import itertools
import random

import pytest

from dualpipe_jax.schedule import (
    ALL_SCHEDULES,
    CostModel,
    dualpipe,
    gpipe,
    one_f_one_b,
    simulate,
    v_half,
    v_min,
)
from dualpipe_jax.schedule.blame import critical_path, slack, why_idle


class Delayed(CostModel):
    """One slot takes longer."""

    def of(self, slot, placement):
        return super().of(slot, placement) + (self.more_of[1] if slot == self.more_of[0] else 0.0)


def delayed(costs, slot, more):
    made = Delayed(costs.F, costs.I, costs.W, costs.FB, costs.send, costs.extra, costs.blocking)
    object.__setattr__(made, "more_of", (slot, more))
    return made


def said(links):
    return [f"{link.rank}:{'+'.join(map(str, link.slot))}@{link.start:g}" for link in links]


def test_why_by_hand():
    # rank 0: 0F0 0F1 ....... 0B0     .... 0B1
    # rank 1: ... 1F0 1B0     1F1 1B1
    timeline = simulate(one_f_one_b(2, 2))
    assert said(why_idle(timeline, 0, 3)) == ["0:0B0@4", "1:1B0@2"]
    assert said(why_idle(timeline, 0, 6.5)) == ["0:0B1@7", "1:1B1@5"]
    assert said(why_idle(timeline, 1, 0)) == ["1:1F0@1", "0:0F0@0"]
    assert why_idle(timeline, 0, 0.5) == why_idle(timeline, 1, 7.5) == []
    assert [link.sent for link in why_idle(timeline, 0, 3)] == [False, True]
    long = why_idle(simulate(gpipe(3, 1)), 0, 4)
    assert said(long) == ["0:0B0@7", "1:1B0@5", "2:2B0@3", "2:2F0@2", "1:1F0@1"], "idle since 1"


def test_where_there_is_no_such_time():
    for rank, time in ((-1, 0), (2, 0), (0, -1), (0, 99)):
        with pytest.raises(ValueError, match=r"got rank .*; there are ranks 0 to 1, and times from 0 to 9"):
            why_idle(simulate(one_f_one_b(2, 2)), rank, time)


COSTS = [CostModel(1, 1.5, 0.7, FB=2.5, send=0.3), CostModel(FB=2, send=0.2, blocking=True)]


@pytest.mark.parametrize("recipe", ALL_SCHEDULES, ids=lambda recipe: recipe.__name__)
@pytest.mark.parametrize("costs", COSTS, ids=["sends", "blocking"])
def test_slots_may_be_late_by_their_slack_and_no_more(recipe, costs):
    schedule, dice = recipe(4, 8), random.Random(0)
    timeline = simulate(schedule, costs)
    room = slack(timeline)
    assert min(map(min, room)) == pytest.approx(0, abs=1e-9)
    places = [(rank, index) for rank, row in enumerate(room) for index in range(len(row))]
    for rank, index in dice.sample(places, 8):
        slot, most = schedule.orders[rank][index], room[rank][index]
        assert simulate(schedule, delayed(costs, slot, most)).makespan == pytest.approx(timeline.makespan)
        longer = simulate(schedule, delayed(costs, slot, most + 0.5)).makespan
        assert longer == pytest.approx(timeline.makespan + 0.5)


@pytest.mark.parametrize(("recipe", "costs"), [(v_half, CostModel(0, 1, 0)), (v_min, CostModel(1, 0, 1))])
def test_slack_counts_slots_of_no_time_that_wait_for_each_other(recipe, costs):
    schedule = recipe(4, 8)
    timeline = simulate(schedule, costs)
    for order, room in zip(schedule.orders, slack(timeline), strict=True):
        for slot, most in zip(order, room, strict=True):
            assert simulate(schedule, delayed(costs, slot, most)).makespan == timeline.makespan
            assert simulate(schedule, delayed(costs, slot, most + 1)).makespan == timeline.makespan + 1


@pytest.mark.parametrize("schedule", [gpipe(4, 8), dualpipe(4, 8)], ids=lambda s: s.name)
def test_a_critical_path_is_without_gaps_and_without_slack(schedule):
    costs = CostModel(FB=2.25, send=0.3)
    timeline = simulate(schedule, costs)
    path = critical_path(timeline)
    assert path[0].end == timeline.makespan and path[-1].start == 0
    for late, early in itertools.pairwise(path):
        assert late.start == pytest.approx(early.end + (costs.send if early.sent else 0))
    where = {slot: (r, i) for r, order in enumerate(schedule.orders) for i, slot in enumerate(order)}
    room = slack(timeline)
    assert all(room[r][i] == pytest.approx(0, abs=1e-9) for r, i in (where[link.slot] for link in path))
