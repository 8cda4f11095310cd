"""The time of a step as the compiler's model has it, of this schedule and of every other."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import models
from dualpipe_jax import inspect
from dualpipe_jax.schedule import CostModel, MemoryModel
from train import ahead, predict


def predict_step(
    compiled: Mapping[str, Any],
    blueprint: ahead.Blueprint,
    target: inspect.Target,
    numbers: models.Config,
    active: int,
    guards: float = 0.0,
) -> dict[str, Any]:
    """Time of a step by the compiler's model: from units' cycles, in the engine's ticks.

    ``guards`` are cycles that a tick's guards take, beside what the compiler knows.

    "overhead_cycles", beside all ticks (see ``predict.overheads``), are this schedule's own and in no other figure.
    "assumed" are costs that this schedule's units do not tell and others need: FB without gain, two thirds of B for I.
    """
    fields = {field.name for field in dataclasses.fields(predict.Unit)}
    units = {
        name: predict.Unit(**{k: v for k, v in unit.items() if k in fields})
        for name, unit in compiled["units"].items()
    }
    send, schedule = compiled["sends"]["each"], blueprint.schedule
    split, unsplit = (predict.costs(units, send, split=split) for split in (True, False))
    costs = split if predict.splits(schedule) else unsplit
    beside = compiled.get("overheads") or {"tick": 0.0, "step": 0.0}
    tick = beside["tick"] + guards
    cycles, ideal = predict.step_cycles(schedule, costs, tick)
    num_microbatches, batch, sequence = blueprint.tokens.shape
    tokens = num_microbatches * batch * sequence
    seconds = cycles / target.device.clock
    needed = tokens * predict.model_flops(numbers, active, sequence)
    num_devices = blueprint.mesh.size
    flops = num_devices * target.device.flops
    sizes, fixed = ahead.rank_memory(blueprint)
    ranked = predict.rank_schedules(
        schedule.num_ranks,
        num_microbatches,
        predict.rank_costs(split, schedule),
        predict.rank_costs(unsplit, schedule),
        sizes,
        target.device.memory,
        fixed,
        tick,
    )
    return {
        "schedules": [_prediction(p, target.device.clock, needed / flops) for p in ranked],
        "costs": {name: getattr(costs, name) for name in ("F", "I", "W", "FB", "send")}
        | {"extra": {str(stage): list(more) for stage, more in costs.extra.items()}},
        "share": _share(predict.rank_costs(split, schedule), sizes, fixed, target.device.clock),
        "assumed": [name for name in ("I", "W", "FB") if name not in units],
        "cycles": cycles,
        "ideal_cycles": ideal,
        "overhead_cycles": beside["step"],
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "mfu": needed / flops / seconds,
        "lower_bound": any(unit.unpriced for unit in units.values()),
    }


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


def _prediction(p: predict.Prediction, clock: float, least: float) -> dict[str, Any]:
    """Seconds and MFU of a schedule; None where it does not serve the counts. JSON has no infinity."""
    if not math.isfinite(p.cycles):
        return {"name": p.name, "seconds": None, "mfu": None, "memory": None, "refused": p.refused}
    seconds = p.cycles / clock
    return {
        "name": p.name,
        "seconds": seconds,
        "mfu": least / seconds,
        "memory": p.memory,
        "refused": p.refused,
    }
