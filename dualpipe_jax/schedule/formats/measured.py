"""Measured steps read: a schedule's JSON with the times of its slots, or a trace of one."""

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from dualpipe_jax.present.numbers import Units
from dualpipe_jax.schedule.formats.json_text import from_json
from dualpipe_jax.schedule.ir import Action, Placement, Schedule, Slot
from dualpipe_jax.schedule.replay import Measured
from dualpipe_jax.schedule.validate import validate

_RANK = re.compile(r"rank (\d+)")


def read_measured(text: str) -> tuple[Measured, Units]:
    """A measured step from JSON: a schedule's, as ``to_json`` writes it, with ``starts`` and ``ends`` of its slots,
    or a Chrome trace as ``to_chrome_trace`` writes it: rows "rank 0", "rank 1" ..., slices "0F3" and "0F3+7B1".

    Of a trace with several steps, such as a profile's "measured" and "simulated", the measured one is read, else the
    first. Where a trace's slices do not say on which pipe their stage is, there is one.

    Raises:
      ValueError: it is neither, or no whole step; says what is missing.
      ScheduleError: what ran is no valid schedule.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"read_measured: not JSON: {error}") from None
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if isinstance(events, list):
        return _from_trace(events), Units("ms")
    if not {"starts", "ends"} <= found.keys():
        raise ValueError(
            'read_measured: no "starts" and "ends"; give a schedule\'s JSON with them, times of the slots of each '
            'rank, or a trace with "traceEvents"'
        )
    schedule, units = (
        validate(from_json(text)),
        found.get("units", found.get("of_a_share", {}).get("units", {})),
    )
    try:
        times = [[tuple(map(float, row)) for row in found[name]] for name in ("starts", "ends")]
        return _measured(schedule, *times), Units(**units)
    except TypeError:
        raise ValueError(
            "read_measured: starts and ends are lists of numbers, one list for each rank"
        ) from None


def _measured(schedule: Schedule, starts: list[tuple[float, ...]], ends: list[tuple[float, ...]]) -> Measured:
    first = min((row[0] for row in starts if row), default=0.0)
    in_step = (tuple(tuple(time - first for time in row) for row in times) for times in (starts, ends))
    return Measured(schedule, *in_step)


def _from_trace(events: Iterable[Any]) -> Measured:
    events = [event for event in events if isinstance(event, dict)]
    rows = {
        (event["pid"], event["tid"]): int(match[1])
        for event in events
        if event.get("name") == "thread_name" and (match := _RANK.fullmatch(_named(event)))
    }
    titles = {event["pid"]: _named(event) for event in events if event.get("name") == "process_name"}
    slices: dict[Any, dict[int, list[tuple[float, float, Slot, Mapping[str, Any]]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for event in events:
        row = event.get("pid"), event.get("tid")
        if event.get("ph") == "X" and row in rows and (slot := _slot(event.get("name", ""))):
            start = event["ts"] / 1000
            one = start, start + event.get("dur", 0) / 1000, slot, event.get("args", {})
            slices[row[0]][rows[row]].append(one)
    if not slices:
        raise ValueError(
            'read_measured: no rows named "rank 0", "rank 1" ... with slices such as "0F3" or "0F3+7B1" in this trace'
        )
    process = next((p for p in slices if titles.get(p, "").startswith("measured")), next(iter(slices)))
    ran = [
        sorted(slices[process].get(rank, ()), key=lambda one: one[:2])
        for rank in range(max(slices[process]) + 1)
    ]
    placement = _placement(ran)
    orders = tuple(tuple(slot for _, _, slot, _ in row) for row in ran)
    highest = max(action.microbatch for order in orders for slot in order for action in slot)
    name = titles.get(process, "measured").removeprefix("measured: ")
    schedule = validate(Schedule(name, placement, (highest + 1) * placement.num_pipes, orders))
    starts, ends = ([tuple(float(one[at]) for one in row) for row in ran] for at in (0, 1))  # type: ignore[arg-type]
    return _measured(schedule, starts, ends)


def _named(event: Mapping[str, Any]) -> str:
    return str(event.get("args", {}).get("name", ""))


def _slot(name: str) -> Slot | None:
    try:
        return tuple(map(Action.parse, name.split("+")))
    except ValueError:
        return None


def _placement(ran: list[list[tuple[float, float, Slot, Mapping[str, Any]]]]) -> Placement:
    """Where the slices run each stage, and on which pipe they say that it is."""
    rank_of: dict[int, int] = {}
    pipe_of: dict[int, int] = {}
    for rank, row in enumerate(ran):
        for _, _, slot, args in row:
            each = [args] if len(slot) == 1 else [args.get("forward", {}), args.get("backward", {})]
            for action, about in zip(slot, each, strict=True):
                if rank_of.setdefault(action.stage, rank) != rank:
                    raise ValueError(
                        f"read_measured: ranks {rank_of[action.stage]} and {rank} both run stage {action.stage}"
                    )
                pipe_of[action.stage] = int(about.get("pipe", 0))
    missing = [stage for stage in range(max(rank_of) + 1) if stage not in rank_of]
    if missing:
        raise ValueError(f"read_measured: no slice of stage {missing[0]}, but of stage {max(rank_of)}")
    pipes = itertools.groupby(sorted(rank_of, key=lambda s: (pipe_of[s], s)), key=pipe_of.__getitem__)
    return Placement(tuple(tuple(rank_of[stage] for stage in stages) for _, stages in pipes))
