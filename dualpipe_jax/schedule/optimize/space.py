"""What a search goes through: placements, and limits of memory."""

import math
from collections.abc import Iterable, Sequence

from dualpipe_jax.schedule.costs import CostModel, at_most, stages_a_share
from dualpipe_jax.schedule.ir import Placement
from dualpipe_jax.schedule.optimize.bounds import bound_of_stages
from dualpipe_jax.schedule.optimize.problem import Problem
from dualpipe_jax.schedule.optimize.terms import least_memory
from dualpipe_jax.schedule.recipes.classic import check_counts

PLACEMENTS = ("linear", "v", "wave", "interleaved", "interleaved_4", "bidirectional")
"""Names of placements; all but the last have one copy of the parameters."""


def placements_of(
    num_ranks: int, num_microbatches: int, placement: Placement | str | None
) -> list[Placement]:
    check_counts("search", num_ranks, num_microbatches)
    known = {
        "linear": Placement.linear(num_ranks),
        "v": Placement.v(num_ranks),
        "wave": Placement.wave(num_ranks, 2),
        "interleaved": Placement.interleaved(num_ranks, 2),
        "interleaved_4": Placement.interleaved(num_ranks, 4),
        "bidirectional": Placement.bidirectional(num_ranks),
    }
    if placement is None:
        return list(dict.fromkeys(known[name] for name in PLACEMENTS[:-1]))
    if isinstance(placement, str):
        if placement not in known:
            raise ValueError(
                f"search: no placement {placement!r}; try one of {', '.join(known)}, or a Placement"
            )
        placement = known[placement]
    if placement.num_ranks != num_ranks:
        raise ValueError(
            f"search: got {num_ranks} ranks and a placement on {placement.num_ranks}; "
            f"try num_ranks={placement.num_ranks}"
        )
    if num_microbatches % placement.num_pipes:
        fewer = num_microbatches - num_microbatches % placement.num_pipes
        raise ValueError(
            f"search: got {num_microbatches} microbatches for the {placement.num_pipes} pipes of the placement, "
            f"which share them equally; try {fewer or placement.num_pipes} or {fewer + placement.num_pipes}"
        )
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
