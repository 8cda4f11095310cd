"""Candidates are ranked, and those that cannot be had say why."""

import math

import pytest

from dualpipe_jax.schedule import ALL_SCHEDULES, CostModel, MemoryModel, dualpipe, dualpipe_v, simulate
from dualpipe_jax.schedule.optimize.choose import choose
from dualpipe_jax.schedule.optimize.search import search

PAIRED = CostModel(F=1, I=1, W=1, FB=2)


def test_every_recipe_is_a_candidate_the_shortest_first():
    candidates = choose(4, 8, PAIRED)
    assert sorted(c.name for c in candidates) == sorted(recipe.__name__ for recipe in ALL_SCHEDULES)
    fitting = [c for c in candidates if c.fits]
    assert [c.makespan for c in fitting] == sorted(c.makespan for c in fitting)
    assert candidates[: len(fitting)] == tuple(fitting)
    for candidate in fitting:
        costs = PAIRED.for_schedule(candidate.schedule)
        assert candidate.makespan == simulate(candidate.schedule, costs).makespan
        assert 0 <= candidate.bubble < 1


def test_a_recipe_that_does_not_serve_the_counts_says_so_itself():
    refused = {c.name: c for c in choose(3, 5, schedules=(dualpipe, dualpipe_v))}["dualpipe"]
    with pytest.raises(ValueError) as error:
        dualpipe(3, 5)
    assert refused.refused == str(error.value)
    assert (refused.schedule, refused.timeline, refused.memory, refused.num_copies) == (None, None, (), 0)
    assert refused.makespan == math.inf and refused.bubble == 1.0


def test_a_schedule_that_does_not_fit_says_what_it_needs_and_is_still_shown():
    *_, last = choose(4, 8, PAIRED, memory_limit=4.5, schedules=(dualpipe_v, dualpipe))
    assert last.refused == "dualpipe: needs 5 of memory on rank 0, but the limit is 4.5"
    assert last.timeline is not None and last.peak == 5 and not last.fits


def test_a_second_copy_of_the_parameters_counts():
    memory = MemoryModel(parameters=10)
    candidates = {c.name: c for c in choose(4, 8, PAIRED, memory=memory, schedules=(dualpipe, dualpipe_v))}
    assert [candidates[name].num_copies for name in ("dualpipe", "dualpipe_v")] == [2, 1]
    assert [candidates[name].peak for name in ("dualpipe", "dualpipe_v")] == [25, 14.5]


def test_a_search_can_be_one_of_them():
    candidates = choose(2, 3, PAIRED, 2.0, search_effort=0.005)
    found = next(c for c in candidates if c.name == "search")
    assert found.schedule == search(2, 3, PAIRED, 2.0, effort=0.005)
    copies = [c for c in candidates if c.num_copies == 1 and c.fits]
    assert found.makespan == min(c.makespan for c in copies)


def test_a_search_without_room_says_how_much_it_needs():
    found = next(c for c in choose(2, 4, PAIRED, 0.5, search_effort=0.02) if c.name == "search")
    assert found.refused.startswith("search: got memory_limit=0.5, but no schedule runs in less than 1,")
