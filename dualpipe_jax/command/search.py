"""`dualpipe search`: a schedule made for the costs, beside the named ones."""

import dataclasses
import json
import math
import time
from typing import Annotated, Any, ClassVar, Literal

import tyro

from dualpipe_jax.command.compare import Row, best_first, rows_of, tabulate
from dualpipe_jax.command.formats import encode, format_of, write
from dualpipe_jax.command.options import (
    Costs,
    Memory,
    NothingFits,
    Number,
    Output,
    SearchOptions,
    Shape,
    check_size,
)
from dualpipe_jax.command.output import in_terminal, show, show_json, waiting
from dualpipe_jax.command.share_files import PartialShare, RankShare
from dualpipe_jax.present.numbers import Units, percent
from dualpipe_jax.schedule import ALL_SCHEDULES, CostModel, MemoryModel, Schedule, simulate
from dualpipe_jax.schedule.costs import REL_TOLERANCE, at_most
from dualpipe_jax.schedule.formats.json_text import to_json
from dualpipe_jax.schedule.optimize.seeds import schedules_for_counts


@dataclasses.dataclass(frozen=True)
class Search(SearchOptions):
    """Search for a schedule for these costs, sends among them, in this memory.

    It is no longer than any named one that fits and has one copy of the parameters, or the placement asked for.
    More memory never makes it longer.

    dualpipe search --ranks 8 --microbatches 32 --FB 2.25 --memory-limit 9 -o found.json
    """

    COMMON: ClassVar = (
        "ranks", "microbatches", "FB", "send", "costs", "memory-limit", "placement", "effort", "output", "json",
    )  # fmt: skip

    placement: Annotated[
        Literal["linear", "v", "wave", "interleaved", "interleaved_4", "bidirectional"] | None,
        tyro.conf.arg(metavar="{linear,v,wave,interleaved,interleaved_4,bidirectional}"),
    ] = None
    """Which rank has which stage. If left out, all are tried but bidirectional, which needs two copies of the
    parameters."""
    effort: float = 1.0
    """How much to try. The search takes longer with more effort."""
    seconds: Number = None
    """Stop trying after so many seconds, whatever the effort."""
    output: Output = None
    """File to write the schedule to: CSV, JSON, SVG, PNG or HTML if its name ends so, else a grid."""
    json: bool = False
    """Print JSON, for programs; the schedule is in it."""
    costs: Costs = dataclasses.field(default_factory=Costs)
    memory: Memory = dataclasses.field(default_factory=Memory)

    def run(self) -> int:
        """Search, keep what was found, and print how it compares; returns the exit status."""
        check_size(self.ranks, self.microbatches, Shape(), len(ALL_SCHEDULES))
        form = format_of(None, False, self.output)
        share = PartialShare().overridden_by(self.costs, self.memory)
        costs, sizes, units = share
        began = time.perf_counter()
        with waiting("searching"):
            found = self.find(costs, sizes)
        seconds = time.perf_counter() - began
        timeline = simulate(found, costs.for_schedule(found))
        if self.output is not None:
            write(encode(timeline, form, share), self.output)
        ours, named = Row.of(timeline, costs, sizes, self.limit), self.named(share)
        if self.json:
            show_json(_facts(found, ours, named, seconds) | {"units": dataclasses.asdict(units)})
        else:
            rows = best_first([ours, *named])
            given = share.in_words(self.ranks, self.microbatches, self.limit)
            show(given, tabulate(rows, share, best=rows.index(ours)))
            unwritten = "; --output FILE keeps it" if in_terminal() else ""
            kept = unwritten if self.output is None else f"; written to {self.output}"
            show(f"{_verdict(ours, named, units)}; found in {seconds:.1f} s{kept}")
        return 0

    def find(self, costs: CostModel, sizes: MemoryModel) -> Schedule:
        """Search for the schedule.

        Raises:
          NothingFits: the memory limit allows no schedule.
        """
        from dualpipe_jax.schedule.optimize.search import search

        try:
            return search(
                self.ranks,
                self.microbatches,
                costs,
                self.limit,
                self.placement,
                memory=sizes,
                effort=self.effort,
                seconds=self.seconds,
            )
        except ValueError as error:
            if "memory_limit=" in str(error):
                raise NothingFits(str(error).replace("memory_limit=", "--memory-limit ")) from None
            raise

    def named(self, share: RankShare) -> list[Row]:
        """The named schedules that fit the memory, the best first."""
        schedules = schedules_for_counts(ALL_SCHEDULES, self.ranks, self.microbatches)
        rows = rows_of(schedules, share, {}, self.limit)
        return best_first(row for row in rows if at_most(row.memory, self.limit))


def _verdict(ours: Row, named: list[Row], units: Units) -> str:
    if not named:
        return "no named schedule fits"
    best = named[0]
    if math.isclose(ours.makespan, best.makespan, rel_tol=REL_TOLERANCE):
        return f"as long as {best.name}, the best of the named that fit"
    change = best.makespan - ours.makespan
    # Longer only than one on another placement than was asked for.
    which = "shorter" if change > 0 else "longer"
    by = percent(abs(change) / best.makespan)
    return f"{units.duration(abs(change))} ({by}) {which} than {best.name}, the best of the named that fit"


def _facts(found: Schedule, ours: Row, named: list[Row], seconds: float) -> dict[str, Any]:
    return {
        "found": dataclasses.asdict(ours),
        "named": [dataclasses.asdict(row) for row in named],
        "seconds": seconds,
        "schedule": json.loads(to_json(found)),
    }
