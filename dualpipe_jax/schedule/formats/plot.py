"""A simulated step as a picture, in the manner of DualPipe's figure in the DeepSeek-V3 technical report."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualpipe_jax.present.figure import FAINT, IDLE, INK, POINTS, new_figure, save
from dualpipe_jax.present.numbers import Units, how_many, percent
from dualpipe_jax.schedule.blame import Link
from dualpipe_jax.schedule.costs import REL_TOLERANCE, MemoryModel
from dualpipe_jax.schedule.formats.colours import NAMES, colours, num_shades, shade_names
from dualpipe_jax.schedule.formats.costs_text import describe
from dualpipe_jax.schedule.formats.plot_grid import (
    CHAIN,
    IDLE_LINES,
    ROW,
    boxes_of,
    draw_chain,
    draw_grid,
    write_right_of_row,
)
from dualpipe_jax.schedule.ir import Op
from dualpipe_jax.schedule.simulate import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FILL = "#9db4d8"
_BAND, _LEFT, _RIGHT, _HEAD, _FOOT = 0.24, 0.75, 1.0, 0.98, 1.1  # inches


def plot(
    timeline: Timeline,
    path: str | Path | None = None,
    *,
    memory: MemoryModel | None = None,
    memory_label: str | None = None,
    units: Units | None = None,
    chain: Sequence[Link] | None = None,
    bands: bool = True,
    until: float | None = None,
    width: float | None = None,
) -> "Figure":
    """Draw a simulated step: one row for each rank, time to the right, and below a band of each rank's memory.

    A box is an action, coloured by op, with its microbatch's number (within its pipe) where there is room.
    The shade shows the pipe and, where a pipe passes a rank several times, how often it has passed before.
    Where there are two shades, the numbers of the second are underlined. The two halves of an overlapped pair
    share one frame, with the forward above. Idle time is hatched, and its sum stands at the end of each
    row; transfers that take time are thin lines between rows. Where the proven lower bound of the placement
    is shorter than the step, a line between the rows marks it. The bands of all ranks have one scale, each
    with its peak at the end. The figure grows with the schedule. Matplotlib's global state is neither read
    nor left changed.

    >>> from dualpipe_jax.schedule import dualpipe, plot, simulate
    >>> figure = plot(simulate(dualpipe(4, 8)))  # a second argument "dualpipe.svg" also writes it there
    >>> figure.texts[1].get_text()
    'bubble 7.7 %   makespan 26   peak live activations 5'

    Args:
      timeline: from ``simulate``.
      path: a file to which the figure is also written, as SVG or PNG by its ending.
      memory: sizes of one stage, for the bands; if left out, live activations in units of the activations of a
        rank's whole share of the model.
      memory_label: the title of the bands.
      units: the units of times and sizes, written after each number.
      chain: slots that wait for each other, from ``blame.critical_path`` or ``blame.why_idle``: they are framed,
        and lines lead from one to the next.
      bands: whether to draw each rank's memory below the rows.
      until: the time at the right edge, at least the step's end, which is the default; pictures of one scale can be
        compared by eye.
      width: the figure's width in inches; as wide as the schedule needs if left out.

    Raises:
      ValueError: if the path ends in neither .svg nor .png.
      ModuleNotFoundError: without matplotlib; the message says how to install it.
    """
    label = memory_label or ("live activations" if memory is None else "memory")
    sizes = MemoryModel().for_schedule(timeline.schedule) if memory is None else memory
    units = units or Units()
    needed, dots = _size(timeline)
    width = needed if width is None else width
    rows = ROW * timeline.schedule.num_ranks
    below = 0.3 + _BAND * timeline.schedule.num_ranks if bands else 0.0
    height = _HEAD + rows + below + _FOOT
    figure = new_figure(width, height, path, dots)
    across = _LEFT / width, (width - _LEFT - _RIGHT) / width
    grid = figure.add_axes((across[0], 1 - (_HEAD + rows) / height, across[1], rows / height))
    kept = [timeline.memory_over_time(rank, sizes) for rank in range(timeline.schedule.num_ranks)]
    until = max(timeline.makespan, until or 0.0) or 1.0
    draw_grid(grid, timeline, (width - _LEFT - _RIGHT) * POINTS / until, units)
    draw_chain(grid, chain or ())
    if bands:
        box = across[0], _FOOT / height, across[1], (below - 0.3) / height
        _draw_memory(figure.add_axes(box, sharex=grid), timeline, kept, label, units)
    grid.set_xlim(0, until)
    _show_time(figure.axes[-1], units)
    _write_head(figure, timeline, f"{label} {units.size(max(max(amounts) for _, amounts in kept))}", units)
    _add_legend(figure, timeline, bool(chain))
    return save(figure, path)


def _draw_memory(
    axes: "Axes", timeline: Timeline, kept: Sequence[tuple[Any, Any]], label: str, units: Units
) -> None:
    """Draw a band for each rank, all to one scale; no band overlaps another."""
    ranks = len(kept)
    most = max(max(amounts) for _, amounts in kept) or 1.0
    for rank, (times, amounts) in enumerate(kept):
        base = rank + 0.94
        heights = [base - 0.86 * amount / most for amount in (*amounts, amounts[-1])]
        until = [*times, timeline.makespan]
        axes.fill_between(until, heights, base, step="post", color=_FILL, linewidth=0)
        peak = max(amounts)
        axes.step(until, heights, where="post", color=INK, linewidth=0.7, label=f"rank {rank}")
        write_right_of_row(
            axes, rank, f"peak {units.size(peak)}", INK if peak >= most * (1 - REL_TOLERANCE) else FAINT
        )
    axes.set_ylim(ranks, 0)
    axes.set_yticks([rank + 0.5 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    axes.set_title(
        f"{label}, all ranks to one scale", size=8.5, color=INK, loc="left", pad=2, parse_math=False
    )


def _show_time(axes: "Axes", units: Units) -> None:
    """Show the time below the last of the axes."""
    axes.set_xlabel(units.of_time("time"), size=8.5, color=INK)
    axes.tick_params(labelsize=8, colors=INK, length=3, labelbottom=True)
    axes.tick_params(axis="y", length=0)
    for name, side in axes.spines.items():
        side.set_visible(name == "bottom")


def _write_head(figure: "Figure", timeline: Timeline, peak: str, units: Units) -> None:
    width, height = figure.get_size_inches()
    schedule = timeline.schedule
    ranks, microbatches = schedule.num_ranks, schedule.num_microbatches
    title = f"{schedule.name}   {how_many(ranks, 'rank')}, {how_many(microbatches, 'microbatch', 'es')}"
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
    if max(timeline.idle) > REL_TOLERANCE * timeline.makespan:
        entries.append((Patch(facecolor=IDLE, edgecolor=IDLE_LINES, hatch="////", linewidth=0), "idle"))
    if chained:
        entries.append((Patch(facecolor="none", edgecolor=CHAIN, linewidth=1.6), "waits for the one before"))
    if shades > 1:
        names = ", ".join(shade_names(schedule.placement)) + (" underlined" if shades == 2 else "")
        greys = tuple(Patch(color=str(0.82 - 0.42 * at / (shades - 1))) for at in range(shades))
        entries.append((greys, names))
    figure.legend(
        *zip(*entries, strict=True),
        loc="upper left",
        bbox_to_anchor=((_LEFT - 0.1) / figure.get_figwidth(), (_FOOT - 0.45) / figure.get_figheight()),
        ncols=min(len(entries), int((figure.get_figwidth() - 2.5) / 1.3)),
        frameon=False,
        fontsize=8.5,
        handlelength=0.9 + 0.45 * min(shades, 4),
        columnspacing=1.5,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )


def _size(timeline: Timeline) -> tuple[float, float]:
    """Width in inches and dots per inch, with room for the numbers in all but the shortest boxes, up to a limit.

    A long schedule gets a wide figure: numbers of two digits are read up to 16 ranks by 64 microbatches.
    """
    lengths = sorted(box.end - box.start for box in boxes_of(timeline))
    short = lengths[len(lengths) // 5] if lengths else 0.0
    wanted = 0.15 * timeline.makespan / short if short else 0.0
    width = min(max(wanted, 10.0), 36.0)
    return width + _LEFT + _RIGHT, 160 if width < 20 else 110
