"""Predict the time of a step from the cycles of its compiled units, for its schedule and for all others.

Cycles come from the compiler's model of the device, or from a roofline where it has none; nothing here was
measured.
"""

import math
from collections.abc import Callable

from dualpipe_jax.pods.costs import splits
from dualpipe_jax.pods.results import ScheduleTime
from dualpipe_jax.pods.stage_memory import StageMemory, reserved_bytes, ticks_of
from dualpipe_jax.schedule import ALL_SCHEDULES, CostModel, MemoryModel, Schedule, simulate
from dualpipe_jax.schedule.costs import at_most
from dualpipe_jax.schedule.lowering.lower import tabulate
from dualpipe_jax.schedule.lowering.table import Keeps, TickTable


def step_cycles(
    schedule: Schedule,
    costs: CostModel,
    tick: float = 0.0,
    at_once: float | None = None,
    placed: CostModel | None = None,
) -> float:
    """Cycles from the first forward to the last backward in the engine's ticks.

    The optimizer and the reduction of gradients are not included.

    Args:
      schedule: the schedule.
      costs: the costs of its units, in cycles.
      tick: cycles of each tick outside its units.
      at_once: the number of ranks whose work the processors can do at the same time, where ranks share them;
        None: all.
      placed: the costs by which the engine places actions on ticks, see ``Pipeline.costs``; None: ``costs``.
    """
    table = table_of(schedule, placed or costs)
    return span(table, costs, at_once) + table.num_ticks * tick


def ideal_cycles(schedule: Schedule, costs: CostModel, at_once: float | None = None) -> float:
    """Cycles from the first forward to the last backward in the ideal order, which has no ticks."""
    work = (costs.of(slot, schedule.placement) for order in schedule.orders for slot in order)
    shared = 0.0 if at_once is None else sum(work) / at_once
    return max(simulate(schedule, costs).makespan, shared)


def table_of(schedule: Schedule, placed: CostModel) -> TickTable:
    """The table of a schedule, as ``lower`` makes it; the placement on ticks is that by which memory is counted."""
    return tabulate(*ticks_of(schedule, placed), Keeps.alike(schedule.placement.num_model_stages))


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
    for recipe in ALL_SCHEDULES:
        name = recipe.__name__
        try:
            schedule = recipe(num_ranks, num_microbatches)
            own = (costs if splits(schedule) else costs_unsplit).for_schedule(schedule)
        except ValueError as error:
            found.append(ScheduleTime(name, None, None, None, str(error).removeprefix(f"{name}: ")))
            continue
        needed = reserved_bytes(schedule, kept, memory)
        refused = "" if at_most(needed, limit) else f"needs {needed / 2**30:.1f} GiB of {limit / 2**30:.1f}"
        found.append(ScheduleTime(name, *price(schedule, own), needed, refused))
    return tuple(sorted(found, key=lambda s: (bool(s.refused), math.inf if s.seconds is None else s.seconds)))
