"""The shortest possible schedule of small steps, by an integer programme over counts; see docs/bounds.md."""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterable
from fractions import Fraction

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.schedule.costs import REL_TOLERANCE, CostModel, MemoryModel, at_most
from dualpipe_jax.schedule.ir import Action, Op, Placement, Schedule, Slot
from dualpipe_jax.schedule.optimize.bounds import bound_of_stages, check_placement
from dualpipe_jax.schedule.optimize.problem import Problem
from dualpipe_jax.schedule.optimize.programme import Programme
from dualpipe_jax.schedule.optimize.terms import least_memory
from dualpipe_jax.schedule.simulate import simulate
from dualpipe_jax.schedule.validate import validate


@dataclasses.dataclass(frozen=True)
class Optimum:
    """The best schedule that ``optimum`` found, and a proven lower bound on the makespan.

    >>> from dualpipe_jax.schedule import Placement, optimum
    >>> found = optimum(Placement.linear(2), 3)
    >>> found.makespan, found.lower_bound, found.proven
    (10.0, 10.0, True)

    Attributes:
      schedule: a valid schedule that fits the memory.
      makespan: its makespan, in the unit of the costs.
      lower_bound: no schedule ends before this.
    """

    schedule: Schedule
    makespan: float
    lower_bound: float

    @property
    def proven(self) -> bool:
        """Whether the schedule is proven optimal; otherwise the time ran out with a gap left."""
        return at_most(self.makespan, self.lower_bound)


@typechecked
def optimum(
    placement: Placement,
    num_microbatches: int,
    costs: CostModel | None = None,
    memory_limit: float = math.inf,
    *,
    memory: MemoryModel | None = None,
    incumbents: Iterable[Schedule] = (),
    time_limit: float = 60.0,
) -> Optimum:
    """The schedule with the least makespan on a placement, over all orders, pairs and splits of B into I and W.

    It asks for a schedule that ends at the lower bound and, while that is proven impossible, for one that ends one
    step of time later. It serves two to four ranks and few microbatches: the time grows with the number of steps,
    and a step is the greatest time that divides all costs, so give costs such as 2:3:2 rather than 1:1.64:0.97.

    >>> optimum(Placement.linear(2), 3).makespan
    10.0

    Args:
      placement: which rank holds which stage.
      num_microbatches: the number of microbatches of the step, all pipes together.
      costs: costs of a rank's equal share of the model, as in ``lower_bound``; all above 0, those of the stages with
        extras, too, and sends not blocking.
      memory_limit: the most memory that a rank may keep, in the unit of ``memory``.
      memory: sizes of a rank's share; live activations when left out.
      incumbents: known schedules. Those on this placement that fit the memory are upper bounds, and a short one
        shortens the search.
      time_limit: the time limit in seconds. When it runs out, the best schedule known is returned, and ``proven``
        is False.

    Raises:
      ValueError: if the costs are not as above or have no common unit, no schedule fits the memory, the placement's
        pipes cannot share the microbatches, or the programme would have too many variables.
      ImportError: without SciPy.
    """
    check_placement("optimum", placement, placement.num_ranks, num_microbatches)
    memory_limit = float(memory_limit)  # a whole number may be too long for NumPy
    problem = Problem(num_microbatches, costs or CostModel(), memory or MemoryModel(), memory_limit)
    problem = problem.of_stages(placement)
    unit, costs_in_steps = _in_whole_steps(problem.costs)
    whole = dataclasses.replace(problem, costs=costs_in_steps)
    bound = bound_of_stages(placement, whole)
    if bound == math.inf:
        raise ValueError(
            f"optimum: got {placement.num_ranks} ranks and {num_microbatches} microbatches, but not even one "
            f"microbatch fits memory_limit={memory_limit:g}; give at least {least_memory(placement, problem.memory):g}"
        )
    best = _best_incumbent(placement, problem, incumbents)
    ends = time.monotonic() + time_limit
    horizon, last = math.ceil(bound - 1e-6), round(simulate(best, problem.costs).makespan / unit)
    while horizon < last:
        programme = Programme(placement, whole, horizon)
        orders = programme.solve(max(0.0, ends - time.monotonic()))
        if orders is not None:
            if orders:
                best = validate(Schedule("optimum", placement, num_microbatches, orders))
            break
        horizon += 1
    found = simulate(best, problem.costs).makespan
    return Optimum(best, found, min(found, horizon * unit))


def _in_whole_steps(costs: CostModel) -> tuple[float, CostModel]:
    """The greatest unit of time that divides all durations, and the costs in this unit."""
    if costs.blocking or min(costs.F, costs.I, costs.W, costs.FB) <= 0:
        raise ValueError(
            f"optimum: F={costs.F:g}, I={costs.I:g}, W={costs.W:g}, FB={costs.FB:g}, "
            f"blocking={costs.blocking}; it needs costs above 0 and sends that do not block: "
            "give a W of nothing a small cost, and blocking=False"
        )
    inside = costs.send if costs.send_inside is None else costs.send_inside
    times = [costs.F, costs.I, costs.W, costs.FB, costs.send, inside, *itertools.chain(*costs.extra.values())]
    exact = [Fraction(time).limit_denominator(1000) for time in times]
    if any(abs(float(e) - time) > REL_TOLERANCE * abs(time) for e, time in zip(exact, times, strict=True)):
        raise ValueError(
            f"optimum: costs {times} of a stage have no common unit, or one far below 1; give multiples of one, "
            "such as F=2, I=3, W=2"
        )
    below = math.lcm(*(e.denominator for e in exact))
    above = math.gcd(*(int(e * below) for e in exact))
    unit = Fraction(above, below)
    f, i, w, fb, send, inside, *rest = (float(e / unit) for e in exact)
    extra = {stage: tuple(rest[3 * n : 3 * n + 3]) for n, stage in enumerate(costs.extra)}
    whole = CostModel(f, i, w, fb, send, extra, False, inside, costs.ranks_per_node)  # type: ignore[arg-type]  # three each
    return float(unit), whole


def _best_incumbent(placement: Placement, problem: Problem, incumbents: Iterable[Schedule]) -> Schedule:
    """The shortest of the incumbents that fit and of ``_one_by_one``, which always fits."""
    costs, fitting = problem.costs, [_one_by_one(placement, problem.num_microbatches)]
    for schedule in incumbents:
        same = schedule.placement == placement and schedule.num_microbatches == problem.num_microbatches
        if same and at_most(max(simulate(schedule, costs).memory(problem.memory)), problem.limit):
            fitting.append(schedule)
    return min(fitting, key=lambda schedule: simulate(schedule, costs).makespan)


def _one_by_one(placement: Placement, num_microbatches: int) -> Schedule:
    orders: list[list[Slot]] = [[] for _ in range(placement.num_ranks)]
    depth = placement.num_model_stages
    for m, pipe in itertools.product(
        range(num_microbatches // placement.num_pipes), range(placement.num_pipes)
    ):
        stages = range(pipe * depth, (pipe + 1) * depth)
        for op, stage in [*((Op.F, s) for s in stages), *((Op.B, s) for s in reversed(stages))]:
            orders[placement.rank_of[stage]].append((Action(stage, op, m),))
    return Schedule("one_by_one", placement, num_microbatches, tuple(map(tuple, orders)))
