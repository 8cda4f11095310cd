"""Rank all schedules for a model on given ranks, with the reason for each that is refused."""

import dataclasses
import functools
import math
from collections.abc import Iterable

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.schedule.costs import CostModel, MemoryModel, at_most
from dualpipe_jax.schedule.ir import Schedule
from dualpipe_jax.schedule.optimize.problem import Problem
from dualpipe_jax.schedule.optimize.search import check_amounts, search
from dualpipe_jax.schedule.recipes import ALL_SCHEDULES, Recipe
from dualpipe_jax.schedule.simulate import Timeline, simulate


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A schedule that ``choose`` considered.

    >>> from dualpipe_jax.schedule import choose
    >>> best = choose(4, 8, memory_limit=4.5)[0]
    >>> best.name, best.makespan, round(best.bubble, 3), best.peak
    ('interleaved_zero_bubble', 25.5, 0.059, 4.0)

    Attributes:
      name: the recipe's name, or "search".
      schedule: the schedule; None if its recipe cannot make one for the counts, or if the costs cannot be
        divided among its stages.
      timeline: the simulated step; None if ``schedule`` is None.
      memory: the most memory that each rank keeps at once, in units of ``MemoryModel``; empty if ``schedule``
        is None.
      refused: the reason why the schedule cannot be used; empty if it can be used.
    """

    name: str
    schedule: Schedule | None = None
    timeline: Timeline | None = None
    memory: tuple[float, ...] = ()
    refused: str = ""

    @property
    def fits(self) -> bool:
        """Whether the schedule exists and fits the memory limit."""
        return not self.refused

    @property
    def makespan(self) -> float:
        """The time of a step; infinite if there is no schedule."""
        return math.inf if self.timeline is None else self.timeline.makespan

    @property
    def bubble(self) -> float:
        """The share of the ranks' time that is idle; 1 if there is no schedule."""
        return 1.0 if self.timeline is None else self.timeline.bubble

    @property
    def peak(self) -> float:
        """The most memory that any rank keeps at once; 0 if there is no schedule."""
        return max(self.memory, default=0.0)

    @property
    def num_copies(self) -> int:
        """The number of copies of the parameters, one for each pipe; 0 if there is no schedule."""
        return 0 if self.schedule is None else self.schedule.placement.num_pipes


@typechecked
def choose(
    num_ranks: int,
    num_microbatches: int,
    costs: CostModel | None = None,
    memory_limit: float = math.inf,
    *,
    memory: MemoryModel | None = None,
    schedules: Iterable[Recipe] | None = None,
    search_effort: float = 0.0,
) -> tuple[Candidate, ...]:
    """Rank schedules for given costs and memory: the shortest that fits first, the refused ones last.

    A second copy of the parameters counts only if ``memory.parameters`` gives the size of a copy.

    >>> [candidate.name for candidate in choose(4, 8, CostModel(FB=2), memory_limit=4.5)][:1]
    ['dualpipe_v']

    Args:
      num_ranks: pipeline ranks.
      num_microbatches: the number of microbatches of the step, over all pipes together.
      costs: costs of a whole rank's share of the model; see ``CostModel.for_schedule``.
      memory_limit: the most memory that each rank may keep at once, its parameters included, in units of ``memory``.
      memory: sizes of a whole rank's share; live activations when left out.
      schedules: recipes to consider; ALL_SCHEDULES when left out.
      search_effort: also consider the schedule that ``search`` finds with this effort, unless it is 0.

    Returns:
      One candidate for each recipe, and one for the search.
    """
    if schedules is None:
        schedules = ALL_SCHEDULES
    problem = Problem(num_microbatches, costs or CostModel(), memory or MemoryModel(), memory_limit)
    schedules = tuple(schedules)
    makers = [(recipe.__name__, recipe) for recipe in schedules]
    # Refuse wrong amounts here: ``_candidate`` would take the error of ``search`` for a refusal.
    if search_effort:
        check_amounts(memory_limit, search_effort, None)
        within = functools.partial(search, costs=costs, memory_limit=memory_limit, memory=memory)
        makers.append(("search", functools.partial(within, schedules=schedules, effort=search_effort)))
    candidates = [_candidate(name, recipe, num_ranks, problem) for name, recipe in makers]
    return tuple(sorted(candidates, key=lambda candidate: (not candidate.fits, candidate.makespan)))


def _candidate(name: str, recipe: Recipe, num_ranks: int, problem: Problem) -> Candidate:
    try:
        schedule = recipe(num_ranks, problem.num_microbatches)
        own = problem.costs.for_schedule(schedule)
    except ValueError as error:
        return Candidate(name, refused=str(error))
    timeline = simulate(schedule, own)
    kept = timeline.memory(problem.memory.for_schedule(schedule))
    refused = ""
    if not at_most(max(kept), problem.limit):
        rank = kept.index(max(kept))
        refused = f"{name}: needs {max(kept):g} of memory on rank {rank}, but the limit is {problem.limit:g}"
    return Candidate(name, schedule, timeline, kept, refused)
