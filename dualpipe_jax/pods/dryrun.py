"""The answer of a dry run: the step is built, counted, compiled, and the compiled program is read."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jax.errors import JaxRuntimeError

from dualpipe_jax import inspect
from dualpipe_jax.engine.guard import usual_divergence
from dualpipe_jax.inspect.compiler import CUBLAS, NO_TILES_MESSAGE
from dualpipe_jax.inspect.dump import find_program
from dualpipe_jax.inspect.lanes import DIRECTION_NAMES, Names
from dualpipe_jax.inspect.measured import measured_rates, read_rates
from dualpipe_jax.inspect.overlap import BACKWARD, FORWARD
from dualpipe_jax.inspect.rates import Rates
from dualpipe_jax.inspect.report import OverlapReport
from dualpipe_jax.inspect.scheduler import parse_statistics
from dualpipe_jax.inspect.target import Device, Target
from dualpipe_jax.parallel import make_mesh
from dualpipe_jax.parallel.mesh import over_nodes
from dualpipe_jax.pods import ahead, loading, timed, timeline
from dualpipe_jax.pods.costs import units_of
from dualpipe_jax.pods.fitting import remedies
from dualpipe_jax.pods.links import count_links, share_dropped
from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.pods.program import Blueprint, Program, Setting, abstract_mesh
from dualpipe_jax.pods.readings import read, read_foreign
from dualpipe_jax.pods.request import Request
from dualpipe_jax.pods.results import Answer, Compiled, Parameters, TargetFigures, Unit, weigh
from dualpipe_jax.pods.step_time import predict_step
from dualpipe_jax.pods.units import unit_of, with_usual
from dualpipe_jax.schedule.lowering.unit_key import UnitKey


def answer(
    request: Request, target: Target, devices: Sequence[Any] | None, say: Callable[[str], None]
) -> Answer:
    """Find all that a request asks about one program.

    Raises:
      ValueError: the options do not fit together or the target, or a file holds no scheduled program.
    """
    machine = describe(target)
    if request.compiled is not None:
        say(f"reading {request.compiled}")
        return Answer(machine, compiled=read_text(request, target))
    say("drawing the step")
    plan = request.plan
    blueprint = draw(plan, target, devices)
    if request.compile == "draw":
        return Answer(machine, plan)
    program, dispatch = blueprint.program, blueprint.program.dispatch
    kinds = ahead.memory_by_kind(blueprint)
    share = dataclasses.asdict(ahead.rank_memory(blueprint))
    kept, limit = ahead.stage_memory_of(blueprint), machine.memory
    found = Answer(
        target=machine,
        program=dataclasses.replace(plan, microbatches=blueprint.num_microbatches),
        stage_layers=program.stage_layers,
        parameters=count_parameters(blueprint),
        memory=weigh(kinds, None, limit, share, kept),
        links=None if dispatch is None else count_links(plan, dispatch, target, blueprint.tokens_of_device),
        dropped=None if dispatch is None else share_dropped(plan, dispatch, blueprint.tokens_of_device),
        products=products_of(blueprint, target.device) if target.device.flops else {},
    )
    if devices is None:
        return with_remedies(found, target, devices, say) if request.hints else found
    device = target.device
    if target.platform == "cpu":
        compiled = timed.measure(blueprint, say, compiler_options(plan, target))
        # Of the devices that are used, which share all cores.
        peak = timed.peak() / blueprint.mesh.size
        device = dataclasses.replace(device, flops=peak, source="of a product on this machine")
        found = dataclasses.replace(found, target=describe(target, device))
    else:
        compiled = with_guards(compile_and_read(request, blueprint, target, say), guards_of(request, target))
    memory = weigh(kinds, compiled, limit, share, kept)
    found = dataclasses.replace(found, compiled=compiled, memory=memory)
    if program.flops and {UnitKey("F")} < compiled.units.keys():
        say("simulating the step")
        step = predict_step(compiled, blueprint, plan, device, others=request.hints)
        found = dataclasses.replace(found, step=step)
    return with_remedies(found, target, devices, say) if request.hints else found


def with_remedies(
    found: Answer, target: Target, devices: Sequence[Any] | None, say: Callable[[str], None]
) -> Answer:
    """The answer; for a step that does not fit also options that make it fit, with memory counted as the step's is.

    No options where the count fits, and only the compiler refuses the program: how much it needs is not known.
    """
    plan, memory = found.program, found.memory
    if plan is None or memory is None or memory.needed <= memory.limit:
        return found
    say("it does not fit: counting what other options need")
    beyond = max(0, memory.beyond or 0)

    def needed(other: Plan) -> int:
        return sum(ahead.memory_by_kind(draw(other, target, devices)).values()) + beyond

    tried = remedies(plan, memory.limit, needed)
    return dataclasses.replace(found, memory=dataclasses.replace(memory, remedies=tried))


def draw(plan: Plan, target: Target | None, devices: Sequence[Any] | None) -> Blueprint:
    """The blueprint of a plan's step.

    Raises:
      ValueError: the options do not fit together or the target.
    """
    plan.check()
    schedule = plan.make_schedule()
    replicas, needed = "" if plan.dp == 1 else f"--dp {plan.dp} x ", plan.num_devices
    if target is not None and target.num_devices < needed:
        raise ValueError(
            f"--target {target}: has {target.num_devices} devices, {replicas}--pp {plan.pp} x --ep {plan.ep} = {needed}"
        )
    ep = over_nodes(plan.ep, plan.ep_nodes)
    make = abstract_mesh if devices is None else functools.partial(make_mesh, devices=devices)
    mesh = make(plan.pp, ep, dp=plan.dp)
    setting = Setting(plan, schedule, mesh, None if target is None else platform_of(target))
    program = _make_program(plan, setting)
    # Said, and not left to the mesh's devices: an abstract mesh has none, and is counted like the mesh of devices.
    fuse = plan.overlap and setting.platform != "cpu"
    return Blueprint(program, schedule, mesh, fuse, plan.gradient_sums)


def _make_program(plan: Plan, setting: Setting) -> Program:
    """Make the program, and check that its layers are on the stages that the plan asks for."""
    asked, stages = plan.stage_layers, setting.schedule.placement.num_model_stages
    words = f"--stage-layers {' '.join(map(str, asked))}"
    if asked and len(asked) != stages:
        raise ValueError(
            f"{words}: of {len(asked)} stages; {plan.schedule} on {plan.pp} ranks has {stages}, one number for each"
        )
    if asked and plan.layers_per_stage is not None:
        raise ValueError(
            f"{words}: --layers-per-stage {plan.layers_per_stage} says it, too, and another number; drop one of both"
        )
    program = loading.make(plan.model, setting, plan.changes)
    if asked and program.stage_layers != asked:
        has = " ".join(map(str, program.stage_layers)) or "nothing"
        raise ValueError(
            f"{words}: --program {plan.model} does not cut its layers so, its Program.stage_layers says {has}; make it "
            "follow setting.plan.stage_layers, or drop the option"
        )
    return program


def count_parameters(blueprint: Blueprint) -> Parameters:
    """Count the trained parameters. The copies of stages that a bidirectional pipe borrows are not counted."""
    program = blueprint.program
    total = ahead.num_parameters(program.params) if program.total is None else program.total
    device = ahead.num_parameters(blueprint.params, device=True)
    return Parameters(total, total if program.active is None else program.active, device)


def platform_of(target: Target) -> Literal["gpu", "tpu", "cpu"]:
    return "gpu" if target.platform == "cuda" else target.platform


def products_of(blueprint: Blueprint, device: Device) -> dict[UnitKey, Unit]:
    """Each unit as if it were its matrix products alone, at the peak of a device."""

    def unit(flops: int) -> Unit:
        cycles = flops / device.flops * device.clock
        return Unit(cycles, cycles, None, 0.0, 0, flops=flops, matmuls=cycles)

    found = {key: unit(flops) for key, flops in blueprint.sketch.flops.items()}
    return with_usual(found, blueprint.program.model.kind_of)


def compile_and_read(
    request: Request, blueprint: Blueprint, target: Target, say: Callable[[str], None]
) -> Compiled:
    """Compile what the request asks for, and read the compiled program."""
    what, plan = request.compile, request.plan
    mesh: Any = blueprint.mesh
    devices = list(mesh.devices.flat)
    title = f"{plan.model}, {plan.schedule_in_words}, {plan.layout} on {target}"
    lower, shown = functools.partial(lower_part, what, blueprint), {"usual": "usual units"}.get(what, what)
    made = compile_ahead(request, target, devices, lower, f"the {shown}", title, say)
    if isinstance(made, str):
        return Compiled(what, out_of_memory=made)
    found = read(
        what,
        made.module,
        made.report,
        made.memory,
        ahead.held_arrays(blueprint),
        blueprint.program.model,
        options=made.options,
        seconds=made.seconds,
    )
    if what == "units" and blueprint.update is not None:
        say(f"compiling the update for {target}")
        update = price_update(blueprint, made.options, made.rates)
        found = dataclasses.replace(found, update=update)
    return found


class CompiledProgram(NamedTuple):
    """A compiled program as it was read, with the rates and options used, and seconds of lowering and compiling."""

    module: inspect.Module
    rates: Rates
    report: OverlapReport
    memory: inspect.Memory | None
    options: dict[str, str]
    seconds: dict[str, float]


def compile_ahead(
    request: Request,
    target: Target,
    devices: Sequence[Any],
    lower: Callable[[], Any],
    shown: str,
    title: str,
    say: Callable[[str], None],
    names: Names = DIRECTION_NAMES,
    forward: Sequence[str] = FORWARD,
    backward: Sequence[str] = BACKWARD,
) -> CompiledProgram | str:
    """Compile a program for a target's devices, and write the files that the request asks for.

    Args:
      request: the request, with its compiler options and files.
      target: the target.
      devices: the target's devices.
      lower: a function that returns the lowered program.
      shown: what the program is, in words for progress messages.
      title: the title of pictures.
      say: a function that reports progress.
      names: the names of the two directions in pictures.
      forward, backward: the operations of each direction; see ``inspect.overlap``.

    Returns:
      The compiled program; or, where it does not fit in memory, the compiler's message.

    Raises:
      ValueError: the compiler refuses the program for another reason.
    """
    started = time.perf_counter()
    say("tracing and lowering")
    lowered = lower()
    say(f"compiling {shown} for {target}")
    options, middle = compiler_options(request.plan, target), time.perf_counter()
    try:
        compiled, options = compile_with(lowered, options, say)
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise ValueError(f"the compiler refuses this program: {str(error)[:2000]}") from None
        return str(error).split("\n\n")[0][:2000]
    say("reading the compiled program")
    seconds = {"lowering": middle - started, "compiling": time.perf_counter() - middle}
    log = "" if request.log is None else Path(request.log).read_text(errors="replace")
    module, rates = inspect.read(compiled), rates_of(request, target, devices)
    statistics = parse_statistics(log)
    report = inspect.overlap(module, rates, forward=forward, backward=backward, statistics=statistics)
    timeline.write(request.files, compiled.as_text, report, module, target, title, names)
    return CompiledProgram(module, rates, report, inspect.memory(compiled), options, seconds)


def compile_with(
    lowered: Any, options: dict[str, str], say: Callable[[str], None]
) -> tuple[Any, dict[str, str]]:
    """Compile a lowered program, a second time with all products by cuBLAS if XLA finds no tiles for one.

    Returns:
      The compiled program, and the options with which it was compiled.

    Raises:
      JaxRuntimeError: the compiler refuses the program for another reason.
    """
    try:
        return lowered.compile(options), options
    except JaxRuntimeError as error:
        if NO_TILES_MESSAGE not in str(error) or CUBLAS.keys() <= options.keys():
            raise
    say("compiling again: XLA finds no tiles for one of its products, so all are cuBLAS'")
    options = options | CUBLAS
    return lowered.compile(options), options


def price_update(blueprint: Blueprint, options: Mapping[str, str], rates: Rates) -> Unit | None:
    """The program's update, compiled alone; None where the compiler says that it does not fit in memory so.

    Raises:
      ValueError: the compiler refuses it for another reason.
    """
    try:
        module = inspect.read(ahead.lower_update(blueprint).compile(options))
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise ValueError(f"the compiler refuses the update: {str(error)[:2000]}") from None
        return None
    return unit_of(inspect.overlap(module, rates), module, module.entry)


def compiler_options(plan: Plan, target: Target) -> dict[str, str]:
    options = inspect.recommended_compiler_options(platform_of(target), target.generation, ahead_of_time=True)
    return options | plan.compiler_options


def lower_part(what: str, blueprint: Blueprint) -> Any:
    """Lower the part of a step that a request compiles; see ``Request.compile``."""
    if what == "step":
        return ahead.lower_step(blueprint)
    ops = ("FB",) if what == "pair" else units_of(blueprint.schedule)
    return ahead.lower_units(blueprint, ops, every_kind=what == "units")


def rates_of(request: Request, target: Target, devices: Sequence[Any] | None = None) -> Rates:
    """The rates of the request's file; without one the target's own, for these devices of it if they are given.

    Raises:
      ValueError: the file holds no rates.
    """
    if request.rates is None:
        return target.rates if devices is None else target.rates_on(devices)
    switched = target.rates.switched
    return measured_rates(request.rates, target.device.clock, switched=switched)


def guards_of(request: Request, target: Target) -> float:
    """Cycles that the guards of a tick take, in the engine's usual form; 0 where the rates do not include them."""
    if request.rates is None:
        return 0.0
    guards = read_rates(request.rates).get("guards", {})
    form = usual_divergence(target.platform)
    return target.device.clock * guards.get(form, {}).get("taken_seconds", 0.0)


def with_guards(compiled: Compiled, cycles: float) -> Compiled:
    """The compiled program with ``cycles`` more in each of its ticks: guards that the compiler knows nothing of."""
    if compiled.overheads is None:
        return compiled
    beside = dataclasses.replace(compiled.overheads, tick=compiled.overheads.tick + cycles)
    return dataclasses.replace(compiled, overheads=beside)


def read_text(request: Request, target: Target) -> Compiled:
    """Read a program that was compiled before, from the text that ``Request.compiled`` names.

    Raises:
      ValueError: the file holds no scheduled program.
    """
    given = str(request.compiled)
    try:
        file, others = find_program(Path(given))
        text, rates = file.read_text(), rates_of(request, target)
        module = inspect.read(text)
        report = inspect.overlap(module, rates)
    except ValueError as error:
        raise ValueError(f"--compiled {given}: {error}") from None
    timeline.write(request.files, lambda: text, report, module, target, f"{file.name} on {target}")
    found = read_foreign(module, report)
    return dataclasses.replace(found, file=str(file), others=tuple(other.name for other in others))


def describe(target: Target, device: Device | None = None) -> TargetFigures:
    """A target's figures. ``device`` replaces those of the target's own device where better ones are known."""
    return TargetFigures(str(target), target.num_devices, **dataclasses.asdict(device or target.device))
