"""The schedules that a search has found so far, and the memory limits within which it searches."""

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from dualpipe_jax.schedule.costs import REL_TOLERANCE, at_most
from dualpipe_jax.schedule.ir import Placement, Schedule
from dualpipe_jax.schedule.optimize.greedy import Policy
from dualpipe_jax.schedule.optimize.player import Player
from dualpipe_jax.schedule.optimize.problem import Problem
from dualpipe_jax.schedule.optimize.terms import make_terms
from dualpipe_jax.schedule.simulate import simulate

DEFAULT_FILL = 0.6
"""The default share of a W that a gap must hold for the W to run in it."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A schedule that was found.

    Attributes:
      makespan: the time of its step.
      number: its number among all schedules found, from 0.
      schedule: the schedule.
      kept: the most memory that any rank keeps.
      fill: the ``fill`` of the player that made it; None if no player did.
    """

    makespan: float
    number: int
    schedule: Schedule
    kept: float
    fill: float | None


class PolicyTrial(NamedTuple):
    """A policy that was played on a placement, with its makespan and its number in the round."""

    makespan: float
    number: int
    placement: Placement
    policy: Policy


Entry = TypeVar("Entry", Found, PolicyTrial)


def distinct(tried: Iterable[Entry]) -> list[Entry]:
    """The entries in ascending order of makespan, one for each makespan: the one with the least number."""
    shortest: list[Entry] = []
    for one in sorted(tried, key=lambda one: (one.makespan, one.number)):
        if not shortest or not at_most(one.makespan, shortest[-1].makespan):
            shortest.append(one)
    return shortest


class FoundSchedules:
    """The schedules found, simulated with the costs and sizes of a whole rank's share of the model.

    ``varied`` are the numbers of the schedules whose variants have been tried.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self.found: list[Found] = []
        self.varied: set[int] = set()

    def add(self, schedule: Schedule, fill: float | None = None) -> None:
        timeline = simulate(schedule, self.problem.costs.for_schedule(schedule))
        kept = max(timeline.memory(self.problem.memory.for_schedule(schedule)))
        self.found.append(Found(timeline.makespan, len(self.found), schedule, kept, fill))

    def best(self, count: int, limit: float) -> list[Found]:
        """The ``count`` shortest schedules that fit a memory limit, see ``distinct``."""
        return distinct(found for found in self.found if at_most(found.kept, limit))[:count]

    def shortest(self, limit: float) -> float:
        """The makespan of the shortest schedule that fits a memory limit; infinite if none does."""
        return next((found.makespan for found in self.best(1, limit)), math.inf)

    def pareto_memory(self) -> list[float]:
        """The memory of each schedule that is shorter than all schedules with less memory, ascending."""
        kept, shortest = [], math.inf
        for found in sorted(self.found, key=lambda found: (found.kept, found.makespan)):
            if found.makespan < shortest * (1 - REL_TOLERANCE):
                kept.append(found.kept)
                shortest = found.makespan
        return kept


class MemoryLevel:
    """A memory limit within which a search goes on until a given time.

    Attributes:
      limit: the most memory that each rank may keep.
      bounds: the lower bound on the makespan of each placement on which some schedule fits the limit.
    """

    def __init__(
        self,
        found_schedules: FoundSchedules,
        limit: float,
        bounds: Mapping[Placement, float],
        deadline: float,
    ):
        self.limit, self.bounds = limit, bounds
        self._found_schedules, self._deadline = found_schedules, deadline
        self._players: dict[tuple[Placement, float], Player] = {}

    def player(self, placement: Placement, fill: float = DEFAULT_FILL) -> Player:
        if (placement, fill) not in self._players:
            within = dataclasses.replace(self._found_schedules.problem, limit=self.limit)
            terms = make_terms(placement, within.of_stages(placement))
            self._players[placement, fill] = Player(terms, fill)
        return self._players[placement, fill]

    def promising_placements(self, makespan: float) -> list[Placement]:
        """The placements whose lower bound is below a makespan; none if the time is up."""
        if time.monotonic() >= self._deadline:
            return []
        return [placement for placement, bound in self.bounds.items() if not at_most(makespan, bound)]
