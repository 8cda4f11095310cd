"""Tables with only some units left: programs that compile in a fraction of the time, to be looked at."""

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from dualpipe_jax.schedule.lowering.table import OPS, TickTable


def units_alone(
    table: TickTable, ops: Collection[str] = ("FB",), kinds: Sequence[int] | None = None
) -> TickTable:
    """A table with nothing left in it but some of its units: of each op the one that runs most often.

    The engine's program of it holds each of these units once, exactly as the whole table's does, with the same
    pools. What it computes is of no use.

    Arguments:
      table: any.
      ops: of "F", "B", "I", "W" and "FB", an overlapped pair.
      kinds: one unit of each op for every kind of stage (for a pair: two kinds) that it works on; of kinds of which
        this has the same number one stands for all. None: one of each op.

    Raises ValueError for an op that there is not, or that the schedule runs nowhere.
    """
    _check(table, ops)
    counts = table.counts()
    most: dict[tuple[object, ...], int] = {}
    for number, (op, forward, backward) in enumerate(table.units):
        stands = [stand for stand in (forward, backward) if stand is not None]
        of = () if kinds is None else tuple(kinds[stand.kind] for stand in stands)
        if op in ops and counts[number] > counts[most.setdefault((op, *of), number)]:
            most[op, *of] = number
    array = table.array.copy()
    unit = table.columns.index("unit")
    kept = np.isin(table.column("unit"), list(most.values()))
    array[:, :, unit] = np.where(kept, table.column("unit"), -1)
    return dataclasses.replace(table, array=array[kept.any(axis=1)])


def unit_everywhere(table: TickTable, number: int) -> np.ndarray:
    """One tick, int32 [ranks, columns], in which all ranks run a unit that run it anywhere, and the others nothing.

    Arguments:
      table: any.
      number: of the unit; -1: no rank runs any.

    Raises ValueError for a number that no rank runs.
    """
    units, column = table.column("unit"), table.columns.index("unit")
    if number >= 0 and not (units == number).any():
        raise ValueError(f"unit_everywhere: no rank of {table.schedule.name} runs unit {number}")
    ticks = np.argmax(units == number, axis=0)  # the first of each rank; 0 for a rank that never does
    row = table.array[ticks, np.arange(units.shape[1])].copy()
    row[:, column] = np.where((units == number).any(axis=0), number, -1)
    return row


def opening(table: TickTable) -> np.ndarray:
    """Ticks, int32 [ticks, ranks, columns], after which every unit finds in its slots what units left there.

    They are the schedule's first, until each rank has done a backward of each of its stages: about then most
    microbatches are on their way that ever are. Then come all units, each once, in the order of the schedule: an I
    that runs late only fills its stash, for a W.
    """
    units = table.column("unit")
    backward = np.array([-1 if unit.backward is None else unit.backward.local for unit in table.units] + [-1])
    ends = [
        int(np.argmax(ran, axis=0)[ran.any(axis=0)].max())
        for local in set(backward.tolist()) - {-1}
        if (ran := backward[units] == local).any()
    ]
    first = {number: int(np.argmax((units == number).any(axis=1))) for number in np.unique(units[units >= 0])}
    each = [unit_everywhere(table, number) for number in sorted(first, key=first.__getitem__)]
    return np.concatenate([table.array[: 1 + max(ends, default=-1)], np.stack(each)])


def _check(table: TickTable, ops: Collection[str]) -> None:
    if unknown := [op for op in ops if op not in OPS]:
        raise ValueError(f"units_alone: there is no unit {', '.join(unknown)}; there are {', '.join(OPS)}")
    there = [op for op in OPS if any(unit.op == op for unit in table.units)]
    if missing := [op for op in ops if op not in there]:
        raise ValueError(
            f"units_alone: {table.schedule.name} with {table.schedule.num_microbatches} microbatches never runs "
            f"{', '.join(missing)}; it runs {', '.join(there)}."
            + (" For pairs take dualpipe or dualpipe_v, with more microbatches" if "FB" in missing else "")
        )
