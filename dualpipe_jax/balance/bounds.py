"""Lower bounds on the load of the busiest device, below which no placement can get."""

import numpy as np

from dualpipe_jax.balance.loads import LOAD_TOLERANCE

_BISECTION_STEPS = 24

_LARGEST_DIVISOR = 3
"""Copies above 1/2 and above 1/3 (1/``_LARGEST_DIVISOR``) of the limit are counted: a device within the limit
has at most one copy above 1/2 and at most two above 1/3."""


def packing_bound(shares: np.ndarray, num_devices: int) -> np.ndarray:
    """A lower bound on the load of the busiest device, however copies are packed: float64 [rows].

    Each device takes k copies. For every m: if the m heaviest copies lie on m devices, these devices hold
    (k - 1) m further copies, which weigh at least as much as the lightest copies do. If two of the m share a
    device, it carries at least the two lightest of the m and the k - 2 lightest copies. Also, of more than
    (j - 1) x num_devices copies at least j lie on one device.

    Args:
      shares: [rows, copies], the loads of copies; their number is a multiple, k, of num_devices.
    """
    ordered = -np.sort(-shares, -1)
    rows, copies = ordered.shape
    slots = copies // num_devices
    mean = ordered.sum(-1) / num_devices
    if slots == 1:
        return ordered[:, 0]
    lightest = np.concatenate([np.zeros((rows, 1)), ordered[:, ::-1].cumsum(-1)], -1)
    many = np.arange(1, num_devices + 1)
    apart = (ordered[:, :num_devices].cumsum(-1) + lightest[:, many * (slots - 1)]) / many
    shared = ordered[:, : num_devices - 1] + ordered[:, 1:num_devices] + lightest[:, [slots - 2]]
    shared = np.concatenate([np.full((rows, 1), np.inf), shared], -1)
    crowded = [j * ordered[:, (j - 1) * num_devices] + lightest[:, slots - j] for j in range(2, slots + 1)]
    return np.max([mean, np.minimum(apart, shared).max(-1), *crowded], 0)


def lower_bound(relative: np.ndarray, num_devices: int, num_slots: int) -> np.ndarray:
    """A lower bound on max/mean over devices, for all placements whose copies share evenly: float64 [layers].

    The load of the mean device is 1. A value T can be reached only if all of these hold:
      - Every expert can have so many copies that each carries at most T: there are slots enough, and no
        expert needs more copies than there are devices.
      - These copies pack within T (``packing_bound``), even if each has only the load that it would have if
        all slots left over were given to its expert.
      - Wherever the slots left over go, at most num_devices copies are above T / 2, and at most twice as many
        above T / 3.
    The bound is the least T for which all hold, approached from below by halving an interval.

    Args:
      relative: [windows, layers, experts], in multiples of the mean device's load (``loads.relative``).
    """
    layers = relative.shape[1]
    low, high = np.ones(layers), np.maximum(2 * relative.sum(-1).max(0), 2.0)
    open_ = np.flatnonzero(~_may_reach(relative, low, num_devices, num_slots))
    low, high, part = low[open_], high[open_], relative[:, open_]
    for _ in range(_BISECTION_STEPS if len(open_) else 0):
        middle = np.where(high > 2 * low, np.sqrt(low * high), (low + high) / 2)
        reached = _may_reach(part, middle, num_devices, num_slots)
        low, high = np.where(reached, low, middle), np.where(reached, middle, high)
    bound = np.ones(layers)
    bound[open_] = low
    return bound


def _may_reach(relative: np.ndarray, limit: np.ndarray, num_devices: int, num_slots: int) -> np.ndarray:
    """Whether no condition of ``lower_bound`` rules out a limit: bool [layers]. If true, so for all higher limits."""
    slots = num_devices * num_slots
    needed = copies_needed(relative, limit)
    spare = slots - needed.sum(-1)
    possible = (spare >= 0) & (needed.max(-1) <= num_devices)
    if not possible.any():
        return possible
    needed, spare = needed[possible], spare[possible]
    most = np.minimum(needed + spare[:, None], num_devices)
    rows = len(needed)
    # One row of slots for each layer: each expert's needed copies, then zeros for the spare slots
    counts = np.concatenate([needed, spare[:, None]], -1).ravel()
    reached = np.ones(rows, bool)
    for window in relative[:, possible]:
        least = np.concatenate([window / most, np.zeros((rows, 1))], -1)
        shares = np.repeat(least.ravel(), counts).reshape(rows, slots)
        reached &= packing_bound(shares, num_devices) <= limit[possible] * (1 + LOAD_TOLERANCE)
        for parts in range(2, min(num_slots, _LARGEST_DIVISOR) + 1):
            large = _fewest_large(window, needed, spare, limit[possible] / parts)
            reached &= large <= (parts - 1) * num_devices + 1e-9
    possible[possible] = reached
    return possible


def _fewest_large(load: np.ndarray, needed: np.ndarray, spare: np.ndarray, size: np.ndarray) -> np.ndarray:
    """A lower bound on the number of copies that carry more than ``size``: float64 [rows].

    An expert's needed copies stay large until it has enough further copies that none is large. The spare
    copies go to the experts where each of them makes most large copies small. The last ones may be divided,
    so that this is a bound.
    """
    large = load / needed > size[:, None] * (1 + LOAD_TOLERANCE)
    cost = np.where(large, np.ceil(load / size[:, None] * (1 - LOAD_TOLERANCE)) - needed, 0.0)
    spared = np.where(large, needed, 0)
    order = np.argsort(cost / needed, -1)
    cost, spared = np.take_along_axis(cost, order, -1), np.take_along_axis(spared, order, -1)
    left = spare[:, None] - (cost.cumsum(-1) - cost)
    share = np.clip(np.divide(left, cost, out=np.ones_like(cost), where=cost > 0), 0.0, 1.0)
    return spared.sum(-1) - (share * spared).sum(-1)


def copies_needed(relative: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """The least number of copies, at least 1, that keeps each copy within the limit [layers] in all windows.

    Returns int64 [layers, experts].
    """
    ratio = relative.max(0) / limit[:, None] * (1 - LOAD_TOLERANCE)
    return np.maximum(np.ceil(np.minimum(ratio, 2**40)), 1).astype(np.int64)
