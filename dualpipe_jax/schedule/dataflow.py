"""The values that an action produces and needs, and how far given orders can run."""

from collections.abc import Iterable, Sequence
from typing import Literal

from dualpipe_jax.schedule.ir import Action, Op, Placement, Schedule, Slot

Value = tuple[Literal["y", "dx"], int, int]
"""An output of one action that another reads: ("y" or "dx", the stage that made it, microbatch).

A forward makes its stage's y; a backward, full or for the input, its stage's dx.
"""

Orders = Sequence[Sequence[Slot]]
"""The slots of each rank, in order: ``Schedule.orders``, or a part of each order."""


def made_by(action: Action) -> tuple[Value, ...]:
    """The value that an action produces for others; a W produces none."""
    stage, op, microbatch = action
    return () if op is Op.W else (("y" if op is Op.F else "dx", stage, microbatch),)


def needed_by(placement: Placement, action: Action) -> tuple[Value, ...]:
    """The values that must exist before an action can start."""
    stage, op, microbatch = action
    if op is Op.F:
        return () if placement.is_first(stage) else (("y", stage - 1, microbatch),)
    if op is Op.W:
        return (("dx", stage, microbatch),)
    own: Value = ("y", stage, microbatch)
    return (own,) if placement.is_last(stage) else (own, ("dx", stage + 1, microbatch))


def makers(orders: Orders) -> dict[Value, tuple[int, int]]:
    """The (rank, slot index) of the slot that makes each value."""
    return {
        value: (rank, index)
        for rank, order in enumerate(orders)
        for index, slot in enumerate(order)
        for action in slot
        for value in made_by(action)
    }


def execution_order(
    placement: Placement, orders: Orders, made: Iterable[Value] = ()
) -> list[tuple[int, int]]:
    """The (rank, slot index) of every slot that can run, in an order in which they can run.

    A slot runs when its predecessor on the rank has run and all values that it needs exist: values of slots that
    ran before, or those in ``made``, which exist from the start. If the orders hang, the slots that never run are
    left out.
    """
    exists = set(made)
    waiting: dict[Value, list[int]] = {}
    at = [0] * len(orders)
    ready = list(range(len(orders)))[::-1]
    ran: list[tuple[int, int]] = []
    while ready:
        rank = ready.pop()
        order = orders[rank]
        while at[rank] < len(order):
            slot = order[at[rank]]
            missing = [v for action in slot for v in needed_by(placement, action) if v not in exists]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            ran.append((rank, at[rank]))
            at[rank] += 1
            for action in slot:
                for value in made_by(action):
                    exists.add(value)
                    ready += waiting.pop(value, ())
    return ran


def complete_execution_order(schedule: Schedule, who: str) -> list[tuple[int, int]]:
    """``execution_order`` of a schedule; raises ValueError, with ``who`` as the caller's name, if it hangs."""
    ran = execution_order(schedule.placement, schedule.orders)
    if len(ran) < sum(map(len, schedule.orders)):
        raise ValueError(f"{who}: {schedule.name} never ends; call validate(schedule) to see why")
    return ran
