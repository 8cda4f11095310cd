"""Move layers between stages to balance ranks, by the measured time of the stages' units. Loads no JAX."""

from collections.abc import Iterator, Sequence

import numpy as np

from dualpipe_jax.schedule import CostModel, Op, Schedule


def moved_layers(
    layers: Sequence[int], schedule: Schedule, costs: CostModel, at_once: float | None = None
) -> tuple[tuple[int, ...], float]:
    """Find the number of layers of each stage that minimises the time of the busiest rank.

    The cost of a layer is taken from the ranks that have neither the first nor the last stage. Only divisions
    are considered that make all stages between the ends equally deep, so that no more kinds of units are
    compiled. The result is an estimate, for layers may differ: compile the units with this division to know.

    Args:
      layers: the present number of layers of each stage of the model.
      schedule: the schedule whose ranks are balanced.
      costs: costs of its units with the present layers; see ``unit_costs``.
      at_once: the number of ranks whose work can be done at the same time; None: all.

    Returns:
      The number of layers of each stage, and the time of the busiest rank as a ratio to its present time.
      These are the present layers and 1 where no division is better, or where every rank has the first or the
      last stage.
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

    def sort_key(shares: tuple[int, ...]) -> tuple[float, int]:
        return round(busiest(shares) / before, 6), sum(abs(a - b) for a, b in zip(shares, own, strict=True))

    before = busiest(own)
    best = min(_equally_deep(sum(own), stages), key=sort_key, default=own)
    after = busiest(best) / before
    return (best, after) if after < 1 else (own, 1.0)


def _equally_deep(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """All divisions of layers in which the stages between the ends have the same number of layers, at least one."""
    for depth in range(1, num_layers // (num_stages - 2) + 1):
        left = num_layers - (num_stages - 2) * depth
        yield from ((first, *[depth] * (num_stages - 2), left - first) for first in range(left + 1))
