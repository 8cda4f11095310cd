"""`dualpipe choose`: which schedule for this model on these ranks."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, ClassVar

import tyro

from dualpipe_jax.command.compare import Row, best_first, facts, tabulate
from dualpipe_jax.command.options import (
    Costs,
    Memory,
    NothingFits,
    SearchOptions,
    Shape,
    check_jitter,
    check_size,
    with_shape,
)
from dualpipe_jax.command.output import Refusals, show, show_json, waiting
from dualpipe_jax.command.share_files import PartialShare, RankShare
from dualpipe_jax.schedule.names import SCHEDULES

if TYPE_CHECKING:
    from dualpipe_jax.schedule.optimize.choose import Candidate


@dataclasses.dataclass(frozen=True)
class Choose(SearchOptions):
    """Rank the schedules that fit the memory, the shortest step first, and say why the rest are refused.

    dualpipe choose --ranks 16 --microbatches 64 --FB 2.25 --memory-limit 17
    """

    COMMON: ClassVar = "ranks", "microbatches", "FB", "send", "costs", "memory-limit", "search", "json"

    search: Annotated[float, tyro.conf.arg(metavar="EFFORT")] = 0.0
    """Consider what `dualpipe search` finds with this effort, too. 0 does not search."""
    jitter: float = 0.0
    """Let each slot's time vary by this share of it (a standard deviation), and print the median and the 95th
    percentile of 200 runs."""
    json: bool = False
    """Print JSON, for programs."""
    costs: Costs = dataclasses.field(default_factory=Costs)
    memory: Memory = dataclasses.field(default_factory=Memory)
    shape: Shape = dataclasses.field(default_factory=Shape)

    def run(self) -> int:
        from dualpipe_jax.schedule import choose

        check_jitter(self.jitter)
        check_size(self.ranks, self.microbatches, self.shape, len(SCHEDULES))
        share, limit = PartialShare().overridden_by(self.costs, self.memory), self.limit
        with waiting("choosing"):
            candidates = choose(
                self.ranks,
                self.microbatches,
                share.costs,
                limit,
                memory=share.sizes,
                schedules=[with_shape(recipe, self.shape) for recipe in SCHEDULES.values()],
                search_effort=self.search,
            )
        fitting = [candidate.timeline for candidate in candidates if candidate.fits]
        refused = {
            candidate.name: _why_not(candidate, share, limit)
            for candidate in candidates
            if not candidate.fits
        }
        rows = best_first(
            Row.of(timeline, share.costs, share.sizes, limit, self.jitter)
            for timeline in filter(None, fitting)
        )
        given = share.in_words(self.ranks, self.microbatches, limit)
        if self.json:
            counts = self.ranks, self.microbatches
            show_json(facts(counts, share, rows, refused, memory_limit=self.memory_limit))
        elif rows:
            show(given, tabulate(rows, share), *([Refusals("refused:", refused)] if refused else []))
        if not rows:
            raise NothingFits(Refusals(f"no schedule fits {given}:", refused))
        return 0


def _why_not(candidate: "Candidate", share: RankShare, limit: float) -> str:
    """Why a candidate is refused; memory is in the unit that the costs name."""
    if candidate.memory and share.units.memory:
        rank = candidate.memory.index(candidate.peak)
        size = share.units.size
        return f"needs {size(candidate.peak)} on rank {rank}, but the limit is {size(limit)}"
    return candidate.refused.removeprefix(f"{candidate.name}: ").replace("memory_limit=", "--memory-limit ")
