"""A simulated step as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.schedule.blame import Link
from dualpipe_jax.schedule.dataflow import made_by, needed_by
from dualpipe_jax.schedule.ir import Action, Op, Placement, Slot, spelt
from dualpipe_jax.schedule.replay import kind_of
from dualpipe_jax.schedule.simulate import Timeline

_Event = dict[str, Any]

_Microseconds = Callable[[float], int]
"""A function from times of the timeline to whole microseconds of the trace."""

_WORK, _SENDS, _MEMORY, _CHAIN = 1, 2, 3, 4
"""The trace's processes: groups of rows. To viewers, 0 is the kernel's idle process, which they hide."""

_FIRST_ROW = 5
"""Rows are threads. Their numbers begin after those of the processes, or viewers would take them for main threads."""

_COLOURS = {"F": "rail_idle", "B": "rail_load", "I": "good", "W": "rail_response", "FB": "rail_animation"}
"""Colour names of chrome://tracing. Perfetto colours by a slice's name without its digits, which is also by op."""


MICROSECONDS = {"": 1000.0, "s": 1e6, "ms": 1000.0, "us": 1.0}
"""The microseconds of each unit of time that a trace can show as it is; a unit without a name counts as 1 ms."""


@typechecked
def to_chrome_trace(
    timeline: Timeline, unit_us: float = MICROSECONDS[""], *, chain: Sequence[Link] | None = None
) -> dict[str, Any]:
    """Draw a simulated step in the Chrome trace event format; ``json.dump`` it to a file and open that.

    One row for each rank, named "rank 0", with a slice for each slot: ``0F3``, or ``0F3+7B1`` for a pair. A
    slice's category is its op, or FB; its arguments are stage, microbatch and pipe, a pair's those of both.
    Arrows lead from a slice to the slices on other ranks that read its outputs. Where sends take time they have
    rows of their own, for each rank as many as it has sends under way at once. Counters show each rank's live
    activations. Idle time is blank.

    >>> from dualpipe_jax.schedule import one_f_one_b, simulate, to_chrome_trace
    >>> trace = to_chrome_trace(simulate(one_f_one_b(2, 2)))
    >>> [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    ['0F0', '0F1', '1F0', '1B0', '0B0', '1F1', '1B1', '0B1']

    Args:
      timeline: from ``simulate``.
      unit_us: microseconds of the trace for one unit of time of the timeline. The trace's times are whole
        microseconds, so that neighbours meet and never overlap; choose it large enough for the shortest
        slot to be seen.
      chain: slots that wait for each other, from ``blame``; they are also shown in a row of their own.

    Raises:
      ValueError: if ``unit_us`` is not finite and above 0.
    """
    if not 0 < unit_us < math.inf:
        raise ValueError(f"to_chrome_trace: unit_us={unit_us}; it must be finite and above 0, such as 1000.0")

    def us(time: float) -> int:
        return round(time * unit_us)

    events = [*_slices(timeline, us), *_sends(timeline, us), *_counters(timeline, us), *_arrows(timeline, us)]
    for link in chain or ():
        name = f"{spelt(link.slot)} on rank {link.rank}"
        events.append(
            _slice(_CHAIN, _CHAIN, name, "chain", (us(link.start), us(link.end)), {"rank": link.rank})
        )
    events.sort(key=lambda event: event["ts"])  # stable: a slice stays before the arrow that is bound to it
    schedule = timeline.schedule
    return {
        "traceEvents": [*_labels(timeline, events), *events],
        "displayTimeUnit": "ms",
        "otherData": {
            "schedule": schedule.name,
            "ranks": schedule.num_ranks,
            "microbatches": schedule.num_microbatches,
            "costs": repr(timeline.costs),
            "makespan": timeline.makespan,
            "microseconds for one unit of time": unit_us,
        },
    }


def _slices(timeline: Timeline, us: _Microseconds) -> Iterator[_Event]:
    placement = timeline.schedule.placement
    for rank, order in enumerate(timeline.schedule.orders):
        for slot, start, end in zip(order, timeline.starts[rank], timeline.ends[rank], strict=True):
            kind = kind_of(slot)
            each = [_action_args(placement, action) for action in slot]
            args = each[0] if len(each) == 1 else dict(zip(("forward", "backward"), each, strict=True))
            span = us(start), us(end)
            drawn = _slice(_WORK, _FIRST_ROW + rank, spelt(slot), kind, span, args)
            yield drawn | {"cname": _COLOURS[kind]}


def _slice(process: int, row: int, name: str, kind: str, span: tuple[int, int], args: _Event) -> _Event:
    start, end = span
    return {
        "ph": "X",
        "pid": process,
        "tid": row,
        "name": name,
        "cat": kind,
        "ts": start,
        "dur": end - start,
        "args": args,
    }


def _action_args(placement: Placement, action: Action) -> _Event:
    stage, op, microbatch = action
    return {"stage": stage, "op": op.value, "microbatch": microbatch, "pipe": placement.pipe_of(stage)}


def _arrows(timeline: Timeline, us: _Microseconds) -> Iterator[_Event]:
    """A flow for each transfer, bound to the slice around its start and to the one around its finish."""
    for number, ((rank, index), (reader, at), action) in enumerate(_transfers(timeline)):
        start, end = us(timeline.starts[rank][index]), us(timeline.ends[rank][index])
        last = max(start, end - 1)  # at the end itself the rank's next slice may start
        read = us(timeline.starts[reader][at])
        arrow = {"pid": _WORK, "id": number, "cat": "data", "name": "y" if action.op is Op.F else "dx"}
        yield arrow | {"ph": "s", "tid": _FIRST_ROW + rank, "ts": last}
        yield arrow | {"ph": "f", "bp": "e", "tid": _FIRST_ROW + reader, "ts": read}


def _sends(timeline: Timeline, us: _Microseconds) -> Iterator[_Event]:
    """Yield a slice for each transfer, in the first of its rank's rows that is free then."""
    if not timeline.costs.dearest_send:
        return
    ranks, placement = timeline.schedule.num_ranks, timeline.schedule.placement
    busy_until: dict[int, int] = {}
    transfers = sorted(_transfers(timeline), key=lambda t: timeline.ends[t[0][0]][t[0][1]])
    for (rank, index), (reader, _), action in transfers:
        end = timeline.ends[rank][index]
        span = us(end), us(end + timeline.costs.transfer(rank, reader))
        rows = range(_FIRST_ROW + ranks + rank, sys.maxsize, ranks)  # the first ``ranks`` rows are the work's
        row = next(row for row in rows if busy_until.get(row, 0) <= span[0])
        busy_until[row] = span[1]
        yield _slice(_SENDS, row, f"{action} to rank {reader}", "send", span, _action_args(placement, action))


def _transfers(timeline: Timeline) -> Iterator[tuple[tuple[int, int], tuple[int, int], Action]]:
    """Yield each transfer between ranks: (rank, slot index) of sender and of reader, and the sender's action."""
    schedule = timeline.schedule
    makers = {
        value: (place, action)
        for place, action in _actions_by_slot(schedule.orders)
        for value in made_by(action)
    }
    for (reader, at), action in _actions_by_slot(schedule.orders):
        for value in needed_by(schedule.placement, action):
            (rank, index), maker = makers[value]
            if rank != reader:
                yield (rank, index), (reader, at), maker


def _actions_by_slot(orders: Iterable[Iterable[Slot]]) -> Iterator[tuple[tuple[int, int], Action]]:
    for rank, order in enumerate(orders):
        for index, slot in enumerate(order):
            for action in slot:
                yield (rank, index), action


def _counters(timeline: Timeline, us: _Microseconds) -> Iterator[_Event]:
    for rank in range(timeline.schedule.num_ranks):
        times, counts = timeline.memory_over_time(rank)
        levels = dict(zip(map(us, times), counts, strict=True))
        for time, live in levels.items():  # of several levels at one moment, the last counts
            counted = {"live activations": live}
            yield {"ph": "C", "pid": _MEMORY, "name": f"rank {rank}", "ts": time, "args": counted}


def _labels(timeline: Timeline, events: Iterable[_Event]) -> Iterator[_Event]:
    ranks = timeline.schedule.num_ranks
    rows = sorted({(event["pid"], event["tid"]) for event in events if event["ph"] == "X"})
    groups = {
        _WORK: timeline.schedule.name,
        _SENDS: "sends",
        _MEMORY: "live activations",
        _CHAIN: "what waits for what",
    }
    for process in sorted({process for process, _ in rows} | {_MEMORY}):
        named = {"ph": "M", "pid": process}
        yield named | {"name": "process_name", "args": {"name": groups[process]}}
        yield named | {"name": "process_sort_index", "args": {"sort_index": process}}
    for process, row in rows:
        if process == _CHAIN:
            continue
        lane, rank = divmod(row - _FIRST_ROW, ranks)
        name = f"rank {rank}" + (f" ({lane})" if lane > 1 else "")
        named = {"ph": "M", "pid": process, "tid": row}
        yield named | {"name": "thread_name", "args": {"name": name}}
        yield named | {"name": "thread_sort_index", "args": {"sort_index": rank * len(rows) + lane}}
