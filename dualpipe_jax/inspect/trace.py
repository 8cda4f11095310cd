"""Write a computation's timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dualpipe_jax.inspect.cycles import Collective, Event
from dualpipe_jax.inspect.lanes import DIRECTION_NAMES, Names, exchange_name, rows, segments
from dualpipe_jax.inspect.report import OverlapReport

_Slice = dict[str, Any]

_Time = Callable[[float], float]
"""A function from cycles to the trace's time."""

_PROCESS = 1
"""The number of the process that holds all rows. Viewers hide process 0, which to them is the kernel's idle process."""

_FIRST_ROW = 2
"""The number of the first row. Rows are threads; viewers take a thread with the process's number for its main thread,
so no row has that number."""

_COLOURS = {"forward": "rail_idle", "backward": "rail_load", "unknown": "grey", "wait": "terrible"}
"""Colours by their names in chrome://tracing; Perfetto chooses its own."""


def to_chrome_trace(
    report: OverlapReport, computation: str, clock: float | None = None, names: Names = DIRECTION_NAMES
) -> dict[str, Any]:
    """Return one computation's timeline in the Chrome trace event format, to be written with ``json.dump``.

    The row "computation" has a slice for each segment of one direction (forward, backward, neither) or wait, and
    in it a slice for each instruction. Every kind of collective has a row of its own, and more than one only if
    durations are unknown. The arguments of a slice are its op_name, opcode, cycles and matrix products; a
    collective also has its payload in bytes, its exposed cycles, and the matrix products between its start and its
    done.

    >>> import jax, jax.numpy as jnp
    >>> from dualpipe_jax import inspect, make_mesh
    >>> step = jax.shard_map(
    ...     lambda x: jax.lax.psum(x @ x.T, "ep"), mesh=make_mesh(1, 2), in_specs=jax.P("ep"), out_specs=jax.P()
    ... )
    >>> compiled = jax.jit(step).lower(jax.ShapeDtypeStruct((256, 128), jnp.float32)).compile()
    >>> report = inspect.overlap(compiled, inspect.gpu_rates("h100"))
    >>> trace = inspect.to_chrome_trace(report, inspect.read(compiled).entry)
    >>> [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    ['computation', 'all-reduce']

    Args:
      report: a report of ``overlap``.
      computation: the name of the computation to write.
      clock: the hertz of the cycles, such as ``target.device.clock``. The trace's times are then rounded to an eighth
        of a microsecond, the finest step that viewers read without rounding it again: so neighbours meet and never
        overlap. If None, a microsecond of the trace is a cycle.
      names: names of the directions, if they are not those of training.

    Raises:
      KeyError: if the program runs no such computation line by line.
      ValueError: if the clock is not above 0.
    """
    if clock is not None and not clock > 0:
        raise ValueError(f"to_chrome_trace: clock={clock}; it must be above 0 hertz, such as 1.75e9")

    def time(cycles: float) -> float:
        return round(cycles) if clock is None else round(8e6 * cycles / clock) / 8

    named = {c.name: c for c in report.inside(computation)}
    lanes = rows(report.timeline(computation))
    direction_names = {what: long for what, (long, _) in names.items()} | {"unknown": "neither"}
    slices = list(_compute_slices(lanes["compute"][0], time, direction_names))
    labels = [_label("process_name", 0, name=f"{report.module}: {computation}")]
    labels += [*_row_labels(_FIRST_ROW, "computation")]
    row = _FIRST_ROW
    for kind, lane in lanes.items():
        for number, events in enumerate(lane if kind != "compute" else ()):
            row += 1
            labels += _row_labels(row, f"{kind} ({number + 1})" if number else kind)
            for event in events:
                label = _collective_label(event, direction_names)
                args = _collective_args(event, named[event.name])
                slices.append(_slice(row, event, label, args, time, direction_names))
    slices.sort(key=lambda event: event["ts"])  # Stable: a segment stays before its first instruction.
    unit = {"hertz": clock} if clock else {"one microsecond is": "one cycle"}
    spent = report.computations[computation]
    return {
        "traceEvents": [*labels, *slices],
        "displayTimeUnit": "ns",
        "otherData": {
            "module": report.module,
            "computation": computation,
            "cycles": spent.cycles,
            "cycles waited": spent.waits,
            **unit,
        },
    }


def _compute_slices(work: list[Event], time: _Time, direction_names: Mapping[str, str]) -> Iterator[_Slice]:
    for segment in segments(work):
        span = segment.events[0]._replace(kind=segment.label, end=segment.end)
        name = direction_names.get(segment.label, segment.label)
        about = {"cycles": span.end - span.start, "instructions": len(segment.events)}
        if segment.label == "wait":
            yield _slice(_FIRST_ROW, span, name, {"for": span.name} | about, time, direction_names)
            continue
        yield _slice(_FIRST_ROW, span, name, about, time, direction_names)
        for event in segment.events:
            yield _slice(_FIRST_ROW, event, event.name, _event_args(event), time, direction_names)


def _slice(
    row: int,
    event: Event,
    name: str,
    args: Mapping[str, Any],
    time: _Time,
    direction_names: Mapping[str, str],
) -> _Slice:
    what = event.kind if event.kind == "wait" else event.direction
    return {
        "ph": "X",
        "pid": _PROCESS,
        "tid": row,
        "name": name,
        "cat": direction_names.get(what, what),
        "cname": _COLOURS[what],
        "ts": time(event.start),
        "dur": time(event.end) - time(event.start),
        "args": {key: value for key, value in args.items() if value not in (None, "", {})},
    }


def _event_args(event: Event) -> dict[str, Any]:
    return {
        "op_name": event.op_name,
        "opcode": event.kind,
        "direction": event.direction,
        "cycles": event.end - event.start,
        "matmuls": dict(event.matmuls),
    }


def _collective_args(event: Event, collective: Collective) -> dict[str, Any]:
    return _event_args(event) | {
        "name": collective.name,
        "form": collective.form,
        "cycles": collective.duration,
        "cycles exposed": collective.exposed,
        "cycles waited": collective.waits,
        "hidden": collective.hidden,
        "payload": collective.payload,
        "group size": collective.group_size,
        "matmuls": {},
        "matmuls between": collective.matmuls,
    }


def _collective_label(event: Event, direction_names: Mapping[str, str]) -> str:
    direction = direction_names[event.direction] if event.direction != "unknown" else ""
    return f"{exchange_name(event) or event.kind} {direction}".rstrip()


def _row_labels(row: int, name: str) -> Iterator[_Slice]:
    yield _label("thread_name", row, name=name)
    yield _label("thread_sort_index", row, sort_index=row)


def _label(what: str, row: int, **args: Any) -> _Slice:
    return {"ph": "M", "pid": _PROCESS, "name": what, "args": args} | ({"tid": row} if row else {})
