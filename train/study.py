"""The answers of a dry run: built, counted, compiled and read."""

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from jax.errors import JaxRuntimeError

import models
from dualpipe_jax import inspect
from dualpipe_jax.command.program import Program
from dualpipe_jax.parallel import EP, make_mesh
from dualpipe_jax.schedule import CostModel, MemoryModel, Schedule
from train import ahead, predict, timeline
from train.bare import lower_bare_pair
from train.model import REMAT, count_parameters
from train.request import UNITS, Request, make_schedule
from train.sizes import size

BARE: Mapping[str, bool] = {"bare": False, "bare_ordered": True}
"""What compiles the pair with nothing around it, and whether in our order."""

_COPY_BYTES = 1 << 20
"""Copies in loops of fewer bytes are not worth a mention."""


def study(
    request: Request,
    target: inspect.Target | None,
    devices: Sequence[Any] | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """All that is asked of one program.

    Raises:
      ValueError: options that do not fit together or the target; a file that holds no scheduled program.
    """
    if request.compiled is not None and target is not None:
        say(f"reading {request.compiled}")
        return {
            "target": describe(target),
            "compiled": read_text(request, target),
        }
    say("drawing the step")
    program = request.program
    numbers, blueprint = draw(program, target, devices)
    total, active = count_parameters(numbers)
    kinds = ahead.memory_by_kind(blueprint)
    found: dict[str, Any] = {
        "target": None if target is None else describe(target),
        "program": dataclasses.asdict(program) | {"microbatches": blueprint.tokens.shape[0]},
        "parameters": {"total": total, "active": active, "device": parameters_of_device(blueprint)},
        "memory": {"kinds": kinds, "total": sum(kinds.values())},
    }
    if devices is None or target is None:
        return found
    found["compiled"] = compiled = compile_and_read(request, blueprint, target, say)
    if "units" in compiled and {"F"} < compiled["units"].keys():
        say("simulating the step")
        found["step"] = predict_step(compiled, blueprint, target, numbers, active, guards_of(request, target))
    return found


def draw(
    program: Program, target: inspect.Target | None, devices: Sequence[Any] | None
) -> tuple[models.Config, ahead.Blueprint]:
    """The model's numbers and the blueprint of its step.

    Raises:
      ValueError: options that do not fit together or the target.
    """
    schedule = make_schedule(program)
    num_stages = schedule.placement.num_model_stages
    layers = None if program.layers_per_stage is None else program.layers_per_stage * num_stages
    numbers = size(program.model, layers, dict(map(_assignment, program.change)))
    if numbers.num_experts % program.ep:
        raise ValueError(
            f"--ep {program.ep}: must divide the {numbers.num_experts} experts of {program.model}"
        )
    batch = program.microbatch_size or program.ep
    if batch % program.ep:
        raise ValueError(f"--microbatch-size {batch}: --ep {program.ep} devices must share it equally")
    needed = program.pp * program.ep
    if target is not None and target.num_devices < needed:
        raise ValueError(
            f"--target {target}: has {target.num_devices} devices, --pp {program.pp} x --ep {program.ep} = {needed}"
        )
    model = models.deepseek(
        numbers,
        _plan(program, numbers, schedule),
        ep_axis=EP,
        dispatch=program.dispatch,
        capacity_factor=program.capacity_factor if program.dispatch == "capacity" else None,
        remat=REMAT[program.remat],
        kernels=models.Kernels(program.attention, program.matmul),
        platform=None if target is None else platform_of(target),
    )
    mesh = (
        ahead.abstract_mesh(program.pp, program.ep)
        if devices is None
        else make_mesh(program.pp, program.ep, devices)
    )
    tokens = (schedule.num_microbatches, batch, program.sequence)
    return numbers, ahead.draw(
        model,
        schedule,
        mesh,
        tokens,
        shard_optimizer=program.shard_optimizer,
        fuse_pairs=not program.serialised,
        moments=program.moments,
        gradient_sums=program.gradient_sums,
    )


def _plan(program: Program, numbers: models.Config, schedule: Schedule) -> tuple[int, ...]:
    """Layers of each stage: as many with experts as was asked for, dense ones on the first; else balanced in time."""
    if program.layers_per_stage is None:
        return models.layer_plan(numbers, schedule)
    shares = [program.layers_per_stage] * schedule.placement.num_model_stages
    return (numbers.num_dense_layers + shares[0], *shares[1:])


def platform_of(target: inspect.Target) -> Literal["gpu", "tpu"]:
    """As JAX's devices call it."""
    return "gpu" if target.platform == "cuda" else "tpu"


def compile_and_read(
    request: Request, blueprint: ahead.Blueprint, target: inspect.Target, say: Callable[[str], None]
) -> dict[str, Any]:
    """Compile, and read what the compiler made of it."""
    what, program = request.compile, request.program
    started = time.perf_counter()
    say("tracing and lowering")
    lowered = _lower(what, blueprint)
    say(f"compiling the {what} for {target}")
    options = inspect.recommended_compiler_options(platform_of(target), target.generation, ahead_of_time=True)
    options |= dict(map(_pair, program.compiler_option))
    middle = time.perf_counter()
    try:
        compiled = lowered.compile(options)
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise ValueError(f"the compiler refuses this program: {str(error)[:2000]}") from None
        return {"what": what, "out_of_memory": str(error).split("\n\n")[0][:2000]}
    say("reading the compiled program")
    seconds = {"lowering": middle - started, "compiling": time.perf_counter() - middle}
    log = "" if request.log is None else Path(request.log).read_text(errors="replace")
    module = inspect.read(compiled)
    report = inspect.overlap(module, rates_of(request, target), statistics=inspect.parse_statistics(log))
    title = f"{program.model}, {program.schedule}, pp {program.pp} x ep {program.ep} on {target}"
    timeline.write(request.files, compiled.as_text, report, module, target, title)
    found = read(module, report, inspect.memory(compiled), ahead.held_arrays(blueprint))
    if what in BARE:
        found["units"] = {"FB": _figures(predict.unit_of(report, module.entry))}
    return {"what": what, "options": options, "seconds": seconds} | found


def _lower(what: str, blueprint: ahead.Blueprint) -> Any:
    if what in BARE:
        return lower_bare_pair(blueprint, ordered=BARE[what])
    return (
        ahead.lower_step(blueprint)
        if what == "step"
        else ahead.lower_units(blueprint, _units(what, blueprint), every_kind=what != "pair")
    )


def rates_of(request: Request, target: inspect.Target) -> inspect.Rates:
    """The target's own rates, or measured ones.

    Raises:
      ValueError: the file holds no rates.
    """
    if request.rates is None:
        return target.rates
    switched = target.rates.switched
    return inspect.measured_rates(request.rates, target.device.clock, switched=switched)


def guards_of(request: Request, target: inspect.Target) -> float:
    """Cycles that the guards of a tick take, in the engine's usual form; 0 where nobody measured them."""
    if request.rates is None:
        return 0.0
    guards = inspect.read_rates(request.rates).get("guards", {})
    return target.device.clock * guards.get("loop", {}).get("taken_seconds", 0.0)


def read_text(request: Request, target: inspect.Target) -> dict[str, Any]:
    """What was compiled before, from its text.

    Raises:
      ValueError: the file holds no scheduled program.
    """
    file = str(request.compiled)
    text, rates = Path(file).read_text(), rates_of(request, target)
    try:
        module = inspect.read(text)
        report = inspect.overlap(module, rates)
    except ValueError as error:
        raise ValueError(f"--compiled {file}: {error}") from None
    timeline.write(request.files, lambda: text, report, module, target, f"{Path(file).name} on {target}")
    return {"what": "text"} | read(module, report, None)


def read(
    module: inspect.Module,
    report: inspect.OverlapReport,
    memory: inspect.Memory | None,
    held: Collection[str] = (),
) -> dict[str, Any]:
    """Overlap, units, sends, copies and memory of a compiled program.

    ``held`` names the arrays that no loop should copy; see ``ahead.array_name``.
    """
    pairs = predict.bodies(module, "FB")
    exchange = [c for c in report.select("collective-permute") if c.computation == predict.walk(module)]
    inside = [c for c in report.select("all-to-all") if not pairs or c.computation in pairs]
    beside = predict.overheads(report, module)
    return {
        "all_to_all": _shares(inside),
        "all_to_alls": [_row(c) for c in inside],
        "sends": _shares(exchange) | {"each": max((c.duration or 0.0 for c in exchange), default=0.0)},
        "units": {name: _figures(unit) for name, unit in predict.measure(report, module).items()},
        "overheads": None if beside is None else {"tick": beside[0], "step": beside[1]},
        "copies": [
            _copy(copy, held) for copy in inspect.copies(module, _COPY_BYTES) if not copy.changes_memory
        ],
        "memory": None if memory is None else dataclasses.asdict(memory) | {"peak": memory.peak},
        "scheduler": {name: dataclasses.asdict(s) for name, s in report.statistics.items() if name in pairs},
    }


def _figures(unit: predict.Unit) -> dict[str, Any]:
    return dataclasses.asdict(unit) | {"over_limit": unit.over_limit, "over_sum": unit.over_sum}


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


def describe(target: inspect.Target) -> dict[str, Any]:
    """A target's figures."""
    return {"name": str(target), "devices": target.num_devices, **dataclasses.asdict(target.device)}


def parameters_of_device(blueprint: ahead.Blueprint) -> int:
    """Numbers that one device holds, a borrowed copy not counted."""
    leaves = jax.tree.leaves(ahead.trainable(blueprint.params))
    return sum(ahead.nbytes(leaf) // leaf.dtype.itemsize for leaf in leaves)


def _units(compile: str, blueprint: ahead.Blueprint) -> tuple[str, ...]:
    """The units asked for, as far as the schedule runs them."""
    if compile == "pair":
        return ("FB",)
    ops = {
        (len(slot) > 1, action.op.name)
        for order in blueprint.schedule.orders
        for slot in order
        for action in slot
    }
    there = {name for paired, name in ops if not paired} | (
        {"FB"} if any(paired for paired, _ in ops) else set()
    )
    return tuple(unit for unit in UNITS if unit in there)


def _shares(chosen: Sequence[inspect.Collective]) -> dict[str, Any]:
    durations = [c.duration for c in chosen]
    exposed = [c.exposed for c in chosen]
    known = None not in durations and None not in exposed
    total = sum(d for d in durations if d is not None)
    waits = sum(e for e in exposed if e is not None)
    return {
        "count": len(chosen),
        "sync": sum(c.form == "sync" for c in chosen),
        "payload": sum(c.payload for c in chosen),
        "cycles": total if known else None,
        "exposed": waits if known else None,
        "hidden": max(0.0, 1 - waits / total) if known and total else None,
    }


def _copy(copy: inspect.Copy, held: Collection[str]) -> dict[str, Any]:
    """A copy; whether it is of a pool, a sum or a parameter is told by its shape."""
    array = ahead.array_name(*copy.array)
    own = {"array": array, "of_state": array in held}
    return {name: getattr(copy, name) for name in ("name", "nbytes", "context", "op_name")} | own


def _row(c: inspect.Collective) -> dict[str, Any]:
    names = (
        "name",
        "form",
        "direction",
        "payload",
        "duration",
        "exposed",
        "hidden",
        "cycles_between",
        "matmuls",
    )
    return {name: getattr(c, name) for name in (*names, "opposite_matmuls")}


def _assignment(text: str) -> tuple[str, int | float]:
    name, value = _pair(text)
    try:
        return name, float(value) if "." in value else int(value)
    except ValueError:
        raise ValueError(f"--change {text}: wants FIELD=NUMBER, for instance dim=2048") from None


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"{text!r}: wants NAME=VALUE")
    return name, value
