"""A picture of several timelines above each other, on one time axis."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dualpipe_jax.present.figure import INK, POINTS, new_figure, save
from dualpipe_jax.profile.timelines import DrawnTimeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_EMPTY = "#f1f1f4"
_WIDTH, _LEFT, _RIGHT, _ROW, _HEAD, _GAP, _FOOT = 15.0, 0.75, 0.25, 0.34, 0.5, 0.42, 0.95  # inches


def draw(timelines: Sequence[DrawnTimeline], path: Path, title: str) -> "Figure":
    """Draw timelines above each other, all to the scale of the longest one.

    Raises:
      ValueError: if the path ends in neither .svg nor .png.
      ModuleNotFoundError: without matplotlib; says how to install it.
    """
    heights = [_GAP + _ROW * one.ranks for one in timelines]
    height = _HEAD + sum(heights) + _FOOT
    figure = new_figure(_WIDTH, height, path, dots=150)
    figure.text(_LEFT / _WIDTH, 1 - 0.16 / height, title, size=12.5, weight="bold", color=INK, va="top")
    longest = max(one.makespan for one in timelines)
    top = _HEAD
    for number, (one, taken) in enumerate(zip(timelines, heights, strict=True)):
        low = 1 - (top + taken) / height
        area = (_LEFT / _WIDTH, low, (_WIDTH - _LEFT - _RIGHT) / _WIDTH, _ROW * one.ranks / height)
        axes = figure.add_axes(area)
        _draw_one(axes, one, longest, (_WIDTH - _LEFT - _RIGHT) * POINTS / longest)
        last = number == len(timelines) - 1
        axes.tick_params(axis="x", labelbottom=last)
        if last:
            axes.set_xlabel(f"time, {one.unit}", size=8.5, color=INK)
        top += taken
    _legend(figure, max(timelines, key=lambda one: len(one.legend)))
    return save(figure, path)


def _draw_one(axes: "Axes", one: DrawnTimeline, longest: float, points: float) -> None:
    """Draw one timeline. ``points``: the points of the page for one unit of time."""
    from matplotlib.patches import Rectangle

    for rank in range(one.ranks):
        axes.add_patch(Rectangle((0, rank + 0.06), one.makespan, 0.88, color=_EMPTY, linewidth=0))
    for rank, part, parts, start, end, colour, ink, label, _ in one.boxes:
        y, high = rank + 0.06 + 0.88 * part / parts, 0.88 / parts
        line = min(0.5, 0.08 * points * (end - start))
        box = Rectangle((start, y), end - start, high, facecolor=colour, edgecolor="white", linewidth=line)
        axes.add_patch(box)
        size = min(
            8.0, 0.8 * high * _ROW * POINTS, (end - start) * points / (0.64 * max(len(label), 2) + 0.3)
        )
        if size >= 2.5:
            middle = (start + end) / 2, y + high / 2
            axes.text(*middle, label, size=size, color=ink, ha="center", va="center_baseline", clip_on=True)
    for rank, start, end in one.pairs:
        axes.add_patch(
            Rectangle((start, rank + 0.06), end - start, 0.88, fill=False, edgecolor=INK, linewidth=0.7)
        )
    axes.set_xlim(0, longest)
    axes.set_ylim(one.ranks, 0)
    axes.set_yticks([rank + 0.5 for rank in range(one.ranks)], [f"rank {rank}" for rank in range(one.ranks)])
    axes.tick_params(length=0, labelsize=8.5, colors=INK)
    axes.set_title(one.title, loc="left", size=9.5, color=INK, pad=4)
    for side in axes.spines.values():
        side.set_visible(False)


def _legend(figure: "Figure", one: DrawnTimeline) -> None:
    from matplotlib.patches import Patch

    entries = [
        (Patch(facecolor="none", edgecolor=INK) if colour == "frame" else Patch(color=colour), name)
        for colour, name in one.legend
    ]
    handles, names = zip(*entries, strict=True)
    figure.legend(
        handles,
        names,
        loc="lower left",
        bbox_to_anchor=((_LEFT - 0.1) / _WIDTH, 0.0),
        ncols=min(5, len(entries)),
        frameon=False,
        fontsize=8,
        columnspacing=1.4,
        handlelength=1.1,
    )
