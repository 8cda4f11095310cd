"""`dualpipe replay`: a measured step beside the same schedule simulated."""

import dataclasses
from typing import Annotated, Any

import tyro

from dualpipe_jax.command.options import CommandError, Costs, Memory, read_text
from dualpipe_jax.command.output import show, show_json
from dualpipe_jax.command.share_files import PartialShare
from dualpipe_jax.present.numbers import Units, number, percent
from dualpipe_jax.present.table import Table
from dualpipe_jax.schedule.costs import stages_a_share
from dualpipe_jax.schedule.formats.costs_text import describe
from dualpipe_jax.schedule.formats.measured import read_measured
from dualpipe_jax.schedule.ir import spelt
from dualpipe_jax.schedule.replay import Replay, replay


@dataclasses.dataclass(frozen=True)
class ReplayStep:
    """Say where a measured step and its simulation differ: by rank, by kind of unit and stage, by single slot.

    Costs are the step's own medians, and its median wait for a transfer, unless --costs names others.

    dualpipe replay runs/NAME/profile/measured.json
    """

    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """A profile's measured.json or timeline.trace, any trace with rows "rank 0" ... and slices "0F3", or a
    schedule's JSON with "starts" and "ends" of the slots of each rank; - for standard input."""
    top: int = 8
    """How many ranks, units and slots to name."""
    json: bool = False
    """Print JSON, for programs."""
    costs: Costs = dataclasses.field(default_factory=Costs)

    def run(self) -> int:
        if self.top < 0:
            raise CommandError(f"--top {self.top}: give at least 0")
        measured, units = read_measured(read_text(self.file))
        costs = None
        if self.costs != Costs():
            share = PartialShare().overridden_by(self.costs, Memory())
            costs, units = share.costs.for_schedule(measured.schedule), _one_of(units, share.units)
        found = replay(measured, costs)
        if self.json:
            show_json(_facts(found, units))
        else:
            show(*_report(found, units, self.top))
        return 0


def _one_of(step: Units, costs: Units) -> Units:
    """The unit of time of a step and of costs; ValueError if they name two."""
    if step.time and costs.time and step.time != costs.time:
        raise ValueError(f"the step is in {step.time}, the costs in {costs.time}; give both in one unit")
    return step if step.time else costs


def _report(found: Replay, units: Units, top: int) -> list[str | Table]:
    measured, simulated = found.measured, found.simulated
    schedule = measured.schedule
    spans = (
        ("simulated at these costs", simulated.makespan),
        ("each unit as long as it took", found.own),
        ("measured", measured.makespan),
    )
    before = [0.0, *(span for _, span in spans)]
    rows = tuple(
        (name, number(span), "" if at == 0 else _signed(span - before[at], span))
        for at, (name, span) in enumerate(spans)
    )
    return [
        f"{schedule.name}, {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches; "
        f"cost of a stage: {describe(simulated.costs, units)}",
        f"bubble {percent(measured.bubble)} measured, {percent(simulated.bubble)} simulated\n",
        Table(("step", units.of_time("makespan"), "more"), rows),
        "\nranks whose work differs most",
        _ranks(found, units, top),
        "\nunits that differ most",
        _units(found, units, top),
        "\nslots that differ most",
        _slots(found, units, top),
    ]


def _ranks(found: Replay, units: Units, top: int) -> Table:
    measured, simulated = found.measured, found.simulated
    head = "rank", units.of_time("works"), "simulated", "idles", "simulated", "through at", "simulated"
    through = ([ends[-1] if ends else 0.0 for ends in line.ends] for line in (measured, simulated))
    columns = measured.busy, simulated.busy, measured.idle, simulated.idle, *through
    rows = (
        (str(rank), *(number(column[rank], of=measured.makespan) for column in columns))
        for rank in found.ranks[:top]
    )
    return Table(head, tuple(rows))


def _units(found: Replay, units: Units, top: int) -> Table:
    head = "unit", "times", units.of_time("median"), "simulated", "least", "most", "more in all"
    rows = (
        (
            f"{unit.kind} of stage{'s' * (len(unit.stages) > 1)} {', '.join(map(str, unit.stages))}",
            str(len(unit.times)),
            *map(number, (unit.median, unit.simulated, min(unit.times), max(unit.times))),
            _signed(unit.difference, sum(unit.times)),
        )
        for unit in found.units[:top]
    )
    return Table(head, tuple(rows))


def _slots(found: Replay, units: Units, top: int) -> Table:
    head = "slot", "rank", units.of_time("from"), "took", "simulated"
    rows = (
        (spelt(late.slot), str(late.rank), *map(number, (late.start, late.took, late.simulated)))
        for late in found.slots[:top]
    )
    return Table(head, tuple(rows))


def _signed(value: float, of: float) -> str:
    text = number(value, of=of)
    return text if text == "0" or text.startswith("-") else f"+{text}"


def _facts(found: Replay, units: Units) -> dict[str, Any]:
    measured, simulated = found.measured, found.simulated
    # As --costs reads them: of a rank's share, not of a stage.
    of_a_share = simulated.costs.divided(1 / stages_a_share(measured.schedule.placement))
    return {
        "schedule": measured.schedule.name,
        "units": dataclasses.asdict(units),
        "costs": dataclasses.asdict(of_a_share),
        "makespan": {"measured": measured.makespan, "simulated": simulated.makespan, "own": found.own},
        "bubble": {"measured": measured.bubble, "simulated": simulated.bubble},
        "busy": {"measured": measured.busy, "simulated": simulated.busy},
        "idle": {"measured": measured.idle, "simulated": simulated.idle},
        "ranks": found.ranks,
        "by_unit": [
            {"kind": unit.kind, "stages": unit.stages, "count": len(unit.times), "median": unit.median}
            | {"simulated": unit.simulated, "difference": unit.difference}
            for unit in found.units
        ],
        "slots": [
            {"rank": late.rank, "slot": spelt(late.slot), "start": late.start}
            | {"took": late.took, "simulated": late.simulated}
            for late in found.slots[:100]
        ],
    }
