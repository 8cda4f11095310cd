"""The space of a search: placements and memory limits."""

import math
from collections.abc import Callable, Iterable, Sequence

from dualpipe_jax.schedule.costs import CostModel, at_most
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


def can_divide_costs(costs: CostModel, placement: Placement) -> bool:
    """Whether no negative extra exceeds the costs of one of the placement's stages."""
    try:
        costs.of_stages(placement)
    except ValueError:
        return False
    return True


def bounds_of(placements: Sequence[Placement], problem: Problem) -> dict[Placement, float]:
    """The lower bound on the makespan for each placement on which some schedule fits the memory limit.

    Raises:
      ValueError: no placement has a schedule that fits; the message gives the least memory that is needed.
    """
    of_stages = {p: problem.of_stages(p) for p in placements}
    least = {p: least_memory(p, own.memory) for p, own in of_stages.items()}
    smallest = min(placements, key=least.__getitem__)
    if not at_most(least[smallest], problem.limit):
        raise ValueError(
            f"search: got memory_limit={problem.limit:g}, but no schedule runs in less than {least[smallest]:g}, "
            f"which one microbatch at a time takes on the placement {smallest.pipes}; "
            f"try memory_limit={least[smallest]:g} or more"
        )
    return {p: bound_of_stages(p, own) for p, own in of_stages.items() if at_most(least[p], problem.limit)}


def memory_limits(
    placements: Sequence[Placement], problem: Problem, pareto_memory: Iterable[float]
) -> dict[float, float]:
    """The memory limits through which a search climbs, ascending, and the part of the effort for each.

    They do not depend on ``problem.limit``. The part is 1 for each of ``pareto_memory``, where a shorter named schedule
    begins to fit, for no limit, and for the number of activations that 1F1B keeps. It is 0.5 for further limits,
    from the least memory to that of 1.5 times as many activations as 1F1B keeps.
    """
    ranks, unit = placements[0].num_ranks, problem.memory.live
    least = min(least_memory(p, problem.of_stages(p).memory) for p in placements)
    kept = 1.0  # in activations, where the least memory has one
    memory_limits = {least: 0.5}  # also where activations take no memory
    while unit and kept <= 1.5 * ranks:
        memory_limits[least + (kept - 1) * unit] = 0.5
        kept = max(kept + 0.5, math.floor(2.5 * kept) / 2)
    whole = (least + (ranks - 1) * unit, math.inf, *pareto_memory)
    memory_limits |= dict.fromkeys((limit for limit in whole if limit > least), 1.0)
    return dict(sorted(memory_limits.items()))
