"""The number of copies of each expert: greedy counts, and others that may pack better."""

from collections.abc import Iterator

import numpy as np

from dualpipe_jax.balance.bounds import copies_needed

_LIMIT_FACTORS = (1.0, 1.022, 1.008, 1.045, 1.004, 1.035, 1.012, 1.06, 1.017, 1.028)
"""Limits on the load of the heaviest copy to try, in multiples of the lower bound. The first ones differ
most, since there may be no time for all."""

_SPARE_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The shares of the spare copies to try for the largest experts, one more copy for each."""


def add_copies(load: np.ndarray, counts: np.ndarray, num_copies: int, most: int) -> np.ndarray:
    """Add one copy at a time, of the expert whose copies carry most: int64 [layers, experts], the new counts.

    Started from one copy of each expert, no other counts have a lighter heaviest copy. Of equal experts the
    first is taken.

    Args:
      load: [layers, experts].
      counts: [layers, experts], the counts to start from.
      num_copies: the number of copies of all experts of a layer in the end; at most experts x most.
      most: the largest number of copies of an expert.
    """
    counts = counts.copy()
    layer = np.arange(len(counts))
    share = np.where(counts < most, load / counts, -1.0)
    missing = num_copies - counts.sum(-1)
    for done in range(int(missing.max(initial=0))):
        expert = share.argmax(-1)
        now = counts[layer, expert] + (missing > done)
        counts[layer, expert] = now
        share[layer, expert] = np.where(now < most, load[layer, expert] / now, -1.0)
    return counts


def other_counts(relative: np.ndarray, bound: np.ndarray, num_copies: int, most: int) -> Iterator[np.ndarray]:
    """Counts to try where the greedy counts do not pack well: each int64 [layers, experts].

    With few slots on a device, the load of the heaviest copy matters less than whether every copy finds a
    partner: a device of two slots can take one copy above half of its load, but not two. So every expert gets
    the copies that keep it within a limit above the bound. Of the spare copies some go to the largest
    experts, whose copies then become small, and the rest to the heaviest copies.
    """
    load = relative.max(0)
    rank = np.argsort(np.argsort(-load, -1, kind="stable"), -1)
    for limit in _LIMIT_FACTORS:
        needed = np.minimum(copies_needed(relative, bound * limit), most)
        spare = num_copies - needed.sum(-1)
        for part in _SPARE_SHARES if (spare > 0).any() else _SPARE_SHARES[:1]:
            largest = rank < np.round(part * spare.clip(0))[:, None]
            counts = np.where((spare >= 0)[:, None], np.minimum(needed + largest, most), 1)
            yield add_copies(load, counts, num_copies, most)


def nearby_counts(counts: np.ndarray, num_tries: int, most: int, random: np.random.Generator) -> np.ndarray:
    """Counts after one to three random moves of a copy from one expert to another: int64 [layers, tries, experts].

    Args:
      counts: int64 [layers, experts].
      most: the largest number of copies of an expert.
    """
    found = np.repeat(counts, num_tries, 0)
    row = np.arange(len(found))
    left = random.integers(1, 4, len(found))
    for turn in range(3):
        chance = random.random((2, *found.shape))
        less = np.where(found > 1, chance[0], -1.0).argmax(-1)
        more = np.where(found < most, chance[1], -1.0).argmax(-1)
        moves = (left > turn) & (found[row, less] > 1) & (found[row, more] < most)
        found[row[moves], less[moves]] -= 1
        found[row[moves], more[moves]] += 1
    return found.reshape(len(counts), num_tries, -1)
