"""`dualpipe show`: one schedule, drawn or written."""

import dataclasses
import re
from typing import Annotated

import tyro

from dualpipe_jax.command.formats import Format, encode, format_of, summary, write
from dualpipe_jax.command.options import CommandError, Costs, Count, Memory, Output, Pipes, Shape
from dualpipe_jax.command.output import describe, in_terminal, make_console, number, show
from dualpipe_jax.command.source import schedule_of
from dualpipe_jax.schedule import MemoryModel, Timeline, simulate
from dualpipe_jax.schedule.blame import Link, critical_path, why_idle


@dataclasses.dataclass(frozen=True)
class Show:
    """Draw one schedule to time, or write it for other tools.

    dualpipe show dualpipe --ranks 4 --microbatches 10 --FB 2
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """Which schedule (`dualpipe compare` lists them), or a file that `dualpipe check` reads."""
    ranks: Count = None
    """Pipeline ranks; not for a file."""
    microbatches: Count = None
    """Microbatches of a step, over all pipes; not for a file."""
    pipes: Pipes = None
    """The rank of each stage, pipe by pipe, such as "(0 1 1 0)", where a file does not say."""
    format: Annotated[
        Format | None,
        tyro.conf.arg(metavar="{text,csv,json,trace,svg,png,html}", help_behavior_hint="(default: text)"),
    ] = None
    """text: a grid drawn to time. csv: PyTorch's. json: for programs. trace: for Perfetto. svg, png: a picture.
    html: a page to play with. Where --output is given, its ending tells."""
    output: Output = None
    """File to write, instead of printing."""
    why: Annotated[str | None, tyro.conf.arg(metavar="{RANK@TIME,path}", help_behavior_hint="")] = None
    """Instead, say what an idle rank waits for at a time, such as 5@21, back to what ran when it fell idle; or, with
    "path", what makes the step as long as it is, from its last slot back to its first."""
    json: bool = False
    """The same as --format json."""
    costs: Costs = dataclasses.field(default_factory=Costs)
    memory: Memory = dataclasses.field(default_factory=Memory)
    shape: Shape = dataclasses.field(default_factory=Shape)

    def run(self) -> int:
        """Draw or write it; returns the exit status."""
        form = format_of(self.format, self.json, self.output)
        schedule, given = schedule_of(self.name, self.ranks, self.microbatches, self.shape, self.pipes)
        costs, sizes = given.under(self.costs, self.memory)
        timeline = simulate(schedule, costs.for_schedule(schedule))
        if self.why is not None:
            show(_explain(timeline, self.why))
        elif form == "text" and self.output is None and in_terminal():
            draw_in_terminal(timeline, sizes)
        else:
            write(encode(timeline, form, costs, sizes), form, self.output)
        return 0


def _explain(timeline: Timeline, asked: str) -> str:
    """What a rank waits for at a time, or the critical path; a line for each link of the chain."""
    if asked == "path":
        return "\n".join(
            [f"the step takes {number(timeline.makespan)}, last", *_lines(critical_path(timeline))]
        )
    match = re.fullmatch(r"(\d{1,9})@(\d{1,15}(?:\.\d{1,15})?)", asked)
    if match is None:
        raise CommandError(f"--why {asked!r}: expected a rank and a time, such as 5@21, or path")
    rank, time = int(match[1]), float(match[2])
    links = why_idle(timeline, rank, time)
    if not links:
        return f"rank {rank} at {number(time)}: works, or is through with all that it has to do"
    head = f"rank {rank} at {number(time)}: idle until {number(links[0].start)}, where it runs"
    return "\n".join([head, *_lines(links)])


def _lines(links: list[Link]) -> list[str]:
    lines = []
    for link, after in zip(links, [*links[1:], None], strict=True):
        slot = "+".join(map(str, link.slot))
        line = f"  rank {link.rank}: {slot} from {number(link.start)} to {number(link.end)}"
        if after is not None:
            line += ", which waits for what comes from" if after.sent else ", which follows on"
        lines.append(line)
    return lines


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
