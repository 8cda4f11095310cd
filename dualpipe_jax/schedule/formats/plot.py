"""A simulated step as a picture, in the manner of DualPipe's figure in the DeepSeek-V3 technical report."""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualpipe_jax.present.figure import FAINT, INK, POINTS, new_figure, save
from dualpipe_jax.present.numbers import Units, percent
from dualpipe_jax.schedule.blame import Link
from dualpipe_jax.schedule.costs import HAIR, MemoryModel
from dualpipe_jax.schedule.formats.colours import NAMES, colours, is_dark, num_shades, shade, shade_names
from dualpipe_jax.schedule.formats.costs_text import describe
from dualpipe_jax.schedule.ir import Action, Op
from dualpipe_jax.schedule.optimize.bounds import bound_of_stages
from dualpipe_jax.schedule.simulate import Timeline, sent_to

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CHAIN = "#e3007b"
_IDLE, _IDLE_LINES, _FILL = "#e9e9ee", "#c3c3cd", "#9db4d8"
_ROW, _BAND, _LEFT, _RIGHT, _HEAD, _FOOT = 0.34, 0.24, 0.75, 1.0, 0.92, 1.1  # inches
_SMALLEST, _LARGEST = 1.8, 8.0  # points of a number in a box


def plot(
    timeline: Timeline,
    path: str | Path | None = None,
    *,
    memory: MemoryModel | None = None,
    memory_label: str | None = None,
    units: Units | None = None,
    chain: Sequence[Link] | None = None,
) -> "Figure":
    """Draw a simulated step: one row for each rank, time to the right, and below it a band for what it keeps.

    A box is an action, coloured by op, with its microbatch's number (within its pipe) where there is room.
    The shade is the pipe; or, where a pipe passes a rank several times, how often it has. The two halves of
    an overlapped pair stand in one frame, the forward above. Idle time is hatched, and its sum stands at the end
    of each row; transfers that take time are thin lines between rows. Where the proven lower bound of the placement
    is shorter than the step, a line marks it. The bands of all ranks have one scale, each with its peak at the
    end. The figure grows with the schedule. Nothing of matplotlib's global state is read or left changed.

    Args:
      timeline: from ``simulate``.
      path: where to write it too; SVG or PNG by its ending.
      memory: sizes for one stage, for the second panel; live activations, that of a rank's whole share
        of the model as the unit, if left out.
      memory_label: what the second panel's axis says.
      units: of times and sizes, written where they stand.
      chain: slots that wait for each other, from ``blame.critical_path`` or ``blame.why_idle``: they are framed, and
        lines lead from one to the next.

    Raises:
      ValueError: if the path ends in neither .svg nor .png.
      ModuleNotFoundError: without matplotlib; says how to install it.
    """
    label = memory_label or ("live activations" if memory is None else "memory")
    sizes = MemoryModel().for_schedule(timeline.schedule) if memory is None else memory
    units = units or Units()
    width, dots = _size(timeline)
    rows, bands = (inches * timeline.schedule.num_ranks for inches in (_ROW, _BAND))
    height = _HEAD + rows + 0.3 + bands + _FOOT
    figure = new_figure(width, height, path, dots)
    across = _LEFT / width, (width - _LEFT - _RIGHT) / width
    grid = figure.add_axes((across[0], 1 - (_HEAD + rows) / height, across[1], rows / height))
    below = figure.add_axes((across[0], _FOOT / height, across[1], bands / height), sharex=grid)
    kept = [timeline.memory_over_time(rank, sizes) for rank in range(timeline.schedule.num_ranks)]
    _draw_grid(grid, timeline, (width - _LEFT - _RIGHT) * POINTS / (timeline.makespan or 1), units)
    _draw_chain(grid, chain or ())
    _draw_memory(below, timeline, kept, label, units)
    _write_head(figure, timeline, f"{label} {units.size(max(max(amounts) for _, amounts in kept))}", units)
    _add_legend(figure, timeline, bool(chain))
    return save(figure, path)


@dataclasses.dataclass(frozen=True)
class _Box:
    """Half of a pair, or a whole slot: the rectangle of one action. ``top`` and ``height`` count rows."""

    action: Action
    start: float
    end: float
    top: float
    height: float


def _boxes(timeline: Timeline) -> Iterator[_Box]:
    for rank, (order, starts, ends) in enumerate(
        zip(timeline.schedule.orders, timeline.starts, timeline.ends, strict=True)
    ):
        for slot, start, end in zip(order, starts, ends, strict=True):
            for part, action in enumerate(slot):
                yield _Box(action, start, end, rank + part / len(slot), 1 / len(slot))


def _draw_idle(axes: "Axes", timeline: Timeline, units: Units) -> None:
    """Hatch the time in which each rank waits, and write its sum beside the row."""
    from matplotlib import rc_context
    from matplotlib.collections import PolyCollection

    gaps = []
    for rank, (starts, ends) in enumerate(zip(timeline.starts, timeline.ends, strict=True)):
        edges = zip([0.0, *ends], [*starts, timeline.makespan], strict=True)
        gaps += [
            _corners(end, start, rank, 1) for end, start in edges if start - end > HAIR * timeline.makespan
        ]
        _write_beside(axes, rank, f"idle {units.duration(timeline.idle[rank])}", FAINT)
    if gaps:
        with rc_context({"hatch.linewidth": 0.5}):
            axes.add_collection(
                PolyCollection(
                    gaps, gid="idle", facecolors=_IDLE, edgecolors=_IDLE_LINES, hatch="////", linewidths=0
                )
            )


def _draw_sends(axes: "Axes", timeline: Timeline) -> None:
    """A thin line for each transfer, from the end of what made it to where it has arrived."""
    from matplotlib.collections import LineCollection

    placement = timeline.schedule.placement
    lines = []
    for box in _boxes(timeline):
        to = sent_to(placement, box.action)
        if took := timeline.costs.transfer(placement.rank_of[box.action.stage], to):
            lines.append([(box.end, box.top + box.height / 2), (box.end + took, to + 0.5)])
    if lines:
        axes.add_collection(
            LineCollection(lines, gid="sends", colors=INK, linewidths=0.4, alpha=0.5, zorder=3)
        )


def _draw_chain(axes: "Axes", chain: Sequence[Link]) -> None:
    """Frame the slots of a chain, and join each to the one that waits for it."""
    from matplotlib.collections import LineCollection, PolyCollection

    if not chain:
        return
    frames = [_corners(link.start, link.end, link.rank, 1) for link in chain]
    axes.add_collection(
        PolyCollection(frames, gid="chain", facecolors="none", edgecolors=_CHAIN, linewidths=1.6, zorder=4)
    )
    joints = [
        [(before.end, before.rank + 0.5), (link.start, link.rank + 0.5)]
        for link, before in itertools.pairwise(chain)
    ]
    axes.add_collection(LineCollection(joints, gid="chain joints", colors=_CHAIN, linewidths=1.2, zorder=4))


def _draw_bound(axes: "Axes", timeline: Timeline, units: Units) -> None:
    schedule = timeline.schedule
    bound = bound_of_stages(
        schedule.placement, schedule.num_microbatches, timeline.costs, math.inf, MemoryModel()
    )
    if 0 < bound < timeline.makespan * (1 - HAIR):
        axes.axvline(bound, color="#c2185b", linewidth=1.1, linestyle=(0, (3, 2)), gid="bound")
        axes.annotate(
            f"proven bound {units.duration(bound)}",
            (bound, 0),
            (-2, 3),
            textcoords="offset points",
            size=7.5,
            ha="right",
            color="#c2185b",
            annotation_clip=False,
        )


def _draw_grid(axes: "Axes", timeline: Timeline, points: float, units: Units) -> None:
    """``points`` of the page to one unit of time."""
    _draw_idle(axes, timeline, units)
    placement = timeline.schedule.placement
    groups: dict[tuple[Op, int], list[_Box]] = defaultdict(list)
    for box in _boxes(timeline):
        groups[box.action.op, shade(placement, box.action.stage)].append(box)
    for (op, at), boxes in groups.items():
        colour = colours(op, num_shades(placement))[at]
        line = min(0.7, 0.08 * points * min(box.end - box.start for box in boxes))
        _draw_boxes(axes, boxes, f"boxes {op} {at}", facecolors=colour, edgecolors="white", linewidths=line)
        for box in boxes:
            _write_number(axes, box, points, "white" if is_dark(colour) else INK)
    framed = [dataclasses.replace(box, height=1) for box in _boxes(timeline) if _is_upper_half(box)]
    if framed:
        line = min(0.9, 0.12 * points * min(box.end - box.start for box in framed))
        _draw_boxes(axes, framed, "pairs", facecolors="none", edgecolors=INK, linewidths=line)
    _draw_sends(axes, timeline)
    _draw_bound(axes, timeline, units)
    _tidy_grid(axes, timeline)


def _is_upper_half(box: _Box) -> bool:
    return box.height < 1 and box.top == int(box.top)


def _draw_boxes(axes: "Axes", boxes: Sequence[_Box], name: str, **style: Any) -> None:
    from matplotlib.collections import PolyCollection

    corners = [_corners(box.start, box.end, box.top, box.height) for box in boxes]
    axes.add_collection(PolyCollection(corners, gid=name, **style))


def _tidy_grid(axes: "Axes", timeline: Timeline) -> None:
    ranks = timeline.schedule.num_ranks
    axes.set_xlim(0, timeline.makespan or 1)
    axes.set_ylim(ranks, 0)
    axes.set_yticks([rank + 0.5 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    axes.tick_params(length=0, labelsize=8.5, colors=INK)
    axes.tick_params(axis="x", labelbottom=False)
    for side in axes.spines.values():
        side.set_visible(False)


def _corners(start: float, end: float, top: float, height: float) -> list[tuple[float, float]]:
    gap = 0.06  # of a row, between ranks
    high = top + gap * (top == int(top))
    low = top + height - gap * (top + height == int(top + height))
    return [(start, high), (end, high), (end, low), (start, low)]


def _write_number(axes: "Axes", box: _Box, points: float, ink: str) -> None:
    text = str(box.action.microbatch)
    size = min(
        _LARGEST,
        0.8 * box.height * _ROW * POINTS,
        (box.end - box.start) * points / (0.64 * max(len(text), 2) + 0.3),
    )
    if size >= _SMALLEST:
        middle = (box.start + box.end) / 2, box.top + box.height / 2
        axes.text(*middle, text, size=size, color=ink, ha="center", va="center_baseline", clip_on=True)


def _write_beside(axes: "Axes", rank: int, text: str, colour: str) -> None:
    """To the right of a rank's row."""
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


def _draw_memory(
    axes: "Axes", timeline: Timeline, kept: Sequence[tuple[Any, Any]], label: str, units: Units
) -> None:
    """A band for each rank, all to one scale, so that none lies under another."""
    ranks = len(kept)
    most = max(max(amounts) for _, amounts in kept) or 1.0
    for rank, (times, amounts) in enumerate(kept):
        base = rank + 0.94
        heights = [base - 0.86 * amount / most for amount in (*amounts, amounts[-1])]
        until = [*times, timeline.makespan]
        axes.fill_between(until, heights, base, step="post", color=_FILL, linewidth=0)
        peak = max(amounts)
        axes.step(until, heights, where="post", color=INK, linewidth=0.7, label=f"rank {rank}")
        _write_beside(axes, rank, f"peak {units.size(peak)}", INK if peak >= most * (1 - HAIR) else FAINT)
    axes.set_ylim(ranks, 0)
    axes.set_yticks([rank + 0.5 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    axes.set_title(
        f"{label}, all ranks to one scale", size=8.5, color=INK, loc="left", pad=2, parse_math=False
    )
    axes.set_xlabel(units.of_time("time"), size=8.5, color=INK)
    axes.tick_params(labelsize=8, colors=INK)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _write_head(figure: "Figure", timeline: Timeline, peak: str, units: Units) -> None:
    width, height = figure.get_size_inches()
    schedule = timeline.schedule
    ranks, microbatches = schedule.num_ranks, schedule.num_microbatches
    title = f"{schedule.name}   {_count(ranks, 'rank')}, {_count(microbatches, 'microbatch', 'es')}"
    facts = f"bubble {percent(timeline.bubble)}   makespan {units.duration(timeline.makespan)}   peak {peak}"
    left = _LEFT / width
    figure.text(
        left, 1 - 0.2 / height, title, size=12.5, weight="bold", color=INK, va="top", parse_math=False
    )
    figure.text(left, 1 - 0.47 / height, facts, size=10, color=INK, va="top", parse_math=False)
    cost = f"cost of a stage: {describe(timeline.costs, units)}"
    figure.text(left, 1 - 0.68 / height, cost, size=8.5, color=FAINT, va="top", parse_math=False)


def _add_legend(figure: "Figure", timeline: Timeline, chained: bool) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    schedule = timeline.schedule
    used = {action.op for order in schedule.orders for slot in order for action in slot}
    shades = num_shades(schedule.placement)
    entries: list[tuple[Any, str]] = [
        (tuple(Patch(color=colour) for colour in colours(op, shades)), f"{op} {NAMES[op]}")
        for op in (Op.F, Op.B, Op.I, Op.W)
        if op in used
    ]
    if any(len(slot) == 2 for order in schedule.orders for slot in order):
        entries.append((Patch(facecolor="none", edgecolor=INK), "overlapped pair"))
    if max(timeline.idle) > HAIR * timeline.makespan:
        entries.append((Patch(facecolor=_IDLE, edgecolor=_IDLE_LINES, hatch="////", linewidth=0), "idle"))
    if chained:
        entries.append((Patch(facecolor="none", edgecolor=_CHAIN, linewidth=1.6), "waits for the one before"))
    if shades > 1:
        names = ", ".join(shade_names(schedule.placement))
        greys = tuple(Patch(color=str(0.82 - 0.42 * at / (shades - 1))) for at in range(shades))
        entries.append((greys, f"shade: {names}"))
    figure.legend(
        *zip(*entries, strict=True),
        loc="lower left",
        bbox_to_anchor=((_LEFT - 0.1) / figure.get_figwidth(), 0.02),
        ncols=min(len(entries), int(figure.get_figwidth() / 1.65)),
        frameon=False,
        fontsize=8.5,
        handlelength=0.9 + 0.45 * min(shades, 4),
        columnspacing=1.5,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )


def _size(timeline: Timeline) -> tuple[float, float]:
    """Width in inches and dots an inch: room for the numbers in all but the shortest boxes, within reason.

    A long schedule gets a wide figure: numbers of two digits are read up to 16 ranks by 64 microbatches.
    """
    lengths = sorted(box.end - box.start for box in _boxes(timeline))
    short = lengths[len(lengths) // 5] if lengths else 0.0
    wanted = 0.15 * timeline.makespan / short if short else 0.0
    width = min(max(wanted, 10.0), 36.0)
    return width + _LEFT + _RIGHT, 160 if width < 20 else 110


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"
