"""A lowered schedule: the integer arrays that the engine's scan reads."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from dualpipe_jax.schedule.costs import CostModel
from dualpipe_jax.schedule.ir import Action, Op, Schedule, Slot
from dualpipe_jax.schedule.lowering.flat import Channel
from dualpipe_jax.schedule.lowering.ticks import makespan

OPS = ("F", "B", "I", "W", "FB")
"""What a rank may do in a tick: one of these, or nothing."""

Life = Literal["FI", "FW", "IW"]
"""The unit that fills a slot, and the last one that reads it (of a full backward, which is both, B)."""


@dataclasses.dataclass(frozen=True)
class Keeps:
    """What stages of each kind keep between their units.

    Attributes:
      kind_of: the kind of each model stage, numbers from 0.
      keep_input: for each kind, how long a stage's input stays in its slot: to the end of "F", of "I" or of "W" (with a
        full backward the last two are the same).
      pools: by name, for each kind that keeps values there how long: "FI", from its F to its I, "FW" or "IW". A kind
        may use many pools, and none.
    """

    kind_of: tuple[int, ...]
    keep_input: tuple[Literal["F", "I", "W"], ...]
    pools: Mapping[str, Mapping[int, Life]]

    @classmethod
    def alike(cls, num_stages: int, keep_input: Literal["F", "I", "W"] = "W") -> "Keeps":
        """All stages of one kind, which keeps something for each of its units."""
        pools: dict[str, Mapping[int, Life]] = {
            "residual_i": {0: "FI"},
            "residual_w": {0: "FW"},
            "stash": {0: "IW"},
        }
        return cls((0,) * num_stages, (keep_input,), pools)


class Stand(NamedTuple):
    """Where a unit works: the rank's local stage (position in ``placement.stages_on[rank]``), and its kind."""

    local: int
    kind: int


class Unit(NamedTuple):
    """What a rank does in a tick: an op, and the stages of its forward and of its backward part."""

    op: str
    forward: Stand | None
    backward: Stand | None

    def slot(self, stages: Sequence[int]) -> Slot:
        """It as a slot of a rank that holds these stages, of a microbatch of any number."""
        parts = (self.forward, Op.F), (self.backward, Op.B if self.op == "FB" else Op(self.op))
        return tuple(Action(stages[stand.local], op, 0) for stand, op in parts if stand is not None)


@dataclasses.dataclass(frozen=True)
class TickTable:
    """A lowered schedule: what each rank does at each tick and in which slots its values live.

    A rank's tick, in this order:
      1. the channels start to send what the rank produced in the tick before;
      2. the rank runs its one unit, if it has one;
      3. what the channels brought is written to the arrival slots of the row.

    So what tick t produces is used in tick t + 2 on another rank; on the same rank (a turnaround of a V) it is handed
    over at once, and may be used in tick t + 1.

    Attributes:
      schedule: what was lowered.
      units: all that any rank does at some tick, by number: one for each op, local stage and kind of stage.
      columns: name of each column of ``array``.
      array: int32 [ticks, ranks, columns]. Slot columns count from 0; where a row has no use for a slot
        column it holds 0, or the bin for an arrival that nobody awaits.
      channels: the permutes of a tick.
      together: the sets of channels that are awaited at a time at some tick of the schedule, each as a bool for every
        channel; all of them last.
      num_slots: slots of each pool, by pool name: "x" (stage inputs; one more than needed: the last is
        the bin), "dy" (gradients of stage outputs; likewise), and those of ``keeps.pools``.
      hands_over: the pools, "x" or "dy", into which some rank writes for a next stage of its own.
      keeps: what was asked for.

    Columns (``F_...``: of the forward; ``G_...``: of the backward, which is a B, I or W):
      unit: its number; -1 for none.
      F_microbatch, G_microbatch: number in the whole batch.   F_stage, G_stage: number in the model.
      F_x: slot of the stage's input, unless the stage is the first.   F_POOL: slots that it fills.
      F_y: slot in "x" for an output whose next stage is on the same rank; the bin otherwise.
      G_x, G_dy, G_POOL: slots that it reads, or, of what is kept from I to W, that an I fills.
      G_dx: slot in "dy" for an input gradient whose next stage is on the same rank; the bin otherwise.
      arrive0, arrive1, ...: for each channel the slot ("x" for a y, "dy" for a dx) of what it brings.
    """

    schedule: Schedule
    units: tuple[Unit, ...]
    columns: tuple[str, ...]
    array: np.ndarray
    channels: tuple[Channel, ...]
    together: tuple[tuple[bool, ...], ...]
    num_slots: dict[str, int]
    hands_over: frozenset[str]
    keeps: Keeps

    @property
    def num_ticks(self) -> int:
        """Trips of the engine's scan."""
        return self.array.shape[0]

    def column(self, name: str) -> np.ndarray:
        """One column, int32 [ticks, ranks]."""
        return self.array[:, :, self.columns.index(name)]

    def brings(self, rows: Any) -> tuple[Any, ...]:
        """Whether each channel brings any rank what it awaits.

        ``rows``: int32 [..., ranks, columns] of any array library, as in ``array``; gives booleans [...].
        """
        unawaited = [self.num_slots[channel.pool] - 1 for channel in self.channels]
        columns = [self.columns.index(f"arrive{k}") for k in range(len(unawaited))]
        return tuple(
            (rows[..., column] != bin_).any(axis=-1) for column, bin_ in zip(columns, unawaited, strict=True)
        )

    def runs(self, rows: Any) -> tuple[Any, ...]:
        """Whether any rank has each unit, by number; ``rows`` and what it gives are as in ``brings``."""
        column = rows[..., self.columns.index("unit")]
        return tuple((column == number).any(axis=-1) for number in range(len(self.units)))

    def counts(self) -> np.ndarray:
        """How often each unit runs, over all ranks and ticks."""
        numbers = self.column("unit")
        return np.bincount(numbers[numbers >= 0], minlength=len(self.units))

    def makespan(self, costs: CostModel) -> float:
        """How long the table takes when each unit takes its cost and empty ticks take nothing.

        A rank starts tick t + 1 when its own work of tick t is done and what its neighbours sent at
        the start of tick t has arrived.
        """
        return makespan(self.work(costs), self.channels, costs)

    def shared_makespan(self, costs: CostModel, at_once: float) -> float:
        """The same where ranks share processors, which as many as ``at_once`` of them can keep busy at a time.

        Ticks follow each other: none ends before the work of all its ranks is done.
        """
        work = self.work(costs)
        return float(np.maximum(work.max(axis=1), work.sum(axis=1) / at_once).sum())

    def work(self, costs: CostModel) -> np.ndarray:
        """What each tick's unit costs, [ticks, ranks]."""
        placement, none = self.schedule.placement, len(self.units)
        cost = np.zeros((self.schedule.num_ranks, none + 1))  # the last is "none", which is -1
        for rank, stages in enumerate(placement.stages_on):
            for number, unit in enumerate(self.units):
                if max(stand.local for stand in unit[1:] if stand is not None) < len(stages):
                    cost[rank, number] = costs.of(unit.slot(stages), placement)
        ranks = np.arange(self.schedule.num_ranks)
        return cost[ranks, self.column("unit")]
