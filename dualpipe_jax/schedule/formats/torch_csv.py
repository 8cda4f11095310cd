"""PyTorch's schedule CSV, out and in: one line for each rank, one cell for each slot."""

import csv
import re
import reprlib
from collections.abc import Mapping, Sequence

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.schedule.costs import CostModel
from dualpipe_jax.schedule.dataflow import execution_order
from dualpipe_jax.schedule.ir import Action, Placement, Schedule, Slot
from dualpipe_jax.schedule.simulate import simulate

_PAIR = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")

_IMPLIED = re.compile(r"\d+(?:(?:SEND|RECV)_[FB]\d+|UNSHARD|RESHARD|REDUCE_GRAD)")
"""Matches actions that PyTorch adds when it lowers a schedule: transfers, FSDP's gathering, the last reduction."""

_Row = list[tuple[int, Slot]]
"""The slots of a line, each with the number of its cell."""


@typechecked
def to_torch_csv(schedule: Schedule, aligned: bool = False) -> str:
    """Write a schedule as ``torch.distributed.pipelining`` reads it, in the format "compute_only".

    PyTorch places the stages by the lines on which they stand and adds the transfers, so that it loads and
    runs any placement of one pipe: ``_PipelineScheduleRuntime(stages, num_microbatches)._load_csv(file)``,
    underscores and all, in 2.13. It runs a pair's two actions one after the other, unless a function
    is registered for OVERLAP_F_B. PyTorch knows no second pipe. Two are written with stages and microbatches as we
    number them, for people and for ``from_torch_csv``; PyTorch takes the stages for one long pipe and
    refuses the schedule as malformed.

    >>> from dualpipe_jax.schedule import dualpipe_v
    >>> print(to_torch_csv(dualpipe_v(2, 3)).splitlines()[0])
    0F0,0F1,0F2,3F0,3I0,3W0,3F1,3B1,(3F2;0B0)OVERLAP_F_B,3B2,0I1,0W1,0I2,0W2

    Args:
      schedule: a valid schedule, see ``validate``.
      aligned: whether column i is time step i, as in the files that PyTorch writes: every slot takes one
        step, and empty cells fill the steps in which a rank waits. PyTorch reads either.

    Raises:
      ValueError: with ``aligned``, if the schedule hangs.
    """
    rows = [list(map(_cell, order)) for order in schedule.orders]
    if aligned:
        rows = _in_columns(rows, simulate(schedule, _OneStep()).starts)
    return "".join(f"{','.join(row)}\n" for row in rows)


@typechecked
def from_torch_csv(text: str, placement: Placement | None = None, name: str = "parsed") -> Schedule:
    """Read a schedule in PyTorch's CSV, one line for each rank. The result is not validated.

    Both of PyTorch's formats are read: from "compute_comms" the work is taken, and SEND, RECV, UNSHARD,
    RESHARD and REDUCE_GRAD are left out, since the order of the work implies them. Empty cells
    only mean that a rank waits. The number of microbatches follows from the highest microbatch.

    >>> from_torch_csv("0F0,,,0B0\\n,1F0,1B0").placement
    Placement(pipes=((0, 1),))

    Args:
      text: the CSV; the r-th line that is not blank is rank r - 1.
      placement: which rank holds which stage. If left out, there is one pipe, with each stage on the rank whose
        line runs it; or two pipes in opposite directions, if the lines hang as one pipe but not as two.
      name: name of the schedule.

    Raises:
      ValueError: if a cell cannot be read (the message says which), the lines do not determine the placement, or
        their number is not that of the placement's ranks.
    """
    lines = enumerate(text.removeprefix("\ufeff").splitlines(), 1)
    rows = {number: _read_row(number, line) for number, line in lines if line.strip()}
    orders = tuple(tuple(slot for _, slot in row) for row in rows.values())
    if placement is None:
        placement = _as_two_pipes(_one_pipe(rows), orders)
    if placement.num_ranks != len(rows):
        raise ValueError(
            f"from_torch_csv: {len(rows)} lines, but {placement.num_ranks} ranks in the placement; "
            "give one line for each rank"
        )
    highest = max((a.microbatch for order in orders for slot in order for a in slot), default=-1)
    return Schedule(name, placement, (highest + 1) * placement.num_pipes, orders)


class _OneStep(CostModel):
    """Costs with which every slot takes one step, B and pairs included; no values of F, I, W and FB give that."""

    def of(self, slot: Slot, placement: Placement) -> float:
        del slot, placement
        return 1.0


def _cell(slot: Slot) -> str:
    return str(slot[0]) if len(slot) == 1 else f"({';'.join(map(str, slot))})OVERLAP_F_B"


def _in_columns(rows: Sequence[Sequence[str]], starts: Sequence[Sequence[float]]) -> list[list[str]]:
    """Put every cell into the column of its start."""
    spread = []
    for row, columns in zip(rows, starts, strict=True):
        cells = [""] * (int(max(columns, default=-1)) + 1)
        for cell, column in zip(row, columns, strict=True):
            cells[int(column)] = cell
        spread.append(cells)
    return spread


def _read_row(line: int, text: str) -> _Row:
    try:
        # Each line by itself: a quotation mark that is not closed would take in the lines after it.
        row = next(csv.reader([text]))
    except csv.Error as error:
        raise ValueError(f"from_torch_csv: line {line} is no CSV: {error}") from None
    read = ((number, _read_cell(line, number, cell.strip())) for number, cell in enumerate(row, 1))
    return [(number, slot) for number, slot in read if slot]


def _read_cell(line: int, number: int, cell: str) -> Slot:
    if not cell or _IMPLIED.fullmatch(cell):
        return ()
    pair = _PAIR.fullmatch(cell)
    try:
        return tuple(map(Action.parse, pair.groups() if pair else [cell]))
    except ValueError:
        raise ValueError(
            f"from_torch_csv: line {line}, cell {number}: cannot read {cell!r}; expected an action such as "
            "0F0, 2I0, 2W0 or 3B1, a pair such as (0F3;3B1)OVERLAP_F_B, or nothing where the rank waits"
        ) from None


def _one_pipe(rows: Mapping[int, _Row]) -> Placement:
    """The placement of one pipe, with each stage on the rank whose line runs it; ``rows`` are by line number."""
    rank_of: dict[int, int] = {}
    for rank, (line, row) in enumerate(rows.items()):
        if not row:
            raise ValueError(f"from_torch_csv: line {line} runs nothing; drop it, or pass placement=")
        for number, slot in row:
            for action in slot:
                first = rank_of.setdefault(action.stage, rank)
                if first != rank:
                    raise ValueError(
                        f"from_torch_csv: line {line}, cell {number}: {action}, but line {list(rows)[first]} runs "
                        f"stage {action.stage} already; a stage lives on one rank, so move it there"
                    )
    if not rank_of or len(rank_of) <= max(rank_of):
        held = sorted(rank_of)
        first = next((stage for stage, there in enumerate(held) if stage != there), 0)
        given = f"stages {reprlib.repr(held)}, but no stage {first}" if held else "no lines"
        raise ValueError(
            f"from_torch_csv: got {given}; to place them, one line must run each stage from 0 to the last. "
            "Add what is missing, or pass placement="
        )
    return Placement((tuple(rank_of[stage] for stage in range(len(rank_of))),))


def _as_two_pipes(placement: Placement, orders: tuple[tuple[Slot, ...], ...]) -> Placement:
    """Two pipes in opposite directions instead of a V, if the orders hang on the V but run on the two pipes."""
    ranks = placement.num_ranks
    if placement != Placement.v(ranks) or _runs(placement, orders):
        return placement
    both = Placement.bidirectional(ranks)
    return both if _runs(both, orders) else placement


def _runs(placement: Placement, orders: tuple[tuple[Slot, ...], ...]) -> bool:
    return len(execution_order(placement, orders)) == sum(map(len, orders))
