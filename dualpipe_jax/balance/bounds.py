"""How even it can get: what no placement can do better than."""

import numpy as np

from dualpipe_jax.balance.loads import HAIR

_HALVINGS = 24

_PARTS = 3
"""Copies above a half of the limit are counted, and above a third: no device takes two, or three, of those."""


def packing_bound(shares: np.ndarray, num_devices: int) -> np.ndarray:
    """The least that the busiest device carries, however copies are packed: float64 [rows].

    For every m: if the m heaviest copies lie on m devices, these have (k - 1) m more copies, which weigh at least
    what the lightest do; if two of them share a device, it carries at least the lighter two of the m, and the k - 2
    lightest. And more than (j - 1) x devices copies cannot go without j of them on one.

    Args:
      shares: [rows, copies], loads of copies; a multiple k of num_devices.
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
    """The least max/mean over devices of any placement whose copies share evenly: float64 [layers].

    A device at the mean is 1. For a lower value T to be reached, every expert needs as many copies as make each at
    most T; only so many slots are left for more copies, so none becomes lighter than those would make it; and what
    is certain to be there has to pack within T (``packing_bound``); nor may there be more copies above T / 2 than
    devices, or above T / 3 than twice as many, wherever the spare ones go. The bound is where that begins to be
    possible.

    Args:
      relative: [windows, layers, experts], in multiples of the mean device's load (``loads.relative``).
    """
    layers = relative.shape[1]
    low, high = np.ones(layers), np.maximum(2 * relative.sum(-1).max(0), 2.0)
    open_ = np.flatnonzero(~_may_reach(relative, low, num_devices, num_slots))
    low, high, part = low[open_], high[open_], relative[:, open_]
    for _ in range(_HALVINGS if len(open_) else 0):
        middle = np.where(high > 2 * low, np.sqrt(low * high), (low + high) / 2)
        reached = _may_reach(part, middle, num_devices, num_slots)
        low, high = np.where(reached, low, middle), np.where(reached, middle, high)
    bound = np.ones(layers)
    bound[open_] = low
    return bound


def _may_reach(relative: np.ndarray, limit: np.ndarray, num_devices: int, num_slots: int) -> np.ndarray:
    """Whether nothing speaks against a limit: bool [layers]. Once true, true for all higher limits."""
    slots = num_devices * num_slots
    needed = copies_needed(relative, limit)
    spare = slots - needed.sum(-1)
    possible = (spare >= 0) & (needed.max(-1) <= num_devices)
    if not possible.any():
        return possible
    needed, spare = needed[possible], spare[possible]
    most = np.minimum(needed + spare[:, None], num_devices)
    rows = len(needed)
    # One row of slots for each layer: experts as often as needed, then nothing for the spare ones
    counts = np.concatenate([needed, spare[:, None]], -1).ravel()
    reached = np.ones(rows, bool)
    for window in relative[:, possible]:
        least = np.concatenate([window / most, np.zeros((rows, 1))], -1)
        shares = np.repeat(least.ravel(), counts).reshape(rows, slots)
        reached &= packing_bound(shares, num_devices) <= limit[possible] * (1 + HAIR)
        for parts in range(2, min(num_slots, _PARTS) + 1):
            large = _fewest_large(window, needed, spare, limit[possible] / parts)
            reached &= large <= (parts - 1) * num_devices + 1e-9
    possible[possible] = reached
    return possible


def _fewest_large(load: np.ndarray, needed: np.ndarray, spare: np.ndarray, size: np.ndarray) -> np.ndarray:
    """The least number of copies that carry more than a size: float64 [rows].

    An expert's needed copies are large until there are so many more that none is. The spare ones go where they spare
    most large copies each; the last may go in parts, which makes this a bound.
    """
    large = load / needed > size[:, None] * (1 + HAIR)
    cost = np.where(large, np.ceil(load / size[:, None] * (1 - HAIR)) - needed, 0.0)
    spared = np.where(large, needed, 0)
    order = np.argsort(cost / needed, -1)
    cost, spared = np.take_along_axis(cost, order, -1), np.take_along_axis(spared, order, -1)
    left = spare[:, None] - (cost.cumsum(-1) - cost)
    share = np.clip(np.divide(left, cost, out=np.ones_like(cost), where=cost > 0), 0.0, 1.0)
    return spared.sum(-1) - (share * spared).sum(-1)


def copies_needed(relative: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Int64 [layers, experts]: copies that make each at most the limit [layers], in all windows; at least one."""
    ratio = relative.max(0) / limit[:, None] * (1 - HAIR)
    return np.maximum(np.ceil(np.minimum(ratio, 2**40)), 1).astype(np.int64)
