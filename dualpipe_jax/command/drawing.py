"""A simulated step in a terminal: coloured blocks to scale, wrapped into strips as wide as the terminal.

Where whole actions fit on one line they are written out; else, as in the papers' figures, a block shows
its microbatch only, and its colour shows the op.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from dualpipe_jax.schedule import Op, Placement, Slot, Timeline
from dualpipe_jax.schedule.formats.colours import colours, is_dark, num_shades, shade, shade_names
from dualpipe_jax.schedule.formats.text import column_at, scale_of


class Block(NamedTuple):
    """A filled range of columns of a rank's line; a pair makes two without a gap."""

    start: int
    end: int
    label: str
    style: str


def draw(timeline: Timeline, console: Console) -> tuple[list[Text], Text]:
    """Lines of a picture no wider than the console, and its legend.

    Raises:
      ValueError: if a slot takes no time and so has no room, or a line would be too long.
    """
    margin = len(f"rank {timeline.schedule.num_ranks - 1} ")
    room = console.width - margin
    rows = _blocks(timeline, brief=False)
    coloured = console.color_system is not None and not console.no_color
    brief = coloured and _width(rows) > room
    if brief:
        rows = _blocks(timeline, brief=True)
    lines: list[Text] = []
    for first, last in _strips(rows, room):
        lines += [Text()] if lines else []
        lines += [Text(f"rank {r}".ljust(margin)) + _line(row, first, last) for r, row in enumerate(rows)]
    return lines, _legend(timeline, brief)


def _strips(rows: list[list[Block]], room: int) -> Iterator[tuple[int, int]]:
    """First and end columns of equal strips, with room left for a label that extends beyond the end."""
    width = _width(rows)
    longest = max((len(block.label) for row in rows for block in row), default=0)
    count = 1 if width <= room else math.ceil(width / max(20, room - longest))
    size = math.ceil(width / count)
    for first in range(0, width, size):
        yield first, first + size


def _width(rows: list[list[Block]]) -> int:
    return max((row[-1].end for row in rows if row), default=0)


def _blocks(timeline: Timeline, brief: bool) -> list[list[Block]]:
    schedule = timeline.schedule
    placement = schedule.placement
    scale = scale_of(timeline, lambda slot: len(" ".join(_labels(slot, brief))))

    def blocks(slot: Slot, start: int, end: int) -> Iterator[Block]:
        cuts = [start, end] if len(slot) == 1 else [start, (start + end) // 2, end]
        for action, label, (left, right) in zip(
            slot, _labels(slot, brief), itertools.pairwise(cuts), strict=True
        ):
            style = _style(placement, action.op, shade(placement, action.stage))
            yield Block(left, right - (right == end), label, style)

    return [
        [
            block
            for slot, start, end in zip(*row, strict=True)
            for block in blocks(slot, column_at(start, scale), column_at(end, scale))
        ]
        for row in zip(schedule.orders, timeline.starts, timeline.ends, strict=True)
    ]


def _labels(slot: Slot, brief: bool) -> list[str]:
    if brief:
        return [str(action.microbatch) for action in slot]
    return [*(f"{action}+" for action in slot[:-1]), str(slot[-1])]


@functools.cache
def _style(placement: Placement, op: Op, shade: int) -> str:
    colour = colours(op, num_shades(placement))[shade]
    return f"{'#ffffff' if is_dark(colour) else '#000000'} on {colour}"


def _line(row: list[Block], first: int, last: int) -> Text:
    """The part of a rank's blocks between two columns. A label is never cut: it may extend beyond the end."""
    line = Text()
    for start, end, label, style in row:
        left, right = max(start, first), min(end, max(last, start + len(label)))
        if start < last and left < right:
            line.append(" " * (left - first - len(line)))
            line.append((label if start >= first else "").ljust(right - left)[: right - left], style)
    return line


def _legend(timeline: Timeline, brief: bool) -> Text:
    placement, orders = timeline.schedule.placement, timeline.schedule.orders
    used = {action.op for order in orders for slot in order for action in slot}
    shades = range(num_shades(placement))
    meaning = {Op.F: "forward", Op.B: "backward", Op.I: "backward, input", Op.W: "backward, weights"}
    legend = Text()
    for op in filter(used.__contains__, Op):
        for at in shades:
            legend.append(f" {op} ", _style(placement, op, at))
        legend.append(f" {meaning[op]}   ")
    numbers = "numbers are microbatches" if brief else "3F0 is stage 3, forward, microbatch 0"
    names = f"; shades: {', '.join(shade_names(placement))}" if len(shades) > 1 else ""
    return legend.append(f"\n{numbers}{names}", "dim")


def print_drawing(timeline: Timeline, console: Console) -> None:
    """Draw on a console; only the legend wraps."""
    lines, legend = draw(timeline, console)
    for line in lines:
        console.print(line, no_wrap=True, overflow="crop")
    console.print()
    console.print(legend)
