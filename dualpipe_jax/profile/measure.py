"""A step's timeline from its trace, the costs of its units, and the schedule simulated at these costs."""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dualpipe_jax.inspect import Module
from dualpipe_jax.profile.capture import Event
from dualpipe_jax.profile.match import (
    Execution,
    ProfileError,
    Unit,
    executions,
    expected_units,
    match,
    unit_guards,
)
from dualpipe_jax.schedule import Action, CostModel, Schedule, Timeline, lower, simulate
from dualpipe_jax.schedule.costs import stages_a_share
from dualpipe_jax.schedule.replay import fit


@dataclasses.dataclass(frozen=True)
class Measured:
    """The timeline of a schedule's step in a trace; times are in milliseconds from the first unit's start.

    Attributes:
      schedule: the schedule that the step runs.
      units: the units of each rank in the order of the table, each with its start and end in the median step.
      durations: for each kind of unit, the durations of all its executions, over all ranks and steps.
      num_steps: number of steps in the trace.
    """

    schedule: Schedule
    units: tuple[tuple[tuple[Unit, Execution], ...], ...]
    durations: Mapping[str, tuple[float, ...]]
    num_steps: int

    @property
    def makespan(self) -> float:
        """The time from the start of the first unit to the end of the last one."""
        return max(execution.end for rank in self.units for _, execution in rank)

    @property
    def busy(self) -> tuple[float, ...]:
        """The time in which each rank ran a unit, in milliseconds."""
        return tuple(_union_length([(e.start, e.end) for _, e in rank]) for rank in self.units)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they ran no unit."""
        return 1 - sum(self.busy) / (self.schedule.num_ranks * self.makespan)

    @property
    def costs(self) -> CostModel:
        """Costs of a stage: the medians of the units that were measured; ``assumed`` names the others."""
        units = ((unit, execution) for rank in self.units for unit, execution in rank)
        return fit(((unit.kind, unit.actions, e.end - e.start) for unit, e in units), self.schedule.placement)

    @property
    def assumed(self) -> tuple[str, ...]:
        """The costs that are assumed, since the schedule has no such unit: I and W half of B each, FB without gain."""
        return tuple(kind for kind in ("F", "I", "W", "FB") if kind not in self.durations)

    @property
    def theory(self) -> Timeline:
        """The schedule simulated at the measured costs."""
        return simulate(self.schedule, self.costs)

    def spans(self) -> dict[Action, tuple[float, float]]:
        """The start and the end of each action, in milliseconds."""
        found: dict[Action, tuple[float, float]] = {}
        for rank in self.units:
            for unit, execution in rank:
                for action in unit.actions:
                    start, end = found.get(action, (execution.start, execution.end))
                    found[action] = min(start, execution.start), max(end, execution.end)
        return found

    def times(self) -> tuple[list[list[float]], list[list[float]]]:
        """Starts and ends of the slots of each rank's order; a pair lasts from its first start to its last end."""
        spans, orders = self.spans(), self.schedule.orders
        starts = [[min(spans[action][0] for action in slot) for slot in order] for order in orders]
        return starts, [[max(spans[action][1] for action in slot) for slot in order] for order in orders]

    def replay(self) -> dict[str, Any]:
        """The costs of a rank's share of the model, as ``dualpipe ... --costs FILE`` reads them, and their origin."""
        costs, parts = self.costs, stages_a_share(self.schedule.placement)
        return {
            "costs": dataclasses.asdict(costs.divided(1 / parts)),
            "units": {"time": "ms"},
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

    A rank's unit runs from its start on the first of the rank's devices to its end on the last: the time that a device
    waits in it for the others is included.

    Args:
      events: the trace's events, from ``read_events``.
      module: the program that was traced, from ``inspect.read``.
      schedule: the schedule that the program runs.
      devices: for each rank, the numbers of its devices.

    Raises:
      ProfileError: the trace holds no step of this program.
    """
    units = unit_guards(module)
    fused = any(kind == "FB" for kind, _ in units.values())
    expected = expected_units(schedule, lower(schedule), fused=fused)
    by_run: dict[int, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        # Other programs have instructions of the same names.
        if event.op in units and event.program in ("", module.name):
            by_run[event.run][event.device].append(event)
    if not by_run:
        raise ProfileError("the trace has no unit of this program; was it taken while a step ran?")
    steps = [_measure_step(run, units, expected, devices) for _, run in sorted(by_run.items())]
    durations: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for rank in step:
            for unit, execution in rank:
                durations[unit.kind].append(execution.end - execution.start)
    typical = sorted(steps, key=_makespan)[(len(steps) - 1) // 2]
    found = {kind: tuple(times) for kind, times in durations.items()}
    return Measured(schedule, typical, found, len(steps))


_MeasuredStep = tuple[tuple[tuple[Unit, Execution], ...], ...]


def _measure_step(
    run: Mapping[int, Sequence[Event]],
    units: Mapping[str, tuple[str, str]],
    expected: Sequence[Sequence[Sequence[Unit]]],
    devices: Sequence[Sequence[int]],
) -> _MeasuredStep:
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


def _makespan(step: _MeasuredStep) -> float:
    return max(execution.end for rank in step for _, execution in rank)


def _union_length(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
