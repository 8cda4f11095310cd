"""When a loss is not to be trusted, and how often a run may go back before it gives up."""

import collections
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

WINDOW, FEWEST = 32, 8
"""Steps that a loss is measured against, and how many there must be."""

NEARLY = 0.9
"""Of the worst there can be."""

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


class Omens:
    """Says once, in words, that a run goes wrong in a way that no single step shows: routing that has collapsed, and a
    loss that is higher than it began.

    Args:
      worst: MaxVio if every token chose the same experts: experts over experts a token, less one.
      learning_rate: of a step, for the words.
    """

    def __init__(self, worst: float, learning_rate: Callable[[int], Any]):
        self._worst, self._rate = worst, learning_rate
        self._first: float | None = None
        self._losses: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._collapsed = 0
        self._said: set[str] = set()

    def look(self, record: Mapping[str, Any]) -> list[str]:
        """What there is to say after a step."""
        if record["step"] == 1:
            self._first = record["loss"]
        self._losses.append(record["loss"])
        rate = f"--learning-rate, now {float(self._rate(record['step'] - 1)):.2g}"
        worst = 0 < NEARLY * self._worst <= record["max_vio"] or record["drop_rate"] > 0.5
        self._collapsed = self._collapsed + 1 if worst else 0
        found = []
        if self._collapsed == WINDOW and self._once("routing"):
            found.append(
                f"routing has collapsed: for {WINDOW} steps few experts have had nearly all tokens (MaxVio "
                f"{record['max_vio']:.2f} of at most {self._worst:.2f}, {record['drop_rate']:.0%} of the assignments "
                f"dropped); lower {rate}, or raise --bias-rate or --balance-factor"
            )
        middle = statistics.median(self._losses)
        began = self._first  # None in a run that is resumed: it did not see it
        if began is not None and len(self._losses) == WINDOW and middle > 1.02 * began and self._once("loss"):
            found.append(
                f"the loss is higher than it began: {middle:.4g} over the last {WINDOW} steps, {began:.4g} at "
                f"first; lower {rate}, or warm up for longer"
            )
        return found

    def _once(self, what: str) -> bool:
        said = what in self._said
        self._said.add(what)
        return not said


def median_and_spread(losses: collections.deque[float]) -> tuple[float, float]:
    """The median, and 1.48 times the median distance from it: the standard deviation if they are normal.

    At least a hundredth of the median: in a flat curve no hair is a spike.
    """
    middle = statistics.median(losses)
    spread = 1.4826 * statistics.median(abs(loss - middle) for loss in losses)
    return middle, max(spread, abs(middle) / 100)
