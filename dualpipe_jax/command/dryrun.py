"""`dualpipe dryrun`: what a training step would take on devices that are not here."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from dualpipe_jax.command.options import CommandError
from dualpipe_jax.command.output import show, show_json
from dualpipe_jax.command.overlap import sent, study, units
from dualpipe_jax.command.program import Files, Program, RatesFile
from dualpipe_jax.present.numbers import format_cycles, gib, percent
from dualpipe_jax.present.table import Table

_ASSUMED = {
    "I": "an input gradient takes two thirds of a whole backward, a weight gradient the rest",
    "FB": "a pair takes as long as its parts",
}
"""By what costs schedules are priced that this one's units do not tell."""

_WORDS = {
    "stages": "parameters of stages",
    "shared": "parameters of all stages, on every rank",
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

    dualpipe dryrun --target v5p:8x8x16 --pp 16 --ep 64 --model v3 --remat all --shard-optimizer
    """

    target: str
    """Devices: v5e:4x4, v5p:8x8x16, v4:, v6e:, tpu7x: or h100:NODESxGPUS."""
    compile: Literal["nothing", "units", "step"] = "units"
    """nothing only counts memory, in seconds and with no compiler; units compiles each unit of the engine once, for
    times; step compiles the trainer's whole step, for the compiler's own account of memory."""
    output: Files = ()
    """Files to write of what is compiled, by their endings: see `dualpipe overlap`."""
    rates_file: RatesFile = None
    """Rates measured by `dualpipe probe`, to price the program by instead of the compiler's figures."""
    write_costs: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """JSON file to write what a rank's share of the model takes and keeps in, in ms and bytes: --costs of `show`,
    `compare`, `choose` and `search`."""
    json: bool = False
    """Print for programs."""
    program: Program = dataclasses.field(default_factory=Program)

    def run(self) -> int:
        """Print the account; returns the exit status."""
        self._check_costs()
        found = study(self.program, self.target, self.compile, self.output, rates=self.rates_file)
        found["memory"] |= verdict(found)
        if self.write_costs is not None and "step" in found:
            self.write_costs.write_text(json.dumps(found["step"]["share"], indent=2) + "\n")
        if self.json:
            show_json(found)
        else:
            show(*_report(found, self.rates_file))
        return 0 if found["memory"]["fits"] else 1

    def _check_costs(self) -> None:
        """Now, for compiling takes minutes and writing comes after it."""
        if self.write_costs is None:
            return
        if self.compile == "nothing":
            raise CommandError(
                "--write-costs: nothing is compiled, so there are no times; drop it or --compile"
            )
        if not self.write_costs.absolute().parent.is_dir():
            raise CommandError(
                f"--write-costs {self.write_costs}: there is no folder {self.write_costs.parent}"
            )


def verdict(found: dict[str, Any]) -> dict[str, Any]:
    """What is needed in all, of how much, and whether that fits.

    Needed is the compiler's own figure for a whole step; else what was counted, and what a program of the units
    takes beyond what was counted of it (all but the optimizer's state); else what was counted.
    """
    compiled, counted = found.get("compiled", {}), found["memory"]["total"]
    limit = found["target"]["memory"]
    memory = compiled.get("memory")
    beyond = None
    if memory is not None:
        there = counted - (found["memory"]["kinds"]["optimizer"] if compiled["what"] != "step" else 0)
        beyond = memory["peak"] - there
    needed = counted + max(0, beyond or 0)
    fits = needed <= limit and "out_of_memory" not in compiled
    return {"beyond": beyond, "needed": needed, "limit": limit, "fits": fits}


def _report(found: dict[str, Any], rates: Path | None) -> list[str | Table]:
    program, target, parameters = found["program"], found["target"], found["parameters"]
    memory, compiled = found["memory"], found.get("compiled", {})
    parts: list[str | Table] = [
        f"{program['model']}, {program['schedule']}, pp {program['pp']} x ep {program['ep']} on {target['name']}, "
        f"{program['microbatches']} microbatches of {program['microbatch_size'] or program['ep']} x "
        f"{program['sequence']} tokens",
        f"parameters: {parameters['total'] / 1e9:.2f} G, {parameters['active'] / 1e9:.2f} G active, "
        f"{parameters['device'] / 1e9:.3f} G a device\n",
        _memory_table(memory),
        f"\n{'fits' if memory['fits'] else 'DOES NOT FIT'}: {gib(memory['needed'])} of {gib(memory['limit'])} GiB "
        f"a device, {percent(memory['needed'] / memory['limit'])}",
    ]
    if "out_of_memory" in compiled:
        parts.append(compiled["out_of_memory"])
    if compiled.get("units"):
        parts += ["\ncycles of each unit, by the compiler's model\n", units(compiled), "\n" + sent(compiled)]
    if step := found.get("step"):
        source = "the compiler's model" if rates is None else f"the rates of {rates}"
        parts += [
            f"\na prediction of {source}, no measurement; the optimizer's time is not in it",
            *_step(step),
            "\nthe same costs under every schedule, what fits first; temporaries are not in this memory",
            *(f"assumed: {words}" for unit, words in _ASSUMED.items() if unit in step["assumed"]),
            "",
            _schedules_table(step["schedules"]),
        ]
    return parts


def _schedules_table(schedules: list[dict[str, Any]]) -> Table:
    rows = [
        (
            row["name"],
            *(
                ("", "", "")
                if row["seconds"] is None
                else (f"{row['seconds']:.4g}", percent(row["mfu"]), gib(row["memory"]))
            ),
            row["refused"],
        )
        for row in schedules
    ]
    return Table(("schedule", "step, s", "MFU", "GiB", "refused"), tuple(rows), best=0)


def _memory_table(memory: dict[str, Any]) -> Table:
    rows = [
        (_WORDS[kind], gib(size), percent(size / memory["limit"])) for kind, size in memory["kinds"].items()
    ]
    rows.append(("counted", gib(memory["total"]), percent(memory["total"] / memory["limit"])))
    if memory["beyond"] is not None:
        rows.append(
            (
                "beyond it, by the compiler",
                gib(memory["beyond"]),
                percent(memory["beyond"] / memory["limit"]),
            )
        )
    return Table(("memory of a device", "GiB", "of the device"), tuple(rows))


def _step(step: dict[str, Any]) -> list[str]:
    bound = "at least " if step["lower_bound"] else ""
    share = "at most " if step["lower_bound"] else ""
    return [
        f"step: {bound}{step['seconds']:.3g} s, {format_cycles(step['cycles'])} cycles "
        f"({format_cycles(step['ideal_cycles'])} in the ideal order)",
        f"{step['tokens']} tokens, {step['tokens_per_second']:.4g} a second",
        f"MFU: {share}{percent(step['mfu'])} of the published peak",
    ]
