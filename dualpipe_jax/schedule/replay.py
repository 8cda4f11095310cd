"""Compare a measured step with a simulated one: what its units cost, and which ranks and units differ most."""

import dataclasses
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from dualpipe_jax.schedule.costs import REL_TOLERANCE, CostModel
from dualpipe_jax.schedule.dataflow import execution_order, makers, needed_by
from dualpipe_jax.schedule.ir import Action, Placement, Schedule, Slot
from dualpipe_jax.schedule.simulate import Timeline, clock, simulate

Timed = tuple[str, tuple[Action, ...], float]
"""A unit that ran: its kind (F, B, I, W, or FB for a pair), its actions, and its duration."""

_OPS_OF_KIND = {"F": (0,), "B": (1, 2), "I": (1,), "W": (2,)}
"""For each kind, the indices of its parts in (F, I, W)."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A step that ran: the start and end of each slot. Times are in one unit, from the start of the first slot.

    Attributes:
      schedule: the schedule that was run.
      starts, ends: ``starts[rank][index]`` is the time at which slot ``orders[rank][index]`` started; ``ends``
        likewise.

    Raises:
      ValueError: a slot has no finite time, ends before it starts, or starts before the rank's previous slot starts.
    """

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    def __post_init__(self):
        counts = [len(order) for order in self.schedule.orders]
        for name, times in (("starts", self.starts), ("ends", self.ends)):
            if [len(row) for row in times] != counts:
                raise ValueError(
                    f"Measured: {name} of {[len(row) for row in times]} slots, but the ranks of {self.schedule.name} "
                    f"run {counts}; give one time for each slot"
                )
        for rank, (starts, ends) in enumerate(zip(self.starts, self.ends, strict=True)):
            for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
                before = starts[index - 1] if index else start
                if not before <= start <= end < math.inf:
                    raise ValueError(
                        f"Measured: rank {rank}, slot {index} runs from {start:g} to {end:g}, the one before it from "
                        f"{before:g}; times are finite, a slot ends after it starts, and slots start in order"
                    )

    @property
    def makespan(self) -> float:
        # Slots may overlap: a rank's last one need not end last.
        return max(itertools.chain.from_iterable(self.ends), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        return tuple(
            sum(end - start for start, end in zip(*rank, strict=True))
            for rank in zip(self.starts, self.ends, strict=True)
        )

    @property
    def idle(self) -> tuple[float, ...]:
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they idle."""
        return sum(self.idle) / (len(self.idle) * self.makespan) if self.makespan else 0.0

    @property
    def costs(self) -> CostModel:
        """Costs of a stage, sends included, estimated from the measured times: see ``fit`` and ``_send``."""
        timed = [(kind_of(slot), slot, end - start) for _, slot, start, end in self.slots()]
        return dataclasses.replace(fit(timed, self.schedule.placement), send=self._send())

    def slots(self) -> Iterator[tuple[int, Slot, float, float]]:
        """Yield the rank, slot, start and end of each slot."""
        for rank, order in enumerate(self.schedule.orders):
            for slot, start, end in zip(order, self.starts[rank], self.ends[rank], strict=True):
                yield rank, slot, start, end

    def _send(self) -> float:
        """The estimated time of a transfer: from the end of a slot to the start of one on another rank that reads it.

        It is the median over slots whose rank was free when the transfer began, since they wait for all of it. If
        there are none, it is the minimum over slots that waited for a part of a transfer, which began before their
        rank was free: some of these may have waited for something else. 0 if no slot waited.
        """
        placement, orders = self.schedule.placement, self.schedule.orders
        made = {value: (rank, self.ends[rank][index]) for value, (rank, index) in makers(orders).items()}
        whole, in_part = [], []
        for rank, order in enumerate(orders):
            for index, (slot, start) in enumerate(zip(order, self.starts[rank], strict=True)):
                free = self.ends[rank][index - 1] if index else 0.0
                inputs = [made[value] for action in slot for value in needed_by(placement, action)]
                sent = max((end for maker, end in inputs if maker != rank), default=math.inf)
                if free <= sent < math.inf:
                    whole.append(max(0.0, start - sent))
                elif sent < free and start - free > REL_TOLERANCE * self.makespan:
                    in_part.append(start - sent)
        return statistics.median(whole) if whole else min(in_part, default=0.0)


def kind_of(slot: Slot) -> str:
    """F, B, I, W, or FB for a pair."""
    return slot[0].op.value if len(slot) == 1 else "FB"


def fit(timed: Iterable[Timed], placement: Placement) -> CostModel:
    """Estimate the costs of a stage from units that ran: medians, and extras of the first and the last stage.

    Kinds that did not run are estimated: a forward is one third and a whole backward two thirds of a pair, I and
    W are halves of a backward, and a pair gains nothing. Where stages run whole backwards only, I and W take the parts
    of them that they take at other stages. The usual cost is that of the stages in the middle, else that of the
    faster end.

    Raises:
      ValueError: no unit that ran tells the cost of a forward or of a backward.
    """
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    pairs: list[tuple[tuple[Action, ...], float]] = []
    for kind, actions, took in timed:
        if kind == "FB":
            pairs.append((actions, took))
        else:
            times[kind][_position(placement, actions[0])].append(took)
    found = {kind: {at: statistics.median(t) for at, t in by.items()} for kind, by in times.items()}
    usual = _usual(found)
    if {"B", "I", "W"} <= usual.keys():
        # A place may run whole backwards only: their I and W take the same parts of them as elsewhere.
        part = usual["I"] / (usual["I"] + usual["W"] or 1.0)
        for place, took in found["B"].items():
            found["I"].setdefault(place, part * took)
            found["W"].setdefault(place, took - part * took)
        usual = _usual(found)
    if not pairs and not ("F" in usual and ("B" in usual or {"I", "W"} <= usual.keys())):
        raise ValueError("fit: no forwards or no backwards were measured; give a whole step")
    both = statistics.median(took for _, took in pairs) if pairs else 0.0
    backward = usual.get("B", usual["I"] + usual["W"] if {"I", "W"} <= usual.keys() else both * 2 / 3)
    forward, i, w = usual.get("F", both / 3), usual.get("I", backward / 2), usual.get("W", backward / 2)
    extra = {place: _extra_at(found, usual, place) for place in ("first", "middle", "last")}
    alone = [
        took - sum(extra[_position(placement, a)][part] for a in actions for part in _OPS_OF_KIND[a.op.value])
        for actions, took in pairs
    ]
    pair = max(0.0, statistics.median(alone)) if alone else forward + usual.get("B", i + w)
    return CostModel(
        forward,
        i,
        w,
        pair,
        extra={0: _limit_reduction(extra["first"], pair), -1: _limit_reduction(extra["last"], pair)},
    )


def _usual(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The time of each kind at the stages in the middle, else at the faster end."""
    return {kind: by.get("middle", min(by.values())) for kind, by in found.items()}


def _position(placement: Placement, action: Action) -> str:
    if placement.is_first(action.stage):
        return "first"
    return "last" if placement.is_last(action.stage) else "middle"


def _extra_at(
    found: Mapping[str, Mapping[str, float]], usual: Mapping[str, float], place: str
) -> tuple[float, float, float]:
    """The extra cost of F, I and W at a place over the usual stage; I gets two thirds of a longer whole backward."""
    more = {kind: by.get(place, usual[kind]) - usual[kind] for kind, by in found.items()}
    if "I" in more:
        return more.get("F", 0.0), more["I"], more.get("W", 0.0)
    backward = more.get("B", 0.0)
    part = 2 / 3 if backward > 0 else 1 / 2  # neither half of a backward may become negative
    return more.get("F", 0.0), part * backward, (1 - part) * backward


def _limit_reduction(more: tuple[float, float, float], pair: float) -> tuple[float, float, float]:
    """Scale a negative extra so that it subtracts no more than a pair takes.

    A stage with almost no work has an extra near -(F + I + W), but a pair takes less than F + I + W, since its
    parts overlap.
    """
    # Scaled parts round, and their sum must not pass the pair by a hair.
    most, much = pair * (1 - REL_TOLERANCE), -sum(more)
    return more if much <= most else tuple(cost * (most / much) for cost in more)  # type: ignore[return-value]


class Unit(NamedTuple):
    """All slots of one kind at one stage or, for pairs, at one forward stage and one backward stage."""

    kind: str
    stages: tuple[int, ...]
    times: tuple[float, ...]
    simulated: float

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def difference(self) -> float:
        """The measured time minus the simulated time, summed over all slots of the unit."""
        return sum(self.times) - len(self.times) * self.simulated


class SlotDifference(NamedTuple):
    """The measured and the simulated duration of one slot."""

    rank: int
    slot: Slot
    start: float
    took: float
    simulated: float


@dataclasses.dataclass(frozen=True)
class Replay:
    """A measured step and its schedule, simulated with given costs of a stage.

    Attributes:
      measured: the measured step.
      simulated: the same schedule, simulated with the costs.
      own: the makespan of the same schedule, simulated with the measured duration of each slot. Neither units nor
        transfers explain the time that a measured step takes beyond this.
    """

    measured: Measured
    simulated: Timeline
    own: float

    @property
    def units(self) -> tuple[Unit, ...]:
        """Kinds of units by stage, those first whose slots together differ most from the simulation."""
        placement, costs = self.simulated.schedule.placement, self.simulated.costs
        times: dict[Slot, list[float]] = defaultdict(list)
        for _, slot, start, end in self.measured.slots():
            times[tuple(action._replace(microbatch=0) for action in slot)].append(end - start)
        units = [
            Unit(kind_of(slot), tuple(stage for stage, _, _ in slot), tuple(took), costs.of(slot, placement))
            for slot, took in times.items()
        ]
        return tuple(sorted(units, key=lambda unit: -abs(unit.difference)))

    @property
    def slots(self) -> tuple[SlotDifference, ...]:
        """All slots, those first whose durations differ most from the simulation."""
        placement, costs = self.simulated.schedule.placement, self.simulated.costs
        differences = [
            SlotDifference(rank, slot, start, end - start, costs.of(slot, placement))
            for rank, slot, start, end in self.measured.slots()
        ]
        return tuple(sorted(differences, key=lambda one: -abs(one.took - one.simulated)))

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, those first whose busy time differs most from the simulation."""
        apart = [abs(one - other) for one, other in zip(self.measured.busy, self.simulated.busy, strict=True)]
        return tuple(sorted(range(len(apart)), key=lambda rank: -apart[rank]))


def replay(measured: Measured, costs: CostModel | None = None) -> Replay:
    """Simulate a measured step's schedule with costs of a stage; by default those estimated from the step itself.

    >>> from dualpipe_jax.schedule import one_f_one_b
    >>> ran = simulate(one_f_one_b(2, 4), CostModel(2, 3, 1, send=0.5))
    >>> found = replay(Measured(ran.schedule, ran.starts, ran.ends))
    >>> found.simulated.makespan == found.own == ran.makespan
    True

    Raises:
      ValueError: the schedule hangs.
    """
    schedule, costs = measured.schedule, costs or measured.costs
    simulated = simulate(schedule, costs)
    ran = execution_order(schedule.placement, schedule.orders)
    times = iter([measured.ends[rank][index] - measured.starts[rank][index] for rank, index in ran])
    _, ends = clock(schedule.placement, schedule.orders, ran, costs, vary=lambda _: next(times))
    return Replay(measured, simulated, max((row[-1] for row in ends if row), default=0.0))
