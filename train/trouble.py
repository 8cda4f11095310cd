"""When a loss is not to be trusted, and how often a run may go back before it gives up."""

import collections
import math
import statistics
from collections.abc import Mapping
from typing import Any

WINDOW, FEWEST = 32, 8
"""Steps that a loss is measured against, and how many there must be."""

PATIENCE = 3
"""How often in a row a run goes back to the same step."""


class Trouble:
    """Looks at each step's loss and gradient norm.

    Args:
      spike: how many spreads above the median of the latest losses a loss may be; None for any.
    """

    def __init__(self, spike: float | None):
        self._spike = spike
        self._losses: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._returns: list[int] = []

    def reason(self, record: Mapping[str, Any]) -> str | None:
        """What is wrong with a step's record, None if nothing is; only then does it count for later ones."""
        for name in ("loss", "grad_norm"):
            if not math.isfinite(record[name]):
                return f"{name} is {record[name]} at step {record['step']}"
        loss = record["loss"]
        if self._spike is not None and len(self._losses) >= FEWEST:
            middle, spread = median_and_spread(self._losses)
            if loss > middle + self._spike * spread:
                return (
                    f"loss is {loss:.4g} at step {record['step']}, {(loss - middle) / spread:.1f} spreads above the "
                    f"median {middle:.4g} of the {len(self._losses)} steps before"
                )
        self._losses.append(loss)
        return None

    def saved(self) -> dict[str, Any]:
        """What ``resume`` takes, for JSON."""
        return {"losses": list(self._losses), "returns": list(self._returns)}

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Go on from what an earlier part of the run saw."""
        self._losses.extend(saved["losses"])
        self._returns.extend(saved["returns"])

    def may_return(self, step: int) -> bool:
        """Note that the run would go back to a step; False if it did too often."""
        self._returns.append(step)
        return self._returns.count(step) <= PATIENCE


def median_and_spread(losses: collections.deque[float]) -> tuple[float, float]:
    """The median, and 1.48 times the median distance from it: the standard deviation if they are normal.

    At least a hundredth of the median: in a flat curve no hair is a spike.
    """
    middle = statistics.median(losses)
    spread = 1.4826 * statistics.median(abs(loss - middle) for loss in losses)
    return middle, max(spread, abs(middle) / 100)
