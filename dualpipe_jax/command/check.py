"""`dualpipe check`: whether a file's schedule computes the gradients, and ends without a deadlock."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from dualpipe_jax.command.options import Costs, Memory, Pipes
from dualpipe_jax.command.output import show, show_json
from dualpipe_jax.command.source import load
from dualpipe_jax.present.numbers import percent
from dualpipe_jax.schedule import ScheduleError, simulate


@dataclasses.dataclass(frozen=True)
class Check:
    """Check a schedule in a file: a grid as `dualpipe show` prints it, JSON, or PyTorch's CSV.

    Exit status 1 where it is invalid, with the culprit shown. Played against the costs that were written with it,
    unless others are given.
    """

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """The file, or - for standard input."""
    pipes: Pipes = None
    """The rank of each stage, pipe by pipe, such as "(0 1 1 0)". Needed for a file that does not say it."""
    json: bool = False
    """Print JSON, for programs."""
    costs: Costs = dataclasses.field(default_factory=Costs)

    def run(self) -> int:
        """Print a summary or the culprit; returns the exit status."""
        try:
            schedule, given = load(str(self.file), self.pipes)
        except ScheduleError as error:
            if not self.json:
                raise
            show_json({"valid": False, "error": str(error)})
            return 1
        share = given.overridden_by(self.costs, Memory())
        timeline = simulate(schedule, share.costs.for_schedule(schedule))
        pairs = sum(len(slot) == 2 for order in schedule.orders for slot in order)
        facts = {
            "name": schedule.name,
            "ranks": schedule.num_ranks,
            "microbatches": schedule.num_microbatches,
            "pipes": schedule.placement.pipes,
            "pairs": pairs,
            "makespan": timeline.makespan,
            "bubble": timeline.bubble,
            "units": dataclasses.asdict(share.units),
        }
        if self.json:
            show_json({"valid": True} | facts)
        else:
            show(
                f"valid: {schedule.name}, {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches, "
                f"{schedule.placement.num_stages} stages, {pairs} pairs; "
                f"makespan {share.units.duration(timeline.makespan)}, bubble {percent(timeline.bubble)}"
            )
        return 0
