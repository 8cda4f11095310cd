"""The time of a step as the compiler's model has it, of this schedule and of every other."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dualpipe_jax.inspect import Device
from dualpipe_jax.pods import ahead, predict
from dualpipe_jax.pods.program import Blueprint
from dualpipe_jax.pods.results import Compiled, Overheads, Part, ScheduleTime, Step, Unit
from dualpipe_jax.schedule import CostModel, MemoryModel, Schedule, Slot, lower

NOTHING = Overheads(0.0, 0.0)


def predict_step(compiled: Compiled, blueprint: Blueprint, device: Device, guards: float = 0.0) -> Step:
    """Time of a step by the compiler's model: from units' cycles, in the engine's ticks.

    ``guards`` are cycles that a tick's guards take, beside what the compiler knows.

    What stands beside all ticks (see ``predict.overheads``) is this schedule's own; the others are given as much.
    "assumed" are costs that this schedule's units do not tell and others need: FB without gain, two thirds of B for I.
    """
    units, send, schedule = compiled.units, compiled.sends.each, blueprint.schedule
    split, unsplit = (predict.costs(units, send, split=split) for split in (True, False))
    costs = split if predict.splits(schedule) else unsplit
    beside = compiled.overheads or NOTHING
    tick = beside.tick + guards
    cycles, ideal = predict.step_cycles(schedule, costs, tick, compiled.at_once)
    tokens, rest = blueprint.program.tokens, beside.step + update_of(compiled)
    seconds = (cycles + rest) / device.clock
    least = tokens * blueprint.program.flops / (blueprint.mesh.size * device.flops)
    sizes, fixed = ahead.rank_memory(blueprint)
    ranked = predict.rank_schedules(
        schedule.num_ranks,
        schedule.num_microbatches,
        predict.rank_costs(split, schedule),
        predict.rank_costs(unsplit, schedule),
        sizes,
        device.memory,
        fixed,
        tick,
        compiled.at_once,
    )
    return Step(
        cycles=cycles,
        ideal_cycles=ideal,
        overhead_cycles=beside.step,
        seconds=seconds,
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        mfu=least / seconds,
        lower_bound=any(unit.unpriced for unit in units.values()),
        update_cycles=None if compiled.update is None else compiled.update.cycles,
        account=account_of(schedule, costs, compiled, least, Overheads(tick, beside.step), device.clock),
        assumed=tuple(name for name in ("I", "W", "FB") if name not in units),
        costs={name: getattr(costs, name) for name in ("F", "I", "W", "FB", "send")}
        | {"extra": {str(stage): list(more) for stage, more in costs.extra.items()}},
        share=_share(predict.rank_costs(split, schedule), sizes, fixed, device.clock),
        schedules=tuple(_time(p, rest, device.clock, least) for p in ranked),
    )


def account_of(
    schedule: Schedule,
    costs: CostModel,
    compiled: Compiled,
    least: float,
    beside: Overheads,
    clock: float,
) -> tuple[Part, ...]:
    """What a step's seconds go to, on average over ranks; the parts add up to the step.

    Work beyond the peak is all that the core does besides the program's operations at the published peak: what is
    computed again, places that are empty, matrix units that are not full, everything that is no matrix product. Idle
    time is what a pipeline of equal stages has, and apart from it what stages that are not equal add (or save).

    Args:
      schedule, costs: in cycles.
      compiled: whose units' waits for collectives are known.
      least: seconds of the program's operations at the peak.
      beside: cycles of a tick beside its units, and of a step beside its ticks.
      clock: hertz.
    """
    equal = dataclasses.replace(costs, extra={}, FB=costs.FB)
    slots = [slot for order in schedule.orders for slot in order]
    at_once = compiled.at_once
    ranks = schedule.num_ranks if at_once is None else min(schedule.num_ranks, at_once)

    def spans(costs: CostModel) -> tuple[float, float]:
        """Cycles of a step in ticks, and of them those in which a rank, or what ranks share, works."""
        busy = sum(costs.of(slot, schedule.placement) for slot in slots) / ranks
        return predict.span(lower(schedule, costs), costs, at_once), busy

    whole, busy = spans(costs)
    even, busy_even = spans(equal)
    waits = sum(_waits(slot, compiled.units, predict.splits(schedule)) for slot in slots) / ranks
    ticks = lower(schedule, costs).num_ticks * beside.tick
    cycles = {
        "work beyond the peak": busy - waits - least * clock,
        "waiting for collectives": waits,
        "idle: bubble of equal stages": even - busy_even,
        "idle: stages that are not equal": (whole - busy) - (even - busy_even),
        "ticks beside their units": ticks,
        "beside the ticks": beside.step,
        "the optimizer's update": update_of(compiled),
    }
    parts = (Part(name, value / clock) for name, value in cycles.items())
    return Part("the program's operations at the peak", least), *parts


def update_of(compiled: Compiled) -> float:
    """Cycles of what a step does with gradients, 0 where nobody knows."""
    return 0.0 if compiled.update is None else compiled.update.cycles


def _waits(slot: Slot, units: Mapping[str, Unit], halves: bool) -> float:
    """Cycles in which the core waits in a slot; a whole backward is priced by its halves where there are some."""
    name = "FB" if len(slot) > 1 else slot[0].op.name
    names = ("I", "W") if name == "B" and halves else (name,)
    return sum(units[name].exposed for name in names if name in units)


def _share(costs: CostModel, sizes: MemoryModel, fixed: int, clock: float) -> dict[str, Any]:
    """What `dualpipe ... --costs FILE` reads, of a whole rank's share of the model: milliseconds and bytes."""

    def ms(cycles: float) -> float:
        return 1e3 * cycles / clock

    times = {name: ms(getattr(costs, name)) for name in ("F", "I", "W", "FB", "send")}
    extra = {str(stage): list(map(ms, more)) for stage, more in costs.extra.items()}
    return {
        "costs": times | {"extra": extra},
        "memory": dataclasses.asdict(dataclasses.replace(sizes, fixed=fixed)),
        "units": {"time": "ms", "memory": "B"},
        "of": "a rank's whole share of the model, one microbatch; predicted, not measured",
    }


def _time(p: predict.Prediction, beside: float, clock: float, least: float) -> ScheduleTime:
    """Seconds and MFU of a schedule; None where it does not serve the counts. JSON has no infinity."""
    if not math.isfinite(p.cycles):
        return ScheduleTime(p.name, None, None, None, p.refused)
    seconds = (p.cycles + beside) / clock
    return ScheduleTime(p.name, seconds, least / seconds, p.memory, p.refused)
