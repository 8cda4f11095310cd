"""`dualpipe overlap`: how much of the all-to-alls a target's compiler hides."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import tyro

from dualpipe_jax.command.options import Output
from dualpipe_jax.command.output import Table, percent, show, show_json
from dualpipe_jax.command.program import Program


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Compile an overlapped pair for devices that are not here, and read what hides behind what. Exit status 1
    where too little is hidden. All times are the compiler's model, or a roofline where it has none (GPUs).

    dualpipe overlap --target v5e:4x4 --pp 4 --ep 4 --model v2-lite --layers-per-stage 1
    """

    target: str
    """Devices: v5e:4x4, v5p:8x8x16, v4:, v6e:, tpu7x: or h100:NODESxGPUS."""
    at_least: Annotated[float, tyro.conf.arg(metavar="PERCENT")] = 97.0
    """How much of the all-to-alls' time must be hidden."""
    whole: bool = False
    """Compile the whole training step instead of one pair, which takes several times as long."""
    text: Output = None
    """Write the compiled program's text here."""
    json: bool = False
    """Print for programs."""
    program: Program = dataclasses.field(default_factory=Program)

    def run(self) -> int:
        """Print the report; returns the exit status."""
        found = study(self.program, self.target, "step" if self.whole else "pair", self.text)
        compiled = found["compiled"]
        hidden = compiled.get("all_to_all", {}).get("hidden")
        enough = hidden is not None and 100 * hidden >= self.at_least
        if self.json:
            show_json(found | {"at_least": self.at_least / 100, "enough": enough})
        elif "out_of_memory" in compiled:
            show(_title(found), "does not fit:", compiled["out_of_memory"])
        else:
            show(_title(found), collectives(compiled), "", *_sentences(compiled, self.at_least, enough))
        return 0 if enough else 1


def study(program: Program, target: str | None, compile: str, text: Path | None = None) -> dict[str, Any]:
    """Ask ``train.dryrun`` in a process of its own.

    Raises:
      ValueError, ModuleNotFoundError: it cannot be done; the compiler is not installed.
      Died: the compiler ended its process.
    """
    from dualpipe_jax.command.child import ask
    from dualpipe_jax.inspect import Target

    environment = {"JAX_PLATFORMS": "cpu"}
    if target is not None:
        known = Target.parse(target)
        if compile != "nothing":
            known.check_compiler()
        environment |= known.environment
    request = {"program": dataclasses.asdict(program), "target": target, "compile": compile}
    request["text"] = None if text is None else str(text.absolute())
    return ask("train.dryrun", request, environment, target or program.model)


def collectives(compiled: dict[str, Any]) -> Table:
    """The all-to-alls of the pair."""
    head = ("all-to-all", "of", "form", "MiB", "takes", "exposed", "hidden", "matmuls of the other")
    rows = [
        (
            row["name"],
            row["direction"],
            row["form"],
            f"{row['payload'] / 2**20:.1f}",
            cycles(row["duration"]),
            cycles(row["exposed"]),
            "?" if row["hidden"] is None else percent(row["hidden"]),
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
            *(cycles(unit[part]) for part in ("cycles", "computation", "communication", "exposed")),
            *("" if unit[part] is None else f"{unit[part]:.3f}" for part in ("over_limit", "over_sum")),
        )
        for name, unit in compiled["units"].items()
    ]
    return Table(head, tuple(rows))


def cycles(count: float | None) -> str:
    """Cycles in thousands, millions or billions."""
    if count is None:
        return "?"
    letter, unit = next(
        ((letter, unit) for letter, unit in (("G", 1e9), ("M", 1e6)) if count >= unit), ("k", 1e3)
    )
    return f"{count / unit:.2f} {letter}" if letter != "k" else f"{count / unit:.1f} k"


def _title(found: dict[str, Any]) -> str:
    program, target = found["program"], found["target"]
    return (
        f"{program['model']}, {program['schedule']}, pp {program['pp']} x ep {program['ep']} on {target['name']} "
        f"({target['devices']} devices)\n"
    )


def _sentences(compiled: dict[str, Any], at_least: float, enough: bool) -> list[str]:
    totals, sends = compiled["all_to_all"], compiled["sends"]
    copied = [copy for copy in compiled["copies"] if copy["of_state"]]
    hidden = "an unknown share" if totals["hidden"] is None else percent(totals["hidden"])
    lines = [
        f"hidden: {hidden} of {cycles(totals['cycles'])} cycles of all-to-all "
        f"({'enough' if enough else 'too little'}: {at_least:g} % asked for)",
        f"sends: {sends['count']} in flight beside it, {cycles(sends['exposed'])} of {cycles(sends['cycles'])} exposed",
        f"copies of slots, sums or parameters in a loop: {len(copied) or 'none'}",
    ]
    lines += [f"  {copy['array']} {copy['op_name']}" for copy in copied[:8]]
    if pair := compiled["units"].get("FB"):
        lines.append(
            f"pair: {cycles(pair['cycles'])} cycles, {pair['over_limit']:.3f} of the larger of its computation "
            f"and its communication, {pair['over_sum']:.3f} of their sum"
            + (f"; a lower bound, {pair['unpriced']} instructions have no price" if pair["unpriced"] else "")
        )
    return lines
