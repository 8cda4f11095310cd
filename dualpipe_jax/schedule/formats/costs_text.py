"""Costs in a few words."""

from dualpipe_jax.present.numbers import Units, number
from dualpipe_jax.schedule.costs import CostModel

_ENDS = {0: "first", -1: "last"}


def describe(costs: CostModel, units: Units | None = None) -> str:
    """Costs in a few words: F, I, W and FB always; sends and extras unless they are 0.

    >>> describe(CostModel(1, 1.5, 0.8, FB=2.75, send=0.1))
    'F 1, I 1.5, W 0.8, FB 2.75, send 0.1'
    >>> describe(CostModel(extra={-2: (0.5, 0, 0)}))
    'F 1, I 1, W 1, FB 3, stage -2 +0.5/+0/+0'
    """
    words = [f"{name} {number(getattr(costs, name))}" for name in ("F", "I", "W", "FB")]
    blocking = " blocking" if costs.blocking else ""
    if costs.send_inside is not None:
        node = f"in a node of {costs.ranks_per_node}"
        words.append(f"send {number(costs.send)}, {number(costs.send_inside)} {node}{blocking}")
    elif costs.send:
        words.append(f"send {number(costs.send)}{blocking}")
    for stage, more in sorted(costs.extra.items(), key=lambda item: (item[0] < 0, item[0])):
        if any(more):
            words.append(f"{_ENDS.get(stage, f'stage {stage}')} {'/'.join(f'{cost:+.6g}' for cost in more)}")
    return ", ".join(words) + (f" {units.time}" if units and units.time else "")
