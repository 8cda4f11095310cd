"""A simulated schedule as the bytes of a file, in each format that the command writes."""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from dualpipe_jax.command import given
from dualpipe_jax.command.options import CommandError
from dualpipe_jax.command.output import Table, amount, describe, in_terminal, number, percent, together
from dualpipe_jax.schedule import CostModel, MemoryModel, Timeline, format_grid

Format = Literal["text", "csv", "json", "trace", "svg", "png", "html"]
PICTURES = "svg", "png", "html"


def format_of(asked: Format | None, json: bool, output: Path | None) -> Format:
    """What was asked for, or else what the file's name says.

    Raises:
      CommandError: two formats were asked for.
    """
    if json and asked not in (None, "json"):
        raise CommandError(f"--json and --format {asked} are two formats; drop either")
    endings: dict[str, Format] = {f".{x}": x for x in ("csv", "json", "trace", "svg", "png", "html")}
    ending = output.suffix.lower() if output else ""
    return "json" if json else asked or endings.get(ending, "text")


def write(data: bytes, form: Format, output: Path | None) -> None:
    """Write to the file, or to standard output.

    Raises:
      CommandError: a picture would be written to a terminal.
    """
    if output is not None:
        output.write_bytes(data)
    elif in_terminal() and form in PICTURES:
        raise CommandError(f"--format {form} is not for a terminal; add --output FILE.{form}")
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)


def encode(timeline: Timeline, form: Format, costs: CostModel, sizes: MemoryModel) -> bytes:
    """The bytes of a file. Costs and sizes are those of a whole rank's share, the timeline's are a stage's."""
    if form in ("svg", "png"):
        return _picture(timeline, form, sizes)
    writers: dict[str, Callable[[], str]] = {
        "text": lambda: _text(timeline, costs, sizes),
        "json": lambda: _json(timeline, costs, sizes),
        "csv": lambda: _csv(timeline),
        "trace": lambda: _trace(timeline),
        "html": lambda: _html(timeline, costs, sizes),
    }
    return f"{writers[form]().rstrip()}\n".encode()


def summary(timeline: Timeline, sizes: MemoryModel) -> tuple[str, Table]:
    """The step in a line, and what each rank does and keeps; equal ranks share a row.

    Sizes are those of a whole rank's share, and so are the activations counted.
    """
    schedule = timeline.schedule
    counted = sizes != MemoryModel()
    activations = timeline.memory(MemoryModel().for_schedule(schedule))
    memory = timeline.memory(sizes.for_schedule(schedule))
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank, idle in enumerate(timeline.idle):
        share = percent(idle / timeline.makespan if timeline.makespan else 0.0)
        cells = number(idle), share, number(activations[rank])
        rows.setdefault((*cells, *([amount(memory[rank])] if counted else [])), []).append(rank)
    line = f"makespan {number(timeline.makespan)}, bubble {percent(timeline.bubble)}"
    if counted:
        line += f", memory {amount(max(memory))}"
    head = "ranks", "idle", "of the step", "activations", *(["memory"] if counted else [])
    return line, Table(head, tuple((together(ranks), *cells) for cells, ranks in rows.items()))


def _text(timeline: Timeline, costs: CostModel, sizes: MemoryModel) -> str:
    line, table = summary(timeline, sizes)
    below = f"{line}\ncost of a stage: {describe(timeline.costs)}\n{table.plain()}"
    comments = "\n".join(f"# {row}" for row in below.splitlines())
    return f"{format_grid(timeline.schedule, timeline.costs)}\n{comments}\n{given.line(costs, sizes)}"


def _json(timeline: Timeline, costs: CostModel, sizes: MemoryModel) -> str:
    from dualpipe_jax.schedule.blame import slack
    from dualpipe_jax.schedule.formats.json_text import to_json

    schedule = timeline.schedule
    simulated = {
        given.ENTRY: given.entry(costs, sizes),
        "costs": dataclasses.asdict(timeline.costs),
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "idle": timeline.idle,
        "peak_activations": timeline.memory(MemoryModel().for_schedule(schedule)),
        "memory": timeline.memory(sizes.for_schedule(schedule)),
        "starts": timeline.starts,
        "ends": timeline.ends,
        "slack": slack(timeline),
    }
    return to_json(schedule, simulated)


def _csv(timeline: Timeline) -> str:
    from dualpipe_jax.schedule.formats.torch_csv import to_torch_csv

    return to_torch_csv(timeline.schedule)


def _trace(timeline: Timeline) -> str:
    from dualpipe_jax.schedule.formats.trace import to_chrome_trace

    return json.dumps(to_chrome_trace(timeline))


def _html(timeline: Timeline, costs: CostModel, sizes: MemoryModel) -> str:
    from dualpipe_jax.schedule.formats.page import html_page

    return html_page(timeline.schedule, costs, sizes)


def _picture(timeline: Timeline, form: str, sizes: MemoryModel) -> bytes:
    from dualpipe_jax.schedule.formats.plot import plot

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"schedule.{form}"
        plot(timeline, path, memory=None if sizes == MemoryModel() else sizes.for_schedule(timeline.schedule))
        return path.read_bytes()
