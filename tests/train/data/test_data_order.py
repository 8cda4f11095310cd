"""Permutations and mixtures, against lists and loops; the thread that makes batches ahead."""

import threading
import time
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from train.data import DataError, Prefetch
from train.data.mixture import mixture, whole_weights
from train.data.permutation import permute

SIZES = [*range(1, 70), 127, 128, 129, 255, 256, 257, 1000, 4095, 4096, 4097, 65537, 300_000]


def test_a_permutation_has_every_number_once():
    for size in SIZES:
        for key in (0, 1, 2**64 - 1):
            whole = permute(np.arange(size), size, key)
            np.testing.assert_array_equal(np.sort(whole), np.arange(size))
            some = np.array([0, size // 2, size - 1])  # elements do not need the others
            np.testing.assert_array_equal(permute(some, size, key), whole[some])


def test_a_permutation_of_more_than_memory_holds():
    size = 10**15
    numbers = np.random.default_rng(0).integers(0, size, 10_000)
    found = permute(numbers, size, 3)
    assert len(set(found.tolist())) == len(set(numbers.tolist()))
    assert found.min() >= 0 and found.max() < size
    assert 0.45 < (found / size).mean() < 0.55


@pytest.mark.parametrize("size", [2, 3, 5])
def test_small_permutations_are_about_equally_likely(size):
    """Chi-square of where one element goes, and of which one comes after it; 5 sigma."""
    keys = 3000
    found = np.array([permute(np.arange(size), size, key * 0x123456789) for key in range(keys)])
    for column in range(size):
        counts = np.bincount(found[:, column], minlength=size)
        chi = ((counts - keys / size) ** 2 / (keys / size)).sum()
        assert chi < size - 1 + 5 * (2 * (size - 1)) ** 0.5 + 5, (column, counts)
    assert len(set(map(tuple, found.tolist()))) == np.prod(np.arange(1, size + 1))


def test_neighbours_are_scattered():
    """A permutation that is no good for shuffling keeps neighbours near or their differences alike."""
    size = 10_000
    found = permute(np.arange(size), size, 4)
    steps = np.abs(np.diff(found))
    assert abs(steps.mean() / size - 1 / 3) < 0.02  # of two independent uniform numbers
    assert Counter(np.diff(found).tolist()).most_common(1)[0][1] < 10
    assert abs(np.corrcoef(np.arange(size), found)[0, 1]) < 0.05


def test_permuting_what_is_outside_is_refused():
    with pytest.raises(ValueError, match=r"range\(5\), got up to 5"):
        permute(np.array([1, 5]), 5, 0)


def test_short_weights_are_exact():
    assert (
        whole_weights((0.7, 0.2, 0.1)) == [7, 2, 1]
        and whole_weights((1,)) == [1]
        and whole_weights((2, 1)) == [2, 1]
    )
    assert whole_weights((0.5, 0.5)) == [1, 1] and whole_weights((30, 45)) == [2, 3]


@pytest.mark.parametrize(
    "weights", [(0.7, 0.2, 0.1), (1, 1, 1, 1), (0.9, 0.05, 0.03, 0.02), (7, 5, 3, 2, 1), (97, 1)]
)
def test_every_source_has_its_share_at_every_point(weights):
    pattern = mixture(weights)
    shares = [Fraction(str(weight)) / sum(Fraction(str(weight)) for weight in weights) for weight in weights]
    period = len(pattern.order)
    sources, indices = pattern.locate(np.arange(3 * period))
    taken = [0] * len(weights)
    for number, (source, index) in enumerate(zip(sources.tolist(), indices.tolist(), strict=True)):
        assert index == taken[source]
        taken[source] += 1
        assert all(abs(had - (number + 1) * share) < 1 for had, share in zip(taken, shares, strict=True))
    assert taken == [3 * period * share for share in shares]


def test_long_weights_are_rounded_to_a_part_in_65536():
    found = whole_weights((2**0.5, 3**0.5, 1e-9))
    total = sum(found)
    assert total <= 2**16 + 2 and found[2] == 1
    assert abs(found[0] / total - 2**0.5 / (2**0.5 + 3**0.5)) < 2**-15


@pytest.mark.parametrize("weights", [(1, 0), (1, -1), (float("nan"), 1)])
def test_weights_below_nothing_are_refused(weights):
    with pytest.raises(DataError, match="--data-weights .* every weight must be above 0"):
        mixture(weights)


def test_batches_are_made_while_the_step_runs():
    thread, made = [], threading.Semaphore(0)

    def draw(step):
        thread.append(threading.get_ident())
        made.release()
        return step

    with Prefetch(draw, depth=2) as ahead:
        for _ in range(3):  # two wait, the third is made and waits for room
            assert made.acquire(timeout=10)
        assert not made.acquire(timeout=0.05)
        ahead.get(0)
        assert ahead.wait < 5
        assert made.acquire(timeout=10)
    assert threading.get_ident() not in thread
    assert not any(one.name.startswith("prefetch") for one in threading.enumerate())


def test_the_wait_is_measured():
    made = threading.Semaphore(0)

    def draw(step):
        time.sleep(0.6)
        made.release()

    with Prefetch(draw) as ahead:
        ahead.get(0)
        assert ahead.wait >= 0.3
        assert made.acquire(timeout=10) and made.acquire(timeout=10), "the next one is there"
        ahead.get(1)
        assert ahead.wait < 0.3


def test_what_is_fetched_ahead_is_what_would_be_drawn_after_a_jump_too():
    drawn = []
    with Prefetch(lambda step: drawn.append(step) or step**2, first=3, stop=8) as ahead:
        assert [ahead.get(step) for step in range(3, 8)] == [9, 16, 25, 36, 49]
    assert drawn == [3, 4, 5, 6, 7]
    with Prefetch(lambda step: step, stop=100) as ahead:
        assert [ahead.get(step) for step in (0, 1, 7, 8, 2, 100, 101, 3)] == [0, 1, 7, 8, 2, 100, 101, 3]


def test_an_error_comes_at_its_step():
    def draw(step):
        if step == 2:
            raise DataError("shard 5 is gone")
        return step

    with Prefetch(draw) as ahead:
        assert [ahead.get(0), ahead.get(1)] == [0, 1]
        for _ in range(2):
            with pytest.raises(DataError, match="shard 5 is gone"):
                ahead.get(2)
        assert ahead.get(3) == 3
