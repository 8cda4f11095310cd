"""Trade bubbles for memory: limit how many microbatches wait for their W."""

import dataclasses

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.schedule.ir import Action, Op, Schedule, Slot


@typechecked
def limit_stash(schedule: Schedule, most: int) -> Schedule:
    """The schedule with at most ``most`` stashes at a time on each rank; backwards beyond that are not split.

    A split backward sends dx to its neighbour sooner, and its W fills a bubble later. Until then its stash
    takes memory: all values from which the weight gradients are computed. Where a rank already has ``most``
    stashes, I becomes a full backward and its W is left out. With 0 no backward is split; with as many as the
    schedule needs, nothing changes.

    >>> from dualpipe_jax.schedule import dualpipe, simulate
    >>> [simulate(limit_stash(dualpipe(16, 64), most)).makespan for most in (8, 4, 2, 1, 0)]
    [206.0, 210.0, 214.0, 218.0, 226.0]

    Raises:
      ValueError: ``most`` is negative.
    """
    if most < 0:
        raise ValueError(f"limit_stash: most must be 0 or more, got {most}")
    orders = tuple(_limited(order, most) for order in schedule.orders)
    return schedule if orders == schedule.orders else dataclasses.replace(schedule, orders=orders)


def _limited(order: tuple[Slot, ...], most: int) -> tuple[Slot, ...]:
    waiting: set[tuple[int, int]] = set()
    limited: list[Slot] = []
    for slot in order:
        action = slot[0]
        work = action.stage, action.microbatch
        if len(slot) > 1 or action.op not in (Op.I, Op.W):
            limited.append(slot)
        elif action.op is Op.I and len(waiting) < most:
            waiting.add(work)
            limited.append(slot)
        elif action.op is Op.I:
            limited.append((Action(action.stage, Op.B, action.microbatch),))
        elif work in waiting:
            waiting.remove(work)
            limited.append(slot)
    return tuple(limited)
