"""`dualpipe show`: one schedule, drawn or written."""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from dualpipe_jax.command.options import CommandError, Costs, Memory, Shape, make
from dualpipe_jax.command.output import (
    Table,
    amount,
    describe,
    in_terminal,
    make_console,
    number,
    percent,
    show,
    together,
)
from dualpipe_jax.schedule import MemoryModel, Timeline, format_grid, simulate

Format = Literal["text", "csv", "json", "trace", "svg", "png", "html"]


@dataclasses.dataclass(frozen=True)
class Show:
    """Draw one schedule to time, or write it for other tools.

    dualpipe show dualpipe --ranks 4 --microbatches 10 --FB 2
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """Which schedule; `dualpipe compare` lists them."""
    ranks: int
    """Pipeline ranks."""
    microbatches: int
    """Microbatches of a step, over all pipes."""
    format: Annotated[Format | None, tyro.conf.arg(metavar="{text,csv,json,trace,svg,png,html}")] = None
    """text: a grid drawn to time. csv: PyTorch's. json: what `dualpipe check` reads. trace: for Perfetto. svg,
    png: a picture. html: a page to play with. By the ending of --output if left out, else text."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE", aliases=["-o"])] = None
    """File to write, instead of printing."""
    json: bool = False
    """The same as --format json."""
    costs: Costs = dataclasses.field(default_factory=Costs)
    memory: Memory = dataclasses.field(default_factory=Memory)
    shape: Shape = dataclasses.field(default_factory=Shape)

    def run(self) -> int:
        """Draw or write it; returns the exit status."""
        schedule = make(self.name, self.ranks, self.microbatches, self.shape)
        timeline = simulate(schedule, self.costs.model().for_schedule(schedule))
        style = self.style()
        if style == "text" and self.output is None and in_terminal():
            draw_in_terminal(timeline, self.memory.model())
        elif style in ("svg", "png"):
            self.write(picture(timeline, style))
        else:
            text = _WRITERS[style](timeline, self)
            self.write(text.encode() if text.endswith("\n") else f"{text}\n".encode())
        return 0

    def style(self) -> str:
        """The format asked for, or the one that the file's name says."""
        if self.json and self.format not in (None, "json"):
            raise CommandError(f"--json and --format {self.format} are two formats; drop either")
        named = self.output.suffix[1:].lower() if self.output else "text"
        known = named if named in ("csv", "json", "svg", "png", "html") else "text"
        return "json" if self.json else self.format or known

    def write(self, data: bytes) -> None:
        """To the file, or to standard output."""
        if self.output is not None:
            self.output.write_bytes(data)
        elif in_terminal() and self.style() in ("svg", "png", "html"):
            raise CommandError(f"{self.style()} is not for a terminal; add --output FILE.{self.style()}")
        else:
            sys.stdout.flush()
            sys.stdout.buffer.write(data)


def summary(timeline: Timeline, sizes: MemoryModel) -> tuple[str, Table]:
    """The step in a line, and what each rank does and keeps; equal ranks share a row.

    Memory and activations are those of a whole rank's share, as the costs given are.
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


def draw_in_terminal(timeline: Timeline, sizes: MemoryModel) -> None:
    """Picture and summary in colour."""
    from dualpipe_jax.command.drawing import print_drawing

    schedule = timeline.schedule
    title = f"{schedule.name}, {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches"
    print_drawing(timeline, console := make_console())
    line, table = summary(timeline, sizes)
    console.print(f"\n{title}: {line}", style="bold")
    console.print(f"cost of a stage: {describe(timeline.costs)}", style="dim")
    show(table)


def picture(timeline: Timeline, style: str) -> bytes:
    """A figure, as the bytes of a file."""
    from dualpipe_jax.schedule.plot import plot

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"schedule.{style}"
        plot(timeline, path)
        return path.read_bytes()


def _text(timeline: Timeline, asked: Show) -> str:
    line, table = summary(timeline, asked.memory.model())
    below = f"{line}\ncost of a stage: {describe(timeline.costs)}\n{table.plain()}"
    comments = "\n".join(f"# {row}" for row in below.splitlines())
    return f"{format_grid(timeline.schedule, timeline.costs)}\n{comments}"


def _json(timeline: Timeline, asked: Show) -> str:
    from dualpipe_jax.schedule.json_text import to_json

    schedule = timeline.schedule
    return to_json(
        schedule,
        {
            "costs": dataclasses.asdict(timeline.costs),
            "makespan": timeline.makespan,
            "bubble": timeline.bubble,
            "idle": timeline.idle,
            "peak_activations": timeline.memory(MemoryModel().for_schedule(schedule)),
            "memory": timeline.memory(asked.memory.model().for_schedule(schedule)),
            "starts": timeline.starts,
            "ends": timeline.ends,
        },
    )


def _csv(timeline: Timeline, asked: Show) -> str:
    del asked
    from dualpipe_jax.schedule.torch_csv import to_torch_csv

    return to_torch_csv(timeline.schedule)


def _trace(timeline: Timeline, asked: Show) -> str:
    del asked
    from dualpipe_jax.schedule.trace import to_chrome_trace

    return json.dumps(to_chrome_trace(timeline))


def _html(timeline: Timeline, asked: Show) -> str:
    from dualpipe_jax.schedule.page import html_page

    return html_page(timeline.schedule, asked.costs.model())


_WRITERS: dict[str, Callable[[Timeline, Show], Any]] = {
    "text": _text,
    "json": _json,
    "csv": _csv,
    "trace": _trace,
    "html": _html,
}
