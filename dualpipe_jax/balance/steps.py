"""Improve a placement step by step; each step moves one or two experts of a layer."""

from collections.abc import Iterator

import numpy as np

from dualpipe_jax.balance.loads import LOAD_TOLERANCE
from dualpipe_jax.balance.pack import SlotLoads, count_copies, holds


def improve(
    held: np.ndarray, relative: np.ndarray, target: np.ndarray, num_steps: int
) -> Iterator[np.ndarray]:
    """Yield placements, each a step after the one before in every layer that has one: int64 [layers, devices, slots].

    A step takes load from the heaviest device, in one of three ways:
      - It swaps a slot of the heaviest device with one of another device, and so moves two experts.
      - Another device replaces a copy of an expert that has other copies by one more copy of an expert of the
        heaviest device.
      - The heaviest device replaces a copy of an expert that has other copies by any other expert.
    It takes the step with the largest gain for each expert moved: the load of the heaviest device before,
    less the largest load of all devices concerned after. That a copy more relieves the other copies of its expert
    does not count on a device that a copy less burdens. The steps end when all layers are at their target or no
    step has a gain by this count.

    Args:
      held: int64 [layers, devices, slots], the placement to start from.
      relative: [windows, layers, experts].
      target: [layers], the load of the heaviest device at which a layer is done.
      num_steps: the largest number of steps.
    """
    held = held.copy()
    going = np.arange(len(held))
    for _ in range(num_steps):
        packed = SlotLoads.of_placement(held[going], relative[:, going])
        above = packed.peak.max(-1) > target[going]
        if not above.any():
            return
        going = going[above]
        going = going[_step(packed.select(above), relative[:, going], held, going)]
        if not len(going):
            return
        yield held.copy()


def _step(packed: SlotLoads, relative: np.ndarray, held: np.ndarray, layers: np.ndarray) -> np.ndarray:
    """Take the best step of each of the layers in ``held``; returns bool [layers], whether there is one."""
    heaviest, most = packed.peak.argmax(-1), packed.peak.max(-1)
    swap_left, swap = packed.best_swap_of_device(heaviest)
    copy_left, copy = _best_copy(packed, relative, heaviest)
    swap_rate, copy_rate = (most - swap_left) / 2, most - copy_left
    swaps = np.flatnonzero((swap_rate > LOAD_TOLERANCE) & (swap_rate >= copy_rate))
    copies = np.flatnonzero((copy_rate > LOAD_TOLERANCE) & (swap_rate < copy_rate))
    device, i, j = (index[swaps] for index in swap)
    one = layers[swaps], heaviest[swaps], i
    other = layers[swaps], device, j
    held[one], held[other] = held[other], held[one]
    device, slot, expert = (index[copies] for index in copy)
    held[layers[copies], device, slot] = expert
    return np.maximum(swap_rate, copy_rate) > LOAD_TOLERANCE


def _best_copy(
    packed: SlotLoads, relative: np.ndarray, heaviest: np.ndarray
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """The best replacement of a copy by a copy of another expert, in each layer.

    Returns, all [layers], the largest load that it leaves on the devices concerned, and (device, slot, new
    expert).
    """
    counts = count_copies(packed.held, relative.shape[-1])
    copies = counts[np.arange(len(counts))[:, None, None], packed.held]
    spare = copies > 1
    # If a copy is given up, the other copies of its expert carry more: [windows, layers, devices, slots]
    added_load = np.where(spare, packed.slots / np.maximum(copies - 1, 1), 0.0)
    load_of_others = np.where(spare, _heaviest_other(packed, heaviest) + added_load, np.inf)
    without_copy = packed.devices[..., None] - packed.slots
    one = _best_copy_elsewhere(packed, counts, heaviest, added_load, load_of_others, without_copy)
    other = _best_copy_on_heaviest(packed, relative / (counts + 1), heaviest, load_of_others, without_copy)
    lower = other[0] < one[0]
    places = zip(other[1], one[1], strict=True)
    return np.where(lower, other[0], one[0]), tuple(np.where(lower, ours, theirs) for ours, theirs in places)


def _best_copy_elsewhere(
    packed: SlotLoads,
    counts: np.ndarray,
    heaviest: np.ndarray,
    added_load: np.ndarray,
    load_of_others: np.ndarray,
    without_copy: np.ndarray,
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """The best way to put one more copy of an expert of the heaviest device in place of a copy elsewhere.

    Args:
      added_load: [windows, layers, devices, slots], the load by which each other copy of the slot's expert
        grows if the slot's copy is given up.
      load_of_others: [windows, layers, devices, slots], the largest load that the devices of those other
        copies then have; infinite if the slot's copy is its expert's only one.
      without_copy: [windows, layers, devices, slots], the load of the slot's device without the slot's copy.

    Returns as ``_best_copy``.
    """
    row = np.arange(len(counts))
    expert, own = packed.held[row, heaviest], packed.slots[:, row, heaviest]
    now = counts[row[:, None], expert]
    lighter = own * (now / (now + 1))
    # top [windows, layers, slots of the heaviest], same [layers, devices, slots, slots of the heaviest]
    top = packed.devices[:, row, heaviest][..., None] - (own - lighter)
    same = packed.held[..., None] == expert[:, None, None, :]
    left = np.maximum(without_copy[..., None] + lighter[:, :, None, None, :], load_of_others[..., None])
    left = np.maximum(left, (added_load * same.any(-1))[..., None] + top[:, :, None, None, :]).max(0)
    left[np.broadcast_to(same.any(2)[:, :, None], left.shape)] = np.inf
    least, (device, slot, which) = _min_of_each_layer(left)
    return least, (device, slot, expert[row, which])


def _best_copy_on_heaviest(
    packed: SlotLoads,
    share: np.ndarray,
    heaviest: np.ndarray,
    load_of_others: np.ndarray,
    without_copy: np.ndarray,
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """The best way to put a copy of another expert in place of a copy on the heaviest device.

    Args:
      share: [windows, layers, experts], the load of each of an expert's copies if there were one more.
      load_of_others, without_copy: see ``_best_copy_elsewhere``.

    Returns as ``_best_copy``.
    """
    row = np.arange(len(packed.held))
    left = without_copy[:, row, heaviest][..., None] + share[:, :, None, :]
    left = np.maximum(left, load_of_others[:, row, heaviest][..., None]).max(0)
    on_top = holds(packed.held[row, heaviest], share.shape[-1])
    left[np.broadcast_to(on_top[:, None], left.shape)] = np.inf
    least, (slot, expert) = _min_of_each_layer(left)
    return least, (heaviest, slot, expert)


def _min_of_each_layer(left: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """The least entry of each layer of an array [layers, ...], and its indices: [layers] each."""
    flat = left.reshape(len(left), -1)
    return flat.min(-1), np.unravel_index(flat.argmin(-1), left.shape[1:])


def _heaviest_other(packed: SlotLoads, heaviest: np.ndarray) -> np.ndarray:
    """For each slot the load of the heaviest device that has another copy of its expert, -inf if none has.

    The heaviest device of the layer is left out: its load after a step is counted separately.

    Returns float64 [windows, layers, devices, slots].
    """
    layers, _, slots = packed.held.shape
    expert = packed.held.reshape(layers, -1)
    loads = np.repeat(packed.devices, slots, -1)
    loads[:, np.arange(layers)[:, None], heaviest[:, None] * slots + np.arange(slots)] = -np.inf
    found = np.full(loads.shape, -np.inf)
    for window, result in zip(loads, found, strict=True):
        order = np.lexsort((-window, expert), axis=-1)
        of, ordered = np.take_along_axis(expert, order, -1), np.take_along_axis(window, order, -1)
        same = of[:, 1:] == of[:, :-1]
        # In falling order of load, an expert's first device gets the second's load, all others the first's
        starts = np.concatenate([np.ones((layers, 1), bool), ~same], -1)
        first = np.maximum.accumulate(np.where(starts, np.arange(of.shape[1]), 0), -1)
        second = np.concatenate([np.where(same, ordered[:, 1:], -np.inf), np.full((layers, 1), -np.inf)], -1)
        np.put_along_axis(result, order, np.where(starts, second, np.take_along_axis(ordered, first, -1)), -1)
    return found.reshape(packed.slots.shape)
