"""`dualpipe show`: one schedule, drawn or written."""

import dataclasses
import re
from typing import Annotated, ClassVar

import tyro

from dualpipe_jax.command.formats import Format, encode, format_of, summary, write
from dualpipe_jax.command.options import CommandError, Costs, Count, Memory, Output, Pipes, Shape, check_size
from dualpipe_jax.command.output import in_terminal, make_console, show
from dualpipe_jax.command.share_files import RankShare
from dualpipe_jax.command.source import is_file, schedule_of
from dualpipe_jax.present.numbers import Units, number
from dualpipe_jax.schedule import Timeline, simulate
from dualpipe_jax.schedule.blame import Link, critical_path, why_idle
from dualpipe_jax.schedule.formats.costs_text import describe
from dualpipe_jax.schedule.formats.text import INSTEAD, most_characters
from dualpipe_jax.schedule.ir import spelt


@dataclasses.dataclass(frozen=True)
class Show:
    """Draw one schedule to time, or write it for other tools.

    dualpipe show dualpipe --ranks 4 --microbatches 10 --FB 2
    """

    COMMON: ClassVar = (
        "name", "ranks", "microbatches", "FB", "send", "costs", "format", "json", "output", "why",
    )  # fmt: skip

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """The schedule, by its name (`dualpipe compare` lists them) or as a file that `dualpipe check` reads."""
    ranks: Count = None
    """Number of pipeline ranks. Files say their own."""
    microbatches: Count = None
    """Number of microbatches of a step, over all pipes. Files say their own."""
    pipes: Pipes = None
    """The rank of each stage, pipe by pipe, such as "(0 1 1 0)". Needed for a file that does not say it."""
    format: Annotated[Format | None, tyro.conf.arg(metavar="{text,csv,json,trace,svg,png,html}")] = None
    """What to write. text: a grid drawn to time. csv: PyTorch's format. json: for programs. trace: for
    Perfetto. svg, png: a picture. html: a page to play with. If left out, text, or what the ending of
    --output says."""
    output: Output = None
    """File to write to, instead of printing."""
    why: Annotated[str | None, tyro.conf.arg(metavar="{RANK@TIME,path}")] = None
    """RANK@TIME, such as 5@21: what rank 5 waits for at time 21, back to what ran when it fell idle. path:
    what makes the step as long as it is, from its last slot back to its first. Said in words instead of the
    grid, or marked in a picture, a page or a trace."""
    json: bool = False
    """Short for --format json."""
    costs: Costs = dataclasses.field(default_factory=Costs)
    memory: Memory = dataclasses.field(default_factory=Memory)
    shape: Shape = dataclasses.field(default_factory=Shape)

    def run(self) -> int:
        form = format_of(self.format, self.json, self.output)
        if form == "text" and self.why is None and not is_file(self.name):
            _check_lines(self.ranks or 1, self.microbatches or 1, self.shape)
        schedule, given = schedule_of(self.name, self.ranks, self.microbatches, self.shape, self.pipes)
        share = given.overridden_by(self.costs, self.memory)
        timeline = simulate(schedule, share.costs.for_schedule(schedule))
        moment = None if self.why in (None, "path") else _moment(self.why)
        chain = None
        if self.why is not None:
            chain = critical_path(timeline) if moment is None else why_idle(timeline, *moment)
        if chain is not None and form == "text":
            write(f"{_explain(timeline, moment, chain, share.units)}\n".encode(), self.output)
        elif form == "text" and self.output is None and in_terminal():
            draw_in_terminal(timeline, share)
        else:
            write(encode(timeline, form, share, chain), self.output)
        return 0


def _check_lines(num_ranks: int, num_microbatches: int, shape: Shape) -> None:
    """Refuse counts whose lines, drawn to time, would be too long. It is called before the schedule is made.

    A microbatch passes all ranks forward and backward, and a rank runs all microbatches forward and backward; an action
    takes at least four characters, such as 0F0 and a separator.

    Raises:
      CommandError: the lines are too long whatever the costs, or there are too many actions for any format.
    """
    check_size(num_ranks, num_microbatches, shape)
    width, most = 2 * len("0F0 ") * max(num_ranks, num_microbatches), most_characters(num_ranks)
    if width > most:
        raise CommandError(
            f"{num_ranks:,} ranks x {num_microbatches:,} microbatches drawn to time are lines of at least {width:,} "
            f"characters, and of {num_ranks:,} ranks at most {most:,} can be drawn; {INSTEAD}"
        )


def _moment(asked: str | None) -> tuple[int, float]:
    match = re.fullmatch(r"(\d{1,9})@(\d{1,15}(?:\.\d{1,15})?)", asked or "")
    if match is None:
        raise CommandError(f"--why {asked!r}: expected a rank and a time, such as 5@21, or path")
    return int(match[1]), float(match[2])


def _explain(timeline: Timeline, moment: tuple[int, float] | None, links: list[Link], units: Units) -> str:
    """A line for each link of a chain: that of a rank's moment, or the critical path if ``moment`` is None."""
    if moment is None:
        return "\n".join([f"the step takes {units.duration(timeline.makespan)}, last", *_lines(links)])
    rank, time = moment
    if not links:
        return f"rank {rank} at {units.duration(time)}: works, or is through with all that it has to do"
    head = f"rank {rank} at {number(time)}: idle until {units.duration(links[0].start)}, where it runs"
    return "\n".join([head, *_lines(links)])


def _lines(links: list[Link]) -> list[str]:
    lines = []
    for link, after in zip(links, [*links[1:], None], strict=True):
        line = f"  rank {link.rank}: {spelt(link.slot)} from {number(link.start)} to {number(link.end)}"
        if after is not None:
            line += ", which waits for what comes from" if after.sent else ", which follows on"
        lines.append(line)
    return lines


def draw_in_terminal(timeline: Timeline, share: RankShare) -> None:
    """Print the schedule drawn to time, a row of colored cells for each rank."""
    from dualpipe_jax.command.drawing import print_drawing

    schedule = timeline.schedule
    title = f"{schedule.name}, {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches"
    print_drawing(timeline, console := make_console())
    line, table = summary(timeline, share)
    console.print(f"\n{title}: {line}", style="bold")
    console.print(f"cost of a stage: {describe(timeline.costs, share.units)}", style="dim")
    show(table)
