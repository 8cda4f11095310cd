"""From a schedule to the integer arrays that the engine's scan reads."""

import dataclasses
from typing import Literal

import numpy as np

from dualpipe_jax.schedule.ir import Schedule

BIN = -1
"""Python index of a pool's last slot: where arrivals that nobody waits for are written."""


@dataclasses.dataclass(frozen=True)
class Channel:
    """One collective permute of the tick: a payload and the (source rank, destination rank) pairs it serves.

    ``payload`` is "y" (a forward's output) or "dx" (a backward's). Every rank sends what it last
    produced on all channels of that payload; the receiver's table says whether it wants it.
    """

    payload: Literal["y", "dx"]
    pairs: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class TickTable:
    """A lowered schedule: what each rank does at each tick and in which slots its values live.

    A rank's tick, in this order:
      1. the channels start to send what the rank produced in the tick before;
      2. the rank runs the units of its row, in the order of ``program``;
      3. what the channels brought is written to the arrival slots of the row.
    So what tick t produces is used in tick t + 2 on another rank; on the same rank (a turnaround of a V)
    it is handed over at once, and may be used by a later unit of tick t or in tick t + 1.

    At most one forward and one backward (B or I) run per rank and tick, and up to ``num_w`` W's.

    Attributes:
      schedule: what was lowered.
      program: order of the units in a tick, a permutation of ("F", "FB", "B", "I", "W"); "F" includes the
        embedding before a first stage and the head after a last one.
      columns: name of each column of ``array``.
      array: int32 [ticks, ranks, columns]. Slot columns count from 0; where a row has no use for a slot
        column it holds 0, or the bin for an arrival that nobody awaits.
      channels: the permutes of a tick.
      num_slots: slots of each pool, by pool name: "x" (stage inputs; one more than needed: the last is
        the bin), "dy" (gradients of stage outputs; likewise), "residual_i" (residuals that only I reads),
        "residual_w" (residuals that W reads), "stash" (values that I hands to W).
      keep_input: how long a stage's input stays in its slot: to the end of "F", of "I" or of "W"
        (with a full backward the last two are the same).

    Columns (local stage: position in ``placement.stages_on[rank]``; microbatch: number in the whole batch):
      pair: 1 where F and B run as an overlapped pair.
      F: local stage of the forward, -1 for none.        B, I: likewise, at most one of the two.
      F_microbatch, F_first, F_last: which microbatch; whether the stage embeds; whether it ends in the head.
      F_x: slot of the stage's input (a first stage writes its embedding there).
      F_residual_i, F_residual_w: slots that the forward fills.
      F_dy: slot in "dy" for the head's gradient of a last stage.
      F_y: slot in "x" for an output whose next stage is on the same rank; the bin otherwise.
      G_microbatch, G_first: of the backward (B or I).   G_x, G_dy, G_residual_i, G_residual_w: its reads.
      G_stash: slot that an I fills.
      G_dx: slot in "dy" for an input gradient whose next stage is on the same rank; the bin otherwise.
      W0, W1, ...: local stage of each W, -1 for none; W0_microbatch, W0_x, W0_residual_w, W0_stash: its reads.
      arrive0, arrive1, ...: for each channel the slot ("x" for a y, "dy" for a dx) of what it brings.
    """

    schedule: Schedule
    program: tuple[str, ...]
    columns: tuple[str, ...]
    array: np.ndarray
    channels: tuple[Channel, ...]
    num_slots: dict[str, int]
    keep_input: Literal["F", "I", "W"]

    @property
    def num_ticks(self) -> int:
        """Trips of the engine's scan."""
        return self.array.shape[0]

    @property
    def num_w(self) -> int:
        """The most W's that any rank runs in one tick."""
        return sum(name[0] == "W" and name[1:].isdigit() for name in self.columns)

    def column(self, name: str) -> np.ndarray:
        """One column, int32 [ticks, ranks]."""
        return self.array[:, :, self.columns.index(name)]
