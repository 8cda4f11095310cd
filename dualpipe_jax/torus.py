"""Where devices lie on a TPU's torus: which links an all-to-all keeps busy, and which devices are near each other.

Python and NumPy only. Coordinates are integers [devices, dims]; of two devices of a chip they are equal.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

Shape = tuple[int, ...]


def closed_dims(shape: Shape) -> tuple[bool, ...]:
    """Along which dims the last chip has a link to the first one.

    Of a slice in three dims all have if each is a multiple of four, else none; in two dims (the third is 1) those of 16
    chips, a whole pod's side (Google Cloud's pages of each TPU).
    """
    if all(size % 4 == 0 for size in shape):
        return (True,) * len(shape)
    flat = math.prod(shape[2:]) == 1
    return tuple(flat and size == 16 for size in shape)


def busiest_link(groups: np.ndarray, shape: Shape) -> float:
    """How often a device's payload crosses the busiest link when all groups exchange at once.

    In an all-to-all each device of a group sends every other one an equal part of its payload, on a shortest way, one
    dim after the other; where both ways round are as short, half goes each way.

    >>> ring = np.array([[[x, 0, 0] for x in range(8)]])
    >>> busiest_link(ring, (8, 8, 16)), busiest_link(ring, (8, 1, 1))
    (1.0, 2.0)

    Args:
      groups: [groups, devices of a group, dims], coordinates.
      shape: of the torus.
    """
    _, size, dims = groups.shape
    at = np.repeat(groups, size, axis=1).reshape(-1, dims)
    to = np.tile(groups, (1, size, 1)).reshape(-1, dims)
    return busiest_way(at, to, shape) / size


def busiest_way(sources: np.ndarray, targets: np.ndarray, shape: Shape) -> float:
    """How many messages cross the busiest link when all are sent at once, on ways as ``busiest_link`` has them.

    >>> here = np.array([[0, 0, 0], [1, 0, 0], [2, 0, 0]])
    >>> busiest_way(here, here + [1, 0, 0], (8, 8, 16)), busiest_way(here, here + [3, 0, 0], (8, 8, 16))
    (1.0, 3.0)

    Args:
      sources, targets: [messages, dims], coordinates.
      shape: of the torus.
    """
    at, to = sources.copy(), targets
    closed = closed_dims(shape)
    busiest = 0.0
    for dim, length in enumerate(shape):
        far = to[:, dim] - at[:, dim]
        if closed[dim]:
            far = (far + length // 2) % length - length // 2  # from -length / 2 on
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
    """An order of a whole torus' chips in which so many consecutive ones are near each other.

    Every ``outer * inner`` consecutive chips fill a box, and in it every ``inner`` ones a smaller one, the boxes whose
    all-to-alls keep the busiest link least busy: those inside the small boxes, and those between chips of the same
    place in them. Of equally good ones the longest along the first dims. Boxes follow each other to and fro, so that
    consecutive ones are neighbours.

    Returns:
      int [chips, dims]; None if no boxes of these sizes fill the torus.
    """
    found = [
        (_busy(small, large, shape), [-size for size in (*large, *small)], small, large)
        for large in _boxes(shape, inner * outer)
        for small in _boxes(large, inner)
    ]
    if not found:
        return None
    *_, small, large = min(found)
    places = np.indices(shape).reshape(len(shape), -1).T
    keys = [*_digits(places % small), *_digits(places % large // small)]
    keys += _digits(_to_and_fro(places // large, tuple(s // b for s, b in zip(shape, large, strict=True))))
    return np.asarray(places[np.lexsort(keys)])


def _digits(places: np.ndarray) -> list[np.ndarray]:
    """The first dim varying fastest, as ``np.lexsort`` takes keys."""
    return list(places.T)


def _to_and_fro(boxes: np.ndarray, counts: Shape) -> np.ndarray:
    turned = boxes.copy()
    before = np.zeros(len(boxes), int)  # how many rows of boxes have been passed
    for dim in reversed(range(len(counts))):
        turned[:, dim] = np.where(before % 2, counts[dim] - 1 - boxes[:, dim], boxes[:, dim])
        before = before * counts[dim] + turned[:, dim]
    return turned


def _boxes(shape: Shape, size: int) -> Iterator[Shape]:
    sides = ([side for side in range(1, length + 1) if length % side == 0] for length in shape)
    return (box for box in itertools.product(*sides) if math.prod(box) == size)


def _busy(small: Shape, large: Shape, shape: Shape) -> float:
    """The busiest links of both exchanges of a large box, one after the other."""
    places = np.indices(large).reshape(len(shape), -1).T
    order = places[np.lexsort([*_digits(places % small), *_digits(places // small)])]
    groups = order.reshape(-1, math.prod(small), len(shape))
    hops: Sequence[np.ndarray] = (groups, groups.swapaxes(0, 1))
    return sum(busiest_link(hop, shape) for hop in hops)
