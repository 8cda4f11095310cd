"""`dualpipe overlap`: how much of the all-to-alls a target's compiler hides."""

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from dualpipe_jax.command.options import CommandError, Count
from dualpipe_jax.command.output import show, show_json
from dualpipe_jax.command.program import Files, Program, RatesFile, experts_on
from dualpipe_jax.present.numbers import format_cycles, percent
from dualpipe_jax.present.table import Table

_ENDINGS = ".svg", ".png", ".trace", ".hlo", ".txt"


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Compile an overlapped pair for devices that are not here, and read what hides behind what. Exit status 1
    where too little is hidden. All times are the compiler's model, or a roofline where it has none (GPUs).

    dualpipe overlap --target v5e:4x4 --pp 4 --ep 4 --model v2-lite --layers-per-stage 1
    dualpipe overlap --target v5p:4x4x2 --what prefill
    """

    target: str
    """Devices: v5e:4x4, v5p:8x8x16, v4:, v6e:, tpu7x: or h100:NODESxGPUS."""
    what: Literal["train", "prefill", "decode"] = "train"
    """train: a pair of a pipeline. prefill, decode: a step of serving in two microbatches, experts over all devices
    of the target, --layers-per-stage layers (4) with experts; --sequence is the prompts' length or decode's context."""
    requests: Count = None
    """Of a device, with --what prefill or decode: 16,384 tokens of prompts, or 128, if left out."""
    at_least: Annotated[float, tyro.conf.arg(metavar="PERCENT")] = 97.0
    """How much of the all-to-alls' time must be hidden."""
    whole: bool = False
    """Compile the whole training step instead of one pair, which takes several times as long."""
    compiled: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Read this text of a program compiled for the target before, instead of compiling one."""
    output: Files = ()
    """Files to write, by their endings. svg, png: a picture of the pair's timeline. trace: the same for Perfetto.
    hlo, txt: the compiled program's text."""
    rates_file: RatesFile = None
    """Rates measured by `dualpipe probe`, to price the program by instead of the compiler's figures."""
    json: bool = False
    """Print for programs."""
    program: Program = dataclasses.field(default_factory=Program)

    def run(self) -> int:
        """Print the report; returns the exit status."""
        if self.compiled is not None and (self.whole or self.program != Program()):
            raise CommandError("--compiled: that program is compiled already; drop --whole and its options")
        self._check_what()
        trained = "nothing" if self.compiled is not None else "step" if self.whole else "pair"
        what = trained if self.what == "train" else self.what
        found = study(
            self.program, self.target, what, self.output, self.compiled, self.rates_file, self.requests
        )
        title = _title(found) if self.compiled is None else f"{self.compiled} on {found['target']['name']}\n"
        compiled = found["compiled"]
        hidden = compiled.get("followed", compiled.get("all_to_all", {})).get("hidden")
        enough = hidden is not None and 100 * hidden >= self.at_least
        if self.json:
            show_json(found | {"at_least": self.at_least / 100, "enough": enough})
        elif "out_of_memory" in compiled:
            show(title, "does not fit:", compiled["out_of_memory"])
        else:
            show(title, collectives(compiled), "", *_sentences(compiled, self.at_least, enough))
        return 0 if enough else 1

    def _check_what(self) -> None:
        """Options of a pipeline say nothing of serving, and the other way round."""
        if self.what == "train":
            if self.requests is not None:
                raise CommandError(
                    "--requests: a pair has none; add --what prefill or --what decode, or drop it"
                )
            return
        usual = Program()
        fixed = ["pp", "ep", "ep_nodes", "schedule", "max_stash", "microbatches", "microbatch_size", "remat"]
        fixed += ["shard_optimizer", "moments", "gradient_sums"]
        given = [name for name in fixed if getattr(self.program, name) != getattr(usual, name)]
        given += [name for name in ("whole", "compiled") if getattr(self, name)]
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise CommandError(
                f"--what {self.what}: experts lie over all of the target, and nothing is trained; drop {options}"
            )


def study(
    program: Program,
    target: str | None,
    compile: str,
    files: Sequence[Path] = (),
    compiled: Path | None = None,
    rates: Path | None = None,
    requests: int | None = None,
) -> dict[str, Any]:
    """Ask ``train.dryrun`` in a process of its own.

    Raises:
      ValueError, ModuleNotFoundError: it cannot be done; the compiler or matplotlib is not installed.
      Died: the compiler ended its process.
    """
    from dualpipe_jax.command.child import ask
    from dualpipe_jax.inspect import Target, read_rates

    if files and compile == "nothing" and compiled is None:
        raise CommandError(
            "--output: nothing is compiled, so there is nothing to write; drop it or --compile"
        )
    if compiled is not None and not compiled.is_file():
        raise CommandError(f"--compiled {compiled}: there is no such file")
    _check_files(files)
    if rates is not None:
        read_rates(rates)
    _check_trainer()
    environment = {"JAX_PLATFORMS": "cpu"}
    if target is not None:
        known = Target.parse(target)
        if compile != "nothing":
            known.check_compiler()
        environment |= known.environment
    request = {
        "program": dataclasses.asdict(program),
        "target": target,
        "compile": compile,
        "files": [str(file.absolute()) for file in files],
        "compiled": None if compiled is None else str(compiled),
        "rates": None if rates is None else str(rates.absolute()),
        "requests": requests,
    }
    return ask("train.dryrun", request, environment, target or program.model)


def _check_trainer() -> None:
    """The step that is compiled is the trainer's, which a wheel does not hold."""
    if importlib.util.find_spec("train") is None:
        raise CommandError(
            "the training step that this compiles is the trainer's, which is in the repository and not in the "
            "installed package; run .venv/bin/dualpipe of a checkout, which scripts/train --help sets up"
        )


def _check_files(files: Sequence[Path]) -> None:
    """Now, for compiling takes minutes and writing comes after it."""
    for file in files:
        if not file.absolute().parent.is_dir():
            raise CommandError(f"--output {file}: there is no folder {file.parent}")
        if file.suffix.lower() not in _ENDINGS:
            raise CommandError(f"--output {file}: cannot tell what to write; end it in {', '.join(_ENDINGS)}")
        if file.suffix.lower() in (".svg", ".png") and importlib.util.find_spec("matplotlib") is None:
            raise ModuleNotFoundError(
                f"--output {file}: a picture needs matplotlib, which is not installed; run: pip install matplotlib"
            )


def collectives(compiled: dict[str, Any]) -> Table:
    """The all-to-alls of the pair."""
    head = ("all-to-all", "of", "form", "MiB", "takes", "exposed", "hidden", "matmuls of the other")
    rows = [
        (
            row["name"],
            row["direction"],
            row["form"],
            f"{row['payload'] / 2**20:.1f}",
            format_cycles(row["duration"]),
            format_cycles(row["exposed"]),
            percent(row["hidden"]),
            str(row["opposite_matmuls"]),
        )
        for row in compiled["all_to_alls"]
    ]
    return Table(head, tuple(rows))


def units(compiled: dict[str, Any]) -> Table:
    """The units of the engine, in cycles."""
    head = ("unit", "cycles", "computation", "communication", "exposed", "over the larger", "over the sum")
    rows = [
        (
            name,
            *(format_cycles(unit[part]) for part in ("cycles", "computation", "communication", "exposed")),
            *("" if unit[part] is None else f"{unit[part]:.3f}" for part in ("over_limit", "over_sum")),
        )
        for name, unit in compiled["units"].items()
    ]
    return Table(head, tuple(rows))


def sent(compiled: dict[str, Any]) -> str:
    """What a device gives to all-to-alls, and how many there are."""
    payloads = [row["payload"] for row in compiled["all_to_alls"]]
    return f"sent: {sum(payloads) / 2**20:.1f} MiB of a device in {len(payloads)} all-to-alls"


def _title(found: dict[str, Any]) -> str:
    program, target = found["program"], found["target"]
    if "requests" in program:
        tokens = f"{program['requests']} requests of {program['sequence']} tokens a device"
        how = "one microbatch" if program["serialised"] else "two microbatches"
        what = found["compiled"]["what"]
        return f"{program['model']}, {what} of {tokens} in {how}, ep {program['ep']} on {target['name']}\n"
    return (
        f"{program['model']}, {program['schedule']}, pp {program['pp']} x ep {experts_on(program)} on {target['name']} "
        f"({target['devices']} devices)\n"
    )


def _sentences(compiled: dict[str, Any], at_least: float, enough: bool) -> list[str]:
    totals, sends = compiled.get("followed", compiled["all_to_all"]), compiled["sends"]
    copied = [copy for copy in compiled["copies"] if copy["of_state"]]
    hidden = "an unknown share" if totals["hidden"] is None else percent(totals["hidden"])
    lines = [
        f"hidden: {hidden} of {format_cycles(totals['cycles'])} cycles of all-to-all "
        f"({'enough' if enough else 'too little'}: {at_least:g} % asked for)",
        sent(compiled),
    ]
    if "followed" in compiled:
        whole = compiled["all_to_all"]["hidden"]
        whole = "unknown" if whole is None else percent(whole)
        lines.insert(1, f"that is without the last one, behind which the model goes on; with it: {whole}")
    if compiled["what"] not in ("prefill", "decode"):
        lines.append(
            f"sends: {sends['count']} in flight beside it, {format_cycles(sends['exposed'])} of "
            f"{format_cycles(sends['cycles'])} exposed"
        )
    if compiled["what"] != "text":  # of which nobody knows what its slots, sums and parameters are
        lines.append(f"copies of slots, sums or parameters in a loop: {len(copied) or 'none'}")
        lines += [f"  {copy['array']} {copy['op_name']}" for copy in copied[:8]]
    names = {"FB": "pair", "prefill": "prefill", "decode": "decode"}
    for unit, name in names.items():
        if figures := compiled["units"].get(unit):
            lines.append(f"{name}: {_over(figures)}")
    return lines


def _over(unit: dict[str, Any]) -> str:
    """A unit's time over the least that it could take."""
    more = f"; a lower bound, {unit['unpriced']} instructions have no price" if unit["unpriced"] else ""
    return (
        f"{format_cycles(unit['cycles'])} cycles, {unit['over_limit']:.3f} of the larger of its computation and its "
        f"communication, {unit['over_sum']:.3f} of their sum{more}"
    )
