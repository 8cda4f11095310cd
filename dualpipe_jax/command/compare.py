"""`dualpipe compare`: schedules side by side."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import tyro

from dualpipe_jax.command.options import Costs, Memory, NothingFits, Shape, make_all
from dualpipe_jax.command.output import Reasons, Table, amount, describe, number, percent, show, show_json
from dualpipe_jax.schedule import CostModel, MemoryModel, Schedule, simulate
from dualpipe_jax.schedule.optimize.bounds import lower_bound


@dataclasses.dataclass(frozen=True)
class Row:
    """What a table says of a schedule; activations in units of a whole rank's share of the model.

    ``above_bound`` is how much longer the step is than the least that is proven for the same placement.
    """

    name: str
    makespan: float
    bubble: float
    above_bound: float
    largest_idle: float
    activations: float
    memory: float
    parameters: int
    pairs: bool

    @classmethod
    def of(cls, schedule: Schedule, costs: CostModel, sizes: MemoryModel, limit: float = math.inf) -> "Row":
        """Simulate a schedule under a whole rank's costs and sizes; a limit of memory raises the bound."""
        timeline = simulate(schedule, costs.for_schedule(schedule))
        counts = schedule.num_ranks, schedule.num_microbatches
        bound = lower_bound(*counts, costs, limit, placement=schedule.placement, memory=sizes)
        return cls(
            schedule.name,
            timeline.makespan,
            timeline.bubble,
            timeline.makespan / bound - 1 if bound else 0.0,
            max(timeline.idle),
            max(timeline.memory(MemoryModel().for_schedule(schedule))),
            max(timeline.memory(sizes.for_schedule(schedule))),
            schedule.placement.num_pipes,
            any(len(slot) == 2 for order in schedule.orders for slot in order),
        )


@dataclasses.dataclass(frozen=True)
class Compare:
    """Compare schedules on the same ranks, microbatches and costs, the shortest step first.

    dualpipe compare --ranks 16 --microbatches 64 --FB 2.25
    """

    ranks: int
    """Pipeline ranks."""
    microbatches: int
    """Microbatches of a step, over all pipes."""
    names: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[NAME ...]", help_behavior_hint="")
    ] = ()
    """Which schedules; all if none is named."""
    format: Literal["text", "markdown", "json"] = "text"
    """How the table is written."""
    json: bool = False
    """The same as --format json."""
    costs: Costs = dataclasses.field(default_factory=Costs)
    memory: Memory = dataclasses.field(default_factory=Memory)
    shape: Shape = dataclasses.field(default_factory=Shape)

    def run(self) -> int:
        """Print the table; returns the exit status."""
        costs, sizes = self.costs.model(), self.memory.model()
        schedules, refused = make_all(self.names, self.ranks, self.microbatches, self.shape)
        rows = by_merit(Row.of(schedule, costs, sizes) for schedule in schedules)
        given = f"{self.ranks} ranks, {self.microbatches} microbatches, {describe(costs)}"
        if self.json or self.format == "json":
            show_json(self.facts(rows, refused))
        elif self.format == "markdown":
            print("\n\n".join([tabulate(rows, sizes).markdown(), *map(_sentence, refused.items())]))
        elif rows:
            show(
                given,
                tabulate(rows, sizes),
                *([Reasons("not with these counts:", refused)] if refused else []),
            )
        if not rows:
            raise NothingFits(
                Reasons(
                    f"no schedule takes {self.ranks} ranks, {self.microbatches} microbatches:", refused
                ).plain()
            )
        return 0

    def facts(self, rows: list[Row], refused: dict[str, str]) -> dict[str, Any]:
        """What the table says, for programs."""
        costs = self.costs.model()
        return {
            "ranks": self.ranks,
            "microbatches": self.microbatches,
            "costs": dataclasses.asdict(costs),
            "lower_bound": lower_bound(self.ranks, self.microbatches, costs),
            "schedules": [dataclasses.asdict(row) for row in rows],
            "refused": refused,
        }


def tabulate(rows: list[Row], sizes: MemoryModel, best: int = 0) -> Table:
    """A table for people. Memory is a column of its own where sizes were given."""
    counted = sizes != MemoryModel()
    head = [
        "schedule",
        "makespan",
        "bubble",
        "above bound",
        "largest idle",
        "activations",
        "parameters",
        "pairs",
    ]
    lines = [
        [
            row.name,
            number(row.makespan),
            percent(row.bubble),
            percent(row.above_bound),
            number(row.largest_idle),
            number(row.activations),
            f"{row.parameters}x",
            "yes" if row.pairs else "no",
        ]
        for row in rows
    ]
    if counted:
        for line, row in zip([head, *lines], ["memory", *(amount(row.memory) for row in rows)], strict=True):
            line.insert(6, row)
    return Table(tuple(head), tuple(map(tuple, lines)), best)


def by_merit(rows: Iterable[Row]) -> list[Row]:
    """The shortest step first; of equal ones the one that needs least memory."""
    return sorted(rows, key=lambda row: (round(row.makespan, 9), row.memory, row.name))


def _sentence(item: tuple[str, str]) -> str:
    return f"Not with these counts: {item[0]}: {item[1]}."
