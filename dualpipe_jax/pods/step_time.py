"""Predict the time of a step from the compiler's cycles, for its schedule and for every other."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from dualpipe_jax.inspect.target import Device
from dualpipe_jax.pods import ahead, predict
from dualpipe_jax.pods.account import UsefulSeconds, account_of
from dualpipe_jax.pods.costs import rank_costs, splits, unit_costs
from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.pods.program import Blueprint
from dualpipe_jax.pods.results import Compiled, Prediction, ScheduleTime
from dualpipe_jax.schedule import CostModel
from dualpipe_jax.schedule.lowering.unit_key import UnitKey


def predict_step(
    compiled: Compiled, blueprint: Blueprint, plan: Plan, device: Device, *, others: bool = True
) -> Prediction:
    """Predict the time of a step in the engine's ticks, from the cycles of its units.

    The cycles outside all ticks (see ``units.overheads``) are those of this schedule; the others are assumed
    to have the same. "assumed" lists costs that others need and this schedule has no units for: an FB without
    gain, and an I of two thirds of B. ``others``: whether to price other schedules, too, which takes seconds.
    """
    units, send, schedule = compiled.units, compiled.sends.each, blueprint.schedule
    split, unsplit = (unit_costs(units, send, split=split) for split in (True, False))
    costs, placed = split if splits(schedule) else unsplit, blueprint.pipeline.placing_costs
    beside = compiled.beside
    rest = beside.step + compiled.update_cycles
    useful, tokens = useful_seconds(blueprint, device, plan), blueprint.program.tokens
    in_ticks = functools.partial(
        predict.step_cycles, tick=beside.tick, at_once=compiled.at_once, placed=placed
    )

    def time_of(cycles: float) -> tuple[float, float]:
        """Seconds and MFU of a step whose ticks take ``cycles`` cycles in all."""
        seconds = (cycles + rest) / device.clock
        return seconds, useful.program / seconds

    cycles = in_ticks(schedule, costs)
    seconds, mfu = time_of(cycles)
    memory, whole = ahead.rank_memory(blueprint), rank_costs(split, schedule)
    ranked: tuple[ScheduleTime, ...] = ()
    if others:
        ranked = predict.rank_schedules(
            schedule.num_ranks,
            schedule.num_microbatches,
            whole,
            rank_costs(unsplit, schedule),
            memory,
            ahead.stage_memory_of(blueprint),
            device.memory,
            lambda other, its: time_of(in_ticks(other, its)),
        )
    return Prediction(
        cycles=cycles,
        ideal_cycles=predict.ideal_cycles(schedule, costs, compiled.at_once),
        overhead_cycles=beside.step,
        seconds=seconds,
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        mfu=mfu,
        lower_bound=any(unit.unpriced for unit in units.values()),
        counted=blueprint.program.counted,
        update_cycles=None if compiled.update is None else compiled.update.cycles,
        account=account_of(schedule, costs, compiled, useful, beside, device, placed),
        assumed=tuple(name for name in ("I", "W", "FB") if UnitKey(name) not in units),
        costs=_named(costs, float),
        placed={name: getattr(placed, name) for name in _COSTS},
        share={
            "costs": _named(whole, lambda cycles: 1e3 * cycles / device.clock),
            "memory": dataclasses.asdict(memory),
            "units": {"time": "ms", "memory": "B"},
            "of": "a rank's whole share of the model, one microbatch; predicted, not measured",
        },
        schedules=ranked,
    )


_COSTS = "F", "I", "W", "FB", "send"


def _named(costs: CostModel, of: Callable[[float], float]) -> dict[str, Any]:
    """Costs in the form that JSON has, each converted by ``of``."""
    extra = {str(stage): list(map(of, more)) for stage, more in costs.extra.items()}
    return {name: of(getattr(costs, name)) for name in _COSTS} | {"extra": extra}


def useful_seconds(blueprint: Blueprint, device: Device, plan: Plan) -> UsefulSeconds:
    """The seconds at the peak of the operations that the program counts, and of those on unfilled room of experts."""
    program = blueprint.program
    at_peak = program.tokens / (blueprint.mesh.size * device.flops)
    beyond = plan.room - 1 if plan.dispatch == "capacity" and plan.room is not None else 0.0
    return UsefulSeconds(at_peak * program.flops, at_peak * program.routed * beyond)
