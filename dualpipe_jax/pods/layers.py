"""Where should a model's layers stand, by what the units of its stages took? Loads no JAX."""

from collections.abc import Iterator, Sequence

import numpy as np

from dualpipe_jax.schedule import CostModel, Op, Schedule


def moved_layers(
    layers: Sequence[int], schedule: Schedule, costs: CostModel, at_once: float | None = None
) -> tuple[tuple[int, ...], float]:
    """Layers of each stage that make the busiest rank least busy, and how busy it is then, of what it is now.

    A layer is taken to cost what it does on ranks that have stages between the ends alone. Only shares are considered
    that make all of these equally deep, so that no more kinds of units are compiled. It is an estimate, for layers may
    differ: compile the units with these shares to know.

    Args:
      layers: of each stage of the model, as they are.
      schedule: whose ranks are meant.
      costs: of its units with these layers; see ``unit_costs``.
      at_once: of how many ranks the work can be done at a time; None: of all.

    Returns:
      The layers as they are and 1 where nothing is better, or no rank is without an end.
    """
    stages = len(layers)
    runs = np.zeros((schedule.num_ranks, stages))  # forwards of each stage on each rank
    busy = np.zeros(schedule.num_ranks)
    for rank, order in enumerate(schedule.orders):
        for slot in order:
            busy[rank] += costs.of(slot, schedule.placement)
            for action in slot:
                runs[rank, schedule.placement.model_stage(action.stage)] += action.op is Op.F
    own = tuple(layers)
    held = runs @ np.asarray(own)
    between = (runs[:, [0, -1]].sum(axis=1) == 0) & (held > 0)
    if not between.any():
        return own, 1.0
    layer = float(np.max(busy[between] / held[between]))
    fixed = busy - layer * held

    def busiest(shares: Sequence[int]) -> float:
        each = fixed + layer * (runs @ np.asarray(shares))
        return float(max(each.max(), 0.0 if at_once is None else each.sum() / at_once))

    def badness(shares: tuple[int, ...]) -> tuple[float, int]:
        return round(busiest(shares) / before, 6), sum(abs(a - b) for a, b in zip(shares, own, strict=True))

    before = busiest(own)
    best = min(_equally_deep(sum(own), stages), key=badness, default=own)
    after = busiest(best) / before
    return (best, after) if after < 1 else (own, 1.0)


def _equally_deep(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """All shares whose stages between the ends have as many layers, one at least."""
    for depth in range(1, num_layers // (num_stages - 2) + 1):
        left = num_layers - (num_stages - 2) * depth
        yield from ((first, *[depth] * (num_stages - 2), left - first) for first in range(left + 1))
