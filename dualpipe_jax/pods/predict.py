"""Predict the time of a step from the cycles of its compiled units, for its schedule and for all others.

Cycles come from the compiler's model of the device, or from a roofline where it has none; nothing here was
measured.
"""

import math
from collections.abc import Callable

from dualpipe_jax.pods.costs import splits
from dualpipe_jax.pods.results import ScheduleTime
from dualpipe_jax.pods.stage_memory import StageMemory, reserved_bytes
from dualpipe_jax.schedule import CostModel, MemoryModel, Schedule, lower, simulate
from dualpipe_jax.schedule.costs import at_most
from dualpipe_jax.schedule.lowering.table import TickTable
from dualpipe_jax.schedule.optimize.choose import choose


def step_cycles(
    schedule: Schedule,
    costs: CostModel,
    tick: float = 0.0,
    at_once: float | None = None,
    placed: CostModel | None = None,
) -> tuple[float, float]:
    """Cycles from the first forward to the last backward: in the engine's ticks, and in the ideal order.

    The optimizer and the reduction of gradients are not included.

    Args:
      schedule: the schedule.
      costs: the costs of its units, in cycles.
      tick: cycles of each tick outside its units; the ideal order has no ticks and leaves them out.
      at_once: the number of ranks whose work the processors can do at the same time, where ranks share them;
        None: all.
      placed: the costs by which the engine places actions on ticks, see ``Pipeline.costs``; None: ``costs``.
    """
    table, ideal = lower(schedule, placed or costs), simulate(schedule, costs).makespan
    if at_once is not None:
        ideal = max(ideal, float(table.work(costs).sum()) / at_once)
    return span(table, costs, at_once) + table.num_ticks * tick, ideal


def span(table: TickTable, costs: CostModel, at_once: float | None) -> float:
    return table.makespan(costs) if at_once is None else table.shared_makespan(costs, at_once)


def rank_schedules(
    num_ranks: int,
    num_microbatches: int,
    costs: CostModel,
    costs_unsplit: CostModel,
    memory: MemoryModel,
    kept: StageMemory,
    limit: float,
    price: Callable[[Schedule, CostModel], tuple[float, float]],
) -> tuple[ScheduleTime, ...]:
    """Rank all schedules for given costs and sizes of a rank's share: those that fit first, the shortest step first.

    Arguments:
      costs: costs of a rank's whole share of the model, for schedules that split backwards.
      costs_unsplit: the same for schedules that do not.
      memory: sizes of a rank's whole share.
      kept: what stages keep of a microbatch.
      limit: bytes of a device's memory.
      price: a function of a schedule and the costs of its stages that returns seconds and MFU of its step.
    """
    found = []
    for own, wanted in ((costs, True), (costs_unsplit, False)):
        for candidate in choose(num_ranks, num_microbatches, own):
            name, schedule = candidate.name, candidate.schedule
            if schedule is None:
                if wanted:
                    refused = candidate.refused.removeprefix(f"{name}: ")
                    found.append(ScheduleTime(name, None, None, None, refused))
            elif splits(schedule) == wanted:
                needed = reserved_bytes(schedule, kept, memory)
                fits = at_most(needed, limit)
                refused = "" if fits else f"needs {needed / 2**30:.1f} GiB of {limit / 2**30:.1f}"
                found.append(
                    ScheduleTime(name, *price(schedule, own.for_schedule(schedule)), needed, refused)
                )
    return tuple(sorted(found, key=lambda s: (bool(s.refused), math.inf if s.seconds is None else s.seconds)))
