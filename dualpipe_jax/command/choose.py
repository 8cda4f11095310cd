"""`dualpipe choose`: which schedule for this model on these ranks."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from dualpipe_jax.command.compare import Row, by_merit, tabulate
from dualpipe_jax.command.given import Given
from dualpipe_jax.command.options import Costs, Memory, NothingFits, Number, Shape, limit_of, recipes
from dualpipe_jax.command.output import Reasons, amount, describe, show, show_json, waiting

if TYPE_CHECKING:
    from dualpipe_jax.schedule.optimize.choose import Candidate


@dataclasses.dataclass(frozen=True)
class Choose:
    """Rank the schedules that fit the memory, the shortest step first, and say why the rest are refused.

    dualpipe choose --ranks 16 --microbatches 64 --FB 2.25 --memory-limit 17
    """

    ranks: int
    """Pipeline ranks."""
    microbatches: int
    """Microbatches of a step, over all pipes."""
    memory_limit: Number = None
    """The most that a rank may keep, in the unit of the sizes below; where none is given, the unit is the
    activations of a microbatch in a whole rank's share. No limit if left out."""
    search: Annotated[float, tyro.conf.arg(metavar="EFFORT")] = 0.0
    """Consider what `dualpipe search` finds with this effort, too."""
    jitter: float = 0.0
    """Each slot's time varies by this share of it (a standard deviation): median and 95th percentile of 200 runs."""
    json: bool = False
    """Print for programs."""
    costs: Costs = dataclasses.field(default_factory=Costs)
    memory: Memory = dataclasses.field(default_factory=Memory)
    shape: Shape = dataclasses.field(default_factory=Shape)

    def run(self) -> int:
        """Print the ranking; returns the exit status."""
        costs, sizes = Given().under(self.costs, self.memory)
        limit = limit_of(self.memory_limit)
        candidates = self.candidates(limit)
        fitting = [candidate.schedule for candidate in candidates if candidate.fits]
        rows = by_merit(
            Row.of(schedule, costs, sizes, limit, self.jitter) for schedule in fitting if schedule
        )
        refused = {
            candidate.name: candidate.refused.removeprefix(f"{candidate.name}: ")
            for candidate in candidates
            if not candidate.fits
        }
        given = f"{self.ranks} ranks, {self.microbatches} microbatches, {describe(costs)}"
        if self.memory_limit is not None:
            given += f", memory limit {amount(limit)}"
        if self.json:
            show_json(self.facts(rows, refused))
        elif rows:
            show(given, tabulate(rows, costs, sizes), *([Reasons("refused:", refused)] if refused else []))
        if not rows:
            raise NothingFits(Reasons(f"no schedule fits {given}:", refused).plain())
        return 0

    def candidates(self, limit: float) -> "tuple[Candidate, ...]":
        """All that were considered."""
        from dualpipe_jax.schedule.optimize.choose import choose

        costs, sizes = Given().under(self.costs, self.memory)
        with waiting("choosing"):
            return choose(
                self.ranks,
                self.microbatches,
                costs,
                limit,
                memory=sizes,
                schedules=recipes(self.shape),
                search_effort=self.search,
            )

    def facts(self, rows: list[Row], refused: dict[str, str]) -> dict[str, Any]:
        """The ranking, for programs."""
        return {
            "ranks": self.ranks,
            "microbatches": self.microbatches,
            "costs": dataclasses.asdict(Given().under(self.costs, self.memory)[0]),
            "memory_limit": self.memory_limit,
            "schedules": [dataclasses.asdict(row) for row in rows],
            "refused": refused,
        }
