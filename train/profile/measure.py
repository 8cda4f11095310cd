"""A step's timeline from its trace, the costs of its units, and what the schedule would take at these costs."""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dualpipe_jax.inspect import Module
from dualpipe_jax.schedule import Action, CostModel, Schedule, Timeline, simulate
from dualpipe_jax.schedule.costs import stages_a_share
from train.profile.capture import Event
from train.profile.match import (
    Execution,
    ProfileError,
    Unit,
    executions,
    expected_units,
    guards,
    lowered,
    match,
)


def _more(
    by_place: Mapping[str, Mapping[str, float]], place: str, usual: Mapping[str, float]
) -> tuple[float, float, float]:
    """What F, I and W take at a place beyond the usual stage; of a whole backward two thirds are I's. Never less."""
    at = {op: by_place.get(op, {}).get(place, cost) for op, cost in usual.items()}
    more = {op: max(0.0, at[op] - cost) for op, cost in usual.items()}
    if "I" in by_place:
        return more["F"], more["I"], more["W"]
    return more["F"], more["B"] * 2 / 3, more["B"] / 3


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a trace says of a schedule's step; times in milliseconds from the first unit's start.

    Attributes:
      schedule: whose step it is.
      units: by rank in order of the table, each with when it ran in the median step.
      durations: kind of unit -> of each execution in all steps, whatever its rank.
      num_steps: in the trace.
    """

    schedule: Schedule
    units: tuple[tuple[tuple[Unit, Execution], ...], ...]
    durations: Mapping[str, tuple[float, ...]]
    num_steps: int

    @property
    def makespan(self) -> float:
        """From the start of the first unit to the end of the last one."""
        return max(execution.end for rank in self.units for _, execution in rank)

    @property
    def busy(self) -> tuple[float, ...]:
        """Time in which each rank ran a unit."""
        return tuple(_covered([(e.start, e.end) for _, e in rank]) for rank in self.units)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they ran none."""
        return 1 - sum(self.busy) / (self.schedule.num_ranks * self.makespan)

    @property
    def costs(self) -> CostModel:
        """Costs of a stage: medians of what was measured; see ``assumed`` for what was not."""
        by_place = self._medians()
        # Of stages with neither embedding nor head, if there are any; else of the quicker end.
        median = {kind: found.get("middle", min(found.values())) for kind, found in by_place.items()}
        backward = median.get("B", median.get("FB", 0.0) * 2 / 3)
        forward = median.get("F", median.get("FB", 0.0) / 3)
        i, w = (median.get(op, backward / 2) for op in "IW")
        usual = {"F": forward, "B": median.get("B", i + w), "I": i, "W": w}
        ends = {stage: _more(by_place, place, usual) for stage, place in ((0, "first"), (-1, "last"))}
        # A pair that is no unit of its own is a forward and a backward, one after the other.
        return CostModel(forward, i, w, median.get("FB", forward + median.get("B", i + w)), extra=ends)

    def _medians(self) -> dict[str, dict[str, float]]:
        """The median of each kind of unit at the model's "first" stage, the "last" one and those in the "middle"."""
        placement, times = self.schedule.placement, defaultdict[str, dict[str, list[float]]](dict)
        for rank in self.units:
            for unit, execution in rank:
                places = {
                    "first"
                    if placement.is_first(a.stage)
                    else "last"
                    if placement.is_last(a.stage)
                    else "middle"
                    for a in unit.actions
                }
                place = "-".join(sorted(places))
                times[unit.kind].setdefault(place, []).append(execution.end - execution.start)
        return {
            kind: {place: statistics.median(seen) for place, seen in found.items()}
            for kind, found in times.items()
        }

    @property
    def assumed(self) -> tuple[str, ...]:
        """Costs of units that this schedule does not run: halves of B for I and W, no gain for FB."""
        return tuple(kind for kind in ("F", "I", "W", "FB") if kind not in self.durations)

    @property
    def theory(self) -> Timeline:
        """The schedule played against these costs."""
        return simulate(self.schedule, self.costs)

    def spans(self) -> dict[Action, tuple[float, float]]:
        """When each action ran."""
        found: dict[Action, tuple[float, float]] = {}
        for rank in self.units:
            for unit, execution in rank:
                for action in unit.actions:
                    start, end = found.get(action, (execution.start, execution.end))
                    found[action] = min(start, execution.start), max(end, execution.end)
        return found

    def replay(self) -> dict[str, Any]:
        """The costs of a rank's share of the model, as ``dualpipe ... --costs FILE`` reads them, and their origin."""
        costs, parts = self.costs, stages_a_share(self.schedule.placement)
        return {
            "costs": dataclasses.asdict(costs.divided(1 / parts)),
            "unit": "ms",
            "of": "a rank's whole share of the model, one microbatch",
            "schedule": self.schedule.name,
            "assumed": list(self.assumed),
            "measured": {
                kind: {
                    "count": len(times),
                    "median": statistics.median(times),
                    "least": min(times),
                    "most": max(times),
                }
                for kind, times in self.durations.items()
            },
        }


def measure(
    events: Iterable[Event], module: Module, schedule: Schedule, devices: Sequence[Sequence[int]]
) -> Measured:
    """Read a step's timeline from a trace.

    A rank's unit runs from its start on the first of the rank's devices to its end on the last: what a device waits in
    it for the others is in it.

    Args:
      events: of the trace.
      module: the program that was traced.
      schedule: that it runs.
      devices: of each rank, their numbers.

    Raises:
      ProfileError: the trace holds no step of this program.
    """
    units = guards(module)
    fused = any(kind == "FB" for kind, _ in units.values())
    expected = expected_units(schedule, lowered(schedule), fused=fused)
    by_run: dict[int, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        # Other programs have instructions of the same names.
        if event.op in units and event.program in ("", module.name):
            by_run[event.run][event.device].append(event)
    if not by_run:
        raise ProfileError("the trace has no unit of this program; was it taken while a step ran?")
    steps = [_step(run, units, expected, devices) for _, run in sorted(by_run.items())]
    durations: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for rank in step:
            for unit, execution in rank:
                durations[unit.kind].append(execution.end - execution.start)
    typical = sorted(steps, key=_length)[(len(steps) - 1) // 2]
    found = {kind: tuple(times) for kind, times in durations.items()}
    return Measured(schedule, typical, found, len(steps))


_Step = tuple[tuple[tuple[Unit, Execution], ...], ...]


def _step(
    run: Mapping[int, Sequence[Event]],
    units: Mapping[str, tuple[str, str]],
    expected: Sequence[Sequence[Sequence[Unit]]],
    devices: Sequence[Sequence[int]],
) -> _Step:
    """One step of all ranks, from 0 on."""
    ranks = []
    for rank, own in enumerate(devices):
        seen = [match(executions(run.get(d, ()), units), expected[rank], f"rank {rank}") for d in own]
        ranks.append(
            [
                (
                    same[0][0],
                    Execution(same[0][0].kind, min(e.start for _, e in same), max(e.end for _, e in same)),
                )
                for same in zip(*seen, strict=True)
            ]
        )
    first = min(execution.start for rank in ranks for _, execution in rank)
    return tuple(
        tuple((unit, e._replace(start=e.start - first, end=e.end - first)) for unit, e in rank)
        for rank in ranks
    )


def _length(step: _Step) -> float:
    return max(execution.end for rank in step for _, execution in rank)


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
