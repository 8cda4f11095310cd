"""What a compiled program's cycles say of a step: costs of its units, its time, its share of the peak.

All of this is the compiler's model of the device, or a roofline where it has none; nothing here was measured.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

from dualpipe_jax.pods.costs import splits
from dualpipe_jax.pods.kept import Kept, set_aside
from dualpipe_jax.schedule import CostModel, MemoryModel, Schedule, lower, simulate
from dualpipe_jax.schedule.costs import at_most
from dualpipe_jax.schedule.lowering.table import TickTable
from dualpipe_jax.schedule.optimize.choose import Candidate, choose


def step_cycles(
    schedule: Schedule,
    costs: CostModel,
    tick: float = 0.0,
    at_once: float | None = None,
    placed: CostModel | None = None,
) -> tuple[float, float]:
    """Cycles from the first forward to the last backward: in the engine's ticks, and in the ideal order.

    The optimizer and the reduction of gradients come on top. ``tick`` is what each tick takes beside its units, which
    the ideal order, of no ticks, leaves out. ``at_once`` is of how many ranks the processors can do the work at a
    time, where they share them; None: all. ``placed`` are the costs by which the engine places actions on ticks, see
    ``Pipeline.costs``; None: those given.
    """
    table, ideal = lower(schedule, placed or costs), simulate(schedule, costs).makespan
    if at_once is not None:
        ideal = max(ideal, float(table.work(costs).sum()) / at_once)
    return span(table, costs, at_once) + table.num_ticks * tick, ideal


def span(table: TickTable, costs: CostModel, at_once: float | None) -> float:
    return table.makespan(costs) if at_once is None else table.shared_makespan(costs, at_once)


@dataclasses.dataclass(frozen=True)
class ScheduleCycles:
    """A schedule for given costs.

    Attributes:
      name: its recipe's.
      cycles: of a step in the engine's ticks; infinite where the recipe does not serve the counts.
      ideal_cycles: in the ideal order.
      memory: bytes of the fullest device.
      refused: why it cannot be had; empty if it can.
    """

    name: str
    cycles: float
    ideal_cycles: float
    memory: float
    refused: str


def rank_schedules(
    num_ranks: int,
    num_microbatches: int,
    costs: CostModel,
    costs_unsplit: CostModel,
    memory: MemoryModel,
    kept: Kept,
    limit: float,
    tick: float = 0.0,
    at_once: float | None = None,
    placed: CostModel | None = None,
) -> tuple[ScheduleCycles, ...]:
    """All schedules for given costs and sizes of a rank's share: the shortest step that fits first.

    Arguments:
      costs: of a whole rank's share, for schedules that split backwards.
      costs_unsplit: for those that do not.
      memory: sizes of a whole rank's share.
      kept: what stages keep of a microbatch.
      limit: bytes of a device.
      tick: cycles of each tick beside its units; as many on a V, whose stages are half as deep and ticks twice as many.
      at_once, placed: see ``step_cycles``.
    """
    price = functools.partial(step_cycles, tick=tick, at_once=at_once, placed=placed)
    found = []
    for own, wanted in ((costs, True), (costs_unsplit, False)):
        for candidate in choose(num_ranks, num_microbatches, own):
            if candidate.schedule is None:
                if wanted:
                    refused = candidate.refused.removeprefix(f"{candidate.name}: ")
                    found.append(ScheduleCycles(candidate.name, math.inf, math.inf, 0.0, refused))
            elif splits(candidate.schedule) == wanted:
                found.append(
                    _predicted(candidate, own, set_aside(candidate.schedule, kept, memory), limit, price)
                )
    return tuple(sorted(found, key=lambda p: (bool(p.refused), p.cycles)))


def _predicted(
    candidate: Candidate,
    costs: CostModel,
    needed: float,
    limit: float,
    price: Callable[[Schedule, CostModel], tuple[float, float]],
) -> ScheduleCycles:
    assert candidate.schedule is not None
    fits = at_most(needed, limit)
    refused = "" if fits else f"needs {needed / 2**30:.1f} GiB of {limit / 2**30:.1f}"
    cycles, ideal = price(candidate.schedule, costs.for_schedule(candidate.schedule))
    return ScheduleCycles(candidate.name, cycles, ideal, needed, refused)
