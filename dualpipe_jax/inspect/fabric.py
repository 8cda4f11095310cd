"""What lies between the devices of a group: how long a collective takes where they are.

Devices are numbered as a compiled program numbers them, in the order of the mesh that it was compiled for.
"""

import dataclasses
import functools
from typing import Protocol

import numpy as np

from dualpipe_jax.torus import Shape, busiest_link, max_link_messages

Groups = tuple[tuple[int, ...], ...]
"""Numbers of the devices that take part together; of permutes each pair of a source and a target."""

EXCHANGES = "all-to-all", "ragged-all-to-all"
PERMUTE = "collective-permute"
_RINGS = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
"""How often all but a device's own part of the payload passes it."""


class Fabric(Protocol):
    """What joins devices, by how long collectives take on it."""

    def collective(self, kind: str, payload: float, groups: Groups) -> float:
        """Cycles that a collective of ``payload`` bytes a device takes at least, in all groups at once; 0: unknown."""


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Nodes of equally many devices, joined by a switch inside and by a network card for each device between.

    >>> Nodes(8, inside=450e9, between=50e9).collective("all-to-all", 64 << 20, (tuple(range(16)),))  # seconds
    0.00067108864

    Attributes:
      size: devices of a node; device i is on node i // size.
      inside, between: bytes a cycle, each way, of a device.
    """

    size: int
    inside: float
    between: float

    def collective(self, kind: str, payload: float, groups: Groups) -> float:
        """What goes inside and what goes between go at once; the longer of both.

        Of an all-to-all every device sends its own; what is gathered or reduced crosses to a node once, over the cards
        of all devices that the group has there.
        """
        if kind == PERMUTE:
            across = any(len({device // self.size for device in pair}) > 1 for pair in groups)
            return payload / (self.between if across else self.inside)
        if kind in EXCHANGES:
            return max(self._exchange(payload, group) for group in groups)
        return _RINGS.get(kind, 0) * max(self._ring(payload, group) for group in groups)

    def _exchange(self, payload: float, group: tuple[int, ...]) -> float:
        there = self._on_nodes(group)
        part = payload / len(group)
        return float(
            max((there.max() - 1) * part / self.inside, (len(group) - there.min()) * part / self.between)
        )

    def _ring(self, payload: float, group: tuple[int, ...]) -> float:
        there = self._on_nodes(group)
        others = 1 - there / len(group)  # what a node does not have
        inside = payload * (1 - 1 / len(group)) / self.inside if there.max() > 1 else 0.0
        return max(inside, float((payload * others / (there * self.between)).max()))

    def _on_nodes(self, group: tuple[int, ...]) -> np.ndarray:
        """Devices of the group on each node that has some."""
        beside = np.bincount(np.asarray(group) // self.size)
        return np.asarray(beside[beside > 0])


@dataclasses.dataclass(frozen=True)
class Torus:
    """A TPU's torus, and where on it the devices of a mesh lie.

    Attributes:
      shape: chips along each dim.
      places: of each device, the coordinates of its chip.
      link: bytes a cycle from a chip to a neighbour.
    """

    shape: Shape
    places: tuple[tuple[int, ...], ...]
    link: float

    def collective(self, kind: str, payload: float, groups: Groups) -> float:
        """What the busiest link needs, see ``torus.busiest_link``; groups of different sizes one after the other.

        Of gathers and reductions, which need not take shortest ways, nothing is said.
        """
        if kind not in (*EXCHANGES, PERMUTE):
            return 0.0
        busiest = _passing if kind == PERMUTE else _busiest
        return payload * busiest(self.shape, self.places, groups) / self.link


@functools.lru_cache
def _busiest(shape: Shape, places: tuple[tuple[int, ...], ...], groups: Groups) -> float:
    by_size: dict[int, list[tuple[int, ...]]] = {}
    for group in groups:
        by_size.setdefault(len(group), []).append(group)
    everywhere = np.asarray(places)
    return sum(busiest_link(everywhere[np.asarray(alike)], shape) for alike in by_size.values())


@functools.lru_cache
def _passing(shape: Shape, places: tuple[tuple[int, ...], ...], pairs: Groups) -> float:
    ends = np.asarray(places)[np.asarray(pairs)]
    return max_link_messages(ends[:, 0], ends[:, 1], shape)
