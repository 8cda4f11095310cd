"""An automatic scheduler: the best of all named schedules, of many greedy policies, and of local improvements."""

import dataclasses
import math
import time
from collections.abc import Iterable

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.schedule.costs import CostModel, MemoryModel, at_most
from dualpipe_jax.schedule.ir import Placement, Schedule
from dualpipe_jax.schedule.optimize.polish import polish
from dualpipe_jax.schedule.optimize.problem import Problem
from dualpipe_jax.schedule.optimize.search_state import FoundSchedules, MemoryLevel
from dualpipe_jax.schedule.optimize.seeds import PolicySearch, schedules_for_counts
from dualpipe_jax.schedule.optimize.space import bounds_of, can_divide_costs, memory_limits, placements_of
from dualpipe_jax.schedule.recipes import ALL_SCHEDULES, Recipe
from dualpipe_jax.schedule.validate import validate

_TOTAL_EFFORT = 3.0
"""The total effort of all memory limits that the search goes through, as a multiple of ``effort``."""

_MOST_POLICIES, _MOST_TRIES = 600, 10_000
"""The most policies, and the most tries of local changes, of one level; more gain little even for small schedules."""


@typechecked
def search(
    num_ranks: int,
    num_microbatches: int,
    costs: CostModel | None = None,
    memory_limit: float = math.inf,
    placement: Placement | str | None = None,
    *,
    memory: MemoryModel | None = None,
    schedules: Iterable[Recipe] | None = None,
    effort: float = 1.0,
    seconds: float | None = None,
) -> Schedule:
    """Find a short schedule for given costs, including transfers, and memory.

    It is no longer than any named schedule that fits and has a placement that is searched; placements with two
    copies of the parameters are searched only on request. Nor is it longer than the schedule found within less
    memory, unless ``seconds`` cuts either search short: the search climbs through ascending memory limits, from
    the least that holds a schedule up to ``memory_limit``, and keeps the schedules that it has found. The limits
    do not depend on ``memory_limit``, but may depend on all other arguments.

    The search starts from the named schedules and from schedules that a greedy scheduler makes under many
    policies. The best are then improved by local changes: reordering moves, pairing forwards and backwards or
    separating them, and splitting backwards so that their W's fill gaps. Every schedule is valid and within the
    limit at any time. The result depends on the arguments alone unless ``seconds`` is given.

    >>> from dualpipe_jax.schedule import simulate
    >>> found = search(2, 4, CostModel(F=1, I=1, W=1, FB=2), memory_limit=2, placement="v", effort=0.1)
    >>> found.name, found.num_ranks
    ('search', 2)

    Args:
      num_ranks: pipeline ranks.
      num_microbatches: the number of microbatches of the step, over all pipes together.
      costs: costs of a whole rank's share of the model (1 / num_ranks of it), for every placement; the costs of
        one of k stages of a share are ``costs.divided(k)``.
      memory_limit: the most memory that each rank may keep at once, its parameters included, in units of ``memory``.
      placement: "linear", "v", "wave" (there and back twice, four stages per rank), "interleaved" (round
        the ranks twice), "interleaved_4" (four times), "bidirectional", or any Placement; when left out, the
        best of those with one copy of the parameters.
      memory: sizes of a whole rank's share; live activations when left out.
      schedules: recipes to start from, which the result is no longer than; ALL_SCHEDULES when left out. A recipe
        that takes ``num_stages_per_rank`` is also tried with four.
      effort: the amount of search, at least 0; the time taken grows with it.
      seconds: the time after which nothing new begins, whatever the effort; the named schedules are always
        simulated, and a change that has begun is ended.

    Raises:
      ValueError: if no schedule fits the memory (the message gives the least that is needed), the placement has
        another number of ranks, its pipes cannot share the microbatches, effort or seconds is negative or not
        finite, or the limit is not a number.
    """
    check_amounts(memory_limit, effort, seconds)
    memory_limit = float(memory_limit)  # a whole number may be too long for NumPy
    problem = Problem(num_microbatches, costs or CostModel(), memory or MemoryModel(), memory_limit)
    placements = placements_of(num_ranks, num_microbatches, placement)
    if placement is None:
        # Where none can, ``bounds_of`` says why.
        placements = [p for p in placements if can_divide_costs(problem.costs, p)] or placements
    bound = min(bounds_of(placements, problem).values())
    found_schedules, policies = FoundSchedules(problem), PolicySearch()
    for schedule in schedules_for_counts(
        ALL_SCHEDULES if schedules is None else schedules, num_ranks, num_microbatches
    ):
        at = schedule.placement
        other = placement is None and at.num_pipes == 1 and can_divide_costs(problem.costs, at)
        if at in placements or other:
            found_schedules.add(schedule)
    ends = math.inf if seconds is None else time.monotonic() + seconds
    parts = memory_limits(placements, problem, found_schedules.pareto_memory())
    climbed = [limit for limit in parts if at_most(limit, memory_limit)]
    for number, limit in enumerate(climbed):
        if at_most(found_schedules.shortest(memory_limit), bound):
            break
        now, share = time.monotonic(), min(1.0, _TOTAL_EFFORT * parts[limit] / sum(parts.values()))
        until = now + max(0.0, ends - now) / (len(climbed) - number)
        bounds = bounds_of(placements, dataclasses.replace(problem, limit=limit))
        level = MemoryLevel(found_schedules, limit, bounds, until)
        policies.add_greedy_schedules(
            found_schedules, level, 1.5e6 * effort * share, round(_MOST_POLICIES * share)
        )
        polish(found_schedules, level, 5e6 * effort * share, _MOST_TRIES * share)
    (best,) = found_schedules.best(1, memory_limit)
    return validate(dataclasses.replace(best.schedule, name="search"))


def check_amounts(memory_limit: float, effort: float, seconds: float | None) -> None:
    """Raise ValueError if effort or seconds is negative or not finite, or if the memory limit is NaN."""
    for name, amount in (("effort", effort), ("seconds", seconds)):
        if amount is not None and not 0 <= amount < math.inf:
            raise ValueError(f"search: got {name}={amount}; it must be finite and at least 0, such as 1")
    if math.isnan(memory_limit):
        raise ValueError("search: got memory_limit=nan; give a number, or leave it out for no limit")
