"""Read measured steps from a schedule's JSON with the times of its slots, or from a Chrome trace."""

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from dualpipe_jax.present.numbers import Units
from dualpipe_jax.schedule.formats.json_text import from_json
from dualpipe_jax.schedule.ir import Placement, Schedule, Slot, parse_slot
from dualpipe_jax.schedule.replay import Measured
from dualpipe_jax.schedule.validate import validate

_RANK = re.compile(r"rank (\d{1,9})")


def read_measured(text: str) -> tuple[Measured, Units]:
    """Read a measured step and its units from JSON.

    The text is a schedule's JSON, as ``to_json`` writes it, with the ``starts`` and ``ends`` of its slots, or a
    Chrome trace, as ``to_chrome_trace`` writes it, with rows "rank 0", "rank 1" ... and slices "0F3" and "0F3+7B1".
    Times of a trace are returned in milliseconds. If a trace has several steps, such as a profile's "measured" and
    "simulated", the measured one is read, else the first. A slice that names no pipe counts as one of pipe 0.

    Raises:
      ValueError: if the text is neither, or not a whole step; the message says what is missing.
      ScheduleError: if the slots that ran are not a valid schedule.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"read_measured: not JSON: {error}") from None
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if isinstance(events, list):
        return _from_trace(events), Units("ms")
    if not isinstance(found, dict) or not {"starts", "ends"} <= found.keys():
        raise ValueError(
            'read_measured: no "starts" and "ends"; give a schedule\'s JSON with them, times of the slots of each '
            'rank, or a trace with "traceEvents"'
        )
    schedule = validate(from_json(text))
    try:
        starts, ends = ([tuple(map(_number, row)) for row in found[name]] for name in ("starts", "ends"))
    except (TypeError, OverflowError):
        raise ValueError(
            "read_measured: starts and ends are lists of numbers, one list for each rank"
        ) from None
    return _measured(schedule, starts, ends), _units(found)


def _number(value: Any) -> float:
    """A JSON number as a float; TypeError for any other value, OverflowError for too large a number."""
    if type(value) not in (int, float):
        raise TypeError
    return float(value)


def _units(found: Mapping[str, Any]) -> Units:
    share = found.get("of_a_share")
    units = found.get("units", share.get("units", {}) if isinstance(share, dict) else {})
    try:
        return Units(**units)
    except TypeError:
        raise ValueError(
            f'read_measured: units are {json.dumps(units)[:60]}; give words by name, such as {{"time": "ms"}}'
        ) from None


def _measured(schedule: Schedule, starts: list[tuple[float, ...]], ends: list[tuple[float, ...]]) -> Measured:
    first = min((row[0] for row in starts if row), default=0.0)
    in_step = (tuple(tuple(time - first for time in row) for row in times) for times in (starts, ends))
    return Measured(schedule, *in_step)


def _from_trace(events: Iterable[Any]) -> Measured:
    """Read a measured step from the events of a trace; events that do not belong to a step are ignored."""
    events = [event for event in events if isinstance(event, dict)]
    rows = {
        row: int(match[1])
        for event in events
        if event.get("name") == "thread_name"
        and (row := _row_of(event)) is not None
        and (match := _RANK.fullmatch(_label(event)))
    }
    titles = {
        row[0]: _label(event)
        for event in events
        if event.get("name") == "process_name" and (row := _row_of(event)) is not None
    }
    slices: dict[Any, dict[int, list[tuple[float, float, Slot, Mapping[str, Any]]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for event in events:
        row = _row_of(event)
        if event.get("ph") == "X" and row in rows and (slot := _slot_of_name(event.get("name"))):
            start = _milliseconds(event, "ts")
            one = start, start + _milliseconds({"dur": 0} | event, "dur"), slot, _object_under(event, "args")
            slices[row[0]][rows[row]].append(one)
    if not slices:
        raise ValueError(
            'read_measured: no rows named "rank 0", "rank 1" ... with slices such as "0F3" or "0F3+7B1" in this trace'
        )
    process = next((p for p in slices if titles.get(p, "").startswith("measured")), next(iter(slices)))
    absent = next(rank for rank in itertools.count() if rank not in slices[process])
    if absent < max(slices[process]):
        raise ValueError(
            f"read_measured: no slice of rank {absent}, but of rank {max(slices[process])}; give those of all ranks"
        )
    ran = [sorted(slices[process][rank], key=lambda one: one[:2]) for rank in range(absent)]
    placement = _placement(ran)
    orders = tuple(tuple(slot for _, _, slot, _ in row) for row in ran)
    highest = max(action.microbatch for order in orders for slot in order for action in slot)
    name = titles.get(process, "measured").removeprefix("measured: ")
    schedule = validate(Schedule(name, placement, (highest + 1) * placement.num_pipes, orders))
    starts, ends = ([tuple(float(one[at]) for one in row) for row in ran] for at in (0, 1))  # type: ignore[arg-type]
    return _measured(schedule, starts, ends)


def _row_of(event: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """The process and thread of an event; None if they are not numbers, strings or absent."""
    row = event.get("pid"), event.get("tid")
    return row if all(isinstance(part, int | str | None) for part in row) else None


def _object_under(about: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The JSON object under a name; an empty one if there is none."""
    found = about.get(name)
    return found if isinstance(found, dict) else {}


def _label(event: Mapping[str, Any]) -> str:
    return str(_object_under(event, "args").get("name", ""))


def _milliseconds(event: Mapping[str, Any], name: str) -> float:
    try:
        return _number(event.get(name)) / 1000
    except (TypeError, OverflowError):
        raise ValueError(
            f"read_measured: the slice {event['name']!r} has {name} {json.dumps(event.get(name))[:60]}; give a number "
            "of microseconds"
        ) from None


def _slot_of_name(name: Any) -> Slot | None:
    if not isinstance(name, str) or name.count("+") > 1:
        return None
    try:
        return parse_slot(name)
    except ValueError:
        return None


def _placement(ran: list[list[tuple[float, float, Slot, Mapping[str, Any]]]]) -> Placement:
    """The placement in which each stage is on the rank that ran it, and on the pipe that its slices name."""
    rank_of: dict[int, int] = {}
    pipe_of: dict[int, int] = {}
    for rank, row in enumerate(ran):
        for _, _, slot, args in row:
            each = (
                [args]
                if len(slot) == 1
                else [_object_under(args, "forward"), _object_under(args, "backward")]
            )
            for action, about in zip(slot, each, strict=True):
                if rank_of.setdefault(action.stage, rank) != rank:
                    raise ValueError(
                        f"read_measured: ranks {rank_of[action.stage]} and {rank} both run stage {action.stage}"
                    )
                pipe = about.get("pipe", 0)
                if not isinstance(pipe, int):
                    raise ValueError(
                        f"read_measured: the slice of {action} has pipe {json.dumps(pipe)[:60]}; give its number"
                    )
                pipe_of[action.stage] = pipe
    missing = next(stage for stage in itertools.count() if stage not in rank_of)
    if missing < max(rank_of):
        raise ValueError(f"read_measured: no slice of stage {missing}, but of stage {max(rank_of)}")
    pipes = itertools.groupby(sorted(rank_of, key=lambda s: (pipe_of[s], s)), key=pipe_of.__getitem__)
    return Placement(tuple(tuple(rank_of[stage] for stage in stages) for _, stages in pipes))
