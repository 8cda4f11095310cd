"""Detection of losses that show trouble, and a limit on how often a run may go back before it gives up."""

import collections
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

WINDOW, MIN_LOSSES = 32, 8
"""The number of latest steps with whose losses a loss is compared, and the smallest number for a comparison."""

COLLAPSED_SHARE = 0.9
"""Share of the largest possible MaxVio from which routing counts as collapsed."""

PATIENCE = 3
"""How often at most a run goes back to the same step."""


class TroubleDetector:
    """Checks the loss and the gradient norm of each step.

    Args:
      spike: the number of spreads above the median of the latest losses that a loss may be; None for no limit. See
        ``median_and_spread``.
    """

    def __init__(self, spike: float | None):
        self._spike = spike
        self._losses: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._return_steps: list[int] = []
        self._step = 0

    def reason(self, record: Mapping[str, Any]) -> str | None:
        """What is wrong with a step's record, in words; None if nothing is. Later losses are compared only with those
        of steps without trouble."""
        self._step = record["step"]
        for name in ("loss", "grad_norm"):
            if not math.isfinite(record[name]):
                return f"{name} is {record[name]} at step {record['step']}"
        loss = record["loss"]
        if self._spike is not None and len(self._losses) >= MIN_LOSSES:
            middle, spread = median_and_spread(self._losses)
            if loss > middle + self._spike * spread:
                return (
                    f"loss is {loss:.4g} at step {record['step']}, {(loss - middle) / spread:.1f} spreads above the "
                    f"median {middle:.4g} of the {len(self._losses)} steps before"
                )
        self._losses.append(loss)
        return None

    def to_json(self) -> dict[str, Any]:
        """The latest losses and the steps that the run went back to, as JSON values for ``resume``."""
        return {"losses": list(self._losses), "returns": list(self._return_steps)}

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Continue from what ``to_json`` returned in an earlier part of the run."""
        self._losses.extend(saved["losses"])
        self._return_steps.extend(saved["returns"])

    def may_return(self, step: int) -> bool:
        """Note that the run wants to go back to ``step``. Returns False after more than ``PATIENCE`` times.

        The losses of the steps that are given up are forgotten: they are lower, so those that come again would be
        spikes beside them.
        """
        for _ in range(min(self._step - 1 - step, len(self._losses))):
            self._losses.pop()
        self._return_steps.append(step)
        return self._return_steps.count(step) <= PATIENCE


class WarningSigns:
    """Warns once each of trouble that no single step shows: collapsed routing, and a loss that is higher than at the
    start of the run.

    Args:
      largest_max_vio: the MaxVio if every token chose the same experts: num_experts / top_k - 1.
      learning_rate: the learning rate as a function of the step, for the text of the warnings.
    """

    def __init__(self, largest_max_vio: float, learning_rate: Callable[[int], Any]):
        self._largest, self._rate = largest_max_vio, learning_rate
        self._first: float | None = None
        self._losses: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._collapsed = 0
        self._warned: set[str] = set()

    def check(self, record: Mapping[str, Any]) -> list[str]:
        """The new warnings after a step."""
        if record["step"] == 1:
            self._first = record["loss"]
        self._losses.append(record["loss"])
        rate = f"--learning-rate, now {float(self._rate(record['step'] - 1)):.2g}"
        is_collapsed = 0 < COLLAPSED_SHARE * self._largest <= record["max_vio"] or record["drop_rate"] > 0.5
        self._collapsed = self._collapsed + 1 if is_collapsed else 0
        found = []
        if self._collapsed == WINDOW and self._is_new("routing"):
            found.append(
                f"routing has collapsed: for {WINDOW} steps few experts have had nearly all tokens (MaxVio "
                f"{record['max_vio']:.2f} of at most {self._largest:.2f}, {record['drop_rate']:.0%} of the assignments "
                f"dropped); lower {rate}, or raise --bias-rate or --balance-factor"
            )
        middle = statistics.median(self._losses)
        # None in a resumed run, which did not see the first step.
        began = self._first
        if (
            began is not None
            and len(self._losses) == WINDOW
            and middle > 1.02 * began
            and self._is_new("loss")
        ):
            found.append(
                f"the loss is higher than it began: {middle:.4g} over the last {WINDOW} steps, {began:.4g} at "
                f"first; lower {rate}, or warm up for longer"
            )
        return found

    def _is_new(self, what: str) -> bool:
        was_given = what in self._warned
        self._warned.add(what)
        return not was_given


def median_and_spread(losses: collections.deque[float]) -> tuple[float, float]:
    """(median, spread) of losses. The spread is 1.48 times the median distance from the median, which is the standard
    deviation if the losses are normally distributed.

    It is at least a hundredth of the median, so that no tiny rise of a flat curve counts as a spike.
    """
    middle = statistics.median(losses)
    spread = 1.4826 * statistics.median(abs(loss - middle) for loss in losses)
    return middle, max(spread, abs(middle) / 100)
