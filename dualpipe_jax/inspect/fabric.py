"""What lies between the devices of a group: how long an all-to-all takes where they are.

Devices are numbered as a compiled program numbers them, in the order of the mesh that it was compiled for.
"""

import dataclasses
import functools
from typing import Protocol

import numpy as np

from dualpipe_jax.torus import Shape, busiest_link

Groups = tuple[tuple[int, ...], ...]


class Fabric(Protocol):
    """Links."""

    def all_to_all(self, payload: float, groups: Groups) -> float:
        """Cycles until all groups have exchanged ``payload`` bytes a device, all at once."""


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Nodes of equally many devices, joined by a switch inside and by a network card for each device between.

    >>> Nodes(8, inside=450e9, between=50e9).all_to_all(64 << 20, (tuple(range(16)),))  # seconds
    0.00067108864

    Attributes:
      size: devices of a node; device i is on node i // size.
      inside, between: bytes a cycle, each way, of a device.
    """

    size: int
    inside: float
    between: float

    def all_to_all(self, payload: float, groups: Groups) -> float:
        """What goes inside and what goes between go at once; the longer of both."""
        return max(self._group(payload, group) for group in groups)

    def _group(self, payload: float, group: tuple[int, ...]) -> float:
        beside = np.bincount(np.asarray(group) // self.size)  # devices of the group on each node
        part, there = payload / len(group), beside[beside > 0]
        return float(
            max((there.max() - 1) * part / self.inside, (len(group) - there.min()) * part / self.between)
        )


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

    def all_to_all(self, payload: float, groups: Groups) -> float:
        """What the busiest link needs, see ``torus.busiest_link``; groups of different sizes one after the other."""
        return payload * _busiest(self.shape, self.places, groups) / self.link


@functools.lru_cache
def _busiest(shape: Shape, places: tuple[tuple[int, ...], ...], groups: Groups) -> float:
    by_size: dict[int, list[tuple[int, ...]]] = {}
    for group in groups:
        by_size.setdefault(len(group), []).append(group)
    everywhere = np.asarray(places)
    return sum(busiest_link(everywhere[np.asarray(alike)], shape) for alike in by_size.values())
