"""Where two schedules diverge: rank by rank, in order and in time."""

import dataclasses
import itertools

from dualpipe_jax.schedule.costs import REL_TOLERANCE
from dualpipe_jax.schedule.ir import Slot
from dualpipe_jax.schedule.simulate import Timeline


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first difference between two simulated steps on one rank.

    Attributes:
      rank: the rank.
      index: the index of the first slot that differs; None if the rank runs the same slots in the same order.
      one, other: the slots at that index in the two steps; None where a step has no more slots on this rank.
      time: the first time at which the rank does something else in the two steps, or waits in one and works in the
        other; None if there is no such time.
    """

    rank: int
    index: int | None
    one: Slot | None
    other: Slot | None
    time: float | None


def partings(one: Timeline, other: Timeline) -> list[Divergence]:
    """The first difference of each rank that does not run the same slots at the same times in both steps.

    >>> from dualpipe_jax.schedule import gpipe, one_f_one_b, simulate
    >>> found = partings(simulate(gpipe(2, 3)), simulate(one_f_one_b(2, 3)))
    >>> [(at.rank, at.index, str(at.one[0]), str(at.other[0]), at.time) for at in found]
    [(0, 2, '0F2', '0B0', 2.0), (1, 1, '1F1', '1B0', 2.0)]

    Raises:
      ValueError: if the two schedules have different placements, so that their slots cannot be compared.
    """
    placements = one.schedule.placement, other.schedule.placement
    if placements[0] != placements[1]:
        names = f"{one.schedule.name} and {other.schedule.name}"
        raise ValueError(
            f"partings: {names} place their stages differently, {placements[0].pipes} and {placements[1].pipes}, so "
            "that no slot of one is one of the other; give schedules of the same placement"
        )
    found = (_divergence_of_rank(one, other, rank) for rank in range(one.schedule.num_ranks))
    return [divergence for divergence in found if divergence is not None]


def _divergence_of_rank(one: Timeline, other: Timeline, rank: int) -> Divergence | None:
    tolerance = REL_TOLERANCE * max(one.makespan, other.makespan)
    runs = [
        list(zip(line.schedule.orders[rank], line.starts[rank], line.ends[rank], strict=True))
        for line in (one, other)
    ]
    time = None
    for index, (here, there) in enumerate(itertools.zip_longest(*runs)):
        same = here is not None and there is not None and here[0] == there[0]
        _, starts, ends = zip(*filter(None, (here, there)), strict=True)
        start_together = same and max(starts) - min(starts) <= tolerance
        if time is None and not (start_together and max(ends) - min(ends) <= tolerance):
            time = min(ends if start_together else starts)
        if not same:
            return Divergence(rank, index, here and here[0], there and there[0], time)
    return None if time is None else Divergence(rank, None, None, None, time)
