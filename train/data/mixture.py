"""Mixtures: the source of a sequence, and how many earlier sequences it gave, without counting through them."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from train.data.errors import DataError

LARGEST_PERIOD = 2**16
"""The largest length of a pattern. Shares whose common denominator is larger are rounded to multiples of 1 over it."""


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A pattern of sources that repeats.

    Attributes:
      order: int64 [period], the source at each place.
      before: int64 [period], how often that source occurs in the pattern before this place.
      counts: int64 [num_sources], how often each source occurs in the whole pattern.
    """

    order: np.ndarray
    before: np.ndarray
    counts: np.ndarray

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The sources of sequences ``numbers``, int64 [n], and their numbers within these sources; both int64 [n]."""
        rounds, places = np.divmod(numbers, len(self.order))
        sources = self.order[places]
        return sources, rounds * self.counts[sources] + self.before[places]


def mixture(weights: Sequence[float]) -> Mixture:
    """The pattern in which, at every place, each source has had its share of all sequences so far to within one.

    The next place goes to the source with the largest ratio of its weight to its number of places, this one included.
    Only those sources are considered whose number of places then does not exceed their share rounded up (the quota
    method; Balinski, Young, 1975).

    Raises:
      DataError: a weight is not above 0.
    """
    counts = np.array(whole_weights(weights), np.int64)
    period = int(counts.sum())
    taken = np.zeros_like(counts)
    order, before = np.empty(period, np.int64), np.empty(period, np.int64)
    for place in range(period):
        within = taken * period < (place + 1) * counts
        source = int(np.argmax(np.where(within, counts / (taken + 1), 0.0)))
        order[place], before[place] = source, taken[source]
        taken[source] += 1
    return Mixture(order, before, counts)


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Weights as whole numbers in the same proportion and lowest terms, or rounded; see ``LARGEST_PERIOD``."""
    for weight in weights:
        if not (weight > 0 and math.isfinite(weight)):
            raise DataError(f"--data-weights {' '.join(map(str, weights))}: every weight must be above 0")
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= LARGEST_PERIOD:
        return [int(share * period) for share in shares]
    return [max(1, round(share * LARGEST_PERIOD)) for share in shares]
