"""Costs in a few words."""

from dualpipe_jax.present.numbers import Units, number
from dualpipe_jax.schedule.costs import CostModel


def describe(costs: CostModel, units: Units | None = None) -> str:
    """Costs in a few words: F, I, W and FB always; sends and extras unless they are 0.

    >>> describe(CostModel(1, 1.5, 0.8, FB=2.75, send=0.1))
    'F 1, I 1.5, W 0.8, FB 2.75, send 0.1'
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
            words.append(f"{_stage(stage)} {'/'.join(f'{cost:+.6g}' for cost in more)}")
    return ", ".join(words) + (f" {units.time}" if units and units.time else "")


def _stage(stage: int) -> str:
    ends = {0: "first", -1: "last"}
    return ends.get(stage, f"stage {stage}" if stage > 0 else f"{-stage}th from the last")
