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

SHARE_ENTRY = "of_a_share"
"""The entry of a schedule's file that holds the costs and sizes."""

_LINE = re.compile(rf"^# {SHARE_ENTRY} (\{{.*\}})\s*$", re.MULTILINE)


_END_STAGES = {"first": 0, "last": -1}
"""Entries of a file that may replace ``extra``, and the stages that they stand for."""

_COSTS = *(field.name for field in dataclasses.fields(CostModel)), *_END_STAGES
"""Entries of costs that a file may have at its top level, without "costs" around them."""


class RankShare(NamedTuple):
    """The costs and memory sizes of a whole rank's share of the model, and their units."""

    costs: CostModel
    sizes: MemoryModel
    units: Units

    @property
    def counts_memory(self) -> bool:
        """Whether memory is more than the number of live activations."""
        return self.sizes != MemoryModel()

    def in_words(self, ranks: int, microbatches: int, limit: float = math.inf) -> str:
        """A line with the ranks, the microbatches, the costs and the memory limit."""
        within = "" if limit == math.inf else f", memory limit {self.units.size(limit)}"
        return f"{ranks} ranks, {microbatches} microbatches, {describe(self.costs, self.units)}{within}"

    def entry(self) -> dict[str, Any]:
        written = {"costs": dataclasses.asdict(self.costs), "memory": dataclasses.asdict(self.sizes)}
        units = {name: unit for name, unit in dataclasses.asdict(self.units).items() if unit}
        return written | ({"units": units} if units else {})

    def comment(self) -> str:
        """The entry as a comment below a grid; empty where all values are the defaults."""
        if self == RankShare(CostModel(), MemoryModel(), Units()):
            return ""
        return f"# {SHARE_ENTRY} {json.dumps(self.entry())}"


@dataclasses.dataclass(frozen=True)
class PartialShare:
    """The costs and sizes of a whole rank's share that a file gives; None where it gives none."""

    costs: CostModel | None = None
    sizes: MemoryModel | None = None
    units: Units = Units()  # noqa: RUF009  # frozen

    def overridden_by(self, costs: Costs, memory: Memory) -> RankShare:
        """The share that the options give; the rest is from the file that they name, or from here if they name none."""
        base = read_share_file(costs.costs) if costs.costs else self
        return RankShare(costs.applied_to(base.costs), memory.applied_to(base.sizes), base.units)


def share_in_text(text: str, name: str) -> PartialShare:
    """The costs and sizes in a schedule's text; most texts have none.

    Raises:
      CommandError: they cannot be read.
    """
    if text.lstrip().startswith("{"):
        entries = json.loads(text)
        return parse_share(entries[SHARE_ENTRY], name) if SHARE_ENTRY in entries else PartialShare()
    found = _LINE.search(text)
    return parse_share(_json_entries(found[1], name), name) if found else PartialShare()


def read_share_file(path: Path) -> PartialShare:
    """Read `--costs`: JSON of {"costs": {...}, "memory": {...}, "units": {...}}, or a schedule's file that has them.

    Raises:
      CommandError: it holds no costs, or they cannot be read.
    """
    text = read_text(str(path))
    entries = _json_entries(text, str(path)) if text.lstrip().startswith("{") else {}
    if {"F", "I", "W"} <= entries.keys():
        costs = {name: entries[name] for name in _COSTS if name in entries}
        entries = {"costs": costs} | {name: entries[name] for name in ("memory", "units") if name in entries}
    given = (
        parse_share(entries, str(path))
        if "costs" in entries and SHARE_ENTRY not in entries
        else share_in_text(text, str(path))
    )
    if given == PartialShare():
        raise CommandError(
            f'{path}: no costs; give JSON such as {{"costs": {{"F": 1, "I": 1, "W": 1, "FB": 2.25, "send": 0.02}}}}'
        )
    return given


def parse_share(entries: Mapping[str, Any], name: str) -> PartialShare:
    """Read costs and sizes from the entries of a file.

    Raises:
      CommandError: an entry is unknown or not a number; the message says which.
    """
    try:
        costs, memory = entries.get("costs"), entries.get("memory")
        if costs is not None:
            extra = {int(stage): tuple(more) for stage, more in costs.get("extra", {}).items()}
            ends = {stage: tuple(costs[name]) for name, stage in _END_STAGES.items() if name in costs}
            own = {name: cost for name, cost in costs.items() if name not in _END_STAGES}
            costs = CostModel(**(own | {"extra": extra | ends}))
        if memory is not None:
            sizes = {name: size for name, size in memory.items() if name != "extra"}
            memory = MemoryModel(
                **sizes, extra={int(stage): more for stage, more in memory.get("extra", {}).items()}
            )
        return PartialShare(costs, memory, Units(**entries.get("units", {})))
    except (TypeError, AttributeError, ValueError) as error:
        told = str(error).replace("__init__() got an unexpected keyword argument", "has no entry")
        raise CommandError(f"{name}: costs that cannot be read: {told}") from None


def _json_entries(text: str, name: str) -> dict[str, Any]:
    """The entries of a JSON text that begins with a brace."""
    try:
        return json.loads(text)  # type: ignore[no-any-return]
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{name}: not JSON: {error}") from None
