"""From a placement to better ones, an expert or two moved at a time."""

from collections.abc import Iterator

import numpy as np

from dualpipe_jax.balance.loads import HAIR
from dualpipe_jax.balance.pack import Packed, count_copies, holds


def improve(
    held: np.ndarray, relative: np.ndarray, target: np.ndarray, num_steps: int
) -> Iterator[np.ndarray]:
    """Placements, each a step from the one before in every layer that has one: int64 [layers, devices, slots].

    A step takes load from the heaviest device. It swaps a slot there with one elsewhere, which moves two experts; or
    it moves one: a slot somewhere gives up a copy of an expert with others, for one more copy of an expert of the
    heaviest device; or a slot of the heaviest device gives up such a copy, for any other expert. Of these it is the
    one that leaves all devices it touches lowest for the experts it moves. It ends when all layers are at their
    target [layers], or no step lowers the heaviest device below what it was with all others it touches.

    Args:
      held: int64 [layers, devices, slots], experts.
      relative: [windows, layers, experts].
      target: [layers], of the heaviest device.
      num_steps: at most.
    """
    held = held.copy()
    going = np.arange(len(held))
    for _ in range(num_steps):
        packed = Packed.of(held[going], relative[:, going])
        above = packed.peak.max(-1) > target[going]
        if not above.any():
            return
        going = going[above]
        going = going[_step(packed.only(above), relative[:, going], held, going)]
        if not len(going):
            return
        yield held.copy()


def _step(packed: Packed, relative: np.ndarray, held: np.ndarray, layers: np.ndarray) -> np.ndarray:
    """The best step of each of the layers, taken in ``held``: bool [layers], whether there is one."""
    heaviest, most = packed.peak.argmax(-1), packed.peak.max(-1)
    swap_left, swap = packed.best_relief(heaviest)
    copy_left, copy = _best_copy(packed, relative, heaviest)
    swap_rate, copy_rate = (most - swap_left) / 2, most - copy_left
    swaps = np.flatnonzero((swap_rate > HAIR) & (swap_rate >= copy_rate))
    copies = np.flatnonzero((copy_rate > HAIR) & (swap_rate < copy_rate))
    device, i, j = (index[swaps] for index in swap)
    one = layers[swaps], heaviest[swaps], i
    other = layers[swaps], device, j
    held[one], held[other] = held[other], held[one]
    device, slot, expert = (index[copies] for index in copy)
    held[layers[copies], device, slot] = expert
    return np.maximum(swap_rate, copy_rate) > HAIR


def _best_copy(
    packed: Packed, relative: np.ndarray, heaviest: np.ndarray
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """What the best exchange of a copy leaves, and its device, slot and new expert."""
    counts = count_copies(packed.held, relative.shape[-1])
    copies = counts[np.arange(len(counts))[:, None, None], packed.held]
    spare = copies > 1
    # Where a copy goes, the others of its expert carry more: [windows, layers, devices, slots]
    rise = np.where(spare, packed.slots / np.maximum(copies - 1, 1), 0.0)
    others = np.where(spare, _heaviest_other(packed, heaviest) + rise, np.inf)
    there = packed.devices[..., None] - packed.slots
    one = _one_more(packed, counts, heaviest, rise, others, there)
    other = _one_less(packed, relative / (counts + 1), heaviest, others, there)
    lower = other[0] < one[0]
    places = zip(other[1], one[1], strict=True)
    return np.where(lower, other[0], one[0]), tuple(np.where(lower, ours, theirs) for ours, theirs in places)


def _one_more(
    packed: Packed,
    counts: np.ndarray,
    heaviest: np.ndarray,
    rise: np.ndarray,
    others: np.ndarray,
    there: np.ndarray,
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """One more copy of an expert of the heaviest device, in place of a copy elsewhere.

    Args:
      rise: [windows, layers, devices, slots], by what each other copy becomes heavier where the slot's goes.
      others: the same, what the heaviest device of those then has; infinite where the copy is its expert's only one.
      there: the same, what the slot's device has without it.
    """
    row = np.arange(len(counts))
    expert, own = packed.held[row, heaviest], packed.slots[:, row, heaviest]
    now = counts[row[:, None], expert]
    lighter = own * (now / (now + 1))
    # top [windows, layers, slots of the heaviest], same [layers, devices, slots, slots of the heaviest]
    top = packed.devices[:, row, heaviest][..., None] - (own - lighter)
    same = packed.held[..., None] == expert[:, None, None, :]
    left = np.maximum(there[..., None] + lighter[:, :, None, None, :], others[..., None])
    left = np.maximum(left, (rise * same.any(-1))[..., None] + top[:, :, None, None, :]).max(0)
    left[np.broadcast_to(same.any(2)[:, :, None], left.shape)] = np.inf
    least, (device, slot, which) = _least(left)
    return least, (device, slot, expert[row, which])


def _one_less(
    packed: Packed, share: np.ndarray, heaviest: np.ndarray, others: np.ndarray, there: np.ndarray
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Another expert in place of a copy on the heaviest device.

    Args:
      share: [windows, layers, experts], of each expert's copies if there were one more.
      others, there: as of ``_one_more``.
    """
    row = np.arange(len(packed.held))
    left = there[:, row, heaviest][..., None] + share[:, :, None, :]
    left = np.maximum(left, others[:, row, heaviest][..., None]).max(0)
    on_top = holds(packed.held[row, heaviest], share.shape[-1])
    left[np.broadcast_to(on_top[:, None], left.shape)] = np.inf
    least, (slot, expert) = _least(left)
    return least, (heaviest, slot, expert)


def _least(left: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """The least of each layer, of [layers, ...], and its indices there."""
    flat = left.reshape(len(left), -1)
    return flat.min(-1), np.unravel_index(flat.argmin(-1), left.shape[1:])


def _heaviest_other(packed: Packed, heaviest: np.ndarray) -> np.ndarray:
    """For each slot the load of the heaviest device that has another copy of its expert, -inf if none has.

    The heaviest device of all is left out: what it has after a step is counted apart.

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
        # The first of an expert looks at the second, every other at the first
        starts = np.concatenate([np.ones((layers, 1), bool), ~same], -1)
        first = np.maximum.accumulate(np.where(starts, np.arange(of.shape[1]), 0), -1)
        second = np.concatenate([np.where(same, ordered[:, 1:], -np.inf), np.full((layers, 1), -np.inf)], -1)
        np.put_along_axis(result, order, np.where(starts, second, np.take_along_axis(ordered, first, -1)), -1)
    return found.reshape(packed.slots.shape)
