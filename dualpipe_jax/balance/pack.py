"""Put copies into slots: packed as DeepSeek does, or dealt in rounds, then swapped until no swap gains anything.

All layers go through each step at once; a layer that is good enough drops out.
"""

import dataclasses

import numpy as np

from dualpipe_jax.balance.loads import LOAD_TOLERANCE

_PAIR_TURNS = 6


def pack(relative: np.ndarray, counts: np.ndarray, num_devices: int) -> np.ndarray:
    """Put every copy into a slot, no two copies of an expert on one device: int64 [layers, devices, slots].

    The heaviest copy comes first; each goes to the lightest device that has room and no copy of the expert.
    Except for this last condition it is DeepSeek's packing, so that the refined result is no worse than
    DeepSeek's. In a layer where it fails, since all devices with room have the expert already, copies are
    dealt (``deal_in_rounds``).

    Args:
      relative: [windows, layers, experts].
      counts: [layers, experts], numbers of copies, each at most num_devices; their sum is a multiple of
        num_devices.
    """
    order, heaviest = _heaviest_first(relative, counts)
    layers, copies = order.shape
    slots = copies // num_devices
    follows = np.zeros((copies, layers), bool)
    np.equal(order.T[1:], order.T[:-1], out=follows[1:])
    some_follow = np.any(follows, axis=-1).tolist()
    barred = np.zeros((layers, num_devices), bool)  # devices with a copy of the expert whose turn it is
    room = np.zeros((layers, num_devices))  # loads, infinite where a device is full
    filled = np.zeros((layers, num_devices), np.int64)
    device, slot = np.empty((copies, layers), np.int64), np.empty((copies, layers), np.int64)
    row, stuck = np.arange(layers), np.zeros(layers, bool)
    # Each layer's start in the flat arrays: they take half of the time of indices in two dims.
    first = row * num_devices
    flat_room, flat_filled, flat_barred = room.reshape(-1), filled.reshape(-1), barred.reshape(-1)
    for copy, load in enumerate(np.ascontiguousarray(heaviest.T)):
        if some_follow[copy]:
            barred &= follows[copy][:, None]
            flat_barred[first + device[copy - 1]] |= follows[copy]
            open_ = np.where(barred, np.inf, room)
            device[copy] = open_.argmin(-1)
            stuck |= open_[row, device[copy]] == np.inf
        else:
            if some_follow[copy - 1]:
                barred[:] = False
            device[copy] = room.argmin(-1)
        at = first + device[copy]
        slot[copy] = flat_filled[at]
        flat_filled[at] += 1
        flat_room[at] = np.where(slot[copy] + 1 < slots, flat_room[at] + load, np.inf)
    held = np.empty((layers, num_devices, slots), np.int64)
    fits = ~stuck
    held[row[fits], device[:, fits], slot[:, fits]] = order.T[:, fits]
    if stuck.any():
        held[stuck] = deal_in_rounds(relative[:, stuck], counts[stuck], num_devices)
    return held


def deal_in_rounds(relative: np.ndarray, counts: np.ndarray, num_devices: int) -> np.ndarray:
    """Put every copy into a slot, no two copies of an expert on one device: int64 [layers, devices, slots].

    Copies are dealt in rounds, the heaviest first, one to each device, and in each round the heaviest goes to
    the device with the least load so far. The copies of an expert follow each other, so that two of them can
    come to one device only if they are dealt in two rounds; in the second round they skip the devices that
    have one.

    Args: see ``pack``.
    """
    expert, _ = _heaviest_first(relative, counts)
    layers, copies = expert.shape
    shares, layer = relative / counts, np.arange(layers)[:, None]
    held = np.empty((layers, num_devices, copies // num_devices), np.int64)
    loads = np.zeros((len(relative), layers, num_devices))
    for slot in range(held.shape[2]):
        dealt = expert[:, slot * num_devices : (slot + 1) * num_devices]
        peak = loads.max(0)
        if slot:
            split = dealt[:, :1]  # the expert of which the round before may have dealt copies
            last = np.argsort(np.where((held[:, :, slot - 1] == split), np.inf, peak), -1, kind="stable")
            first = np.arange(num_devices) < (dealt == split).sum(-1, keepdims=True)
            np.put_along_axis(peak, last, np.where(first, -1.0, np.take_along_axis(peak, last, -1)), -1)
        device = np.argsort(peak, -1, kind="stable")
        held[layer, device, slot] = dealt
        loads[:, layer, device] += shares[:, layer, dealt]
    return held


def _heaviest_first(relative: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The expert of each copy, and each copy's load in its worst window, both [layers, copies].

    The heaviest copies come first; the copies of an expert follow each other.
    """
    layers = len(counts)
    copies = int(counts[:1].sum())
    shares = (relative / counts).max(0)
    order = np.argsort(-shares, -1, kind="stable")
    counts = np.take_along_axis(counts, order, -1).ravel()
    return (
        np.repeat(order.ravel(), counts).reshape(layers, copies),
        np.repeat(np.take_along_axis(shares, order, -1).ravel(), counts).reshape(layers, copies),
    )


@dataclasses.dataclass
class SlotLoads:
    """Copies in slots with their loads, kept up to date as slots are swapped.

    Attributes:
      held: int64 [layers, devices, slots], the expert in each slot.
      slots: float64 [windows, layers, devices, slots], the load of the copy in each slot.
      devices: float64 [windows, layers, devices], the load of each device.
    """

    held: np.ndarray
    slots: np.ndarray
    devices: np.ndarray

    @classmethod
    def of_placement(cls, held: np.ndarray, relative: np.ndarray) -> "SlotLoads":
        """A placement ``held`` with the loads of its copies, from loads of experts [windows, layers, experts]."""
        shares = relative / count_copies(held, relative.shape[-1])
        layer = np.arange(len(held))[:, None, None]
        slots = shares[:, layer, held]
        return cls(held.copy(), slots, slots.sum(-1))

    @property
    def peak(self) -> np.ndarray:
        """The load of each device in its worst window: float64 [layers, devices]."""
        return self.devices.max(0)

    def select(self, layers: np.ndarray) -> "SlotLoads":
        """A copy with some of the layers."""
        return SlotLoads(self.held[layers], self.slots[:, layers], self.devices[:, layers])

    def replace_layers(self, layers: np.ndarray, part: "SlotLoads") -> None:
        """Replace these layers by ``part``, which ``select`` returned and which has been changed since."""
        self.held[layers] = part.held
        self.slots[:, layers], self.devices[:, layers] = part.slots, part.devices

    def best_swaps(self, one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each pair of devices, the swap of one slot for another after which the larger of their loads is least.

        Args:
          one: int [layers, 1 or pairs], the first device of each pair.
          other: int [layers, pairs], the second device of each pair.

        Returns three arrays [layers, pairs]: the larger load after the swap, in the worst window (infinite if
        every swap would put two copies of an expert on one device), the slot of ``one``, and the slot of
        ``other``.
        """
        layer = np.arange(len(self.held))[:, None]
        a, b = self.slots[:, layer, one], self.slots[:, layer, other]
        load_a, load_b = self.devices[:, layer, one], self.devices[:, layer, other]
        half, mean = (load_a - load_b) / 2, (load_a + load_b) / 2
        # After a swap the two loads are mean +- (half - the load that one gave to the other), so the larger is:
        left = a[..., :, None] - (b + half[..., None])[..., None, :]
        np.abs(left, out=left)
        left += mean[..., None, None]
        slots = left.shape[-1]
        flat = left.reshape(*left.shape[:3], slots * slots)
        flat = flat[0] if len(flat) == 1 else flat.max(0)
        best = flat.argmin(-1)
        self._avoid_doubles(flat, best, one, other)
        return np.take_along_axis(flat, best[..., None], -1)[..., 0], best // slots, best % slots

    def best_swap_of_device(self, heaviest: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """The best swap of a device ``heaviest`` [layers] with any other device.

        Returns, all [layers], the larger load that it leaves, and (the other device, the slots of both).
        """
        layers, devices, _ = self.held.shape
        row = np.arange(layers)
        if devices == 1:
            return np.full(layers, np.inf), (row, row, row)
        others = (heaviest[:, None] + np.arange(1, devices)) % devices
        left, i, j = self.best_swaps(heaviest[:, None], others)
        which = left.argmin(-1)
        return left[row, which], (others[row, which], i[row, which], j[row, which])

    def _avoid_doubles(self, left: np.ndarray, best: np.ndarray, one: np.ndarray, other: np.ndarray) -> None:
        """Where the best swap would put two copies of an expert on one device, choose the best other swap, in place."""
        slots = self.held.shape[-1]
        layer = np.arange(len(self.held))[:, None]
        a, b = np.broadcast_to(self.held[layer, one], (*best.shape, slots)), self.held[layer, other]
        from_a = np.take_along_axis(a, (best // slots)[..., None], -1)
        from_b = np.take_along_axis(b, (best % slots)[..., None], -1)
        doubles = np.nonzero(((a == from_b) | (b == from_a)).any(-1))
        if len(doubles[0]):
            same = a[doubles][:, :, None] == b[doubles][:, None, :]
            barred = same.any(-1)[:, :, None] | same.any(-2)[:, None, :]
            allowed = np.where(barred.reshape(len(same), -1), np.inf, left[doubles])
            left[doubles], best[doubles] = allowed, allowed.argmin(-1)

    def swap(
        self, layer: np.ndarray, one: np.ndarray, i: np.ndarray, other: np.ndarray, j: np.ndarray
    ) -> None:
        """Exchange slot i of device ``one`` and slot j of device ``other``, each [swaps]; no device is in two swaps."""
        moved_load = self.slots[:, layer, one, i] - self.slots[:, layer, other, j]
        for array in (self.held[None], self.slots):
            kept = array[:, layer, one, i]
            array[:, layer, one, i] = array[:, layer, other, j]
            array[:, layer, other, j] = kept
        self.devices[:, layer, one] -= moved_load
        self.devices[:, layer, other] += moved_load


def count_copies(held: np.ndarray, num_experts: int) -> np.ndarray:
    """The number of copies of each expert, int64 [layers, experts], from experts in slots [layers, devices, slots]."""
    layers = len(held)
    at = held.reshape(layers, -1) + num_experts * np.arange(layers)[:, None]
    return np.bincount(at.ravel(), minlength=layers * num_experts).reshape(layers, num_experts)


def holds(held: np.ndarray, num_experts: int) -> np.ndarray:
    """Whether each expert is in any of the slots: bool [..., experts], from experts in slots [..., slots]."""
    found = np.zeros((*held.shape[:-1], num_experts), bool)
    np.put_along_axis(found, held, True, -1)
    return found


def refine(packed: SlotLoads, target: np.ndarray, turns: int | None = None) -> None:
    """Swap slots, in place, until a layer's peak is at its target [layers], no swap lowers it, or ``turns`` are over.

    The first ``_PAIR_TURNS`` turns swap heavy devices with light ones, many pairs at a time; each further
    turn swaps the heaviest device with any other.
    """
    layers, part = np.arange(len(target)), packed.select(np.arange(len(target)))
    able = np.ones(len(layers), bool)
    # Swaps of the heaviest device end by themselves, since each lowers its load; the number only limits the time.
    for turn in range(_PAIR_TURNS + 6 * packed.held.shape[1] + 50 if turns is None else turns):
        going = (part.peak.max(-1) > target[layers]) & able
        if not going.all():
            packed.replace_layers(layers, part)
            layers, part = layers[going], part.select(going)
        if not len(layers):
            return
        if turn < _PAIR_TURNS:
            _swap_pairs(part, turn)
            able = np.ones(len(layers), bool)
        else:
            able = _swap_heaviest(part)
    packed.replace_layers(layers, part)


def _swap_pairs(packed: SlotLoads, turn: int) -> None:
    """Swap between the heavier half of the devices and the lighter half, from turn 2 on between the outer quarters.

    Each turn makes other pairs.
    """
    order = np.argsort(-packed.peak, -1, kind="stable")
    half = order.shape[1] // (2 if turn < 2 else 4)
    if not half:
        return
    one, other = order[:, :half], np.roll(order[:, ::-1][:, :half], turn, -1)
    left, i, j = packed.best_swaps(one, other)
    now = np.take_along_axis(packed.peak, one, -1)
    now = np.maximum(now, np.take_along_axis(packed.peak, other, -1))
    gains = np.nonzero(left < now - LOAD_TOLERANCE)
    packed.swap(gains[0], one[gains], i[gains], other[gains], j[gains])


def _swap_heaviest(packed: SlotLoads) -> np.ndarray:
    """Do the best swap of each layer's heaviest device with any other; returns bool [layers], whether there was one."""
    heaviest = packed.peak.argmax(-1)
    left, (other, i, j) = packed.best_swap_of_device(heaviest)
    gains = left < packed.peak.max(-1) - LOAD_TOLERANCE
    packed.swap(np.flatnonzero(gains), heaviest[gains], i[gains], other[gains], j[gains])
    return gains
