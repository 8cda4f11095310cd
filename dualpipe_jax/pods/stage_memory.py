"""Bytes that the engine sets aside for any schedule, from what the stages of one step keep. Loads no JAX."""

import dataclasses
import functools

import numpy as np

from dualpipe_jax.schedule import CostModel, MemoryModel, Schedule
from dualpipe_jax.schedule.lowering.flat import Flat, flatten
from dualpipe_jax.schedule.lowering.lives import Values
from dualpipe_jax.schedule.lowering.table import Keeps
from dualpipe_jax.schedule.lowering.ticks import place


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """The values that stages of each kind keep of a microbatch, and their bytes.

    Attributes:
      kind_of: the kind of each model stage, numbers from 0.
      keep_input: for each kind, how long a stage's input stays; see ``lowering.table.Keeps``.
      lives: for each pool and each kind, how long a value stays in the pool; "" if the kind keeps nothing
        there.
      sizes: bytes of one slot of each pool.
      boundary: bytes of a stage's input, which are also those of the gradient of its output.
      placed: the costs by which the engine places actions on ticks.
    """

    kind_of: tuple[int, ...]
    keep_input: tuple[str, ...]
    lives: tuple[tuple[str, ...], ...]
    sizes: tuple[float, ...]
    boundary: float
    placed: CostModel

    def of_most_stages(self, life: str) -> float:
        """Bytes that a stage keeps for the lifetime ``life``, such as "FW". The stage is of the most frequent kind."""
        usual = max(sorted(set(self.kind_of)), key=self.kind_of.count)
        return sum(size for size, own in zip(self.sizes, self.lives, strict=True) if own[usual] == life)

    def scaled(self, tokens: float) -> "StageMemory":
        """The same for microbatches with ``tokens`` times as many tokens on a device."""
        sizes = tuple(size * tokens for size in self.sizes)
        return dataclasses.replace(self, sizes=sizes, boundary=self.boundary * tokens)


def reserved_bytes(schedule: Schedule, kept: StageMemory, share: MemoryModel) -> float:
    """Bytes of a device that the engine sets aside for a schedule: slots of every pool, and what it always holds.

    Each pool has the same number of slots on all ranks, the largest that any rank needs, for all ranks run
    one program. Pools are full at different times; ``Timeline.memory``, the most that a rank keeps at once,
    may therefore be less.

    The result is exact for schedules with as many stages of the model as ``kept`` has. Others cut the same
    layers into more or fewer stages; their kinds are assumed to follow each other in the same order and
    proportions.

    Args:
      schedule: any schedule.
      kept: what stages keep of a microbatch.
      share: sizes of a rank's share of the model. Only those that do not depend on microbatches are read.
    """
    placement, of_stages = schedule.placement, share.for_schedule(schedule)
    at_rest = max(of_stages.at_rest(placement, rank) for rank in range(schedule.num_ranks))
    stages, counted = placement.num_model_stages, len(kept.kind_of)
    kind_of = tuple(kept.kind_of[round(k * (counted - 1) / max(stages - 1, 1))] for k in range(stages))
    inputs, *slots = _num_slots(schedule, kind_of, kept.keep_input, kept.lives, kept.placed)
    stays = sum(number * size for number, size in zip(slots, kept.sizes, strict=True)) * counted / stages
    return at_rest + stays + (inputs + _UNDER_WAY) * kept.boundary


_UNDER_WAY = 2
"""Boundary values that are being sent between two ticks: an output, and a gradient of an input."""


@functools.cache
def _num_slots(
    schedule: Schedule,
    kind_of: tuple[int, ...],
    keep_input: tuple[str, ...],
    lives: tuple[tuple[str, ...], ...],
    placed: CostModel,
) -> tuple[int, ...]:
    """The number of slots of stages' inputs and gradients of their outputs together, then of each pool of ``lives``."""
    pools = {str(k): {kind: life for kind, life in enumerate(own) if life} for k, own in enumerate(lives)}
    keeps = Keeps(kind_of, keep_input, pools)  # type: ignore[arg-type]  # plain strings, where Keeps has Literals
    _, found = Values(*ticks_of(schedule, placed), keeps).slots()
    return found["x"] + found["dy"], *(found[pool] for pool in pools)


@functools.cache  # a large schedule takes a second, and a search needs it once for each remat and dispatch
def ticks_of(schedule: Schedule, placed: CostModel) -> tuple[Flat, np.ndarray]:
    """A schedule's slots, and the tick on which the engine places each of them by these costs."""
    flat = flatten(schedule)
    return flat, place(flat, placed)
