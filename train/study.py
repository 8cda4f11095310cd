"""The answers of a dry run: built, counted, compiled and read."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from jax.errors import JaxRuntimeError

import models
from dualpipe_jax import inspect
from dualpipe_jax.command.program import Program, experts_on
from dualpipe_jax.parallel import check_float8, expert_axes, make_mesh, over_nodes
from dualpipe_jax.schedule import Schedule
from train import ahead, predict, timeline
from train.bare import lower_bare_pair
from train.links import count_links
from train.model import REMAT, count_parameters
from train.readings import read, unit_figures
from train.request import UNITS, Request, make_schedule
from train.sizes import size
from train.step_time import predict_step

BARE: Mapping[str, bool] = {"bare": False, "bare_ordered": True}
"""What compiles the pair with nothing around it, and whether in our order."""


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
        "links": count_links(program, numbers, target, tokens_of_device(blueprint)),
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
    numbers = size(program.model, layers, dict(map(assignment, program.change)))
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
    if devices is not None and "float8" in (program.dispatch_payload, program.matmul):
        check_float8(devices[0], matmul=program.matmul == "float8")
    model = models.deepseek(
        numbers,
        _plan(program, numbers, schedule),
        ep_axis=expert_axes(program.ep_nodes),
        dispatch=program.dispatch,
        capacity_factor=program.capacity_factor if program.dispatch == "capacity" else None,
        payload=program.dispatch_payload,
        remat=REMAT[program.remat],
        kernels=models.Kernels(program.attention, program.matmul),
        platform=None if target is None else platform_of(target),
    )
    ep = over_nodes(program.ep, program.ep_nodes)
    mesh = ahead.abstract_mesh(program.pp, ep) if devices is None else make_mesh(program.pp, ep, devices)
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
    options = compiler_options(program, target)
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
    mesh: Any = blueprint.mesh
    rates = rates_of(request, target, list(mesh.devices.flat))
    report = inspect.overlap(module, rates, statistics=inspect.parse_statistics(log))
    title = f"{program.model}, {program.schedule}, pp {program.pp} x ep {experts_on(program)} on {target}"
    timeline.write(request.files, compiled.as_text, report, module, target, title)
    found = read(module, report, inspect.memory(compiled), ahead.held_arrays(blueprint))
    if what in BARE:
        found["units"] = {"FB": unit_figures(predict.unit_of(report, module.entry))}
    return {"what": what, "options": options, "seconds": seconds} | found


def compiler_options(program: Program, target: inspect.Target) -> dict[str, str]:
    """The recommended ones, and those asked for."""
    options = inspect.recommended_compiler_options(platform_of(target), target.generation, ahead_of_time=True)
    return options | dict(map(_pair, program.compiler_option))


def _lower(what: str, blueprint: ahead.Blueprint) -> Any:
    if what in BARE:
        return lower_bare_pair(blueprint, ordered=BARE[what])
    return (
        ahead.lower_step(blueprint)
        if what == "step"
        else ahead.lower_units(blueprint, _units(what, blueprint), every_kind=what != "pair")
    )


def rates_of(request: Request, target: inspect.Target, devices: Sequence[Any] | None = None) -> inspect.Rates:
    """The target's own rates, of these devices of it if they are known, or measured ones.

    Raises:
      ValueError: the file holds no rates.
    """
    if request.rates is None:
        return target.rates if devices is None else target.rates_on(devices)
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


def describe(target: inspect.Target) -> dict[str, Any]:
    """A target's figures."""
    return {"name": str(target), "devices": target.num_devices, **dataclasses.asdict(target.device)}


def parameters_of_device(blueprint: ahead.Blueprint) -> int:
    """Numbers that one device holds, a borrowed copy not counted."""
    leaves = jax.tree.leaves(ahead.trainable(blueprint.params))
    return sum(ahead.nbytes(leaf) // leaf.dtype.itemsize for leaf in leaves)


def tokens_of_device(blueprint: ahead.Blueprint) -> int:
    """Of one microbatch."""
    _, *part = blueprint.tokens.sharding.shard_shape(blueprint.tokens.shape)
    return math.prod(part)


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


def assignment(text: str) -> tuple[str, int | float]:
    """A field of the model and its number."""
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
