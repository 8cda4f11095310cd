"""Tables with only some units left: their programs compile in a fraction of the time and can be inspected."""

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from dualpipe_jax.schedule.lowering.table import OPS, TickTable


def units_alone(
    table: TickTable, ops: Collection[str] = ("FB",), kinds: Sequence[int] | None = None
) -> TickTable:
    """The table with only one unit of each op left: the one that runs most often.

    The engine's program of it holds each of these units once, exactly as the whole table's program does, with the
    same pools. The values that it computes are meaningless.

    Arguments:
      table: any lowered schedule.
      ops: the ops to keep, among "F", "B", "I", "W" and "FB", an overlapped pair.
      kinds: a number for each kind of stage; one unit of each op is kept for every number (of a pair: every two
        numbers) that it works on, so kinds with the same number share one unit. None: one unit of each op.

    Raises ValueError for an op that does not exist, or that the schedule never runs.
    """
    _check(table, ops)
    counts = table.counts()
    most: dict[tuple[object, ...], int] = {}
    for number, (op, forward, backward) in enumerate(table.units):
        stages = [stage for stage in (forward, backward) if stage is not None]
        of = () if kinds is None else tuple(kinds[stage.kind] for stage in stages)
        if op in ops and counts[number] > counts[most.setdefault((op, *of), number)]:
            most[op, *of] = number
    array = table.array.copy()
    unit = table.columns.index("unit")
    kept = np.isin(table.column("unit"), list(most.values()))
    array[:, :, unit] = np.where(kept, table.column("unit"), -1)
    return dataclasses.replace(table, array=array[kept.any(axis=1)])


def unit_everywhere(table: TickTable, number: int) -> np.ndarray:
    """One tick, int32 [ranks, columns]: every rank that ever runs the unit runs it, and the others run nothing.

    Arguments:
      table: any lowered schedule.
      number: the number of the unit; -1: no rank runs a unit.

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
    """Ticks, int32 [ticks, ranks, columns], after which every unit reads slots that other units have filled.

    They are the schedule's first ticks, until each rank has run a backward of each of its stages: about then the
    number of microbatches under way is at its largest. Then all units run, each once, in the order in which they
    first occur in the schedule: an I that runs this late only fills its stash, for a W.
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
