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
"""The ops of units: in a tick, a rank runs one of these or nothing."""

Life = Literal["FI", "FW", "IW"]
"""The unit that fills a slot, then the last unit that reads it. A full backward B stands for both I and W."""


@dataclasses.dataclass(frozen=True)
class Keeps:
    """The values that stages of each kind keep between their units.

    Attributes:
      kind_of: the kind of each model stage, numbers from 0.
      keep_input: for each kind, how long a stage's input stays in its slot: to the end of "F", of "I" or of "W" (with a
        full backward the last two are the same).
      pools: by the pool's name, for each kind that keeps values there, how long it keeps them: "FI", from its F to
        its I, "FW" or "IW". A kind may use several pools or none.
    """

    kind_of: tuple[int, ...]
    keep_input: tuple[Literal["F", "I", "W"], ...]
    pools: Mapping[str, Mapping[int, Life]]

    @classmethod
    def alike(cls, num_stages: int, keep_input: Literal["F", "I", "W"] = "W") -> "Keeps":
        """All stages are of one kind, with one pool for each lifetime."""
        pools: dict[str, Mapping[int, Life]] = {
            "residual_i": {0: "FI"},
            "residual_w": {0: "FW"},
            "stash": {0: "IW"},
        }
        return cls((0,) * num_stages, (keep_input,), pools)


class LocalStage(NamedTuple):
    """The stage of a unit: its position among the rank's stages, ``placement.stages_on[rank]``, and its kind."""

    local: int
    kind: int


class Unit(NamedTuple):
    """The work of a rank in a tick: an op, and the stages of its forward and of its backward part."""

    op: str
    forward: LocalStage | None
    backward: LocalStage | None

    def slot(self, stages: Sequence[int]) -> Slot:
        """The unit as a slot of a rank that holds ``stages``; its microbatches are numbered 0."""
        parts = (self.forward, Op.F), (self.backward, Op.B if self.op == "FB" else Op(self.op))
        return tuple(Action(stages[stage.local], op, 0) for stage, op in parts if stage is not None)


@dataclasses.dataclass(frozen=True)
class TickTable:
    """A lowered schedule: the unit that each rank runs in each tick, and the slots in which its values are stored.

    A rank's tick, in this order:
      1. the channels start to send what the rank produced in the tick before;
      2. the rank runs its one unit, if it has one;
      3. the values that the channels brought are written to the arrival slots of the row.

    So a value that tick t produces is used on another rank in tick t + 2 at the earliest; on the same rank (a
    turnaround of a V) it is stored at once, and may be used in tick t + 1.

    Attributes:
      schedule: the schedule that was lowered.
      units: all units that any rank runs, by number: one for each op, local stage and kind of stage that occurs.
      columns: the name of each column of ``array``.
      array: int32 [ticks, ranks, columns]. Slot columns count from 0; where a row does not use a slot
        column it holds 0, or the bin for an arrival that no unit reads.
      channels: the permutes of a tick.
      together: the sets of channels whose values ranks store in the same tick of the schedule, each as one bool
        for every channel; the last set has all channels.
      num_slots: the number of slots of each pool, by pool name: "x" (stage inputs; one more than needed: the last is
        the bin), "dy" (gradients of stage outputs; likewise), and those of ``keeps.pools``.
      hands_over: the pools, "x" or "dy", into which some rank writes an output whose next stage is its own.
      keeps: the values that stages keep, as passed to ``lower``.

    Columns (``F_...``: of the forward; ``G_...``: of the backward, which is a B, I or W):
      unit: the number of the unit; -1 for none.
      F_microbatch, G_microbatch: number in the whole batch.   F_stage, G_stage: number in the model.
      F_x: slot of the stage's input, unless the stage is the first.   F_POOL: slots that the forward fills.
      F_y: slot in "x" for an output whose next stage is on the same rank; the bin otherwise.
      G_x, G_dy, G_POOL: slots that the backward reads or, in pools kept from I to W ("IW"), that an I fills.
      G_dx: slot in "dy" for an input gradient whose next stage is on the same rank; the bin otherwise.
      arrive0, arrive1, ...: for each channel the slot ("x" for a y, "dy" for a dx) of the value that it brings.
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
        """The number of iterations of the engine's scan."""
        return self.array.shape[0]

    def column(self, name: str) -> np.ndarray:
        """One column, int32 [ticks, ranks]."""
        return self.array[:, :, self.columns.index(name)]

    def brings(self, rows: Any) -> tuple[Any, ...]:
        """Whether each channel brings a value that any rank stores.

        ``rows``: int32 [..., ranks, columns] of any array library, as in ``array``. Returns bool [...] for each
        channel.
        """
        unawaited = [self.num_slots[channel.pool] - 1 for channel in self.channels]
        columns = [self.columns.index(f"arrive{k}") for k in range(len(unawaited))]
        return tuple(
            (rows[..., column] != bin_).any(axis=-1) for column, bin_ in zip(columns, unawaited, strict=True)
        )

    def runs(self, rows: Any) -> tuple[Any, ...]:
        """Whether any rank runs each unit, by number: one bool [...] per unit; ``rows`` are as in ``brings``."""
        column = rows[..., self.columns.index("unit")]
        return tuple((column == number).any(axis=-1) for number in range(len(self.units)))

    def counts(self) -> np.ndarray:
        """How often each unit runs, over all ranks and ticks: int64 [units]."""
        numbers = self.column("unit")
        return np.bincount(numbers[numbers >= 0], minlength=len(self.units))

    def makespan(self, costs: CostModel) -> float:
        """How long the table takes when each unit takes its cost and empty ticks take nothing.

        A rank starts tick t + 1 when its own work of tick t is done and the values that its neighbours sent
        at the start of tick t have arrived.
        """
        return makespan(self.work(costs), self.channels, costs)

    def shared_makespan(self, costs: CostModel, at_once: float) -> float:
        """The makespan where ranks share processors on which ``at_once`` ranks can run at full speed at a time.

        Ticks follow each other: none ends before the work of all its ranks is done.
        """
        work = self.work(costs)
        return float(np.maximum(work.max(axis=1), work.sum(axis=1) / at_once).sum())

    def work(self, costs: CostModel) -> np.ndarray:
        """The cost of each tick's unit on each rank, float64 [ticks, ranks]; 0 where a rank runs nothing."""
        placement, none = self.schedule.placement, len(self.units)
        cost = np.zeros((self.schedule.num_ranks, none + 1))  # the last is "none", which is -1
        for rank, stages in enumerate(placement.stages_on):
            for number, unit in enumerate(self.units):
                if max(stage.local for stage in unit[1:] if stage is not None) < len(stages):
                    cost[rank, number] = costs.of(unit.slot(stages), placement)
        ranks = np.arange(self.schedule.num_ranks)
        return cost[ranks, self.column("unit")]
