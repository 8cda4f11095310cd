"""From a schedule to the integer arrays that the engine's scan reads."""

import dataclasses
import heapq
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

from dualpipe_jax.schedule.costs import CostModel
from dualpipe_jax.schedule.ir import Op, Schedule
from dualpipe_jax.schedule.lowering.flat import Channel, Flat, channels, flatten
from dualpipe_jax.schedule.lowering.ticks import makespan, place

__all__ = ["Channel", "Keeps", "Stand", "TickTable", "Unit", "forward_only", "lower"]

OPS = ("F", "B", "I", "W", "FB")
"""What a rank may do in a tick: one of these, or nothing."""

_MOMENTS = 2
"""To a tick: its unit, then the arrivals."""


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
      num_slots: slots of each pool, by pool name: "x" (stage inputs; one more than needed: the last is
        the bin), "dy" (gradients of stage outputs; likewise), and those of ``keeps.pools``.
      hands_over: of "x" and "dy" those into which some rank writes for a next stage of its own.
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

    def counts(self) -> np.ndarray:
        """How often each unit runs, over all ranks and ticks."""
        numbers = self.column("unit")
        return np.bincount(numbers[numbers >= 0], minlength=len(self.units))

    def makespan(self, costs: CostModel) -> float:
        """How long the table takes when each unit takes its cost and empty ticks take nothing.

        A rank starts tick t + 1 when its own work of tick t is done and what its neighbours sent at
        the start of tick t has arrived.
        """
        placement = self.schedule.placement
        alone = {"F": costs.F, "B": costs.B, "I": costs.I, "W": costs.W, "FB": costs.FB}
        parts = {"F": (), "B": (1, 2), "I": (1,), "W": (2,), "FB": (1, 2)}
        cost = np.zeros((self.schedule.num_ranks, len(self.units) + 1))  # the last is "none", which is -1
        for rank, stages in enumerate(placement.stages_on):
            more = [costs.more(placement, stage) for stage in stages]
            for number, (op, forward, backward) in enumerate(self.units):
                stands = [stand.local for stand in (forward, backward) if stand is not None]
                if max(stands) < len(stages):
                    ahead = more[forward.local][0] if forward is not None else 0.0
                    back = (
                        sum(more[backward.local][part] for part in parts[op]) if backward is not None else 0.0
                    )
                    cost[rank, number] = alone[op] + ahead + back
        ranks = np.arange(self.schedule.num_ranks)
        return makespan(cost[ranks, self.column("unit")], self.channels, costs)


def lower(schedule: Schedule, costs: CostModel | None = None, keeps: Keeps | None = None) -> TickTable:
    """Place a schedule's slots on ticks and its values in slots.

    The placement is the one that ends soonest under ``costs`` of those tried; it never changes the order
    in which a rank works. Raises ValueError when the ranks of the schedule wait for each other.

    Arguments:
      keeps: what stages keep; None: all of one kind, which reads its input to the end.
    """
    flat = flatten(schedule)
    keeps = keeps or Keeps.alike(schedule.placement.num_model_stages)
    return tabulate(flat, place(flat, costs or CostModel()), keeps)


def forward_only(schedule: Schedule) -> Schedule:
    """The same schedule with nothing but its forwards, each rank's in their order."""
    orders = tuple(
        tuple((action,) for slot in order for action in slot if action.op is Op.F)
        for order in schedule.orders
    )
    return dataclasses.replace(schedule, name=f"{schedule.name}_forward", orders=orders)


def tabulate(flat: Flat, ticks: np.ndarray, keeps: Keeps) -> TickTable:
    """The table of a placement: ``ticks`` holds the tick of each slot of ``flat``, one slot a tick."""
    schedule, permutes, values = flat.schedule, channels(flat.schedule), _Values(flat, ticks, keeps)
    filled = [name for name, lives in keeps.pools.items() if set(lives.values()) != {"IW"}]
    slot_of, num_slots = {}, {}
    for pool, (start, end) in values.lives().items():
        slot_of[pool], num_slots[pool] = _colour(values.rank, start, end)
    for pool in ("x", "dy"):
        num_slots[pool] += 1
    columns = (
        *("unit", "F_microbatch", "F_stage", "F_x", "F_y", *(f"F_{pool}" for pool in filled)),
        *("G_microbatch", "G_stage", "G_x", "G_dy", "G_dx", *(f"G_{pool}" for pool in keeps.pools)),
        *(f"arrive{k}" for k in range(len(permutes))),
    )
    array = np.zeros((int(ticks.max(initial=-1)) + 1, schedule.num_ranks, len(columns)), np.int32)
    number = {name: k for k, name in enumerate(columns)}

    def put(name: str, slots, entries):
        array[ticks[slots], flat.rank[slots], number[name]] = entries

    units, unit_of = values.units()
    array[:, :, number["unit"]] = -1
    put("unit", np.arange(flat.num_slots), unit_of)
    works = [
        ("F", flat.f_slot, filled),
        ("G", flat.g_slot, [*keeps.pools]),
        ("G", flat.w_slot, [*keeps.pools]),
    ]
    for letter, slots, pools in works:
        mine = np.flatnonzero(slots >= 0)
        at = slots[mine]
        put(f"{letter}_microbatch", at, values.microbatch[mine])
        put(f"{letter}_stage", at, values.model_stage[mine])
        for pool in ("x", *pools):
            put(f"{letter}_{pool}", at, slot_of[pool][mine])
        if letter == "G":
            put("G_dy", at, slot_of["dy"][mine])

    hands_over = set()
    for name, pool in (
        ("F_y", "x"),
        ("G_dx", "dy"),
        *((f"arrive{k}", c.pool) for k, c in enumerate(permutes)),
    ):
        array[:, :, number[name]] = num_slots[pool] - 1
    for payload, pool, column, source, at in (
        ("y", "x", "F_y", values.f_source, flat.f_slot),
        ("dx", "dy", "G_dx", values.g_source, flat.g_slot),
    ):
        taken = np.flatnonzero((source >= 0) & (at >= 0))
        giver, slots = at[source[taken]], slot_of[pool][taken]
        here = values.rank[taken] == flat.rank[giver]
        put(column, giver[here], slots[here])
        hands_over |= {pool} if here.any() else set()
        for k, channel in enumerate(permutes):
            if channel.payload == payload:
                shift = (channel.pairs[0][1] - channel.pairs[0][0]) % schedule.num_ranks
                mine = ~here & ((values.rank[taken] - flat.rank[giver]) % schedule.num_ranks == shift)
                array[ticks[giver[mine]] + 1, values.rank[taken[mine]], number[f"arrive{k}"]] = slots[mine]
    return TickTable(schedule, units, columns, array, permutes, num_slots, frozenset(hands_over), keeps)


class _Values:
    """Every (stage, microbatch) of a placed schedule: where it belongs and when it is worked on."""

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
        self.first = np.array([placement.is_first(s) for s in stages])[stage]
        self.last = np.array([placement.is_last(s) for s in stages])[stage]
        number = np.arange(len(stage))
        self.f_source = np.where(self.first, -1, number - per_pipe)
        self.g_source = np.where(self.last, -1, number + per_pipe)
        self._flat, self._keeps = flat, keeps

        def moment(slot):
            return np.where(slot >= 0, ticks[slot] * _MOMENTS, -1)

        self.f, self.g = moment(flat.f_slot), moment(flat.g_slot)
        self.split = flat.w_slot >= 0
        self.w = np.where(self.split, moment(flat.w_slot), self.g)

    def units(self) -> tuple[tuple[Unit, ...], np.ndarray]:
        """All units, in a stable order, and the number of each slot's."""
        flat = self._flat

        def stands(values: np.ndarray) -> list[Stand | None]:
            pairs = zip(
                self.local_stage[values].tolist(), self.kind[values].tolist(), values.tolist(), strict=True
            )
            return [Stand(local, kind) if value >= 0 else None for local, kind, value in pairs]

        letters = np.select(
            [flat.pair, flat.f >= 0, flat.b >= 0, flat.i >= 0], ["FB", "F", "B", "I"], "W"
        ).tolist()
        backward = np.maximum(np.maximum(flat.b, flat.i), flat.w)
        found = list(map(Unit, letters, stands(flat.f), stands(backward)))
        none = Stand(-1, -1)
        units = sorted(set(found), key=lambda u: (OPS.index(u.op), u.forward or none, u.backward or none))
        numbers = {unit: k for k, unit in enumerate(units)}
        return tuple(units), np.array([numbers[unit] for unit in found], np.int32)

    def lives(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """First and last moment of each value in each pool; -1 where it is never there."""
        keeps, back = self._keeps, self.g >= 0
        ends = {"F": self.f, "I": np.maximum(self.f, self.g), "W": np.maximum(self.f, self.w)}
        x_end = np.choose(self.kind, [ends[letter] for letter in keeps.keep_input])
        x = self._received(self.f, self.f_source)
        dy = self._received(self.g, self.g_source)
        lives = {
            "x": (np.where((self.f >= 0) & ~self.first, x, -1), x_end),
            "dy": (np.where(back & ~self.last, dy, -1), self.g),
        }
        moments = {"FI": (self.f, self.g), "FW": (self.f, self.w), "IW": (self.g, self.w)}
        for name, by_kind in keeps.pools.items():
            start, end = np.full(len(self.f), -1), np.full(len(self.f), -1)
            for kind, life in by_kind.items():
                there = (self.kind == kind) & (self.split if life == "IW" else back)
                start[there], end[there] = moments[life][0][there], moments[life][1][there]
            lives[name] = start, end
        return lives

    def _received(self, produced: np.ndarray, source: np.ndarray) -> np.ndarray:
        """When another stage's output is written: on the same rank at once, else a tick later, at its end."""
        late = (produced[source] // _MOMENTS + 2) * _MOMENTS - 1
        return np.where(self.rank[source] == self.rank, produced[source], late)


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
