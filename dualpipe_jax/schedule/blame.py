"""Why a rank waits, and how much later each slot could end: chains of dependent slots in a simulated step."""

import dataclasses
import math
from collections.abc import Iterator

from dualpipe_jax.schedule.costs import REL_TOLERANCE
from dualpipe_jax.schedule.dataflow import Value, execution_order, makers, needed_by
from dualpipe_jax.schedule.ir import Slot
from dualpipe_jax.schedule.simulate import Timeline, blocking_send_time

_Place = tuple[int, int]
"""A rank, and the index of a slot in its order."""


@dataclasses.dataclass(frozen=True)
class Link:
    """One slot of a chain, in which each slot could not start earlier because of the next.

    Attributes:
      rank, slot, start, end: the slot, the rank that ran it, and its times.
      sent: whether the previous slot of the chain waited for a transfer from this one on another rank, rather
        than for this one to end on the same rank.
    """

    rank: int
    slot: Slot
    start: float
    end: float
    sent: bool


def why_idle(timeline: Timeline, rank: int, time: float) -> list[Link]:
    """The chain of slots for which an idle rank waits at ``time``.

    It begins with the slot that the rank runs next and ends with one that ran when the rank became idle.

    >>> from dualpipe_jax.schedule import one_f_one_b, simulate
    >>> [f"{link.rank}:{link.slot[0]}" for link in why_idle(simulate(one_f_one_b(2, 2)), 0, 2.5)]
    ['0:0B0', '1:1B0']

    Returns:
      The chain; empty if the rank works at that time, or has run all its slots.

    Raises:
      ValueError: if there is no such rank, or the time is not within the step.
    """
    ranks, makespan = timeline.schedule.num_ranks, timeline.makespan
    if not 0 <= rank < ranks or not 0 <= time <= makespan:
        raise ValueError(
            f"why_idle: got rank {rank} at {time:g}; there are ranks 0 to {ranks - 1}, and times from 0 to {makespan:g}"
        )
    starts, ends = timeline.starts[rank], timeline.ends[rank]
    following = next((index for index, start in enumerate(starts) if start > time), None)
    if following is None or (following and ends[following - 1] > time):
        return []
    idle_since = ends[following - 1] if following else 0.0
    links: list[Link] = []
    for link in _chain(timeline, (rank, following)):
        links.append(link)
        if len(links) > 1 and link.start <= idle_since + REL_TOLERANCE * timeline.makespan:
            break
    return links


def critical_path(timeline: Timeline) -> list[Link]:
    """The chain of slots that determines the makespan, from the step's last slot back to one that did not wait."""
    last = max(range(timeline.schedule.num_ranks), key=lambda rank: max(timeline.ends[rank], default=0.0))
    return list(_chain(timeline, (last, len(timeline.ends[last]) - 1)))


def slack(timeline: Timeline) -> tuple[tuple[float, ...], ...]:
    """By rank and slot index, how much later each slot could end without a longer step; 0 on a critical path.

    All orders stay as they are.
    """
    latest = [[math.inf] * len(ends) for ends in timeline.ends]
    for ends, order in zip(timeline.ends, latest, strict=True):
        if ends:
            order[-1] = timeline.makespan
    schedule = timeline.schedule
    made_at = makers(schedule.orders)
    # Not in the order of times: of slots that take none, one may wait for another with the same start and end.
    for rank, index in reversed(execution_order(schedule.placement, schedule.orders)):
        took = timeline.ends[rank][index] - timeline.starts[rank][index]
        for (other, at), delay, _ in _waits(timeline, made_at, (rank, index)):
            latest[other][at] = min(latest[other][at], latest[rank][index] - took - delay)
    return tuple(
        tuple(late - end for late, end in zip(row, ends, strict=True))
        for row, ends in zip(latest, timeline.ends, strict=True)
    )


def _chain(timeline: Timeline, first: _Place) -> Iterator[Link]:
    made_at, sent = makers(timeline.schedule.orders), False
    place: _Place | None = first
    while place is not None:
        rank, index = place
        start = timeline.starts[rank][index]
        yield Link(rank, timeline.schedule.orders[rank][index], start, timeline.ends[rank][index], sent)
        place, sent = None, False
        for (other, at), delay, crosses in _waits(timeline, made_at, (rank, index)):
            if timeline.ends[other][at] + delay >= start - REL_TOLERANCE * timeline.makespan and start > 0:
                place, sent = (other, at), crosses
                break


def _waits(
    timeline: Timeline, made_at: dict[Value, _Place], place: _Place
) -> list[tuple[_Place, float, bool]]:
    """The slots for which a slot waits, the delay after the end of each, and whether it is a transfer.

    Transfers come first.
    """
    schedule, costs = timeline.schedule, timeline.costs
    rank, index = place
    found = []
    for action in schedule.orders[rank][index]:
        for value in needed_by(schedule.placement, action):
            maker = made_at[value]
            if maker[0] != rank:
                found.append((maker, costs.transfer(maker[0], rank), True))
    if index:
        before = schedule.orders[rank][index - 1]
        found.append(((rank, index - 1), blocking_send_time(schedule.placement, before, costs), False))
    return found
