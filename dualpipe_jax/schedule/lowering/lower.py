"""From a schedule to the integer arrays that the engine's scan reads."""

import dataclasses
import heapq
from typing import Literal

import numpy as np

from dualpipe_jax.schedule.costs import CostModel
from dualpipe_jax.schedule.ir import Op, Schedule
from dualpipe_jax.schedule.lowering.flat import Channel, Flat, channels, flatten
from dualpipe_jax.schedule.lowering.ticks import makespan, place

__all__ = ["BIN", "Channel", "TickTable", "forward_only", "lower"]

BIN = -1
"""Python index of a pool's last slot: where arrivals that nobody waits for are written."""

PROGRAM = ("B", "I", "W", "F", "FB")
"""Order of the units in a tick."""


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
      W0, W1, ...: local stage of each W, -1 for none.
      W0_microbatch, W0_x, W0_residual_w, W0_stash: its reads.
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

    def makespan(self, costs: CostModel) -> float:
        """How long the table takes when each unit takes its cost and empty ticks take nothing.

        A rank starts tick t + 1 when its own work of tick t is done and what its neighbours sent at
        the start of tick t, ``costs.send`` ago, has arrived.
        """
        placement = self.schedule.placement
        local = max(map(len, placement.stages_on))
        more = np.zeros((self.schedule.num_ranks, local + 1, 3))  # the last row is for "none", which is -1
        for rank, stages in enumerate(placement.stages_on):
            more[rank, : len(stages)] = [costs.more(placement, stage) for stage in stages]
        ranks = np.arange(self.schedule.num_ranks)

        def cost(name: str, alone: float, *parts: int) -> np.ndarray:
            stage = self.column(name)
            return alone * (stage >= 0) + sum(more[ranks, stage, part] for part in parts)

        work = cost("F", costs.F, 0) + cost("B", costs.B, 1, 2) + cost("I", costs.I, 1)
        work = work + sum(cost(f"W{k}", costs.W, 2) for k in range(self.num_w))
        work = work + np.where(self.column("pair") == 1, costs.FB - costs.F - costs.B, 0.0)
        return makespan(work, self.channels, costs.send)


def lower(
    schedule: Schedule, costs: CostModel | None = None, keep_input: Literal["F", "I", "W"] = "W"
) -> TickTable:
    """Place a schedule's slots on ticks and its values in slots.

    The placement is the one that ends soonest under ``costs`` of those tried; it never changes the order
    in which a rank works. Raises ValueError when the ranks of the schedule wait for each other.
    """
    flat = flatten(schedule)
    return tabulate(flat, place(flat, costs or CostModel()), PROGRAM, keep_input)


def forward_only(schedule: Schedule) -> Schedule:
    """The same schedule with nothing but its forwards, each rank's in their order."""
    orders = tuple(
        tuple((action,) for slot in order for action in slot if action.op is Op.F)
        for order in schedule.orders
    )
    return dataclasses.replace(schedule, name=f"{schedule.name}_forward", orders=orders)


def tabulate(
    flat: Flat, ticks: np.ndarray, program: tuple[str, ...], keep_input: Literal["F", "I", "W"]
) -> TickTable:
    """The table of a placement: ``ticks`` holds the tick of each slot of ``flat``."""
    schedule, permutes = flat.schedule, channels(flat.schedule)
    owed, num_w = _number_owed(flat, ticks)
    columns = (
        *("pair", "F", "B", "I", "F_microbatch", "F_first", "F_last", "F_x", "F_residual_i", "F_residual_w"),
        *("F_dy", "F_y", "G_microbatch", "G_first", "G_x", "G_dy", "G_residual_i", "G_residual_w", "G_stash"),
        "G_dx",
        *(f"W{k}{part}" for k in range(num_w) for part in ("", "_microbatch", "_x", "_residual_w", "_stash")),
        *(f"arrive{k}" for k in range(len(permutes))),
    )
    array = np.zeros((int(ticks.max(initial=-1)) + 1, schedule.num_ranks, len(columns)), np.int32)
    number = {name: k for k, name in enumerate(columns)}

    def put(name: str, slots, values):
        array[ticks[slots], flat.rank[slots], number[name]] = values

    values = _Values(flat, ticks, program)
    lives = values.lives(keep_input)
    slot_of, num_slots = {}, {}
    for pool, (start, end) in lives.items():
        slot_of[pool], num_slots[pool] = _colour(values.rank, start, end)
    for pool in ("x", "dy"):
        num_slots[pool] += 1
    for name in ("F", "B", "I", *(f"W{k}" for k in range(num_w))):
        array[:, :, number[name]] = -1
    for name, pool in (("F_y", "x"), ("G_dx", "dy")):
        array[:, :, number[name]] = num_slots[pool] - 1

    f, g, w = (np.flatnonzero(found >= 0) for found in (flat.f_slot, flat.g_slot, flat.w_slot))
    f_at, g_at, w_at = flat.f_slot[f], flat.g_slot[g], flat.w_slot[w]
    put("pair", np.flatnonzero(flat.pair), 1)
    put("F", f_at, values.local_stage[f])
    put("F_microbatch", f_at, values.microbatch[f])
    put("F_first", f_at, values.first[f])
    put("F_last", f_at, values.last[f])
    put("F_x", f_at, slot_of["x"][f])
    put("F_residual_i", f_at, slot_of["residual_i"][f])
    put("F_residual_w", f_at, slot_of["residual_w"][f])
    put("F_dy", f_at, np.where(values.last[f], slot_of["dy"][f], 0))

    full = flat.b[g_at] >= 0
    put("B", g_at, np.where(full, values.local_stage[g], -1))
    put("I", g_at, np.where(full, -1, values.local_stage[g]))
    put("G_microbatch", g_at, values.microbatch[g])
    put("G_first", g_at, values.first[g])
    put("G_x", g_at, slot_of["x"][g] if keep_input != "F" else 0)
    put("G_dy", g_at, slot_of["dy"][g])
    put("G_residual_i", g_at, slot_of["residual_i"][g])
    put("G_residual_w", g_at, slot_of["residual_w"][g])
    put("G_stash", g_at, slot_of["stash"][g])

    for k in range(num_w):
        mine, at = w[owed == k], w_at[owed == k]
        put(f"W{k}", at, values.local_stage[mine])
        put(f"W{k}_microbatch", at, values.microbatch[mine])
        put(f"W{k}_x", at, slot_of["x"][mine] if keep_input == "W" else 0)
        put(f"W{k}_residual_w", at, slot_of["residual_w"][mine])
        put(f"W{k}_stash", at, slot_of["stash"][mine])

    for payload, pool, column, source, at in (
        ("y", "x", "F_y", values.f_source, flat.f_slot),
        ("dx", "dy", "G_dx", values.g_source, flat.g_slot),
    ):
        taken = np.flatnonzero((source >= 0) & (at >= 0))
        giver, slots = at[source[taken]], slot_of[pool][taken]
        here = values.rank[taken] == flat.rank[giver]
        put(column, giver[here], slots[here])
        for k, channel in enumerate(permutes):
            if channel.payload == payload:
                array[:, :, number[f"arrive{k}"]] = num_slots[pool] - 1
                shift = (channel.pairs[0][1] - channel.pairs[0][0]) % schedule.num_ranks
                mine = ~here & ((values.rank[taken] - flat.rank[giver]) % schedule.num_ranks == shift)
                array[ticks[giver[mine]] + 1, values.rank[taken[mine]], number[f"arrive{k}"]] = slots[mine]
    return TickTable(schedule, program, columns, array, permutes, num_slots, keep_input)


class _Values:
    """Every (stage, microbatch) of a placed schedule: where it belongs and when it is worked on.

    Moments count ``1 + len(program)`` to a tick: one for each unit in the program's order, then the arrivals.
    """

    def __init__(self, flat: Flat, ticks: np.ndarray, program: tuple[str, ...]):
        placement, per_pipe = flat.schedule.placement, flat.schedule.microbatches_per_pipe
        stage, microbatch = np.divmod(np.arange(placement.num_stages * per_pipe), per_pipe)
        stages = range(placement.num_stages)
        local_stage = [placement.stages_on[rank].index(s) for s, rank in enumerate(placement.rank_of)]
        self.microbatch = np.array([placement.pipe_of(s) for s in stages])[stage] * per_pipe + microbatch
        self.rank = np.array(placement.rank_of)[stage]
        self.local_stage = np.array(local_stage)[stage]
        self.first = np.array([placement.is_first(s) for s in stages])[stage]
        self.last = np.array([placement.is_last(s) for s in stages])[stage]
        number = np.arange(len(stage))
        self.f_source = np.where(self.first, -1, number - per_pipe)
        self.g_source = np.where(self.last, -1, number + per_pipe)
        self.per_tick = 1 + len(program)
        self._ticks = ticks

        def moment(slot, unit):
            phase = np.where(flat.pair[slot], program.index("FB"), unit)
            return np.where(slot >= 0, ticks[slot] * self.per_tick + phase, -1)

        full = (flat.g_slot >= 0) & (flat.b[flat.g_slot] >= 0)
        self.f = moment(flat.f_slot, program.index("F"))
        self.g = moment(flat.g_slot, np.where(full, program.index("B"), program.index("I")))
        self.w = np.where(full, self.g, moment(flat.w_slot, program.index("W")))
        self.split = flat.w_slot >= 0

    def lives(self, keep_input: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """First and last moment of each value in each pool; -1 where it is never there."""
        x = np.where(self.first, self.f, self._received(self.f, self.f_source))
        x_end = {"F": self.f, "I": np.maximum(self.f, self.g), "W": np.maximum(self.f, self.w)}[keep_input]
        dy = np.where(self.last, self.f, self._received(self.g, self.g_source))
        back = self.g >= 0
        return {
            "x": (np.where(self.f >= 0, x, -1), x_end),
            "dy": (np.where(back, dy, -1), self.g),
            "residual_i": (np.where(back, self.f, -1), self.g),
            "residual_w": (np.where(back, self.f, -1), self.w),
            "stash": (np.where(self.split, self.g, -1), self.w),
        }

    def _received(self, produced: np.ndarray, source: np.ndarray) -> np.ndarray:
        """When another stage's output is written: on the same rank at once, else a tick later, at its end."""
        late = (produced[source] // self.per_tick + 2) * self.per_tick - 1
        return np.where(self.rank[source] == self.rank, produced[source], late)


def _number_owed(flat: Flat, ticks: np.ndarray) -> tuple[np.ndarray, int]:
    """For each value with a W its number among the W's of that rank and tick, and the most of these."""
    slots = flat.w_slot[flat.w_slot >= 0]
    order = np.argsort(slots, kind="stable")
    row = ticks[slots[order]] * flat.schedule.num_ranks + flat.rank[slots[order]]
    ranked = np.argsort(row, kind="stable")
    begins = np.flatnonzero(np.diff(row[ranked], prepend=-1))
    counts = np.diff(begins, append=len(row))
    number = np.empty(len(row), np.int64)
    number[order[ranked]] = np.arange(len(row)) - np.repeat(begins, counts)
    return number, int(counts.max(initial=0))


def _colour(rank: np.ndarray, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, int]:
    """Give intervals of a rank that share a moment different slots, with as few slots as can be."""
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
