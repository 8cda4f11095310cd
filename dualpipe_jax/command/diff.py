"""`dualpipe diff`: where two schedules part."""

import dataclasses
from typing import Annotated, Any

import tyro

from dualpipe_jax.command.options import CommandError, Costs, Count, Memory, Pipes, Shape
from dualpipe_jax.command.output import show, show_json
from dualpipe_jax.command.source import schedules_of
from dualpipe_jax.present.numbers import number
from dualpipe_jax.present.table import Table
from dualpipe_jax.schedule import simulate
from dualpipe_jax.schedule.difference import Divergence, partings
from dualpipe_jax.schedule.formats.costs_text import describe
from dualpipe_jax.schedule.ir import spelt


@dataclasses.dataclass(frozen=True)
class Diff:
    """Say where two schedules of the same placement part on each rank, in order and in time.

    dualpipe diff gpipe one_f_one_b --ranks 4 --microbatches 8
    """

    one: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """A schedule by name, or a file that `dualpipe check` reads."""
    other: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """Another."""
    ranks: Count = None
    """Number of pipeline ranks. If left out, that of the first file."""
    microbatches: Count = None
    """Number of microbatches of a step, over all pipes. If left out, that of the first file."""
    pipes: Pipes = None
    """The rank of each stage, pipe by pipe, such as "(0 1 1 0)". Needed for a file that does not say it."""
    json: bool = False
    """Print JSON, for programs."""
    costs: Costs = dataclasses.field(default_factory=Costs)
    shape: Shape = dataclasses.field(default_factory=Shape)

    def run(self) -> int:
        names = self.one, self.other
        schedules, refused, given = schedules_of(names, self.ranks, self.microbatches, self.shape, self.pipes)
        if refused:
            raise CommandError("; ".join(f"{name}: {why}" for name, why in refused.items()))
        costs, _, units = given.overridden_by(self.costs, Memory())
        one, other = (
            simulate(schedule, costs.for_schedule(schedule)) for schedule in (schedules[0], schedules[-1])
        )
        found = partings(one, other)
        if self.json:
            show_json(
                {
                    "names": names,
                    "makespans": [one.makespan, other.makespan],
                    "units": dataclasses.asdict(units),
                    "ranks": [_facts(parting) for parting in found],
                }
            )
            return 0
        spans = (
            f"makespan {number(one.makespan)} and {units.duration(other.makespan)}; {describe(costs, units)}"
        )
        show(f"{self.one} and {self.other}: {spans}")
        head = "rank", "part at slot", self.one, self.other, units.of_time("part at time")
        rows = tuple(
            (
                str(at.rank),
                "-" if at.index is None else str(at.index),
                "-" if at.one is None else spelt(at.one),
                "-" if at.other is None else spelt(at.other),
                "-" if at.time is None else number(at.time),
            )
            for at in found
        )
        show(Table(head, rows) if rows else "the same on every rank, in order and in time")
        return 0


def _facts(at: Divergence) -> dict[str, Any]:
    one, other = (None if slot is None else spelt(slot) for slot in (at.one, at.other))
    return {"rank": at.rank, "slot": at.index, "one": one, "other": other, "time": at.time}
