"""Draw a computation's timeline as a picture: the core's work on top, the collectives in flight below."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_jax.inspect.cycles import Event, sum_up
from dualpipe_jax.inspect.lanes import DIRECTION_NAMES, Names, Segment, exchange_name, rows, segments
from dualpipe_jax.inspect.report import OverlapReport
from dualpipe_jax.present.figure import FAINT, GREEN, INK, ORANGE, POINTS, new_figure, save
from dualpipe_jax.present.numbers import percent, scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"forward": ORANGE[0], "backward": GREEN[0], "unknown": "#d3d3da"}
"""The colours of F and B in the pictures of schedules, and grey for neither."""

_RED = "#c8102e"
_WIDTH, _LEFT, _RIGHT, _HEAD, _FOOT = 10.0, 1.3, 0.2, 0.82, 0.82  # inches
_TALL, _ROW, _GAP = 0.62, 0.42, 0.1
_MIN_SEGMENT_SHARE = 1 / 400
"""The least share of the timeline that a segment must have to be drawn apart from its neighbours."""


def plot(
    report: OverlapReport,
    computation: str,
    path: str | Path | None = None,
    *,
    title: str | None = None,
    clock: float | None = None,
    names: Names = DIRECTION_NAMES,
) -> "Figure":
    """Draw one computation's timeline: a lane for the core's work, and one for each kind of collective.

    Work is coloured by direction, and pieces too short to be seen are drawn with their neighbours; waits are
    hatched in red, all at their true length. A collective has the colour of its own direction. The heading gives the
    hidden shares, and the time divided by the larger of computation and communication. Matplotlib's global
    state is neither read nor changed.

    >>> import jax, jax.numpy as jnp
    >>> from dualpipe_jax import inspect, make_mesh
    >>> step = jax.shard_map(
    ...     lambda x: jax.lax.psum(x @ x.T, "ep"), mesh=make_mesh(1, 2), in_specs=jax.P("ep"), out_specs=jax.P()
    ... )
    >>> compiled = jax.jit(step).lower(jax.ShapeDtypeStruct((256, 128), jnp.float32)).compile()
    >>> report = inspect.overlap(compiled, inspect.gpu_rates("h100"))
    >>> figure = inspect.plot(report, inspect.read(compiled).entry, title="One step")  # a third argument is a path
    >>> figure.texts[0].get_text()
    'One step'

    Args:
      report: a report of ``overlap``.
      computation: the name of the computation to draw.
      path: a file to write as well; SVG or PNG by its ending.
      title: the first line; by default the computation's name.
      clock: the hertz of the cycles, such as ``target.device.clock``, to give the total time in milliseconds too.
      names: names of the directions, if they are not those of training.

    Raises:
      KeyError: if the program runs no such computation line by line.
      ValueError: if the path ends in neither .svg nor .png, or the clock is not above 0.
      ModuleNotFoundError: if matplotlib is not installed; the message says how to install it.
    """
    if clock is not None and not clock > 0:
        raise ValueError(f"plot: clock={clock}; it must be above 0 hertz, such as 1.75e9")
    events = report.timeline(computation)
    lanes = rows(events)
    inner = _TALL + (sum(map(len, lanes.values())) - 1) * (_GAP + _ROW)
    height = _HEAD + inner + _FOOT
    figure = new_figure(_WIDTH, height, path)
    across = _WIDTH - _LEFT - _RIGHT
    axes = figure.add_axes((_LEFT / _WIDTH, _FOOT / height, across / _WIDTH, inner / height))
    length = report.computations[computation].cycles or 1.0
    letter, unit = scale(length)
    page = _Page(axes, unit, across * POINTS / length)
    _draw_work(page, segments(lanes.pop("compute")[0], _MIN_SEGMENT_SHARE * length))
    hidden = {c.name: percent(c.hidden) for c in report.inside(computation)}
    ticks = {_TALL / 2: "computation"}
    top = _TALL + _GAP
    for kind, lane in lanes.items():
        ticks[top + _ROW / 2] = kind
        for row in lane:
            _draw_collectives(page, row, top, hidden, names)
            top += _ROW + _GAP
    axes.set_yticks(list(ticks), list(ticks.values()))
    _style_axes(axes, inner, length / unit, f"{letter}cycles, modelled")
    _write_head(figure, title or computation, *_summary(report, computation, clock))
    _add_legend(figure, events, names)
    return save(figure, path)


class _Page(NamedTuple):
    """The axes, the cycles of one unit of the horizontal axis (the vertical one is in inches), and points per cycle."""

    axes: "Axes"
    unit: float
    points: float


def _draw_work(page: _Page, work: Sequence[Segment]) -> None:
    for what in (*COLOURS, "wait"):
        own = [segment for segment in work if segment.label == what]
        style: dict[str, Any] = {"facecolors": COLOURS.get(what, "white"), "linewidths": 0}
        if what == "wait":
            style |= {"edgecolors": _RED, "linewidths": 0.8, "hatch": "//////", "zorder": 3}
        if own:
            spans = [(s.start / page.unit, (s.end - s.start) / page.unit) for s in own]
            page.axes.broken_barh(spans, (0, _TALL), gid=f"work {what}", **style)
        for segment in own if what == "wait" else ():
            length = f"{(segment.end - segment.start) / page.unit:.2f}"
            _write_label(page, segment, _TALL / 2, (f"waits {length}", length), size=7.0, color=_RED)


def _draw_collectives(
    page: _Page, row: Sequence[Event], top: float, hidden: Mapping[str, str], names: Names
) -> None:
    for event in row:
        span = event.start / page.unit, (event.end - event.start) / page.unit
        style: dict[str, Any] = {"facecolors": COLOURS[event.direction], "edgecolors": INK, "linewidths": 0.6}
        page.axes.broken_barh([span], (top, _ROW), gid=f"{event.kind} {event.name}", **style)
        _, direction = names.get(event.direction, ("", ""))
        name = f"{exchange_name(event)} {direction}".strip()
        texts = f"{name or event.kind}, {hidden[event.name]} hidden", name, direction
        _write_label(page, event, top + _ROW / 2, texts, size=8.0, color=INK)


def _write_label(
    page: _Page, where: Event | Segment, middle: float, texts: Iterable[str], size: float, color: str
) -> None:
    """Write the first of the texts for which there is room, or none."""
    room = (where.end - where.start) * page.points
    text = next((text for text in texts if room > size * (0.57 * len(text) + 0.4)), "")
    edge = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}  # no hatches behind it
    page.axes.text(
        (where.start + where.end) / 2 / page.unit,
        middle,
        text,
        size=size,
        color=color,
        ha="center",
        va="center",
        zorder=4,
        bbox=edge if text and color == _RED else None,
    )


def _style_axes(axes: "Axes", height: float, length: float, label: str) -> None:
    axes.set_xlim(0, length)
    axes.set_ylim(height, 0)
    axes.set_xlabel(label, size=8.5, color=INK)
    axes.tick_params(labelsize=8.5, colors=INK)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _summary(report: OverlapReport, computation: str, clock: float | None) -> tuple[str, str]:
    """Return two lines of text: hidden shares by kind with the relative time, and the total cycles.

    The relative time is the time divided by the larger of computation and communication.
    """
    own, spent = report.inside(computation), report.computations[computation]
    words = []
    for kind in dict.fromkeys(c.kind for c in own):
        hidden = sum_up(kind, tuple(c for c in own if c.kind == kind)).hidden
        words.append(f"{kind}: {percent(hidden)} hidden")
    letter, unit = scale(spent.cycles)
    totals = [f"{spent.cycles / unit:.2f} {letter}cycles", f"work {spent.work / unit:.2f}"]
    if clock is not None:
        totals.insert(1, f"{1e3 * spent.cycles / clock:.3g} ms at {clock / 1e9:g} GHz")
    durations = [c.duration for c in own if c.duration is not None]
    if len(durations) == len(own):
        if larger := max(spent.work, sum(durations)):
            words.append(f"time: {spent.cycles / larger:.3f} of the larger of computation and communication")
        if own:
            totals.append(f"collectives {sum(durations) / unit:.2f}")
    return "    ".join(words), "   ".join(totals)


def _write_head(figure: "Figure", title: str, facts: str, totals: str) -> None:
    height = figure.get_figheight()
    left, right = _LEFT / _WIDTH, 1 - _RIGHT / _WIDTH
    figure.text(left, 1 - 0.17 / height, title, size=11.5, weight="bold", color=INK, va="top")
    figure.text(left, 1 - 0.46 / height, facts, size=9.5, color=INK, va="top")
    figure.text(right, 0.21 / height, totals, size=8.0, color=FAINT, va="center_baseline", ha="right")


def _add_legend(figure: "Figure", events: Sequence[Event], names: Names) -> None:
    from matplotlib.patches import Patch

    used = {event.direction for event in events} | {event.kind for event in events if event.kind == "wait"}
    entries = [
        Patch(facecolor=colour, label=names.get(what, ("neither", ""))[0])
        for what, colour in COLOURS.items()
        if what in used
    ]
    if "wait" in used:
        entries.append(Patch(facecolor="white", edgecolor=_RED, hatch="//////", label="the core waits"))
    figure.legend(
        handles=entries,
        loc="center left",
        bbox_to_anchor=((_LEFT - 0.12) / _WIDTH, 0.21 / figure.get_figheight()),
        ncols=max(1, len(entries)),
        frameon=False,
        fontsize=8.5,
        handlelength=1.2,
        columnspacing=1.0,
    )
