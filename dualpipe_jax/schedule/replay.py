"""A measured step beside a simulated one: what its units cost, and which ranks and units differ most."""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from dualpipe_jax.schedule.costs import HAIR, CostModel
from dualpipe_jax.schedule.dataflow import execution_order, makers, needed_by
from dualpipe_jax.schedule.ir import Action, Placement, Schedule, Slot
from dualpipe_jax.schedule.simulate import Timeline, clock, simulate

Timed = tuple[str, tuple[Action, ...], float]
"""A unit that ran: its kind (F, B, I, W, or FB for a pair), the actions that it did, how long it took."""

_PARTS = {"F": (0,), "B": (1, 2), "I": (1,), "W": (2,)}
"""The ops of F, I and W that each kind does."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A step that ran: when each slot of a schedule did. Times are in one unit, from the first slot's start.

    Attributes:
      schedule: what was run.
      starts, ends: by rank, of each slot of its order.

    Raises:
      ValueError: a slot has no time, ends before it starts, or starts before the rank is through with the one before.
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
                if not before <= start <= end:
                    raise ValueError(
                        f"Measured: rank {rank}, slot {index} runs from {start:g} to {end:g}, the one before it from "
                        f"{before:g}; a slot ends after it starts, and slots start in order"
                    )

    @property
    def makespan(self) -> float:
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

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
        """Costs of a stage, sends among them, that the step was played by: see ``fit`` and ``_sends``."""
        timed = [(kind_of(slot), slot, end - start) for _, slot, start, end in self.slots()]
        return dataclasses.replace(fit(timed, self.schedule.placement), send=self._send())

    def slots(self) -> Iterator[tuple[int, Slot, float, float]]:
        """Rank, slot, start and end of each."""
        for rank, order in enumerate(self.schedule.orders):
            for slot, start, end in zip(order, self.starts[rank], self.ends[rank], strict=True):
                yield rank, slot, start, end

    def _send(self) -> float:
        """The median time between what another rank made and the start that waited for all of its transfer.

        Where ranks wait for parts of transfers only, which began before they were free, it is the least of these times:
        some of these ranks may have waited for something else.
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
                elif sent < free and start - free > HAIR * self.makespan:
                    in_part.append(start - sent)
        return statistics.median(whole) if whole else min(in_part, default=0.0)


def kind_of(slot: Slot) -> str:
    """F, B, I, W, or FB for a pair."""
    return slot[0].op.value if len(slot) == 1 else "FB"


def fit(timed: Iterable[Timed], placement: Placement) -> CostModel:
    """Costs of a stage from units that ran: medians, and what the first and the last stage take more or less.

    Of kinds that did not run: a whole backward is two thirds of a pair, its two parts are halves of it, a pair gains
    nothing. A stage in the middle is the usual one; where there is none, the quicker end is.

    Raises:
      ValueError: nothing ran that tells of forwards or backwards.
    """
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    pairs: list[tuple[tuple[Action, ...], float]] = []
    for kind, actions, took in timed:
        if kind == "FB":
            pairs.append((actions, took))
        else:
            times[kind][_place(placement, actions[0])].append(took)
    found = {kind: {at: statistics.median(t) for at, t in by.items()} for kind, by in times.items()}
    usual = {kind: by.get("middle", min(by.values())) for kind, by in found.items()}
    both = statistics.median(took for _, took in pairs) if pairs else 0.0
    backward = usual.get("B", usual["I"] + usual["W"] if {"I", "W"} <= usual.keys() else both * 2 / 3)
    forward, i, w = usual.get("F", both / 3), usual.get("I", backward / 2), usual.get("W", backward / 2)
    if not forward or not backward:
        raise ValueError("fit: no forwards or no backwards were measured; give a whole step")
    extra = {place: _more(found, usual, place) for place in ("first", "middle", "last")}
    alone = [
        took - sum(extra[_place(placement, a)][part] for a in actions for part in _PARTS[a.op.value])
        for actions, took in pairs
    ]
    pair = max(0.0, statistics.median(alone)) if alone else forward + usual.get("B", i + w)
    return CostModel(
        forward, i, w, pair, extra={0: _at_most(extra["first"], pair), -1: _at_most(extra["last"], pair)}
    )


def _place(placement: Placement, action: Action) -> str:
    if placement.is_first(action.stage):
        return "first"
    return "last" if placement.is_last(action.stage) else "middle"


def _more(
    found: Mapping[str, Mapping[str, float]], usual: Mapping[str, float], place: str
) -> tuple[float, float, float]:
    """What F, I and W take at a place beyond the usual stage; of a longer whole backward two thirds are I's."""
    more = {kind: by.get(place, usual[kind]) - usual[kind] for kind, by in found.items()}
    if "I" in more:
        return more.get("F", 0.0), more["I"], more.get("W", 0.0)
    backward = more.get("B", 0.0)
    part = 2 / 3 if backward > 0 else 1 / 2  # no half of a backward may become less than nothing
    return more.get("F", 0.0), part * backward, (1 - part) * backward


def _at_most(more: tuple[float, float, float], pair: float) -> tuple[float, float, float]:
    """No more taken away than a pair takes, in which a stage of next to nothing has less to hide."""
    much = -sum(more) / pair if pair else 1.0
    return more if much <= 1 else tuple(cost / much for cost in more)  # type: ignore[return-value]


class Unit(NamedTuple):
    """All slots of a kind at a stage (a pair's forward's), or at a pair of stages."""

    kind: str
    stages: tuple[int, ...]
    times: tuple[float, ...]
    simulated: float

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def difference(self) -> float:
        """Measured beyond simulated, all together."""
        return sum(self.times) - len(self.times) * self.simulated


class Late(NamedTuple):
    """One slot that took longer or shorter than simulated."""

    rank: int
    slot: Slot
    start: float
    took: float
    simulated: float


@dataclasses.dataclass(frozen=True)
class Replay:
    """A measured step, simulated at some costs of a stage.

    Attributes:
      measured: the step.
      simulated: the same schedule at the costs.
      own: the same, each slot at the time that it took; what a measured step takes longer than this are waits that
        neither units nor transfers explain.
    """

    measured: Measured
    simulated: Timeline
    own: float

    @property
    def units(self) -> tuple[Unit, ...]:
        """Kinds of units by stage, those first that differ most, all their slots together."""
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
    def slots(self) -> tuple[Late, ...]:
        """Slots, those first that differ most."""
        placement, costs = self.simulated.schedule.placement, self.simulated.costs
        late = [
            Late(rank, slot, start, end - start, costs.of(slot, placement))
            for rank, slot, start, end in self.measured.slots()
        ]
        return tuple(sorted(late, key=lambda one: -abs(one.took - one.simulated)))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks, those first whose work differs most."""
        apart = [abs(one - other) for one, other in zip(self.measured.busy, self.simulated.busy, strict=True)]
        return tuple(sorted(range(len(apart)), key=lambda rank: -apart[rank]))


def replay(measured: Measured, costs: CostModel | None = None) -> Replay:
    """Play a measured step's schedule at costs of a stage; its own medians and sends if left out.

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
