"""Write a profile: the measured timeline beside the simulated one as picture, trace and data, and costs to replay."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualpipe_jax.installing import install_command
from dualpipe_jax.profile.measure import Measured
from dualpipe_jax.profile.picture import draw
from dualpipe_jax.profile.timelines import TIMELINES_FILE, DrawnTimeline, draw_simulated, draw_spans
from dualpipe_jax.schedule import CostModel, Timeline, lower, simulate, to_chrome_trace, to_json

COSTS, TRACE, PICTURE, MEASURED = "costs.json", "timeline.trace", "timeline.png", "measured.json"
_PROCESS_OFFSET = 100
"""The distance between the process numbers of the two timelines in one trace."""


def write_profile(measured: Measured, folder: Path, devices: Sequence[Any]) -> str:
    """Write a profile's files to a folder, and return a summary of a few lines.

    The files are timeline.json for the report, costs.json and measured.json for ``dualpipe``, timeline.trace for
    Perfetto, and timeline.png where matplotlib is installed.

    Args:
      measured: the result of ``measure``.
      folder: the folder to write to; made if it does not exist.
      devices: the devices of the mesh.
    """
    theory = measured.theory
    both = [
        draw_measured(measured, _shared_cores(devices)),
        draw_simulated(theory, "simulated at these costs", "ms"),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TIMELINES_FILE).write_text(json.dumps([dataclasses.asdict(one) for one in both]))
    (folder / COSTS).write_text(json.dumps(measured.replay(), indent=2) + "\n")
    starts, ends = measured.times()
    step = {"starts": starts, "ends": ends, "units": {"time": "ms"}}
    (folder / MEASURED).write_text(to_json(measured.schedule, step) + "\n")
    (folder / TRACE).write_text(json.dumps(perfetto(measured, theory)))
    name = f"{measured.schedule.name}, {measured.schedule.num_ranks} ranks"
    try:
        draw(both, folder / PICTURE, f"{name}: a step measured, and simulated at the measured costs")
        picture = f", {PICTURE}"
    except ModuleNotFoundError:
        picture = f"; no picture without matplotlib: {install_command('matplotlib', extra='plot')}"
    lines = summary(measured, theory, _shared_cores(devices))
    return f"{lines}\nprofile         {folder}/: {COSTS}, {MEASURED}, {TRACE}{picture}"


def summary(measured: Measured, theory: Timeline, shared_cores: str) -> str:
    """A text with the bubble and the length of a step, measured and simulated, and the costs of the simulation."""
    costs, schedule = measured.costs, measured.schedule
    ticks = lower(schedule, _placing_costs(measured)).makespan(costs)
    even = simulate(schedule).bubble
    words = "  ".join(f"{name} {getattr(costs, name):.3g}" for name in ("F", "I", "W", "FB"))
    assumed = f" ({', '.join(measured.assumed)} assumed)" if measured.assumed else ""
    return (
        f"measured        bubble {measured.bubble:.1%}, {measured.makespan:.4g} ms from the first unit to the last, "
        f"median of {measured.num_steps} steps{shared_cores and f'; {shared_cores}'}\n"
        f"simulated       bubble {theory.bubble:.1%}, {theory.makespan:.4g} ms at the measured costs "
        f"({ticks:.4g} ms in the engine's ticks); {even:.1%} when F = I = W\n"
        f"costs, ms       {words} of a stage{assumed}"
    )


def _placing_costs(measured: Measured) -> CostModel:
    """The costs by which the engine places actions on ticks, whatever units take; see ``Pipeline.placing_costs``."""
    return CostModel(FB=2.0) if "FB" in measured.durations else CostModel()


def draw_measured(measured: Measured, shared_cores: str) -> DrawnTimeline:
    """The drawing of the measured timeline; where pairs are not units of their own, their halves are separate boxes."""
    title = f"measured: bubble {measured.bubble:.1%}, {measured.makespan:,.4g} ms{shared_cores and f'; {shared_cores}'}"
    fused = any(unit.kind == "FB" for rank in measured.units for unit, _ in rank)
    return draw_spans(
        measured.schedule, measured.spans(), title, "ms", measured.makespan, measured.bubble, fused=fused
    )


def perfetto(measured: Measured, theory: Timeline) -> dict[str, Any]:
    """Both timelines in one trace: groups "measured: ..." and "simulated: ..."."""
    starts, ends = measured.times()
    real = dataclasses.replace(theory, starts=tuple(map(tuple, starts)), ends=tuple(map(tuple, ends)))
    first, second = to_chrome_trace(real), to_chrome_trace(theory)
    events = _renamed_events(first, "measured", 0) + _renamed_events(second, "simulated", _PROCESS_OFFSET)
    other = second["otherData"] | {"measured bubble": measured.bubble, "measured makespan": measured.makespan}
    return first | {"traceEvents": events, "otherData": other}


def _renamed_events(trace: dict[str, Any], what: str, offset: int) -> list[dict[str, Any]]:
    """A trace's events: ``offset`` is added to process numbers, ``what`` put before process names and arrows' ids."""
    events = []
    for event in trace["traceEvents"]:
        event = event | {"pid": event["pid"] + offset}
        if "id" in event:
            event["id"] = f"{what} {event['id']}"
        if event["name"] == "process_name":
            event["args"] = {"name": f"{what}: {event['args']['name']}"}
        if event["name"] == "process_sort_index":
            event["args"] = {"sort_index": event["args"]["sort_index"] + offset}
        events.append(event)
    return events


def _shared_cores(devices: Sequence[Any]) -> str:
    """A warning where several virtual devices share the CPU's cores, which makes their times long; else empty."""
    cores = os.cpu_count() or 1
    if devices[0].platform != "cpu" or len(devices) <= 1:
        return ""
    return f"{len(devices)} virtual devices shared {cores} core{'s' if cores > 1 else ''}"
