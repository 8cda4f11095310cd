"""Prepare a computation's timeline for drawing: rows of events that do not overlap, segments of one direction."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dualpipe_jax.inspect.collectives import KINDS
from dualpipe_jax.inspect.cycles import Event

Names = Mapping[str, tuple[str, str]]
"""The displayed names of ``forward`` and ``backward``, each with a letter."""

DIRECTION_NAMES: Names = {"forward": ("forward", "F"), "backward": ("backward", "B")}
"""The names of directions in training."""


class Segment(NamedTuple):
    """Consecutive events on the lane ``compute`` that are drawn as one.

    Attributes:
      label: the direction of the events, or ``wait``.
      events: the events, without gaps between them.
    """

    label: str
    events: tuple[Event, ...]

    @property
    def start(self) -> float:
        """Cycles from the computation's start."""
        return self.events[0].start

    @property
    def end(self) -> float:
        """Cycles from the computation's start."""
        return self.events[-1].end


def exchange_name(event: Event) -> str:
    """Return ``dispatch`` or ``combine`` if a named scope says which exchange of the experts it is, else ""."""
    found = re.findall(r"\b(dispatch|combine)\b", event.op_name)
    return found[-1] if found else ""


def rows(events: Iterable[Event]) -> dict[str, list[list[Event]]]:
    """Return rows of events by lane, ``compute`` first, then kinds of collectives.

    The events of a row do not overlap. Collectives of one kind run one after the other and need one row, unless their
    durations are unknown: then they last from start to done and may need several.
    """
    lanes: dict[str, list[list[Event]]] = {"compute": [[]]}
    order = {lane: place for place, lane in enumerate(("compute", *KINDS))}
    for event in sorted(events, key=lambda event: order[event.lane]):  # stable: by start within a lane
        lane = lanes.setdefault(event.lane, [])
        free = next((row for row in lane if not row or row[-1].end <= event.start), None)
        if free is None:
            lane.append([event])
        else:
            free.append(event)
    return lanes


def segments(work: Sequence[Event], min_cycles: float = 0.0) -> list[Segment]:
    """Return the lane ``compute`` with consecutive events of one direction joined.

    Args:
      work: the events of the lane.
      min_cycles: the least cycles of a segment. Shorter events are joined with their neighbours, and the segment has
        the direction with the most cycles in it; waits stay as they are.
    """
    found: list[Segment] = []
    pending: list[Event] = []

    def close() -> None:
        if not pending:
            return
        label = _dominant_label(pending)
        short = label != "wait" and pending[-1].end - pending[0].start < min_cycles
        if short and found and found[-1].label != "wait":
            label = found[-1].label
        before = found.pop().events if found and found[-1].label == label else ()
        found.append(Segment(label, (*before, *pending)))
        pending.clear()

    for event in work:
        if event.kind == "wait":
            close()
        pending.append(event)
        if event.kind == "wait" or event.end - pending[0].start >= min_cycles:
            close()
    close()
    return found


def _dominant_label(events: Sequence[Event]) -> str:
    if events[0].kind == "wait":
        return "wait"
    cycles = dict.fromkeys(sorted({event.direction for event in events}), 0.0)
    for event in events:
        cycles[event.direction] += event.end - event.start
    return max(cycles, key=cycles.__getitem__)
