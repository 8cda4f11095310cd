"""Tables with only some units left: programs that compile in a fraction of the time, to be looked at."""

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from dualpipe_jax.schedule.lowering.lower import TickTable

_OPS = {"FB": ("F", "B"), "F": ("F",), "B": ("B",), "I": ("I",), "W": ("W0",)}
_ENDS = {"embed": "F_first", "head": "F_last", "embed_backward": "G_first"}
UNITS = (*_OPS, *_ENDS)
"""What a tick may hold; the last three stand at the ends of a pipe."""


def units_alone(table: TickTable, units: Collection[str] = ("FB",)) -> TickTable:
    """A table with nothing left in it but some of its units, each for one local stage (a pair for two).

    The engine's program of it holds each of these units once, exactly as the whole table's does, with the same
    pools. What it computes is of no use.

    Arguments:
      table: any.
      units: of ``UNITS``: "FB" is an overlapped pair, the other letters are those of a schedule.

    Raises ValueError for a unit that there is not, or that the schedule runs nowhere.
    """
    _check(table, units)
    number = {name: k for k, name in enumerate(table.columns)}
    kept = {op: np.zeros(table.array.shape[:2], bool) for op in ("F", "B", "I", "W0")}
    for unit in (unit for unit in units if unit in _OPS):
        for op in _OPS[unit]:
            kept[op] |= _first_stages(table, unit)
    ends = [_ENDS[unit] for unit in units if unit in _ENDS]

    array = table.array.copy()
    for name in ("F", "B", "I", *(f"W{k}" for k in range(table.num_w))):
        array[:, :, number[name]] = np.where(kept.get(name, False), table.column(name), -1)
    array[:, :, number["pair"]] &= kept["F"] & kept["B"]
    for name in set(_ENDS.values()) - set(ends):
        array[:, :, number[name]] = 0
    rows = np.logical_or.reduce([*kept.values(), *(table.column(end) == 1 for end in ends)])
    return dataclasses.replace(table, array=array[rows.any(axis=1)])


def _runs(table: TickTable, unit: str) -> np.ndarray:
    """Where a unit runs: bool [ticks, ranks]."""
    if unit in _ENDS:
        return table.column(_ENDS[unit]) == 1
    if unit == "W" and not table.num_w:
        return np.zeros(table.array.shape[:2], bool)
    runs = np.logical_and.reduce([table.column(op) >= 0 for op in _OPS[unit]])
    return runs & ((table.column("pair") == 1) == (unit == "FB"))


def _first_stages(table: TickTable, unit: str) -> np.ndarray:
    """Where it runs for those local stages for which it runs first."""
    runs, columns = _runs(table, unit), [table.column(op) for op in _OPS[unit]]
    first = tuple(np.argwhere(runs)[0])
    return runs & np.logical_and.reduce([column == column[first] for column in columns])


def _check(table: TickTable, units: Sequence[str] | Collection[str]) -> None:
    if unknown := [unit for unit in units if unit not in UNITS]:
        raise ValueError(f"units_alone: there is no unit {', '.join(unknown)}; there are {', '.join(UNITS)}")
    if missing := [unit for unit in units if not _runs(table, unit).any()]:
        there = ", ".join(unit for unit in UNITS if _runs(table, unit).any())
        raise ValueError(
            f"units_alone: {table.schedule.name} with {table.schedule.num_microbatches} microbatches never runs "
            f"{', '.join(missing)}; it runs {there}."
            + (" For pairs take dualpipe or dualpipe_v, with more microbatches" if "FB" in missing else "")
        )
