"""What an action makes, what it needs, and how far a schedule can run."""

from typing import Literal

from dualpipe_jax.schedule.ir import Action, Op, Placement, Schedule

Value = tuple[Literal["y", "dx"], int, int]
"""What one action hands to another: ("y" or "dx", stage that made it, microbatch).

A forward makes its stage's y; a backward, full or for the input, its stage's dx.
"""


def made_by(action: Action) -> Value | None:
    """The value that others may need from an action; None for a W."""
    stage, op, microbatch = action
    if op is Op.W:
        return None
    return ("y" if op is Op.F else "dx", stage, microbatch)


def needed_by(placement: Placement, action: Action) -> tuple[Value, ...]:
    """The values that must exist before an action can start."""
    stage, op, microbatch = action
    if op is Op.F:
        return () if placement.is_first(stage) else (("y", stage - 1, microbatch),)
    if op is Op.W:
        return (("dx", stage, microbatch),)
    own: Value = ("y", stage, microbatch)
    return (own,) if placement.is_last(stage) else (own, ("dx", stage + 1, microbatch))


def execution_order(schedule: Schedule) -> list[tuple[int, int]]:
    """The (rank, slot index) of every slot that can run, in an order in which they can run.

    A slot runs when its predecessor on the rank has run and all that it needs exists. In a schedule that
    hangs, the slots that never run are left out.
    """
    made: set[Value] = set()
    waiting: dict[Value, list[int]] = {}
    at = [0] * schedule.num_ranks
    ready = list(range(schedule.num_ranks))[::-1]
    ran: list[tuple[int, int]] = []
    while ready:
        rank = ready.pop()
        order = schedule.orders[rank]
        while at[rank] < len(order):
            slot = order[at[rank]]
            missing = next((v for a in slot for v in needed_by(schedule.placement, a) if v not in made), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            ran.append((rank, at[rank]))
            at[rank] += 1
            for value in filter(None, map(made_by, slot)):
                made.add(value)
                ready += waiting.pop(value, ())
    return ran
