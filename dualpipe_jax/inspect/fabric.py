"""Model the network between devices: how long a collective takes, by the places of its devices.

Devices are numbered as in a compiled program, in the order of the mesh for which it was compiled.
"""

import dataclasses
import functools
from typing import Protocol

import numpy as np

from dualpipe_jax.torus import Shape, busiest_link, max_link_messages

Groups = tuple[tuple[int, ...], ...]
"""The device numbers of each group; for permutes, pairs of a source and a target."""

EXCHANGES = "all-to-all", "ragged-all-to-all"
PERMUTE = "collective-permute"
_BROADCAST = "collective-broadcast"
_RING_PASSES = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
"""How often a ring moves the payload, without the device's own part, through each device."""


class Fabric(Protocol):
    """A network between devices, which tells the durations of collectives."""

    def collective(self, kind: str, payload: float, groups: Groups) -> float:
        """Return the least cycles of a collective of ``payload`` bytes a device in all groups at once; 0 if unknown."""


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Nodes with the same number of devices, with a switch inside each node and one network card per device between.

    >>> Nodes(8, inside=450e9, between=50e9).collective("all-to-all", 64 << 20, (tuple(range(16)),))  # seconds
    0.00067108864

    Attributes:
      size: number of devices of a node; device i is on node i // size.
      inside, between: bytes per cycle, each way, of a device, inside a node and between nodes.
    """

    size: int
    inside: float
    between: float

    def collective(self, kind: str, payload: float, groups: Groups) -> float:
        """Return the cycles of a collective; transfers inside and between nodes run at once, and the longer one counts.

        In an all-to-all every device sends its own data. Data that is gathered or reduced crosses to a node once, over
        the cards of all devices that the group has there; so does data that one device sends to all others.
        """
        if kind == PERMUTE:
            across = any(len({device // self.size for device in pair}) > 1 for pair in groups)
            return payload / (self.between if across else self.inside)
        if kind in EXCHANGES:
            return max(self._exchange(payload, group) for group in groups)
        if kind == _BROADCAST:
            return max(self._broadcast(payload, group) for group in groups)
        return _RING_PASSES.get(kind, 0) * max(self._ring(payload, group) for group in groups)

    def _exchange(self, payload: float, group: tuple[int, ...]) -> float:
        there = self._on_nodes(group)
        part = payload / len(group)
        return float(
            max((there.max() - 1) * part / self.inside, (len(group) - there.min()) * part / self.between)
        )

    def _ring(self, payload: float, group: tuple[int, ...]) -> float:
        there = self._on_nodes(group)
        others = 1 - there / len(group)  # The share of the payload that a node does not have.
        inside = payload * (1 - 1 / len(group)) / self.inside if there.max() > 1 else 0.0
        return max(inside, float((payload * others / (there * self.between)).max()))

    def _broadcast(self, payload: float, group: tuple[int, ...]) -> float:
        there = self._on_nodes(group)
        inside = payload / self.inside if there.max() > 1 else 0.0
        return max(inside, payload / (float(there.min()) * self.between) if len(there) > 1 else 0.0)

    def _on_nodes(self, group: tuple[int, ...]) -> np.ndarray:
        """Return the number of the group's devices on each node that has any."""
        counts = np.bincount(np.asarray(group) // self.size)
        return np.asarray(counts[counts > 0])


@dataclasses.dataclass(frozen=True)
class Torus:
    """A TPU's torus, and the places of a mesh's devices on it.

    Attributes:
      shape: number of chips along each dim.
      places: the coordinates of each device's chip.
      link: bytes per cycle from a chip to a neighbour.
    """

    shape: Shape
    places: tuple[tuple[int, ...], ...]
    link: float

    def collective(self, kind: str, payload: float, groups: Groups) -> float:
        """Return the cycles of the busiest link, see ``torus.busiest_link``; groups of different sizes run in sequence.

        The result is 0, unknown, for gathers and reductions, which need not take shortest paths.
        """
        if kind not in (*EXCHANGES, PERMUTE):
            return 0.0
        link_load = _permute_link_load if kind == PERMUTE else _exchange_link_load
        return payload * link_load(self.shape, self.places, groups) / self.link


@functools.lru_cache
def _exchange_link_load(shape: Shape, places: tuple[tuple[int, ...], ...], groups: Groups) -> float:
    by_size: dict[int, list[tuple[int, ...]]] = {}
    for group in groups:
        by_size.setdefault(len(group), []).append(group)
    everywhere = np.asarray(places)
    return sum(busiest_link(everywhere[np.asarray(alike)], shape) for alike in by_size.values())


@functools.lru_cache
def _permute_link_load(shape: Shape, places: tuple[tuple[int, ...], ...], pairs: Groups) -> float:
    ends = np.asarray(places)[np.asarray(pairs)]
    return max_link_messages(ends[:, 0], ends[:, 1], shape)
