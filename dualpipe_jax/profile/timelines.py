"""Timelines of a step in the form that the report draws: boxes by rank, and a group of timelines on one axis."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dualpipe_jax.schedule.formats.colours import NAMES, colours, is_dark, num_shades, shade, shade_names
from dualpipe_jax.schedule.ir import Action, Op, Schedule
from dualpipe_jax.schedule.simulate import Timeline

TIMELINES_FILE = "timeline.json"
"""The file in a run's profile folder that holds the timelines that ``DrawnTimeline.axis_group`` takes."""


@dataclasses.dataclass(frozen=True)
class DrawnTimeline:
    """A timeline to be drawn.

    Attributes:
      title: the title above it.
      unit: the unit of time, for the axis.
      ranks: the number of ranks; each has a row.
      makespan: the time from the start of the first action to the end of the last, in ``unit``.
      bubble: the share of all ranks' time in which they idle.
      boxes: [rank, part, parts, start, end, colour, ink, label, title] of each action; those of a pair are parts 0 and
        1 of 2.
      pairs: [rank, start, end] of each overlapped pair.
      legend: [colour, name] of each kind of box and frame in it.
    """

    title: str
    unit: str
    ranks: int
    makespan: float
    bubble: float
    boxes: list[list[Any]]
    pairs: list[list[Any]]
    legend: list[list[str]]

    @staticmethod
    def axis_group(several: Sequence["DrawnTimeline"]) -> dict[str, Any]:
        """The group of timelines that page.js draws on one axis."""
        return {
            "legend": max((one.legend for one in several), key=len),
            "timelines": [dataclasses.asdict(one) for one in several],
        }


def draw_simulated(timeline: Timeline, title: str, unit: str) -> DrawnTimeline:
    """The drawing of a simulated timeline."""
    facts = f"{title}: bubble {timeline.bubble:.1%}, {timeline.makespan:,.4g} {unit}"
    spans = {
        action: (start, end)
        for order, starts, ends in zip(timeline.schedule.orders, timeline.starts, timeline.ends, strict=True)
        for slot, start, end in zip(order, starts, ends, strict=True)
        for action in slot
    }
    return draw_spans(timeline.schedule, spans, facts, unit, timeline.makespan, timeline.bubble)


def draw_spans(
    schedule: Schedule,
    spans: Mapping[Action, tuple[float, float]],
    title: str,
    unit: str,
    makespan: float,
    bubble: float,
    *,
    fused: bool = True,
) -> DrawnTimeline:
    """The drawing of a timeline from the start and the end of each action, measured or simulated.

    ``fused``: whether a pair is drawn in one frame, the forward above, or as two boxes of a row's full height.
    """
    boxes, pairs = [], []
    shades = num_shades(schedule.placement)
    for rank, order in enumerate(schedule.orders):
        for slot in order:
            parts = len(slot) if fused else 1
            if parts > 1:
                pairs.append([rank, *(round(time, 4) for time in spans[slot[0]])])
            for part, action in enumerate(slot):
                start, end = (round(time, 4) for time in spans[action])
                colour = colours(action.op, shades)[shade(schedule.placement, action.stage)]
                ink = "#ffffff" if is_dark(colour) else "#1c1c22"
                about = (
                    f"{NAMES[action.op]} of stage {action.stage}, microbatch {action.microbatch}: "
                    f"{start:.4g} to {end:.4g} {unit}"
                )
                label = str(action.microbatch)
                boxes.append([rank, part if fused else 0, parts, start, end, colour, ink, label, about])
    return DrawnTimeline(
        title, unit, schedule.num_ranks, makespan, bubble, boxes, pairs, _legend(schedule, bool(pairs))
    )


def read_timelines(folder: Path) -> list[DrawnTimeline]:
    """Read the timelines of a run's profile: the measured one, then the one simulated at the measured costs.

    Empty if the run has no profile.
    """
    path = folder / "profile" / TIMELINES_FILE
    if not path.is_file():
        return []
    return [DrawnTimeline(**one) for one in json.loads(path.read_text())]


def _legend(schedule: Schedule, framed: bool) -> list[list[str]]:
    used = {action.op for order in schedule.orders for slot in order for action in slot}
    shades = num_shades(schedule.placement)
    names = shade_names(schedule.placement) if shades > 1 else ("",)
    legend = [
        [colours(op, shades)[at], " ".join(filter(None, (NAMES[op], name and f"({name})")))]
        for op in (Op.F, Op.B, Op.I, Op.W)
        if op in used
        for at, name in enumerate(names)
    ]
    if framed:
        legend.append(["frame", "overlapped pair"])
    return legend
