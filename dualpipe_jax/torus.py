"""Where devices lie on a TPU's torus: which links an all-to-all keeps busy, and which devices are near each other.

Python and NumPy only. Coordinates are integers [devices, dims]; two devices of one chip have equal coordinates.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

Shape = tuple[int, ...]


def closed_dims(shape: Shape) -> tuple[bool, ...]:
    """For each dim of a slice, whether it is a ring: whether the last chip has a link to the first one.

    In a slice of three dims all are rings if each size is a multiple of four, else none. In a slice of two
    dims, given as three with a last size of 1, the dims of 16 chips are rings, a whole pod's side (Google
    Cloud's pages of each TPU).
    """
    if all(size % 4 == 0 for size in shape):
        return (True,) * len(shape)
    flat = math.prod(shape[2:]) == 1
    return tuple(flat and size == 16 for size in shape)


def busiest_link(groups: np.ndarray, shape: Shape) -> float:
    """The load of the busiest link when all groups exchange at once, in multiples of one device's payload.

    In an all-to-all each device of a group sends every other device an equal part of its payload, on a
    shortest path, one dim after the other; where both ways round a ring are equally short, half goes each
    way.

    >>> ring = np.array([[[x, 0, 0] for x in range(8)]])
    >>> busiest_link(ring, (8, 8, 16)), busiest_link(ring, (8, 1, 1))
    (1.0, 2.0)

    Args:
      groups: integers [groups, devices of a group, dims], coordinates.
      shape: the number of chips of the torus along each dim.
    """
    _, size, dims = groups.shape
    at = np.repeat(groups, size, axis=1).reshape(-1, dims)
    to = np.tile(groups, (1, size, 1)).reshape(-1, dims)
    return max_link_messages(at, to, shape) / size


def max_link_messages(sources: np.ndarray, targets: np.ndarray, shape: Shape) -> float:
    """The number of messages that cross the busiest link when all are sent at once, on the paths of ``busiest_link``.

    >>> here = np.array([[0, 0, 0], [1, 0, 0], [2, 0, 0]])
    >>> max_link_messages(here, here + [1, 0, 0], (8, 8, 16)), max_link_messages(here, here + [3, 0, 0], (8, 8, 16))
    (1.0, 3.0)

    Args:
      sources, targets: integers [messages, dims], coordinates.
      shape: the number of chips of the torus along each dim.
    """
    at, to = sources.copy(), targets
    closed = closed_dims(shape)
    busiest = 0.0
    for dim, length in enumerate(shape):
        far = to[:, dim] - at[:, dim]
        if closed[dim]:
            far = (far + length // 2) % length - length // 2  # the shorter way round, at least -length / 2
        tie = closed[dim] & (2 * np.abs(far) == length)
        for sign in (1, -1):
            load = np.zeros(shape)
            steps, weight = np.where(tie, length // 2, sign * far), np.where(tie, 0.5, 1.0)
            for step in range(int(steps.max(initial=0))):
                crossing = steps > step
                link = at[crossing]
                link[:, dim] = (link[:, dim] + sign * step) % length
                np.add.at(load, tuple(link.T), weight[crossing])
            busiest = max(busiest, float(load.max()))
        at[:, dim] = to[:, dim]
    return busiest


def near_order(shape: Shape, inner: int, outer: int = 1) -> np.ndarray | None:
    """An order of all chips of a torus in which consecutive chips are near each other.

    Every ``outer * inner`` consecutive chips fill a large box, and every ``inner`` consecutive chips in it a
    small box. The boxes are those with the least load on the busiest link, summed over two all-to-alls: one
    inside each small box, and one between the chips at the same place in all small boxes of a large box.
    Among equally good boxes, those longest along the first dims are chosen. Large boxes follow each other
    back and forth, so that consecutive ones are neighbours.

    Returns:
      int [chips, dims], coordinates; None if no boxes of these sizes fill the torus.
    """
    found = [
        (_load_of_boxes(small, large, shape), [-size for size in (*large, *small)], small, large)
        for large in _boxes(shape, inner * outer)
        for small in _boxes(large, inner)
    ]
    if not found:
        return None
    *_, small, large = min(found)
    places = np.indices(shape).reshape(len(shape), -1).T
    keys = [*_sort_keys(places % small), *_sort_keys(places % large // small)]
    keys += _sort_keys(
        _snake_order(places // large, tuple(s // b for s, b in zip(shape, large, strict=True)))
    )
    return np.asarray(places[np.lexsort(keys)])


def _sort_keys(places: np.ndarray) -> list[np.ndarray]:
    """The coordinates along each dim as keys of ``np.lexsort``: the first dim varies fastest."""
    return list(places.T)


def _snake_order(boxes: np.ndarray, counts: Shape) -> np.ndarray:
    turned = boxes.copy()
    before = np.zeros(len(boxes), int)  # the number of rows of boxes before this one
    for dim in reversed(range(len(counts))):
        turned[:, dim] = np.where(before % 2, counts[dim] - 1 - boxes[:, dim], boxes[:, dim])
        before = before * counts[dim] + turned[:, dim]
    return turned


def _boxes(shape: Shape, size: int) -> Iterator[Shape]:
    sides = ([side for side in range(1, length + 1) if length % side == 0] for length in shape)
    return (box for box in itertools.product(*sides) if math.prod(box) == size)


def _load_of_boxes(small: Shape, large: Shape, shape: Shape) -> float:
    """The load of the busiest link, summed over the two all-to-alls of a large box (see ``near_order``)."""
    places = np.indices(large).reshape(len(shape), -1).T
    order = places[np.lexsort([*_sort_keys(places % small), *_sort_keys(places // small)])]
    groups = order.reshape(-1, math.prod(small), len(shape))
    hops: Sequence[np.ndarray] = (groups, groups.swapaxes(0, 1))
    return sum(busiest_link(hop, shape) for hop in hops)
