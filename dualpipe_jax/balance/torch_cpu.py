"""PyTorch's sort and sum on a CPU, with the same order of ties and the same bits, without PyTorch.

DeepSeek's balancer sorts weights that are often equal (those of an expert's copies are), by a sort that does
not specify the order of equal items. On CPUs it is std::sort of GCC's library, whose order is the same on
every machine.
"""

import numpy as np

_SORT_THRESHOLD = 16
"""The length of pieces at which std::sort stops partitioning. It then sorts the whole by insertion, which
keeps equal items in order."""

_LANES, _CHAINS = 8, 4
"""The number of float32 lanes of a vector, and the number of vectors in which partial sums are kept."""


def sort_descending(weights: np.ndarray) -> np.ndarray:
    """int64 [rows, items], like ``torch.sort(weights, descending=True).indices`` of float32 [rows, items].

    Equal items come in the order that introsort leaves: median-of-three partitions, then insertion.
    """
    order = np.argsort(-weights, -1, kind="stable")
    if weights.shape[-1] > _SORT_THRESHOLD:
        ordered = np.take_along_axis(weights, order, -1)
        for row in np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(-1)):
            cut = np.array(_introsort_partitions(weights[row].tolist()))
            order[row] = cut[np.argsort(-weights[row, cut], kind="stable")]
    return order


def _introsort_partitions(values: list[float]) -> list[int]:
    """Indices after all partitions of introsort: pieces in falling order of their values, each unsorted inside.

    A piece that 2 log2 n partitions in a row have not made small is sorted by a heap.
    """
    at = list(range(len(values)))
    left = [(0, len(values), 2 * (len(values).bit_length() - 1))]
    while left:
        first, last, depth = left.pop()
        if last - first > _SORT_THRESHOLD and depth:
            cut = _partition(values, at, first, last)
            left += [(first, cut, depth - 1), (cut, last, depth - 1)]
        elif last - first > _SORT_THRESHOLD:
            at[first:last] = _heap_sort(values, at[first:last])
    return at


def _heap_sort(values: list[float], heap: list[int]) -> list[int]:
    """Indices sorted by a heap with the least value on top, so that the largest value comes first."""
    for top in reversed(range(len(heap) // 2)):
        _adjust_heap(values, heap, top, len(heap), heap[top])
    for end in reversed(range(1, len(heap))):
        inserted, heap[end] = heap[end], heap[0]
        _adjust_heap(values, heap, 0, end, inserted)
    return heap


def _adjust_heap(values: list[float], heap: list[int], top: int, size: int, inserted: int) -> None:
    """Put an index into the heap below ``top``: down along the smaller children to the bottom, then up to its place."""
    hole = top
    while (right := 2 * hole + 2) < size:
        child = right - 1 if values[heap[right]] > values[heap[right - 1]] else right
        heap[hole] = heap[child]
        hole = child
    if right == size:
        heap[hole] = heap[right - 1]
        hole = right - 1
    while hole > top and values[heap[(hole - 1) // 2]] > values[inserted]:
        heap[hole] = heap[(hole - 1) // 2]
        hole = (hole - 1) // 2
    heap[hole] = inserted


def _partition(values: list[float], at: list[int], first: int, last: int) -> int:
    """Move values above the pivot to the left, below it to the right, equal ones to either side.

    Returns the position at which the right side begins.
    """
    pivot = _median(values, at, first + 1, first + (last - first) // 2, last - 1)
    at[first], at[pivot] = at[pivot], at[first]
    middle, left, right = values[at[first]], first + 1, last
    while True:
        while values[at[left]] > middle:
            left += 1
        right -= 1
        while middle > values[at[right]]:
            right -= 1
        if left >= right:
            return left
        at[left], at[right] = at[right], at[left]
        left += 1


def _median(values: list[float], at: list[int], one: int, two: int, three: int) -> int:
    a, b, c = values[at[one]], values[at[two]], values[at[three]]
    if a > b:
        return two if b > c else three if a > c else one
    return one if a > c else three if b > c else two


def sum_last(weights: np.ndarray) -> np.ndarray:
    """float32 [...], like ``weights.sum(-1)`` of a contiguous float32 tensor [..., items] of up to 512 items."""
    items = weights.shape[-1]
    lanes = _LANES if items >= _LANES else 1
    whole = items // lanes * lanes
    vectors = np.moveaxis(weights[..., :whole].reshape(*weights.shape[:-1], whole // lanes, lanes), -2, 0)
    chained = len(vectors) // _CHAINS * _CHAINS
    chains = np.zeros((_CHAINS, *vectors.shape[1:]), weights.dtype)
    for at in range(0, chained, _CHAINS):
        chains += vectors[at : at + _CHAINS]
    for vector in vectors[chained:]:
        chains[0] += vector
    total = chains[0] + chains[1] + chains[2] + chains[3]
    summed = np.zeros(weights.shape[:-1], weights.dtype)
    for part in (weights[..., whole:], total):
        for item in np.moveaxis(part, -1, 0):
            summed += item
    return summed
