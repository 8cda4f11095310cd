"""`dualpipe dryrun`: what a training step would take on devices that are not here."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from dualpipe_jax.command.options import CommandError, check_files
from dualpipe_jax.command.output import say_written, show, show_json
from dualpipe_jax.command.overlap import (
    Files,
    PlanFile,
    RatesFile,
    TargetName,
    ask_pods,
    dispatch_words,
    exposed_sends_words,
    name_of,
    plan_of_options,
    sent_words,
    units_table,
)
from dualpipe_jax.pods.plain import plain
from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.pods.request import Request
from dualpipe_jax.pods.results import Answer, LinkTraffic, Memory, Prediction, ScheduleTime, TargetFigures
from dualpipe_jax.present.numbers import format_cycles, gib, in_runs, percent
from dualpipe_jax.present.table import Table

_ASSUMED = {
    "I": "an input gradient takes two thirds of a whole backward, a weight gradient the rest",
    "FB": "a pair takes as long as its parts",
}
"""What is assumed about costs that other schedules need, but this schedule has no unit to measure."""

_WORDS = {
    "stages": "parameters of stages",
    "shared": "parameters of all stages",
    "cast": "copies as they are used",
    "mirrored": "second copy of the stages",
    "optimizer": "optimizer state",
    "gradients": "sums of gradients",
    "residuals": "residual slots",
    "stash": "stash, from I to W",
    "boundary": "inputs of stages, gradients, sends",
    "batch": "tokens and figures",
}


@dataclasses.dataclass(frozen=True)
class Dryrun:
    """Memory of each device by kind, time of a step and share of the peak, for devices that are not here. Exit
    status 1 where it does not fit. Memory is counted exactly; times are a prediction of the compiler's model.

    dualpipe dryrun --target v5p:8x8x16 --pp 16 --ep 64 --program v3 --sequence 2048 --remat all
    --dispatch capacity --capacity-factor 1 --shard optimizer
    """

    COMMON: ClassVar = (
        "target", "program", "pp", "ep", "sequence", "remat", "dispatch", "capacity-factor", "shard", "compile", "plan",
        "json",
    )  # fmt: skip

    target: TargetName
    """The devices: v5e:4x4 or v5p:8x8x16, likewise v4, v6e and tpu7x, or h100:NODESxGPUS, likewise a100,
    h200, b200 and gb200; or cpu:N, which runs and times the units on this machine."""
    compile: Literal["nothing", "units", "step"] = "units"
    """nothing: only count the memory, which takes seconds and needs no compiler. units: compile each unit of
    the engine once, for the times. step: compile the program's whole step, for the compiler's own count of
    memory."""
    output: Files = ()
    """Files to write of what is compiled. Their endings say what, as in `dualpipe overlap`."""
    rates_file: RatesFile = None
    """File of rates that `dualpipe probe` measured. Times follow from these instead of the compiler's
    figures."""
    write_costs: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """JSON file to write the costs to: what a rank's share of the model takes in ms and keeps in bytes.
    `dualpipe show`, `compare`, `choose` and `search` read it with --costs."""
    json: bool = False
    """Print JSON, for programs."""
    plan_file: PlanFile = None
    """File that `dualpipe plan` wrote, which says --program and all options of the step."""
    plan: Annotated[Plan | None, tyro.conf.arg(name="step")] = None

    def run(self) -> int:
        self._check_times()
        plan, files = plan_of_options(self.plan, self.plan_file), tuple(map(str, self.output))
        rates = None if self.rates_file is None else str(self.rates_file)
        found = ask_pods(Request(plan, self.target, self.compile, files, rates=rates, hints=True))
        assert found.memory is not None
        if self.write_costs is not None and found.step is not None:
            self.write_costs.write_text(json.dumps(plain(found.step.share), indent=2) + "\n")
            say_written(self.write_costs)
        if self.json:
            show_json(plain(found))
        else:
            show(*_report(found, self.rates_file))
        if not found.memory.fits:
            return 1
        if self.write_costs is not None and found.step is None:
            raise CommandError(
                f"--write-costs {self.write_costs}: not written; of a program whose Program.flops is 0 no step is "
                "predicted"
            )
        return 0

    def _check_times(self) -> None:
        """Refuse options of times where nothing is compiled, and check early that costs can be written."""
        given = {"--write-costs": self.write_costs, "--rates": self.rates_file}
        for flag in (flag for flag, file in given.items() if file is not None and self.compile == "nothing"):
            raise CommandError(f"{flag}: nothing is compiled, so there are no times; drop it or --compile")
        if self.write_costs is not None:
            check_files(self.write_costs, flag="--write-costs")


def _report(found: Answer, rates: Path | None) -> list[str | Table]:
    plan, parameters, memory, compiled = found.program, found.parameters, found.memory, found.compiled
    assert plan is not None and parameters is not None and memory is not None
    parts: list[str | Table] = [
        f"{name_of(found)}, {plan.num_microbatches} microbatches of {plan.batch} x {plan.sequence} tokens",
        f"parameters: {parameters.total / 1e9:.2f} G, {parameters.active / 1e9:.2f} G active, "
        f"{parameters.device / 1e9:.3f} G a device",
        *dispatch_words(found),
        *([f"layers of stages: {in_runs(found.stage_layers)}"] if found.stage_layers else []),
        "",
        _memory_table(memory),
        f"\n{'fits' if memory.fits else 'DOES NOT FIT'}: {gib(memory.needed)} of {gib(memory.limit)} GiB "
        f"a device, {percent(memory.needed / memory.limit)}",
        *([] if memory.fits else remedies(memory)),
    ]
    if links := found.links:
        parts += [
            f"\na device's dispatch of {links.tokens} tokens in a layer, by random routing over {links.nodes} "
            f"nodes: copies of a token, and their bytes ({links.used} here; room for uneven loads is more)\n",
            links_table(links.ways),
        ]
    if compiled is not None and compiled.out_of_memory is not None:
        parts.append(compiled.out_of_memory)
    if compiled is not None and compiled.units:
        timed = compiled.cores is not None
        how = (
            f"nanoseconds of each unit, timed; {compiled.cores:g} cores shared by all"
            if timed
            else ("cycles of each unit, by the compiler's model")
        )
        parts += [
            f"\n{how}\n",
            units_table(compiled),
            *([] if timed else ["\n" + sent_words(compiled), exposed_sends_words(compiled)]),
        ]
    if step := found.step:
        source = "the compiler's model" if rates is None else f"the rates of {rates}"
        missing = "" if step.update_cycles is not None else "; what is done with gradients is not in it"
        if compiled is not None and compiled.cores is not None:
            source = f"units that were timed, {compiled.cores:g} cores at work without a pause"
        parts += [
            f"\na prediction of {source}, no measurement{missing}",
            *_step(step, found.target),
            "",
            account_table(step),
            "\nthe same costs under every schedule, what fits first; temporaries are not in this memory",
            *(f"assumed: {words}" for unit, words in _ASSUMED.items() if unit in step.assumed),
            "",
            _schedules_table(step.schedules),
        ]
    return parts


def _schedules_table(schedules: Sequence[ScheduleTime]) -> Table:
    rows = [
        (
            row.name,
            *(
                ("", "", "")
                if row.seconds is None
                else (f"{row.seconds:.4g}", percent(row.mfu), gib(row.memory or 0))
            ),
            row.refused,
        )
        for row in schedules
    ]
    return Table(("schedule", "step, s", "MFU", "GiB", "refused"), tuple(rows), best=0)


def _memory_table(memory: Memory) -> Table:
    limit = memory.limit
    rows = [(_WORDS[kind], gib(size), percent(size / limit)) for kind, size in memory.kinds.items()]
    rows.append(("counted", gib(memory.total), percent(memory.total / limit)))
    if memory.beyond is not None:
        rows.append(("beyond it, by the compiler", gib(memory.beyond), percent(memory.beyond / limit)))
    return Table(("memory of a device", "GiB", "of the device"), tuple(rows))


def remedies(memory: Memory) -> list[str | Table]:
    """Options that make the step fit, each in addition to those before, with the memory that results."""
    if memory.needed <= memory.limit:
        return [
            "what is counted would fit, but the compiler refuses the program; --remat, --shard and --max-stash save"
        ]
    if not memory.remedies:
        return ["no option makes it need less: it takes more devices, by --pp or --ep"]
    rows = [(one.option, gib(one.needed), one.price) for one in memory.remedies]
    enough = memory.remedies[-1].needed <= memory.limit
    said = "it fits with these options:" if enough else "not even so; more devices help, by --pp or --ep:"
    return [f"\n{said}\n", Table(("option", "then GiB", "price"), tuple(rows), left=(0, 2))]


def links_table(ways: Mapping[str, LinkTraffic]) -> Table:
    """For each way of dispatch, the copies of a token, and their MiB on a device."""
    rows = [
        (
            name,
            *(f"{copies:.2f}" for copies in (way.across, way.inside)),
            *(f"{size / 2**20:.1f}" for size in (way.bytes_across, way.bytes_inside)),
        )
        for name, way in ways.items()
    ]
    return Table(("way", "across nodes", "inside", "MiB across", "MiB inside"), tuple(rows))


def account_table(step: Prediction) -> Table:
    """The parts of the step's time, and the MFU that the parts so far would give: from 100 % down to the step's."""
    rows, so_far = [], 0.0
    for part in step.account:
        so_far += part.seconds
        # The difference of two equal times may leave a rounding error, which is shown as 0.
        seconds = part.seconds if abs(part.seconds) > 1e-9 * step.seconds else 0.0
        row = part.name, f"{seconds:.4g}", percent(part.seconds / step.seconds)
        rows.append((*row, percent(step.mfu * step.seconds / so_far)))
    rows.append(("the step", f"{step.seconds:.4g}", percent(1.0), percent(step.mfu)))
    return Table(("on average over ranks", "s", "of the step", "MFU so far"), tuple(rows))


def _step(step: Prediction, target: TargetFigures) -> list[str]:
    timed = target.name.startswith("cpu:")
    peak = "a measured peak" if timed else "the published peak"
    dtype = "float32" if timed else "bfloat16"
    peak += f", {target.flops / 1e12:.4g} TFLOP/s a device in {dtype} ({target.source})"
    counted = step.counted or "the program's own operations"
    bound = "at least " if step.lower_bound else ""
    share = "at most " if step.lower_bound else ""
    return [
        f"step: {bound}{step.seconds:.3g} s, {format_cycles(step.cycles)} cycles "
        f"({format_cycles(step.ideal_cycles)} in the ideal order)",
        f"{step.tokens} tokens, {step.tokens_per_second:.4g} a second",
        f"MFU: {share}{percent(step.mfu)} of {peak}; counted: {counted}; nothing that is "
        "computed again, no room that is not filled",
    ]
