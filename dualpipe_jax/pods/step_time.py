"""The time of a step as the compiler's model has it, of this schedule and of every other."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from dualpipe_jax.inspect.target import Device
from dualpipe_jax.pods import ahead, predict
from dualpipe_jax.pods.account import Useful, account_of
from dualpipe_jax.pods.costs import rank_costs, splits, unit_costs
from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.pods.program import Blueprint
from dualpipe_jax.pods.results import Compiled, Overheads, Prediction
from dualpipe_jax.schedule import CostModel
from dualpipe_jax.schedule.lowering.unit_key import UnitKey


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
    beside = Overheads(compiled.beside.tick + guards, compiled.beside.step)
    rest = beside.step + compiled.update_cycles
    useful, tokens = useful_of(blueprint, device, plan), blueprint.program.tokens
    in_ticks = functools.partial(
        predict.step_cycles, tick=beside.tick, at_once=compiled.at_once, placed=placed
    )

    def time_of(cycles: float) -> tuple[float, float]:
        """Seconds and MFU of a step whose ticks take so many cycles."""
        seconds = (cycles + rest) / device.clock
        return seconds, useful.program / seconds

    cycles, ideal = in_ticks(schedule, costs)
    seconds, mfu = time_of(cycles)
    memory, whole = ahead.rank_memory(blueprint), rank_costs(split, schedule)
    ranked = predict.rank_schedules(
        schedule.num_ranks,
        schedule.num_microbatches,
        whole,
        rank_costs(unsplit, schedule),
        memory,
        ahead.kept_of(blueprint),
        device.memory,
        lambda other, its: time_of(in_ticks(other, its)[0]),
    )
    return Prediction(
        cycles=cycles,
        ideal_cycles=ideal,
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
    """Costs as JSON has them, each as ``of`` gives it."""
    extra = {str(stage): list(map(of, more)) for stage, more in costs.extra.items()}
    return {name: of(getattr(costs, name)) for name in _COSTS} | {"extra": extra}


def useful_of(blueprint: Blueprint, device: Device, plan: Plan) -> Useful:
    """The part of a step that is the program's own, and what its experts' room makes of it."""
    program = blueprint.program
    at_peak = program.tokens / (blueprint.mesh.size * device.flops)
    beyond = plan.room - 1 if plan.dispatch == "capacity" and plan.room is not None else 0.0
    return Useful(at_peak * program.flops, at_peak * program.routed * beyond)
