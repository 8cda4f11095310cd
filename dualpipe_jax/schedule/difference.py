"""Where two schedules part: rank by rank, in order and in time."""

import dataclasses
from collections.abc import Iterator

from dualpipe_jax.schedule.costs import HAIR
from dualpipe_jax.schedule.ir import Slot
from dualpipe_jax.schedule.simulate import Timeline


@dataclasses.dataclass(frozen=True)
class Parting:
    """Where one rank of two simulated steps stops doing the same.

    Attributes:
      rank: which.
      index: of the first slot that is another; None if the rank runs the same slots in the same order.
      one, other: the slots there; None where a rank has no more.
      time: when it first does something else, or one of two waits while the other works; None if never.
    """

    rank: int
    index: int | None
    one: Slot | None
    other: Slot | None
    time: float | None


def partings(one: Timeline, other: Timeline) -> list[Parting]:
    """Where the two part, for each rank that does not do the same at the same times in both.

    >>> from dualpipe_jax.schedule import gpipe, one_f_one_b, simulate
    >>> found = partings(simulate(gpipe(2, 3)), simulate(one_f_one_b(2, 3)))
    >>> [(at.rank, at.index, str(at.one[0]), str(at.other[0]), at.time) for at in found]
    [(0, 2, '0F2', '0B0', 2.0), (1, 1, '1F1', '1B0', 2.0)]

    Raises:
      ValueError: the schedules have other ranks, or place their stages on other ones, so that their slots say
        different things.
    """
    placements = one.schedule.placement, other.schedule.placement
    if placements[0] != placements[1]:
        names = f"{one.schedule.name} and {other.schedule.name}"
        raise ValueError(
            f"partings: {names} place their stages differently, {placements[0].pipes} and {placements[1].pipes}, so "
            "that no slot of one is one of the other; give schedules of the same placement"
        )
    return [found for rank in range(one.schedule.num_ranks) for found in _of_a_rank(one, other, rank)]


def _of_a_rank(one: Timeline, other: Timeline, rank: int) -> Iterator[Parting]:
    hair = HAIR * max(one.makespan, other.makespan)
    runs = [
        list(zip(line.schedule.orders[rank], line.starts[rank], line.ends[rank], strict=True))
        for line in (one, other)
    ]
    index = time = None
    for at in range(max(map(len, runs))):
        here, there = (run[at] if at < len(run) else None for run in runs)
        same = here is not None and there is not None and here[0] == there[0]
        near = here and there and max(abs(here[1] - there[1]), abs(here[2] - there[2])) <= hair
        if time is None and not (same and near):
            moments = [moment for slot in (here, there) if slot for moment in slot[1:]]
            starts = [slot[1] for slot in (here, there) if slot]
            in_step = same and abs(starts[0] - starts[1]) <= hair  # only the ends differ
            time = sorted(moments)[2] if in_step else min(starts)
        if not same:
            index = at
            yield Parting(rank, at, here and here[0], there and there[0], time)
            return
    if time is not None:
        yield Parting(rank, index, None, None, time)
