"""Schedules as text that people can read and ``parse_grid`` reads back."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.schedule.costs import CostModel
from dualpipe_jax.schedule.ir import Placement, Schedule, Slot, parse_slot, spelt
from dualpipe_jax.schedule.simulate import Timeline, simulate

_HEADER = re.compile(
    r"#\s*(?:(?P<name>.*?),\s*)?ranks\s+(?P<ranks>\d+),\s*microbatches\s+(?P<microbatches>\d+)"
    r"(?:,\s*pipes\s+(?P<pipes>\([\d ()]*\)))?\s*"
)

_WIDEST = 1_000_000
"""The most characters of a line drawn to time."""
_LARGEST = 100_000_000
"""The most characters of all lines drawn to time."""


@typechecked
def format_grid(schedule: Schedule, costs: CostModel | None = None) -> str:
    """Print a schedule, one line per rank; ``parse_grid`` reads it back.

    Without costs, column i holds each rank's i-th slot. With costs, the columns are time: a slot starts
    where it starts in the simulated step, and dots fill the time in which a rank waits.

    >>> from dualpipe_jax.schedule import one_f_one_b
    >>> print(format_grid(one_f_one_b(2, 2)))
    # one_f_one_b, ranks 2, microbatches 2, pipes (0 1)
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1
    >>> print(format_grid(one_f_one_b(2, 2), CostModel(F=1, I=1, W=1)))
    # one_f_one_b, ranks 2, microbatches 2, pipes (0 1)
    rank 0: 0F0 0F1 ....... 0B0     ... 0B1
    rank 1: ... 1F0 1B0     1F1 1B1

    Raises:
      ValueError: with costs, if the schedule hangs, if a slot takes no time and so has no room, or if the lines
        would be too long: because a slot takes very little time in comparison with the others, or there are very
        many ranks.
    """
    if costs is not None:
        return format_timeline(simulate(schedule, costs))
    return _with_header(schedule, _aligned(_slot_texts(schedule)))


def format_timeline(timeline: Timeline) -> str:
    """The text that ``format_grid`` returns with costs, for a step that has been simulated already."""
    return _with_header(timeline.schedule, _lines_to_time(timeline))


def most_characters(num_ranks: int) -> int:
    """The most characters of each of ``num_ranks`` lines drawn to time."""
    return min(_WIDEST, _LARGEST // max(1, num_ranks))


INSTEAD = "take fewer ranks or microbatches, or write it in another format, such as JSON"
"""The advice for lines that are too long."""


def _slot_texts(schedule: Schedule) -> list[list[str]]:
    return [[spelt(slot) for slot in order] for order in schedule.orders]


def _with_header(schedule: Schedule, lines: Iterable[str]) -> str:
    pipes = " ".join(f"({' '.join(map(str, pipe))})" for pipe in schedule.placement.pipes)
    header = f"# {schedule.name}, ranks {schedule.num_ranks}, microbatches {schedule.num_microbatches}, "
    return "\n".join([f"{header}pipes {pipes}", *_labelled(range(schedule.num_ranks), lines)])


@typechecked
def parse_grid(text: str, placement: Placement | None = None, name: str | None = None) -> Schedule:
    """Read a schedule that ``format_grid`` printed, or bare lines of slots, one per rank.

    The first line may be ``# name, ranks 4, microbatches 8, pipes (0 1 2 3) (3 2 1 0)``. Parts that it leaves
    out come from the arguments; without that line, the number of microbatches comes from the actions. Labels
    ``rank 0:`` are optional, dots are idle time, blank lines are ignored. The result is not validated.

    >>> parse_grid("0F0 0B0", Placement.linear(1)).orders[0][1]
    (Action(stage=0, op=<Op.B: 'B'>, microbatch=0),)

    Args:
      text: the grid.
      placement: which rank holds which stage; needed where the header does not name the pipes.
      name: name of the schedule, unless the header has one.

    Raises:
      ValueError: if a line cannot be read (the message says which), or header, placement and lines disagree.
    """
    numbered = [(i, line.strip()) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    header = _HEADER.fullmatch(numbered[0][1]) if numbered else None
    orders = tuple(_parse_line(i, line) for i, line in numbered if not line.startswith("#"))
    if header and header["pipes"]:
        stated = Placement(
            tuple(tuple(map(int, pipe.split())) for pipe in re.findall(r"\(([^()]*)\)", header["pipes"]))
        )
        if placement not in (None, stated):
            raise ValueError(f"parse_grid: the header says {stated}, the argument {placement}; drop either")
        placement = stated
    if placement is None:
        raise ValueError(
            "parse_grid: where do the stages live? Pass placement=, such as Placement.linear(4), or begin "
            "the text with '# name, ranks 4, microbatches 8, pipes (0 1 2 3)'"
        )
    counts = {len(orders), placement.num_ranks} | ({int(header["ranks"])} if header else set())
    if len(counts) > 1:
        raise ValueError(
            f"parse_grid: {len(orders)} lines of slots, {placement.num_ranks} ranks in the placement"
            + (f", {header['ranks']} in the header" if header else "")
            + "; they must be the same number, one line for each rank"
        )
    highest = max((a.microbatch for order in orders for slot in order for a in slot), default=-1)
    microbatches = int(header["microbatches"]) if header else (highest + 1) * placement.num_pipes
    return Schedule((header and header["name"]) or name or "parsed", placement, microbatches, orders)


def excerpt(schedule: Schedule, around: Mapping[int, int], faulty_rank: int, index: int | None) -> str:
    """Lines of the ranks of ``around``, each near its slot ``around[rank]``.

    The line of rank ``faulty_rank`` is marked, and its slot ``index``, if there is one, is in brackets.
    """
    rows = []
    for rank in sorted(around):
        order = schedule.orders[rank]
        first = max(0, min(around[rank] - 3, len(order) - 8))
        cells = ["..."] if first else []
        for i in range(first, min(first + 8, len(order))):
            cells.append(f"[{spelt(order[i])}]" if (rank, i) == (faulty_rank, index) else spelt(order[i]))
        rows.append([*cells, *(["..."] if first + 8 < len(order) else [])])
    lines = [
        f"{line}  <-- here" if rank == faulty_rank else line
        for rank, line in zip(sorted(around), _aligned(rows), strict=True)
    ]
    return "\n".join(_labelled(sorted(around), lines))


def _labelled(ranks: Sequence[int], lines: Iterable[str]) -> list[str]:
    width = len(str(max(ranks, default=0)))
    return [f"rank {rank:<{width}}: {line}".rstrip() for rank, line in zip(ranks, lines, strict=True)]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]
    return [" ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def scale_of(timeline: Timeline, length: Callable[[Slot], int]) -> float:
    """The columns per unit of time with which each slot has room for ``length(slot)`` characters and one more.

    Raises:
      ValueError: a slot takes no time, or a line would be too long.
    """
    schedule, costs = timeline.schedule, timeline.costs
    slots = dict.fromkeys(itertools.chain.from_iterable(schedule.orders))
    free = next((slot for slot in slots if not costs.of(slot, schedule.placement)), None)
    if free is not None:
        raise ValueError(
            f"format_grid: {spelt(free)} takes no time under {costs}; to draw time, all costs must be above 0"
        )
    scale = max(((length(slot) + 1) / costs.of(slot, schedule.placement) for slot in slots), default=1.0)
    width, most = timeline.makespan * scale, most_characters(schedule.num_ranks)
    if width > most:
        raise ValueError(
            f"format_grid: drawn to time under {costs}, a line is {width:.2g} characters long, and of "
            f"{schedule.num_ranks:,} ranks at most {most:,}; let costs differ less, {INSTEAD}"
        )
    return scale


def _lines_to_time(timeline: Timeline) -> list[str]:
    schedule, scale = timeline.schedule, scale_of(timeline, lambda slot: len(spelt(slot)))
    lines = []
    for row, starts, ends in zip(_slot_texts(schedule), timeline.starts, timeline.ends, strict=True):
        line = ""
        for cell, start, end in zip(row, starts, ends, strict=True):
            wait = column_at(start, scale) - len(line)
            line += "." * (wait - 1) + " " * (wait > 0)
            line += cell.ljust(column_at(end, scale) - column_at(start, scale))
        lines.append(line)
    return lines


def column_at(time: float, scale: float) -> int:
    """The column at which a time is drawn, at ``scale`` columns per unit; rounding errors of sums do not move it."""
    return math.floor(time * scale + 1e-6)


def _parse_line(number: int, line: str) -> tuple[Slot, ...]:
    cells = re.sub(r"^rank\s+\d+\s*:", "", line).split()
    try:
        return tuple(parse_slot(cell) for cell in cells if cell.strip("."))
    except ValueError as error:
        raise ValueError(f"parse_grid: line {number}: {error}") from None
