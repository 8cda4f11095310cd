"""report.html: curves, load of experts, timelines, options, environment, how to reproduce; one file, no network."""

import base64
import json
import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dualpipe_jax.profile.timelines import DrawnTimeline, draw_simulated, read_timelines
from dualpipe_jax.schedule import simulate
from train.config import FLAGS, ConfigError, TrainConfig, make_schedule, option
from train.figures.step import PARTS
from train.recipe import is_overridden
from train.report.folder import RunFolder, command_line

Page = dict[str, Any]
"""What page.js draws:
  title, about: text.    alarms: texts, each in a box of its own.    events: steps that are marked in all curves.
  tiles: [value, name] pairs.
  sections: {"title", "about"?, "charts"?, "heat"?, "timelines"?, "tables"?, "text"?}.
  chart: {"title", "series": [{"name", "x", "y"}], "log"?, "zero"?, "wide"?}; null stands for no finite number.
  heat: {"shape": [steps, layers, experts], "steps", "one", "values"}: base64 of bytes, "one" for the mean load.
  timelines: see ``dualpipe_jax.profile.timelines``.    table: {"title"?, "head"?, "rows": [[name, *cells]]}."""

_HERE = Path(__file__).parent
_MEAN_LOAD_BYTE, _MAX_CELLS, _MAX_POINTS = 64, 1_000_000, 2000
"""The byte that stands for the mean load; the largest number of cells of the heat map; that of points of a curve."""

_CURVES: tuple[tuple[str, tuple[str, ...], dict[str, bool]], ...] = (
    ("gradient norm", ("grad_norm",), {"log": True}),
    ("learning rate", ("learning_rate",), {"zero": True}),
    ("tokens a second", ("tokens_per_s",), {"zero": True}),
    ("seconds of a step, the first left out", ("step_s", "data_wait_s", "checkpoint_s"), {"zero": True}),
    ("MFU", ("mfu",), {"zero": True}),
    ("TFLOP/s of all devices", ("tflops_per_s",), {"zero": True}),
    ("memory, GiB", ("device_memory_gib", "process_memory_gib"), {"zero": True}),
)
_BALANCE: tuple[tuple[str, tuple[str, ...], dict[str, bool]], ...] = (
    ("MaxVio, 0 is even", ("max_vio",), {"zero": True}),
    ("entropy of load, 1 is even", ("load_entropy",), {}),
    ("busiest device's load over the mean, 1 is even", ("device_load",), {}),
    ("range of routing biases", ("bias_range",), {"zero": True}),
    ("dropped assignments", ("dropped",), {"zero": True}),
)


def write_report(folder: Path) -> Path:
    """Write a run's report.html from the files in its folder. Returns the page's path.

    Raises:
      ConfigError: it is not a run's folder, or its files are damaged.
    """
    run = RunFolder.read(folder)
    path = folder / "report.html"
    path.write_text(render(report_page(run)), encoding="utf-8")
    return path


def render(page: Page) -> str:
    parts = {name: (_HERE / f"page.{name}").read_text(encoding="utf-8") for name in ("css", "js")}
    # No "<" at all: "</script>" would end the data, and from "<!--<script>" on nothing would.
    data = json.dumps(page, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    template = string.Template((_HERE / "page.html").read_text(encoding="utf-8"))
    title = page["title"].replace("&", "&amp;").replace("<", "&lt;")
    return template.substitute(parts, title=title, data=data)


def report_page(run: RunFolder) -> Page:
    try:
        measured = read_timelines(run.path)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{run.path}: its profile's timeline cannot be read: {error}; remove the folder profile"
        ) from None
    schedule = make_schedule(run.config)
    theory = draw_simulated(simulate(schedule), f"{schedule.name} simulated, F = I = W", "times F")
    sections: list[Mapping[str, Any]] = [
        {"title": "Curves", "charts": [loss_chart([run]), *charts([run], _CURVES), *_gradient_parts(run)]},
        {"title": "Balance of experts", "charts": charts([run], _BALANCE), **_heat(run)},
        _timeline_section(measured, theory),
        {
            "title": "Options",
            "about": "Those in colour are not the defaults.",
            "tables": _options(run.config),
        },
    ]
    if run.environment:
        rows = [[name, str(value)] for name, value in run.environment.items()]
        sections.append({"title": "Environment", "tables": [{"rows": rows}]})
    about = (
        "The same commit, options, text and devices give the same losses; on the same machine bit for bit."
    )
    sections.append({"title": "How to reproduce", "about": about, "text": _reproduce(run)})
    return {
        "title": run.path.name,
        "about": _about(run),
        "alarms": [f"Step {event['step']}: {event['event']}" for event in run.events],
        "events": [event["step"] for event in run.events],
        "tiles": _tiles(run, simulate(schedule).bubble, measured),
        "sections": sections,
    }


def loss_chart(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """A chart of the losses of one or more runs; of a single run also of its held-out losses."""
    series = [_curve(run, "loss", run.path.name if len(runs) > 1 else "training") for run in runs]
    if len(runs) == 1 and runs[0].evaluations:
        held = runs[0].evaluations
        x, y = [r["step"] for r in held], [r["heldout_loss"] for r in held]
        series.append({"name": "held out", "x": x, "y": y})
    return {"title": "loss, nats per token", "series": series, "wide": True}


def charts(
    runs: Sequence[RunFolder], wanted: Iterable[tuple[str, tuple[str, ...], Mapping[str, bool]]]
) -> list[dict[str, Any]]:
    """Charts of those ``wanted`` metrics that the runs have: (title, names of metrics, options of the chart) each."""
    found = []
    for title, names, options in wanted:
        curves = [
            _curve(run, name, name if len(runs) == 1 else run.path.name)
            for name in names
            for run in runs
            if any(value is not None for value in run.series(name)[1])
        ]
        if curves:
            found.append({"title": title, "series": curves, **options})
    return found


def _curve(run: RunFolder, metric: str, name: str) -> dict[str, Any]:
    x, y = run.series(metric)
    if metric == "step_s" and len(x) > 1:
        # The first step compiles, and would flatten all others.
        x, y = x[1:], y[1:]
    stride = -(-len(x) // _MAX_POINTS) or 1
    return {"name": name, "x": x[::stride], "y": y[::stride]}


def _gradient_parts(run: RunFolder) -> list[dict[str, Any]]:
    curves = [_curve(run, f"grad_norms/{part}", part) for part in PARTS]
    curves = [curve for curve in curves if curve["x"]]
    return [{"title": "gradient norms by part", "series": curves, "log": True}] if curves else []


def _heat(run: RunFolder) -> dict[str, Any]:
    steps, loads = run.series("load")
    if not loads or len({np.shape(load) for load in loads}) > 1:
        return {}
    values = np.asarray(loads, float)  # [steps, layers, experts]
    stride = -(-values.size // _MAX_CELLS)
    steps, values = steps[::stride], values[::stride]
    parts = values / np.maximum(values.mean(-1, keepdims=True), 1e-9)
    codes = np.minimum(np.round(parts * _MEAN_LOAD_BYTE), 255).astype(np.uint8)
    encoded = base64.b64encode(codes.tobytes()).decode()
    return {"heat": {"shape": list(codes.shape), "steps": steps, "one": _MEAN_LOAD_BYTE, "values": encoded}}


def _timeline_section(measured: Sequence[DrawnTimeline], theory: DrawnTimeline) -> dict[str, Any]:
    about = "The schedule's theory; --profile STEPS measures it and lays both side by side."
    shown = [DrawnTimeline.axis_group([theory])]
    if measured:
        about = "Measured from the profile, and simulated with the measured costs of its units."
        shown = [DrawnTimeline.axis_group(measured), *shown]
    return {"title": "Timeline of a step", "about": about, "timelines": shown}


def _options(config: TrainConfig) -> list[dict[str, Any]]:
    tables = dict[str, list[Any]]()
    for flag, path in FLAGS.items():
        value = option(config, flag)
        text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        row = [flag.removeprefix("--"), {"own": text} if is_overridden(config, flag) else text]
        tables.setdefault(path[0] if len(path) > 1 else "run", []).append(row)
    return [{"title": title, "rows": rows} for title, rows in tables.items()]


def _about(run: RunFolder) -> str:
    step = run.config.step
    return (
        f"Model {run.config.model.name}, schedule {step.schedule_in_words}, {step.layout}; a step is "
        f"{step.num_microbatches} microbatches of {step.batch} sequences of {step.sequence} tokens. "
        f"{run.environment.get('devices', '')} {run.environment.get('started', '')}"
    ).strip()


def _tiles(run: RunFolder, simulated: float, measured: Sequence[DrawnTimeline]) -> list[list[str]]:
    tiles = [[f"{len(run.steps)} / {run.config.optimizer.steps}", "steps"]]
    # Evaluations before the last "anew" are of other text.
    anew = max((n for n, r in enumerate(run.evaluations) if r.get("anew")), default=0)
    held = [r["heldout_loss"] for r in run.evaluations[anew:] if r["heldout_loss"] is not None]
    if len(held) > 1:
        tiles.append([f"{held[0]:.3f} → {held[-1]:.3f}", "held-out loss"])
    if run.steps:
        last = run.steps[-1]["loss"]
        tiles.append(["not a number" if last is None else f"{last:.4f}", "last training loss"])
    later = run.steps[1:]  # the first step compiles
    if later:
        tiles.append([f"{np.median([r['tokens_per_s'] for r in later]):,.0f}", "tokens/s, median"])
        tiles.append([f"{np.median([r['tflops_per_s'] for r in later]):.3g}", "TFLOP/s, median"])
        mfu = [r["mfu"] for r in later if "mfu" in r]
        source = run.environment.get("peak", "")
        of = f" ({source})" if source and mfu else ""
        tiles.append([f"{np.median(mfu):.1%}" if mfu else "n/a", f"MFU{of}"])
    tiles.append([f"{simulated:.1%}", "bubble, F = I = W"])
    if measured:
        tiles.append([f"{measured[0].bubble:.1%}", "bubble, measured"])
    return tiles


def _reproduce(run: RunFolder) -> str:
    commit = str(run.environment.get("commit", "")).split(" ")[0]
    lines = [f"git checkout {commit}"] if commit else []
    return "\n".join([*lines, command_line(run.config)])
