"""Placement with each group of experts on one node: groups are packed onto nodes, then each node's experts placed."""

from collections.abc import Callable

import numpy as np

from dualpipe_jax.balance.pack import SlotLoads, holds, pack, refine
from dualpipe_jax.balance.placement import Layout

PlaceFunction = Callable[[np.ndarray, int, np.ndarray | None], np.ndarray]
"""A function that places experts on devices. Its arguments are loads [windows, rows, experts], the number of
devices, and the placement in force [rows, devices, slots] or None; it returns the new one, int64 [rows,
devices, slots]."""


def place_by_groups(
    load: np.ndarray, layout: Layout, previous: np.ndarray | None, place: PlaceFunction
) -> np.ndarray:
    """The expert in each slot, with all copies of a group's experts on one node: int64 [layers, devices, slots].

    Loads of nodes are made even as those of devices are, by swaps of whole groups. Even nodes may have less
    even devices, so DeepSeek's packing of groups is tried as well, and the better result is taken.

    Args:
      load: [windows, layers, experts], the mean device at 1.
      previous: [layers, devices, slots], the placement in force, or None; its groups stay on their nodes.
      place: the function that places experts on a node's devices.

    Raises:
      ValueError: ``previous`` has a group on two nodes; says which.
    """
    assert layout.num_groups is not None
    if previous is not None:
        return _place_nodes(load, layout, _groups_of(previous, load.shape[-1], layout), previous, place)
    whole = load.reshape(*load.shape[:2], layout.num_groups, -1).sum(-1) * (
        layout.num_nodes / layout.num_devices
    )
    once = np.ones(whole.shape[1:], np.int64)
    packed = SlotLoads.of_placement(pack(whole, once, layout.num_nodes), whole)
    first = _place_nodes(load, layout, packed.held, None, place)
    start = packed.held.copy()
    refine(packed, np.ones(len(start)))
    if np.array_equal(packed.held, start):
        return first
    second = _place_nodes(load, layout, packed.held, None, place)
    peak, other_peak = (SlotLoads.of_placement(held, load).peak.max(-1) for held in (first, second))
    better = other_peak < peak
    return np.where(better[:, None, None], second, first)


def _place_nodes(
    load: np.ndarray, layout: Layout, groups: np.ndarray, previous: np.ndarray | None, place: PlaceFunction
) -> np.ndarray:
    """Place each node's experts on its devices.

    Args:
      groups: int64 [layers, nodes, groups of a node].
    """
    _, layers, experts = load.shape
    nodes, devices = layout.num_nodes, layout.num_devices // layout.num_nodes
    size = experts // groups[0].size
    own = (np.sort(groups, -1)[..., None] * size + np.arange(size)).reshape(layers * nodes, -1)
    layer = np.repeat(np.arange(layers), nodes)[:, None]
    before = None
    if previous is not None:
        place_in_node = np.empty((layers, experts), np.int64)
        place_in_node[layer, own] = np.arange(own.shape[-1])
        before = place_in_node[np.arange(layers)[:, None, None], previous]
        before = before.reshape(layers * nodes, devices, -1)
    held = place(load[:, layer, own], devices, before)
    return own[np.arange(len(own))[:, None, None], held].reshape(layers, layout.num_devices, layout.num_slots)


def _groups_of(previous: np.ndarray, num_experts: int, layout: Layout) -> np.ndarray:
    """The groups on each node of a placement: int64 [layers, nodes, groups of a node]."""
    assert layout.num_groups is not None
    layers, nodes = len(previous), layout.num_nodes
    group = (previous // (num_experts // layout.num_groups)).reshape(layers, nodes, -1)
    there = holds(group, layout.num_groups)
    apart = there.sum(1) != 1
    if apart.any():
        layer, which = np.argwhere(apart)[0].tolist()
        raise ValueError(
            f"balance: the previous placement has copies of group {which} of layer {layer} on "
            f"{int(there[layer, :, which].sum())} nodes; leave previous out, to begin anew, or num_groups"
        )
    even = there.sum(-1) == layout.num_groups // nodes
    if not even.all():
        layer, node = np.argwhere(~even)[0].tolist()
        raise ValueError(
            f"balance: the previous placement has {int(there[layer, node].sum())} groups of layer {layer} on node "
            f"{node}, not {layout.num_groups // nodes}; leave previous out, to begin anew"
        )
    return np.nonzero(there)[2].reshape(layers, nodes, -1)
