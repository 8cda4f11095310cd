"""A schedule as arrays: slots and values by number, and the channels between ranks."""

import dataclasses
import itertools
from typing import Literal

import numpy as np

from dualpipe_jax.schedule.costs import CostModel
from dualpipe_jax.schedule.dataflow import complete_execution_order
from dualpipe_jax.schedule.ir import Op, Schedule


@dataclasses.dataclass(frozen=True)
class Channel:
    """One collective permute of the tick: a payload and the (source rank, destination rank) pairs it serves.

    ``payload`` is "y" (a forward's output) or "dx" (a backward's). In a tick, every rank sends
    its output of the tick before on all channels of that payload; the receiver's table says whether it stores it.
    """

    payload: Literal["y", "dx"]
    pairs: tuple[tuple[int, int], ...]

    @property
    def pool(self) -> Literal["x", "dy"]:
        """The pool into which the receiver writes the values of this channel."""
        return "x" if self.payload == "y" else "dy"


@dataclasses.dataclass(frozen=True)
class Flat:
    """A schedule as arrays over its slots, rank by rank, each rank's in order.

    A value is a (stage, microbatch of its pipe), numbered ``stage * microbatches_per_pipe + microbatch``.

    Attributes:
      schedule: the schedule that was flattened.
      rank: the rank of each slot.
      begin: the index of each rank's first slot, and a last entry with the number of slots.
      f, b, i, w: the value that the slot's F, B, I, W works on, or -1.
      f_slot, g_slot, w_slot: for each value the slot of its F, of its B or I, of its W, or -1.
      f_source, g_source: for each value, the value whose output its F, or its B or I, reads from another stage,
        or -1.
      f_needs, g_needs: for each slot, the slot that computes the output which its F, or its B or I, reads from
        another stage, or -1.
    """

    schedule: Schedule
    rank: np.ndarray
    begin: np.ndarray
    f: np.ndarray
    b: np.ndarray
    i: np.ndarray
    w: np.ndarray
    f_slot: np.ndarray
    g_slot: np.ndarray
    w_slot: np.ndarray
    f_source: np.ndarray
    g_source: np.ndarray
    f_needs: np.ndarray
    g_needs: np.ndarray

    @property
    def num_slots(self) -> int:
        return len(self.rank)

    @property
    def pair(self) -> np.ndarray:
        return (self.f >= 0) & (self.b >= 0)

    def costs(self, costs: CostModel) -> np.ndarray:
        """The duration of each slot, in the unit of ``costs``."""
        placement, orders = self.schedule.placement, self.schedule.orders
        return np.array([costs.of(slot, placement) for slot in itertools.chain.from_iterable(orders)])


def flatten(schedule: Schedule) -> Flat:
    """Number the slots and link each to the slots whose outputs it reads."""
    placement, per_pipe = schedule.placement, schedule.microbatches_per_pipe
    begin = np.cumsum([0, *(len(order) for order in schedule.orders)])
    num_slots, num_values = int(begin[-1]), placement.num_stages * per_pipe
    slot_of = {op: [-1] * num_values for op in Op}
    values = {op: [-1] * num_slots for op in Op}
    number = 0
    for order in schedule.orders:
        for slot in order:
            for stage, op, microbatch in slot:
                value = stage * per_pipe + microbatch
                slot_of[op][value] = number
                values[op][number] = value
            number += 1
    slots_of = {op: np.array(found, np.int64) for op, found in slot_of.items()}
    f, b, i, w = (np.array(values[op], np.int64) for op in (Op.F, Op.B, Op.I, Op.W))
    f_slot, g_slot = slots_of[Op.F], np.maximum(slots_of[Op.B], slots_of[Op.I])

    every, stages = np.arange(num_values), range(placement.num_stages)
    first, last = (
        np.repeat(list(map(at, stages)), per_pipe) for at in (placement.is_first, placement.is_last)
    )
    f_source, g_source = np.where(first, -1, every - per_pipe), np.where(last, -1, every + per_pipe)
    f_from, g_from = np.where(first, -1, f_slot[f_source]), np.where(last, -1, g_slot[g_source])
    g = np.maximum(b, i)
    return Flat(
        schedule=schedule,
        rank=np.repeat(np.arange(len(schedule.orders)), np.diff(begin)),
        begin=begin,
        f=f,
        b=b,
        i=i,
        w=w,
        f_slot=f_slot,
        g_slot=g_slot,
        w_slot=slots_of[Op.W],
        f_source=f_source,
        g_source=g_source,
        f_needs=np.where(f >= 0, f_from[f], -1),
        g_needs=np.where(g >= 0, g_from[g], -1),
    )


def channels(schedule: Schedule) -> tuple[Channel, ...]:
    """The permutes of a tick, one for each payload and distance between ranks that some stage boundary needs."""
    placement = schedule.placement
    backward = any(action.op is not Op.F for order in schedule.orders for slot in order for action in slot)
    found: dict[tuple[Literal["y", "dx"], int], set[tuple[int, int]]] = {}
    for pipe in placement.pipes:
        for here, there in itertools.pairwise(pipe):
            if here != there:
                found.setdefault(("y", (there - here) % placement.num_ranks), set()).add((here, there))
                if backward:
                    found.setdefault(("dx", (here - there) % placement.num_ranks), set()).add((there, here))
    ordered = sorted(found.items(), key=lambda item: (item[0][0] != "y", item[0][1]))
    return tuple(Channel(payload, tuple(sorted(pairs))) for (payload, _), pairs in ordered)


def topological(flat: Flat) -> list[int]:
    """The slots in an order in which every slot comes after the slots that it needs.

    Raises ValueError if the schedule hangs.
    """
    ran = complete_execution_order(flat.schedule, "lower")
    begin = flat.begin.tolist()
    return [begin[rank] + index for rank, index in ran]
