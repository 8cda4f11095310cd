"""What a search goes through: placements, and limits of memory."""

import math
from collections.abc import Callable, Iterable, Sequence

from dualpipe_jax.schedule.costs import CostModel, at_most, stages_a_share
from dualpipe_jax.schedule.ir import Placement
from dualpipe_jax.schedule.optimize.bounds import bound_of_stages, check_placement
from dualpipe_jax.schedule.optimize.problem import Problem
from dualpipe_jax.schedule.optimize.terms import least_memory
from dualpipe_jax.schedule.recipes.classic import check_counts

PLACEMENTS: dict[str, Callable[[int], Placement]] = {
    "linear": Placement.linear,
    "v": Placement.v,
    "wave": lambda num_ranks: Placement.wave(num_ranks, 2),
    "interleaved": lambda num_ranks: Placement.interleaved(num_ranks, 2),
    "interleaved_4": lambda num_ranks: Placement.interleaved(num_ranks, 4),
    "bidirectional": Placement.bidirectional,
}
"""Placements by name; all but the last have one copy of the parameters."""


def placements_of(
    num_ranks: int, num_microbatches: int, placement: Placement | str | None
) -> list[Placement]:
    check_counts("search", num_ranks, num_microbatches)
    if placement is None:
        return list(
            dict.fromkeys(make(num_ranks) for name, make in PLACEMENTS.items() if name != "bidirectional")
        )
    if isinstance(placement, str):
        if placement not in PLACEMENTS:
            raise ValueError(
                f"search: no placement {placement!r}; try one of {', '.join(PLACEMENTS)}, or a Placement"
            )
        placement = PLACEMENTS[placement](num_ranks)
    check_placement("search", placement, num_ranks, num_microbatches)
    return [placement]


def can_cost(costs: CostModel, placement: Placement) -> bool:
    """Whether its stages are not so fine that an extra takes more away than there is."""
    try:
        costs.divided(stages_a_share(placement))
    except ValueError:
        return False
    return True


def bounds_of(placements: Sequence[Placement], problem: Problem) -> dict[Placement, float]:
    """The time below which nothing ends, for each placement that some schedule can be run on within the limit.

    An error if there are none.
    """
    of_stages = {p: problem.of_stages(p) for p in placements}
    least = {p: least_memory(p, own.memory) for p, own in of_stages.items()}
    modest = min(placements, key=least.__getitem__)
    if not at_most(least[modest], problem.limit):
        raise ValueError(
            f"search: got memory_limit={problem.limit:g}, but no schedule runs in less than {least[modest]:g}, "
            f"which one microbatch at a time takes on the placement {modest.pipes}; "
            f"try memory_limit={least[modest]:g} or more"
        )
    return {p: bound_of_stages(p, own) for p, own in of_stages.items() if at_most(least[p], problem.limit)}


def ladder(placements: Sequence[Placement], problem: Problem, turns: Iterable[float]) -> dict[float, float]:
    """The limits to climb through, ascending, whatever the limit that is asked for; and of each its part of the effort.

    Where a longer named schedule gives way to a shorter one, without limit, and for as many activations as 1F1B
    keeps, it is a whole part; on the way between those half a part.
    """
    ranks, unit = placements[0].num_ranks, problem.memory.live
    least = min(least_memory(p, problem.of_stages(p).memory) for p in placements)
    kept = 1.0  # of activations, where the least has one
    ladder: dict[float, float] = {}
    while unit and kept <= 1.5 * ranks:
        ladder[least + (kept - 1) * unit] = 0.5
        kept = max(kept + 0.5, math.floor(2.5 * kept) / 2)
    whole = (least + (ranks - 1) * unit, math.inf, *turns)
    ladder |= dict.fromkeys((rung for rung in whole if rung > least), 1.0)
    return dict(sorted(ladder.items()))
