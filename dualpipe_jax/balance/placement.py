"""Layouts, devices with slots for experts, and placements, the expert in each slot of each device."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.balance.loads import in_range
from dualpipe_jax.balance.pack import count_copies


@typechecked
@dataclasses.dataclass(frozen=True)
class Layout:
    """Devices, and the number of experts that each can hold.

    >>> from dualpipe_jax.balance import Layout
    >>> Layout(num_devices=2, num_slots=5).num_replicas
    10

    Attributes:
      num_devices: number of devices that share a layer's experts.
      num_slots: number of experts that a device holds in a layer, copies included.
      num_nodes: number of machines, each of num_devices / num_nodes consecutive devices.
      num_groups: number of groups of experts of consecutive indices. All copies of a group's experts are on
        one node, which suits routing that is limited to a few groups. None: every expert may be anywhere.
        With groups the loads are less even, since a node carries all the load of its groups.

    Raises:
      ValueError: a count is below 1, or groups are asked for where nodes are unequal or groups cannot be dealt
        evenly to them.
    """

    num_devices: int
    num_slots: int
    num_nodes: int = 1
    num_groups: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            count = getattr(self, field.name)
            if count is not None and count < 1:
                raise ValueError(f"Layout: {field.name}={count}; it must be at least 1")
        if self.num_groups is not None and self.num_devices % self.num_nodes:
            raise ValueError(
                f"Layout: num_devices={self.num_devices} is no multiple of num_nodes={self.num_nodes}; groups of "
                "experts need nodes of equal size: give a num_nodes that divides num_devices, or no num_groups"
            )
        if self.num_groups is not None and self.num_groups % self.num_nodes:
            raise ValueError(
                f"Layout: num_groups={self.num_groups} is no multiple of num_nodes={self.num_nodes}; each node needs "
                "equally many groups of experts: give a num_nodes that divides num_groups, or no num_groups"
            )

    @property
    def num_replicas(self) -> int:
        """The number of slots of all devices in a layer, which is the number of copies of all experts."""
        return self.num_devices * self.num_slots

    def check(self, num_experts: int) -> None:
        """Raise ValueError, which says why, if this number of experts does not fit the layout."""
        slots = f"{self.num_devices} devices of {self.num_slots} slots"
        if self.num_replicas < num_experts:
            raise ValueError(
                f"balance: {slots} have no room for the loads' {num_experts} experts; give at least "
                f"{-(-num_experts // self.num_devices)} slots a device"
            )
        if self.num_slots > num_experts:
            raise ValueError(
                f"balance: {slots} would hold an expert twice on one device, for the loads are of {num_experts} "
                f"experts; give at most {num_experts} slots a device"
            )
        if self.num_groups is not None and num_experts % self.num_groups:
            raise ValueError(
                f"balance: {num_experts} experts are no multiple of {self.num_groups} groups; give num_groups that "
                "divides them, or leave it out"
            )
        if self.num_groups is not None and self.num_slots > num_experts // self.num_nodes:
            raise ValueError(
                f"balance: {slots} would hold an expert twice on one device, for a node has "
                f"{num_experts // self.num_nodes} experts; give at most that many slots a device"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """The device and slot of each copy of every layer's experts; copies share their expert's tokens evenly.

    >>> from dualpipe_jax.balance import Placement
    >>> placed = Placement.in_order(num_layers=1, num_experts=4, num_devices=2, num_slots=2)
    >>> placed.experts.tolist()
    [[[0, 1], [2, 3]]]
    >>> placed.imbalance([[3, 1, 1, 1]]).tolist()
    [1.3333333333333333]

    Attributes:
      experts: int [layers, devices, slots], the expert in each slot.
      num_experts: number of experts of a layer.

    Raises:
      ValueError: some expert has no copy, or two on one device, or an entry is no expert; says where.
    """

    experts: np.ndarray
    num_experts: int

    def __post_init__(self) -> None:
        experts = np.array(self.experts)
        if experts.ndim != 3 or experts.dtype.kind not in "iu" or 0 in experts.shape:
            raise ValueError(
                f"Placement: experts are {experts.dtype} {list(experts.shape)}; give integers [layers, devices, slots]"
            )
        experts = experts.astype(np.int64)
        experts.setflags(write=False)
        object.__setattr__(self, "experts", experts)
        if experts.min() < 0 or experts.max() >= self.num_experts:
            at = np.argwhere((experts < 0) | (experts >= self.num_experts))[0].tolist()
            raise ValueError(
                f"Placement: layer {at[0]}, device {at[1]}, slot {at[2]} holds expert {experts[tuple(at)]}; there are "
                f"experts 0 to {self.num_experts - 1}"
            )
        if self.num_experts > (slots := experts[0].size):
            raise ValueError(
                f"Placement: {self.num_experts} experts in {slots} slots of a layer; each needs one"
            )
        ordered = np.sort(experts, -1)
        twice = ordered[..., 1:] == ordered[..., :-1]
        if twice.any():
            layer, device, slot = np.argwhere(twice)[0].tolist()
            raise ValueError(
                f"Placement: layer {layer}, device {device} holds expert {ordered[layer, device, slot]} twice; give it "
                "one copy there"
            )
        if not (self.counts > 0).all():
            layer, expert = np.argwhere(self.counts == 0)[0].tolist()
            raise ValueError(
                f"Placement: expert {expert} has no copy in layer {layer}; every expert needs one"
            )

    @property
    def num_layers(self) -> int:
        """The number of layers with experts."""
        return self.experts.shape[0]

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return self.experts.shape[1]

    @property
    def num_slots(self) -> int:
        """The number of slots of a device in a layer."""
        return self.experts.shape[2]

    @property
    def counts(self) -> np.ndarray:
        """The number of copies of each expert: int64 [layers, experts]."""
        return count_copies(self.experts, self.num_experts)

    @property
    def slots_of(self) -> np.ndarray:
        """The slots of each expert, ascending, -1 where it has fewer copies: int64 [layers, experts, most copies].

        Device d has the slots from d * num_slots on.
        """
        flat, counts = self.experts.reshape(self.num_layers, -1), self.counts
        order = np.argsort(flat, -1, kind="stable")
        expert = np.take_along_axis(flat, order, -1)
        rank = np.arange(flat.shape[1]) - np.take_along_axis(counts.cumsum(-1) - counts, expert, -1)
        slots = np.full((*counts.shape, counts.max()), -1)
        slots[np.arange(self.num_layers)[:, None], expert, rank] = order
        return slots

    def device_loads(self, loads: ArrayLike) -> np.ndarray:
        """The load of each device: float64 [..., layers, devices], from loads [..., layers, experts]."""
        given = np.asarray(loads, float)
        if given.shape[-2:] != (self.num_layers, self.num_experts):
            raise ValueError(
                f"Placement: loads are {list(given.shape)}; give [..., {self.num_layers}, {self.num_experts}]"
            )
        shares = given / self.counts
        layer = np.arange(self.num_layers)[:, None, None]
        return shares[..., layer, self.experts].sum(-1)

    def imbalance(self, loads: ArrayLike) -> np.ndarray:
        """The busiest device's load over the mean: float64 [..., layers], at least 1; 1 where there is no load.

        Raises:
          ValueError: loads are of another shape, or some are NaN, infinite or negative.
        """
        given = np.asarray(loads, float)
        if not (np.isfinite(given) & (given >= 0)).all():
            raise ValueError(
                "Placement: loads must be finite and at least 0; some are NaN, infinite or negative"
            )
        devices = self.device_loads(in_range(given))
        mean = devices.mean(-1)
        return np.divide(devices.max(-1), mean, out=np.ones_like(mean), where=mean > 0)

    def moves_from(self, previous: "Placement") -> np.ndarray:
        """The number of experts that devices must fetch, since ``previous`` has them elsewhere: int64 [layers]."""
        alike = previous.experts.shape[:2] == self.experts.shape[:2]
        if not alike or previous.num_experts != self.num_experts:
            raise ValueError(f"Placement: {previous} is of other layers, devices or experts than {self}")
        return count_moves(previous.experts, self.experts)

    def to_json(self) -> dict[str, Any]:
        """The placement as a dict of lists and numbers, which ``json.dumps`` writes and ``from_json`` reads."""
        return {"num_experts": self.num_experts, "experts": self.experts.tolist()}

    @classmethod
    def from_json(cls, entries: Mapping[str, Any]) -> "Placement":
        """The placement from the dict of ``to_json``; further entries are ignored.

        Raises:
          ValueError: entries are missing, or are no placement; says what is wrong.
        """
        try:
            experts, num_experts = np.array(entries["experts"]), entries["num_experts"]
            if type(num_experts) is not int:
                raise TypeError(f"num_experts is {num_experts!r}, no whole number")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f'a placement needs "num_experts" and "experts" [layers, devices, slots]; {error!r}'
            ) from None
        return cls(experts, num_experts)

    @classmethod
    def in_order(cls, num_layers: int, num_experts: int, num_devices: int, num_slots: int) -> "Placement":
        """A placement of experts in order over the devices; slots left over have copies of the first experts."""
        Layout(num_devices, num_slots).check(num_experts)
        experts = np.arange(num_devices * num_slots) % num_experts
        return cls(np.tile(experts.reshape(num_devices, num_slots), (num_layers, 1, 1)), num_experts)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Placement)
            and self.num_experts == other.num_experts
            and np.array_equal(self.experts, other.experts)
        )

    __hash__ = None  # type: ignore[assignment]  # an array is inside

    def __str__(self) -> str:
        return (
            f"a placement of {self.num_layers} layers x {self.num_experts} experts on {self.num_devices} devices of "
            f"{self.num_slots} slots"
        )


def read_placement(text: str) -> Placement:
    """The placement in a JSON text. Raises ValueError for text that is none."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a placement is JSON, but this is not: {error}") from None
    if not isinstance(entries, dict):
        raise ValueError('a placement is a JSON object with "num_experts" and "experts"')
    return Placement.from_json(entries)


def count_moves(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The number of experts that devices hold in ``after`` and not in ``before``: int64 [layers].

    Both are experts in slots, [layers, devices, slots]. An expert that is twice on a device, as DeepSeek's
    algorithm may place it, is counted once.
    """
    ordered = np.sort(after, -1)
    known = (ordered[..., :, None] == before[..., None, :]).any(-1)
    known[..., 1:] |= ordered[..., 1:] == ordered[..., :-1]
    return (~known).sum((-1, -2))
