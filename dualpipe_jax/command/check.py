"""`dualpipe check`: is a file's schedule one that computes the gradients, and ends?"""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Annotated

import tyro

from dualpipe_jax.command.options import CommandError, Costs
from dualpipe_jax.command.output import number, percent, show, show_json
from dualpipe_jax.schedule import Placement, Schedule, ScheduleError, parse_grid, simulate, validate
from dualpipe_jax.schedule.formats.json_text import from_json


@dataclasses.dataclass(frozen=True)
class Check:
    """Check a schedule in a file: a grid as `dualpipe show` prints it, JSON, or PyTorch's CSV.

    Exit status 1 where it is invalid, with the culprit shown.
    """

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """The file, or - for standard input."""
    pipes: Annotated[str | None, tyro.conf.arg(metavar="PIPES", help_behavior_hint="")] = None
    """The rank of each stage, pipe by pipe, such as "(0 1 1 0)", where the file does not say."""
    json: bool = False
    """Print for programs."""
    costs: Costs = dataclasses.field(default_factory=Costs)

    def run(self) -> int:
        """Print a summary or the culprit; returns the exit status."""
        try:
            text = sys.stdin.read() if str(self.file) == "-" else self.file.read_text()
        except UnicodeDecodeError:
            raise CommandError(f"{self.file}: not a text; give a grid, JSON or PyTorch's CSV") from None
        placement = None if self.pipes is None else parse_pipes(self.pipes)
        try:
            schedule = validate(read(text, placement))
        except CommandError:
            raise
        except ValueError as error:
            if self.json:
                show_json({"valid": False, "error": str(error)})
                return 1
            raise (
                error if isinstance(error, ScheduleError) else ScheduleError(f"{self.file}: {error}")
            ) from None
        self.report(schedule)
        return 0

    def report(self, schedule: Schedule) -> None:
        """Say what was found."""
        timeline = simulate(schedule, self.costs.model().for_schedule(schedule))
        pairs = sum(len(slot) == 2 for order in schedule.orders for slot in order)
        facts = {
            "name": schedule.name,
            "ranks": schedule.num_ranks,
            "microbatches": schedule.num_microbatches,
            "pipes": schedule.placement.pipes,
            "pairs": pairs,
            "makespan": timeline.makespan,
            "bubble": timeline.bubble,
        }
        if self.json:
            show_json({"valid": True} | facts)
            return
        show(
            f"valid: {schedule.name}, {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches, "
            f"{schedule.placement.num_stages} stages, {pairs} pairs; "
            f"makespan {number(timeline.makespan)}, bubble {percent(timeline.bubble)}"
        )


def read(text: str, placement: Placement | None) -> Schedule:
    """The schedule of a text in any format that holds one.

    Raises:
      CommandError: the text does not say where stages live, and no placement is given.
      ValueError: it cannot be read.
    """
    if text.lstrip().startswith("{"):
        return from_json(text)
    if _is_csv(text):
        from dualpipe_jax.schedule.formats.torch_csv import from_torch_csv

        return from_torch_csv(text, placement)
    if placement is None and not re.match(r"\s*#.*pipes\s*\(", text):
        raise CommandError('where do the stages live? Add --pipes, such as --pipes "(0 1 2 3)"')
    return parse_grid(text, placement)


def parse_pipes(text: str) -> Placement:
    """Read the rank of each stage: (0 1 2 3) (3 2 1 0), commas or spaces."""
    pipes = [re.findall(r"\d+", pipe) for pipe in re.findall(r"\(([\d\s,]*)\)", text)]
    if not pipes or re.sub(r"\([\d\s,]*\)|[\s,]", "", text):
        raise CommandError(f'--pipes {text!r}: expected ranks in brackets, such as "(0 1 2 3) (3 2 1 0)"')
    return Placement(tuple(tuple(map(int, pipe)) for pipe in pipes))


def _is_csv(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return any("," in line or ";" in line for line in lines)
