"""`dualpipe compare`: schedules side by side."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, Literal

import tyro

from dualpipe_jax.command.options import (
    CommandError,
    Costs,
    Count,
    Memory,
    NothingFits,
    Pipes,
    Shape,
    check_jitter,
)
from dualpipe_jax.command.output import Refusals, show, show_json
from dualpipe_jax.command.share_files import RankShare
from dualpipe_jax.command.source import schedules_of
from dualpipe_jax.present.numbers import number, percent
from dualpipe_jax.present.table import Table
from dualpipe_jax.schedule import CostModel, MemoryModel, Schedule, Timeline, simulate
from dualpipe_jax.schedule.simulate import jittered


@dataclasses.dataclass(frozen=True)
class Row:
    """A schedule's row of the table; activations are in units of a whole rank's share of the model.

    ``free_sends`` and ``real_sends`` are the makespans where transfers take no time, and where they take the time that
    was given, or else ``realistic_send``. ``jitter`` has the median and the 95th percentile of the makespan
    where slots vary, if that was asked for. ``above_bound`` is the share by which the step is longer than the proven
    lower bound for the same placement.
    """

    name: str
    makespan: float
    free_sends: float
    real_sends: float
    jitter: tuple[float, float] | None
    bubble: float
    above_bound: float
    largest_idle: float
    activations: float
    memory: float
    stages: int
    parameters: int
    pairs: bool

    @classmethod
    def of(
        cls,
        timeline: Timeline,
        costs: CostModel,
        sizes: MemoryModel,
        limit: float = math.inf,
        jitter: float = 0.0,
    ) -> "Row":
        """The row of a simulated schedule, from a whole rank's costs and sizes; a memory limit raises the bound."""
        from dualpipe_jax.schedule import lower_bound

        schedule = timeline.schedule
        other = simulate(schedule, other_send(costs).for_schedule(schedule)).makespan
        free, real = (other, timeline.makespan) if costs.dearest_send else (timeline.makespan, other)
        counts = schedule.num_ranks, schedule.num_microbatches
        bound = lower_bound(*counts, costs, limit, placement=schedule.placement, memory=sizes)
        return cls(
            schedule.name,
            timeline.makespan,
            free,
            real,
            _quantiles(schedule, timeline.costs, jitter) if jitter else None,
            timeline.bubble,
            timeline.makespan / bound - 1 if bound else 0.0,
            max(timeline.idle),
            max(timeline.memory(MemoryModel().for_schedule(schedule))),
            max(timeline.memory(sizes.for_schedule(schedule))),
            max(map(len, schedule.placement.stages_on)),
            schedule.placement.num_pipes,
            any(len(slot) == 2 for order in schedule.orders for slot in order),
        )


def realistic_send(costs: CostModel) -> float:
    """The time of a transfer where none is given: a fiftieth of a forward.

    DeepSeek-V3's microbatch of 4096 tokens is 4096 x 7168 values of 2 bytes, 59 MB, or 1.2 ms at the 50 GB/s of
    a network card; the forward of a rank's four layers takes 36 ms of computation and about as much again of
    communication (its published trace).
    """
    return 0.02 * costs.F


def other_send(costs: CostModel) -> CostModel:
    """The costs with free transfers, or if they are free already, with transfers of a realistic time."""
    free = dataclasses.replace(costs, send=0.0, send_inside=None)
    return free if costs.dearest_send else dataclasses.replace(free, send=realistic_send(costs))


@dataclasses.dataclass(frozen=True)
class Compare:
    """Compare schedules on the same ranks, microbatches and costs, the shortest step first.

    dualpipe compare --ranks 16 --microbatches 64 --FB 2.25 --send 0.02 --jitter 0.1
    """

    COMMON: ClassVar = "names", "ranks", "microbatches", "FB", "send", "costs", "jitter", "format", "json"

    names: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[NAME ...]")] = ()
    """The schedules, by their names or as files that `dualpipe check` reads. If left out, all schedules."""
    ranks: Count = None
    """Number of pipeline ranks. If left out, that of the first file."""
    microbatches: Count = None
    """Number of microbatches of a step, over all pipes. If left out, that of the first file."""
    pipes: Pipes = None
    """The rank of each stage, pipe by pipe, such as "(0 1 1 0)". Needed for a file that does not say it."""
    jitter: float = 0.0
    """Let each slot's time vary by this share of it (a standard deviation), and print the median and the 95th
    percentile of 200 runs."""
    format: Literal["text", "markdown", "json"] = "text"
    """How the table is written."""
    json: bool = False
    """Short for --format json."""
    costs: Costs = dataclasses.field(default_factory=Costs)
    memory: Memory = dataclasses.field(default_factory=Memory)
    shape: Shape = dataclasses.field(default_factory=Shape)

    def run(self) -> int:
        check_jitter(self.jitter)
        if self.json and self.format == "markdown":
            raise CommandError("--json and --format markdown are two formats; drop either")
        schedules, refused, remembered = schedules_of(
            self.names, self.ranks, self.microbatches, self.shape, self.pipes
        )
        share = remembered.overridden_by(self.costs, self.memory)
        if not schedules:
            counts = {"ranks": self.ranks, "microbatches": self.microbatches}
            asked = ", ".join(f"{count} {of}" for of, count in counts.items() if count is not None)
            raise NothingFits(Refusals(f"no schedule takes {asked}:", refused))
        ranks, microbatches = schedules[0].num_ranks, schedules[0].num_microbatches
        rows = rows_of(schedules, share, refused, jitter=self.jitter)
        if self.json or self.format == "json":
            from dualpipe_jax.schedule import lower_bound

            bound = lower_bound(ranks, microbatches, share.costs)
            show_json(facts((ranks, microbatches), share, rows, refused, lower_bound=bound))
        elif self.format == "markdown":
            sentences = (f"Not with these counts: {name}: {why}." for name, why in refused.items())
            print("\n\n".join([tabulate(rows, share).markdown(), *sentences]))
        else:
            show(
                share.in_words(ranks, microbatches),
                tabulate(rows, share),
                *([Refusals("not with these counts:", refused)] if refused else []),
            )
        return 0


def facts(
    counts: tuple[int, int], share: RankShare, rows: list[Row], refused: dict[str, str], **more: Any
) -> dict[str, Any]:
    """A comparison as JSON for programs; the entries of ``more`` stand before the schedules."""
    return {
        "ranks": counts[0],
        "microbatches": counts[1],
        "costs": dataclasses.asdict(share.costs),
        "units": dataclasses.asdict(share.units),
        **more,
        "schedules": [dataclasses.asdict(row) for row in rows],
        "refused": refused,
    }


def _quantiles(schedule: Schedule, costs: CostModel, jitter: float) -> tuple[float, float]:
    """The median and the 95th percentile of the makespan."""
    import numpy as np

    median, late = np.quantile(jittered(schedule, costs, jitter), (0.5, 0.95))
    return float(median), float(late)


def tabulate(rows: list[Row], share: RankShare, best: int = 0) -> Table:
    """The printed table. Memory and jitter have columns where they were asked for."""
    costs, _, units = share
    columns: dict[str, Callable[[Row], str]] = {
        "schedule": lambda row: row.name,
        "stages": lambda row: str(row.stages),
        units.of_time("makespan"): lambda row: number(row.makespan),
        f"send {number(other_send(costs).send)}": lambda row: number(
            row.free_sends if costs.dearest_send else row.real_sends
        ),
    }
    if any(row.jitter for row in rows):
        columns |= {
            "jitter 50 %": lambda row: number(row.jitter[0], 1) if row.jitter else "",
            "95 %": lambda row: number(row.jitter[1], 1) if row.jitter else "",
        }
    columns |= {
        "bubble": lambda row: percent(row.bubble),
        "above bound": lambda row: percent(row.above_bound),
        "largest idle": lambda row: number(row.largest_idle, of=row.makespan),
        "activations": lambda row: number(row.activations),
    }
    if share.counts_memory:
        columns[units.of_memory("memory")] = lambda row: units.size(row.memory)
    columns |= {
        "parameters": lambda row: f"{row.parameters}x",
        "pairs": lambda row: "yes" if row.pairs else "no",
    }
    return Table.of(columns, rows, best=best)


def rows_of(
    schedules: Iterable[Schedule],
    share: RankShare,
    refused: dict[str, str],
    limit: float = math.inf,
    jitter: float = 0.0,
) -> list[Row]:
    """A row for each schedule, the best first. If these costs do not suit one, ``refused`` gets the reason."""
    rows = []
    for schedule in schedules:
        try:
            own = share.costs.for_schedule(schedule)
        except ValueError as error:
            refused[schedule.name] = str(error)
        else:
            rows.append(Row.of(simulate(schedule, own), share.costs, share.sizes, limit, jitter))
    return best_first(rows)


def best_first(rows: Iterable[Row]) -> list[Row]:
    """The shortest step first; of equal ones the one that needs least memory."""
    # Nine digits, not nine decimals: a step may take 1e-9 of its unit, or 1e9.
    return sorted(rows, key=lambda row: (float(f"{row.makespan:.9g}"), row.memory, row.name))
