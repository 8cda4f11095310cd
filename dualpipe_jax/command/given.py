"""Costs and sizes of a rank's share as JSON: written with schedules, read back from there or from a file of costs.

A file of costs may have more entries, for example what was measured and how: see a profile's costs.json.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dualpipe_jax.command.options import CommandError, Costs, Memory, read_text
from dualpipe_jax.present.numbers import Units
from dualpipe_jax.schedule import CostModel, MemoryModel
from dualpipe_jax.schedule.formats.costs_text import describe

ENTRY = "of_a_share"
"""The entry of a schedule's file that holds the costs and sizes."""

_LINE = re.compile(rf"^# {ENTRY} (\{{.*\}})\s*$", re.MULTILINE)


_ENDS = {"first": 0, "last": -1}
"""Entries of a file that may replace ``extra``, and the stages that they stand for."""

_COSTS = *(field.name for field in dataclasses.fields(CostModel)), *_ENDS
"""Entries of costs that a file may have at its top level, without "costs" around them."""


class Share(NamedTuple):
    """The costs and memory sizes of a whole rank's share of the model, and their units."""

    costs: CostModel
    sizes: MemoryModel
    units: Units

    @property
    def counts_memory(self) -> bool:
        """Whether memory is more than the number of live activations."""
        return self.sizes != MemoryModel()

    def words(self, ranks: int, microbatches: int, limit: float = math.inf) -> str:
        """A line with the ranks, the microbatches, the costs and the memory limit."""
        within = "" if limit == math.inf else f", memory limit {self.units.size(limit)}"
        return f"{ranks} ranks, {microbatches} microbatches, {describe(self.costs, self.units)}{within}"

    def entry(self) -> dict[str, Any]:
        written = {"costs": dataclasses.asdict(self.costs), "memory": dataclasses.asdict(self.sizes)}
        units = {name: unit for name, unit in dataclasses.asdict(self.units).items() if unit}
        return written | ({"units": units} if units else {})

    def comment(self) -> str:
        """The entry as a comment below a grid; empty where all values are the defaults."""
        if self == Share(CostModel(), MemoryModel(), Units()):
            return ""
        return f"# {ENTRY} {json.dumps(self.entry())}"


@dataclasses.dataclass(frozen=True)
class Given:
    """The costs and sizes of a whole rank's share that a file gives; None where it gives none."""

    costs: CostModel | None = None
    sizes: MemoryModel | None = None
    units: Units = Units()  # noqa: RUF009  # frozen

    def under(self, costs: Costs, memory: Memory) -> Share:
        """The share that the options give; the rest is from the file that they name, or from here if they name none."""
        base = from_file(costs.costs) if costs.costs else self
        return Share(costs.over(base.costs), memory.over(base.sizes), base.units)


def remembered(text: str, name: str) -> Given:
    """The costs and sizes in a schedule's text; most texts have none.

    Raises:
      CommandError: they cannot be read.
    """
    if text.lstrip().startswith("{"):
        entries = json.loads(text)
        return parse(entries[ENTRY], name) if isinstance(entries, dict) and ENTRY in entries else Given()
    found = _LINE.search(text)
    return parse(_parsed(found[1], name), name) if found else Given()


def from_file(path: Path) -> Given:
    """Read `--costs`: JSON of {"costs": {...}, "memory": {...}, "units": {...}}, or a schedule's file that has them.

    Raises:
      CommandError: it holds no costs, or they cannot be read.
    """
    text = read_text(str(path))
    entries = _parsed(text, str(path)) if text.lstrip().startswith("{") else {}
    if {"F", "I", "W"} <= entries.keys():
        costs = {name: entries[name] for name in _COSTS if name in entries}
        entries = {"costs": costs} | {name: entries[name] for name in ("memory", "units") if name in entries}
    given = (
        parse(entries, str(path))
        if "costs" in entries and ENTRY not in entries
        else remembered(text, str(path))
    )
    if given == Given():
        raise CommandError(
            f'{path}: no costs; give JSON such as {{"costs": {{"F": 1, "I": 1, "W": 1, "FB": 2.25, "send": 0.02}}}}'
        )
    return given


def parse(entries: Mapping[str, Any], name: str) -> Given:
    """Read costs and sizes from the entries of a file.

    Raises:
      CommandError: an entry is unknown or not a number; the message says which.
    """
    try:
        costs, memory = entries.get("costs"), entries.get("memory")
        if costs is not None:
            extra = {int(stage): tuple(more) for stage, more in costs.get("extra", {}).items()}
            ends = {stage: tuple(costs[name]) for name, stage in _ENDS.items() if name in costs}
            own = {name: cost for name, cost in costs.items() if name not in _ENDS}
            costs = CostModel(**(own | {"extra": extra | ends}))
        if memory is not None:
            sizes = {name: size for name, size in memory.items() if name != "extra"}
            memory = MemoryModel(
                **sizes, extra={int(stage): more for stage, more in memory.get("extra", {}).items()}
            )
        return Given(costs, memory, Units(**entries.get("units", {})))
    except (TypeError, AttributeError, ValueError) as error:
        told = str(error).replace("__init__() got an unexpected keyword argument", "has no entry")
        raise CommandError(f"{name}: costs that cannot be read: {told}") from None


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{name}: not JSON: {error}") from None
    return entries if isinstance(entries, dict) else {}
