"""The upper half of a schedule's picture: the slots of each rank over time, its waits and its total idle time."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dualpipe_jax.present.figure import FAINT, IDLE, INK, POINTS
from dualpipe_jax.present.numbers import Units
from dualpipe_jax.schedule.blame import Link
from dualpipe_jax.schedule.costs import REL_TOLERANCE
from dualpipe_jax.schedule.formats.colours import colours, is_dark, num_shades, shade
from dualpipe_jax.schedule.ir import Action, Op
from dualpipe_jax.schedule.optimize.bounds import bound_of_stages
from dualpipe_jax.schedule.optimize.problem import Problem
from dualpipe_jax.schedule.simulate import Timeline, reading_rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHAIN = "#e3007b"
IDLE_LINES = "#c3c3cd"
ROW = 0.34
"""The height of a rank's row in inches."""

_Corners = list[tuple[float, float]]

_SMALLEST, _LARGEST = 1.8, 8.0  # points of a number in a box


@dataclasses.dataclass(frozen=True)
class ActionBox:
    """The rectangle of one action: half of a pair, or a whole slot. ``top`` and ``height`` are in rows."""

    action: Action
    start: float
    end: float
    top: float
    height: float

    @property
    def corners(self) -> _Corners:
        return _corners(self.start, self.end, self.top, self.height)


def boxes_of(timeline: Timeline) -> Iterator[ActionBox]:
    for rank, (order, starts, ends) in enumerate(
        zip(timeline.schedule.orders, timeline.starts, timeline.ends, strict=True)
    ):
        for slot, start, end in zip(order, starts, ends, strict=True):
            for part, action in enumerate(slot):
                yield ActionBox(action, start, end, rank + part / len(slot), 1 / len(slot))


def _draw_idle(axes: "Axes", timeline: Timeline, units: Units) -> None:
    """Hatch the time in which each rank waits, and write its sum beside the row."""
    from matplotlib import rc_context

    gaps = []
    for rank, (starts, ends) in enumerate(zip(timeline.starts, timeline.ends, strict=True)):
        edges = zip([0.0, *ends], [*starts, timeline.makespan], strict=True)
        gaps += [
            _corners(end, start, rank, 1)
            for end, start in edges
            if start - end > REL_TOLERANCE * timeline.makespan
        ]
        write_right_of_row(axes, rank, f"idle {units.duration(timeline.idle[rank])}", FAINT)
    if gaps:
        with rc_context({"hatch.linewidth": 0.5}):
            style = {"facecolors": IDLE, "edgecolors": IDLE_LINES, "hatch": "////", "linewidths": 0}
            _draw_boxes(axes, gaps, "idle", zorder=0.6, **style)


def _draw_sends(axes: "Axes", timeline: Timeline) -> None:
    """Draw a thin line for each transfer, from the end of the action that made the value to its arrival."""
    placement = timeline.schedule.placement
    lines = []
    for box in boxes_of(timeline):
        to = reading_rank(placement, box.action)
        if took := timeline.costs.transfer(placement.rank_of[box.action.stage], to):
            lines.append([(box.end, box.top + box.height / 2), (box.end + took, to + 0.5)])
    if lines:
        _draw_lines(axes, lines, "sends", colors=INK, linewidths=0.4, alpha=0.5, zorder=3)


def draw_chain(axes: "Axes", chain: Sequence[Link]) -> None:
    """Frame the slots of a chain, and join each to the one that waits for it."""
    if not chain:
        return
    frames = [_corners(link.start, link.end, link.rank, 1) for link in chain]
    _draw_boxes(axes, frames, "chain", facecolors="none", edgecolors=CHAIN, linewidths=1.6, zorder=4)
    joints = [
        [(before.end, before.rank + 0.5), (link.start, link.rank + 0.5)]
        for link, before in itertools.pairwise(chain)
    ]
    _draw_lines(axes, joints, "chain joints", colors=CHAIN, linewidths=1.2, zorder=4)


def _draw_bound(axes: "Axes", timeline: Timeline, units: Units) -> None:
    schedule = timeline.schedule
    bound = bound_of_stages(schedule.placement, Problem(schedule.num_microbatches, timeline.costs))
    if 0 < bound < timeline.makespan * (1 - REL_TOLERANCE):
        axes.axvline(bound, -0.01, 1.02, color="#c2185b", lw=1.4, gid="bound", zorder=0.8, clip_on=False)
        axes.annotate(
            f"proven bound {units.duration(bound)}",
            (bound, 0),
            (2, 4),
            textcoords="offset points",
            size=7.5,
            ha="right",
            color="#c2185b",
            annotation_clip=False,
        )


def draw_grid(axes: "Axes", timeline: Timeline, points: float, units: Units) -> None:
    """Draw the whole upper half except the chain; one unit of time is ``points`` of the page wide."""
    _draw_idle(axes, timeline, units)
    placement = timeline.schedule.placement
    groups: dict[tuple[Op, int], list[ActionBox]] = defaultdict(list)
    for box in boxes_of(timeline):
        groups[box.action.op, shade(placement, box.action.stage)].append(box)
    digits = len(str(max((box.action.microbatch for box in boxes_of(timeline)), default=0)))
    for (op, at), boxes in groups.items():
        colour = colours(op, num_shades(placement))[at]
        line = min(0.7, 0.08 * points * min(box.end - box.start for box in boxes))
        corners = [box.corners for box in boxes]
        _draw_boxes(axes, corners, f"boxes {op} {at}", facecolors=colour, edgecolors="white", linewidths=line)
        ink = "white" if is_dark(colour) else INK
        sizes = [_size_of_number(box, points, digits) for box in boxes]
        for box, size in zip(boxes, sizes, strict=True):
            _write_number(axes, box, size, ink)
        if at == 1 and num_shades(placement) == 2:
            _underline(axes, boxes, sizes, points, ink)
    framed = [dataclasses.replace(box, height=1) for box in boxes_of(timeline) if _is_upper_half(box)]
    if framed:
        line = min(0.9, 0.12 * points * min(box.end - box.start for box in framed))
        corners = [box.corners for box in framed]
        _draw_boxes(axes, corners, "pairs", facecolors="none", edgecolors=INK, linewidths=line)
    _draw_sends(axes, timeline)
    _draw_bound(axes, timeline, units)
    _tidy_grid(axes, timeline)


def _is_upper_half(box: ActionBox) -> bool:
    return box.height < 1 and box.top == int(box.top)


def _draw_boxes(axes: "Axes", corners: Sequence[_Corners], name: str, **style: Any) -> None:
    from matplotlib.collections import PolyCollection

    axes.add_collection(PolyCollection(corners, gid=name, **style))


def _draw_lines(axes: "Axes", lines: Sequence[_Corners], name: str, **style: Any) -> None:
    from matplotlib.collections import LineCollection

    axes.add_collection(LineCollection(lines, gid=name, **style))


def _tidy_grid(axes: "Axes", timeline: Timeline) -> None:
    ranks = timeline.schedule.num_ranks
    axes.set_xlim(0, timeline.makespan or 1)
    axes.set_ylim(ranks, 0)
    axes.set_yticks([rank + 0.5 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    axes.tick_params(length=0, labelsize=8.5, colors=INK)
    axes.tick_params(axis="x", labelbottom=False)
    for side in axes.spines.values():
        side.set_visible(False)


def _edges(top: float, height: float) -> tuple[float, float]:
    gap = 0.06  # of a row, between ranks
    return top + gap * (top == int(top)), top + height - gap * (top + height == int(top + height))


def _corners(start: float, end: float, top: float, height: float) -> _Corners:
    high, low = _edges(top, height)
    return [(start, high), (end, high), (end, low), (start, low)]


def _size_of_number(box: ActionBox, points: float, digits: int) -> float:
    """The font size of the number in a box, in points; 0 if there is no room for it."""
    high, wide = box.height * ROW * POINTS, (box.end - box.start) * points
    size = min(_LARGEST, 0.8 * high, wide / (0.64 * digits + 0.3))
    return size if size >= _SMALLEST else 0.0


def _write_number(axes: "Axes", box: ActionBox, size: float, ink: str) -> None:
    if size:
        middle = (box.start + box.end) / 2, sum(_edges(box.top, box.height)) / 2
        text = str(box.action.microbatch)
        axes.text(*middle, text, size=size, color=ink, ha="center", va="center_baseline", clip_on=True)


def _underline(
    axes: "Axes", boxes: Sequence[ActionBox], sizes: Sequence[float], points: float, ink: str
) -> None:
    lines = []
    for box, size in zip(boxes, sizes, strict=True):
        if size:
            middle = (box.start + box.end) / 2
            below = sum(_edges(box.top, box.height)) / 2 + 0.52 * size / (ROW * POINTS)
            half = 0.32 * size * len(str(box.action.microbatch)) / points
            lines.append([(middle - half, below), (middle + half, below)])
    _draw_lines(axes, lines, "underlines", colors=ink, linewidths=0.09 * max(sizes))


def write_right_of_row(axes: "Axes", rank: int, text: str, colour: str) -> None:
    """Write to the right of a rank's row."""
    axes.annotate(
        text,
        (1, rank + 0.5),
        (5, 0),
        xycoords=axes.get_yaxis_transform(),
        textcoords="offset points",
        size=7.5,
        va="center",
        color=colour,
    )
