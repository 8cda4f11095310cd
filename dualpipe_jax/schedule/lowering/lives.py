"""The lifetime of each value of a placed schedule, and the slot in which it is stored."""

import heapq

import numpy as np

from dualpipe_jax.schedule.lowering.flat import Flat
from dualpipe_jax.schedule.lowering.table import OPS, Keeps, LocalStage, Unit

_MOMENTS_PER_TICK = 2
"""The number of moments of a tick: at the first its unit runs, at the second arrivals are written."""


class Values:
    """Every (stage, microbatch) of a placed schedule: its rank, its stage, and the moments of its units."""

    def __init__(self, flat: Flat, ticks: np.ndarray, keeps: Keeps):
        placement, per_pipe = flat.schedule.placement, flat.schedule.microbatches_per_pipe
        stage, microbatch = np.divmod(np.arange(placement.num_stages * per_pipe), per_pipe)
        stages = range(placement.num_stages)
        local_stage = [placement.stages_on[rank].index(s) for s, rank in enumerate(placement.rank_of)]
        self.microbatch = np.array([placement.pipe_of(s) for s in stages])[stage] * per_pipe + microbatch
        self.rank = np.array(placement.rank_of)[stage]
        self.local_stage = np.array(local_stage)[stage]
        self.model_stage = np.array([placement.model_stage(s) for s in stages])[stage]
        self.kind = np.array(keeps.kind_of)[self.model_stage]
        self._flat, self._keeps = flat, keeps

        def moment(slot):
            return np.where(slot >= 0, ticks[slot] * _MOMENTS_PER_TICK, -1)

        self.f, self.g = moment(flat.f_slot), moment(flat.g_slot)
        self.split = flat.w_slot >= 0
        self.w = np.where(self.split, moment(flat.w_slot), self.g)

    def units(self) -> tuple[tuple[Unit, ...], np.ndarray]:
        """All units in a stable order, and an int32 array [slots] with the number of each slot's unit."""
        flat = self._flat

        def local_stages(values: np.ndarray) -> list[LocalStage | None]:
            pairs = zip(
                self.local_stage[values].tolist(), self.kind[values].tolist(), values.tolist(), strict=True
            )
            return [LocalStage(local, kind) if value >= 0 else None for local, kind, value in pairs]

        letters = np.select(
            [flat.pair, flat.f >= 0, flat.b >= 0, flat.i >= 0], ["FB", "F", "B", "I"], "W"
        ).tolist()
        backward = np.maximum(np.maximum(flat.b, flat.i), flat.w)
        found = list(map(Unit, letters, local_stages(flat.f), local_stages(backward)))
        none = LocalStage(-1, -1)
        units = sorted(set(found), key=lambda u: (OPS.index(u.op), u.forward or none, u.backward or none))
        numbers = {unit: k for k, unit in enumerate(units)}
        return tuple(units), np.array([numbers[unit] for unit in found], np.int32)

    def lives(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """For each pool, the first and the last moment of each value; the first is -1 if it is never in the pool."""
        keeps, back = self._keeps, self.g >= 0
        ends = {"F": self.f, "I": np.maximum(self.f, self.g), "W": np.maximum(self.f, self.w)}
        x_end = np.choose(self.kind, [ends[letter] for letter in keeps.keep_input])
        f_source, g_source = self._flat.f_source, self._flat.g_source
        x, dy = self._received(self.f, f_source), self._received(self.g, g_source)
        lives = {
            "x": (np.where((self.f >= 0) & (f_source >= 0), x, -1), x_end),
            "dy": (np.where(back & (g_source >= 0), dy, -1), self.g),
        }
        moments = {"FI": (self.f, self.g), "FW": (self.f, self.w), "IW": (self.g, self.w)}
        for name, by_kind in keeps.pools.items():
            start, end = np.full(len(self.f), -1), np.full(len(self.f), -1)
            for kind, life in by_kind.items():
                there = (self.kind == kind) & (self.split if life == "IW" else back)
                start[there], end[there] = moments[life][0][there], moments[life][1][there]
            lives[name] = start, end
        return lives

    def slots(self) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        """For each pool, the slot of each value, and the number of slots; "x" and "dy" have one more, the bin."""
        slot_of, num_slots = {}, {}
        for pool, (start, end) in self.lives().items():
            slot_of[pool], num_slots[pool] = colour(self.rank, start, end)
        for pool in ("x", "dy"):
            num_slots[pool] += 1
        return slot_of, num_slots

    def _received(self, produced: np.ndarray, source: np.ndarray) -> np.ndarray:
        """The moment at which another stage's output is written.

        That is at once on the same rank, else at the end of the next tick.
        """
        late = (produced[source] // _MOMENTS_PER_TICK + 2) * _MOMENTS_PER_TICK - 1
        return np.where(self.rank[source] == self.rank, produced[source], late)


def colour(rank: np.ndarray, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, int]:
    """Give intervals that share a moment on one rank different slots, with as few slots as possible.

    Returns the slot of each interval (0 where its start is -1), and the number of slots.
    """
    slots, most = np.zeros(len(start), np.int64), 0
    order = np.flatnonzero(start >= 0)
    order = order[np.lexsort((start[order], rank[order]))]
    held: list[tuple[int, int]] = []
    current = -1
    for number, r, begin, until in zip(
        order.tolist(), rank[order].tolist(), start[order].tolist(), end[order].tolist(), strict=True
    ):
        if r != current:
            held, current = [], r
        if held and held[0][0] < begin:
            slots[number] = held[0][1]
            heapq.heapreplace(held, (until, held[0][1]))
        else:
            slots[number] = len(held)
            heapq.heappush(held, (until, len(held)))
            most = max(most, len(held))
    return slots, most
