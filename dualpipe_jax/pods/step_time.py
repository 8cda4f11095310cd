"""The time of a step as the compiler's model has it, of this schedule and of every other."""

import dataclasses
import math
from typing import Any

from dualpipe_jax.inspect.target import Device
from dualpipe_jax.pods import ahead, predict
from dualpipe_jax.pods.account import Useful, account_of
from dualpipe_jax.pods.costs import rank_costs, splits, unit_costs
from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.pods.program import Blueprint
from dualpipe_jax.pods.results import Compiled, Overheads, Prediction, ScheduleTime
from dualpipe_jax.schedule import CostModel, MemoryModel
from dualpipe_jax.schedule.lowering.unit_key import UnitKey

NOTHING = Overheads(0.0, 0.0)


def predict_step(
    compiled: Compiled, blueprint: Blueprint, plan: Plan, device: Device, guards: float = 0.0
) -> Prediction:
    """Time of a step by the compiler's model: from units' cycles, in the engine's ticks.

    ``guards`` are cycles that a tick's guards take, beside what the compiler knows.

    What stands beside all ticks (see ``units.overheads``) is this schedule's own; the others are given as much.
    "assumed" are costs that this schedule's units do not tell and others need: FB without gain, two thirds of B for I.
    """
    units, send, schedule = compiled.units, compiled.sends.each, blueprint.schedule
    split, unsplit = (unit_costs(units, send, split=split) for split in (True, False))
    costs, placed = split if splits(schedule) else unsplit, blueprint.pipeline.placing_costs
    beside = compiled.overheads or NOTHING
    tick = beside.tick + guards
    cycles, ideal = predict.step_cycles(schedule, costs, tick, compiled.at_once, placed)
    tokens, rest = blueprint.program.tokens, beside.step + update_of(compiled)
    seconds = (cycles + rest) / device.clock
    useful = useful_of(blueprint, device, plan)
    least = useful.program
    sizes, fixed = ahead.rank_memory(blueprint)
    ranked = predict.rank_schedules(
        schedule.num_ranks,
        schedule.num_microbatches,
        rank_costs(split, schedule),
        rank_costs(unsplit, schedule),
        dataclasses.replace(sizes, fixed=fixed),
        ahead.kept_of(blueprint),
        device.memory,
        tick,
        compiled.at_once,
        placed,
    )
    return Prediction(
        cycles=cycles,
        ideal_cycles=ideal,
        overhead_cycles=beside.step,
        seconds=seconds,
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        mfu=least / seconds,
        lower_bound=any(unit.unpriced for unit in units.values()),
        counted=blueprint.program.counted,
        update_cycles=None if compiled.update is None else compiled.update.cycles,
        account=account_of(schedule, costs, compiled, useful, Overheads(tick, beside.step), device, placed),
        assumed=tuple(name for name in ("I", "W", "FB") if UnitKey(name) not in units),
        costs=_named(costs) | {"extra": {str(stage): list(more) for stage, more in costs.extra.items()}},
        placed=_named(placed),
        share=_share(rank_costs(split, schedule), sizes, fixed, device.clock),
        schedules=tuple(_time(p, rest, device.clock, least) for p in ranked),
    )


def _named(costs: CostModel) -> dict[str, float]:
    return {name: getattr(costs, name) for name in ("F", "I", "W", "FB", "send")}


def useful_of(blueprint: Blueprint, device: Device, plan: Plan) -> Useful:
    """The part of a step that is the program's own, and what its experts' room makes of it."""
    program = blueprint.program
    at_peak = program.tokens / (blueprint.mesh.size * device.flops)
    beyond = plan.room - 1 if plan.dispatch == "capacity" and plan.room is not None else 0.0
    return Useful(at_peak * program.flops, at_peak * program.routed * beyond)


def update_of(compiled: Compiled) -> float:
    """Cycles of what a step does with gradients, 0 where nobody knows."""
    return 0.0 if compiled.update is None else compiled.update.cycles


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


def _time(p: predict.ScheduleCycles, beside: float, clock: float, least: float) -> ScheduleTime:
    """Seconds and MFU of a schedule; None where it does not serve the counts. JSON has no infinity."""
    if not math.isfinite(p.cycles):
        return ScheduleTime(p.name, None, None, None, p.refused)
    seconds = (p.cycles + beside) / clock
    return ScheduleTime(p.name, seconds, least / seconds, p.memory, p.refused)
