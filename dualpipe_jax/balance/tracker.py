"""Loads over time: a moving average of the tokens that each step counted."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True, eq=False)
class LoadTracker:
    """A moving average of counts of tokens. It is immutable; ``add`` returns the next one.

    >>> from dualpipe_jax.balance import LoadTracker
    >>> tracker = LoadTracker.start(num_layers=1, num_experts=2, half_life=1.0)
    >>> tracker.add([[4, 0]]).add([[0, 4]]).loads.tolist()
    [[1.3333333333333333, 2.6666666666666665]]

    Attributes:
      half_life: the number of steps after which a step counts half as much as the latest.
      sums: float64 [layers, experts], the weighted sum of counts; older steps have less weight.
      weight: the sum of the weights of all added steps: 0 before the first, at most 1 / (1 - 2 ** (-1 /
        half_life)).
      steps: the number of steps that were added.
    """

    half_life: float
    sums: np.ndarray
    weight: float = 0.0
    steps: int = 0

    @classmethod
    def start(cls, num_layers: int, num_experts: int, half_life: float = 100.0) -> "LoadTracker":
        """A tracker to which no step has been added.

        Raises:
          ValueError: a count is below 1, or the half-life is not above 0.
        """
        if num_layers < 1 or num_experts < 1:
            raise ValueError(
                f"LoadTracker: {num_layers} layers x {num_experts} experts; give at least one of each"
            )
        if not 0 < half_life < np.inf:
            raise ValueError(f"LoadTracker: half_life={half_life}; give steps, above 0")
        return cls(float(half_life), np.zeros((num_layers, num_experts)))

    def add(self, counts: ArrayLike) -> "LoadTracker":
        """The tracker after one more step.

        Args:
          counts: integers [layers, experts], the number of tokens that the step sent to each expert, over all
            devices.

        Raises:
          ValueError: counts are no integers, negative or of another shape; says which.
        """
        given = np.asarray(counts)
        if given.dtype.kind not in "iu":
            raise ValueError(
                f"LoadTracker: counts are {given.dtype}; give integers, how many tokens each expert had"
            )
        if given.shape != self.sums.shape:
            raise ValueError(f"LoadTracker: counts are {list(given.shape)}; give {list(self.sums.shape)}")
        if given.min() < 0:
            raise ValueError(f"LoadTracker: a count is {given.min()}; counts are at least 0")
        keep = 0.5 ** (1 / self.half_life)
        return dataclasses.replace(
            self, sums=keep * self.sums + given, weight=keep * self.weight + 1, steps=self.steps + 1
        )

    @property
    def loads(self) -> np.ndarray:
        """The tokens of each expert in an average step, for ``balance``: float64 [layers, experts].

        Raises:
          ValueError: no step was added yet.
        """
        if not self.steps:
            raise ValueError("LoadTracker: no step was added yet, so there are no loads; add counts first")
        return self.sums / self.weight

    def state(self) -> dict[str, Any]:
        """A dict of arrays and numbers for a checkpoint; ``restore`` makes the same tracker of it, to the last bit."""
        return dataclasses.asdict(self)

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> "LoadTracker":
        """The tracker whose ``state()`` this is; the arrays may have become lists in JSON.

        Raises:
          ValueError: an entry is missing, or is not of the form that ``state()`` returns.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if missing := [name for name in names if name not in state]:
            raise ValueError(
                f"LoadTracker: the state has no {', '.join(missing)}; give what state() returned"
            )
        sums = np.asarray(state["sums"], float)
        if sums.ndim != 2 or 0 in sums.shape:
            raise ValueError(
                f"LoadTracker: sums of the state are {list(sums.shape)}; they are [layers, experts]"
            )
        fresh = cls.start(sums.shape[0], sums.shape[1], float(state["half_life"]))
        return dataclasses.replace(
            fresh, sums=sums.copy(), weight=float(state["weight"]), steps=int(state["steps"])
        )
