"""The device mesh: data-parallel replicas by pipeline ranks by expert-parallel devices."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.torus import near_order

DP = "dp"
"""The mesh axis of replicas: each has a part of every microbatch, and all parameters except those stored sharded."""

PP = "pp"
"""The mesh axis of the pipeline's ranks."""

EP = "ep"
"""The mesh axis over which experts are sharded; each of its devices also holds an equal part of every microbatch."""

NODE = "node"
"""The mesh axis of nodes. A mesh has it if experts are sharded over several nodes and dispatch takes two hops; "ep" is
then the axis of one node's devices."""

BATCH_AXES = (DP, NODE, EP)
"""Axes over which a microbatch is sharded, the first one varying slowest; a mesh need not have all of them."""

AXES = (DP, PP, NODE, EP)
"""All axes that a mesh may have, in the order in which it has them."""


@typechecked
def expert_axes(nodes: int = 1) -> str | tuple[str, str]:
    """Return the axis of ``make_mesh``'s mesh that shards experts, or the two axes that do so on several nodes.

    ``PartitionSpec`` and collectives take either.
    """
    return EP if nodes == 1 else (NODE, EP)


@typechecked
def over_nodes(ep: int, nodes: int = 1) -> int | tuple[int, int]:
    """Return the ``ep`` for ``make_mesh``: the number of devices, or (nodes, devices of a node) on several nodes.

    Raises ValueError if the nodes do not divide the devices.
    """
    if nodes < 1 or ep % nodes:
        raise ValueError(
            f"ep {ep} on {nodes} nodes: give a number of nodes that divides it, as many devices on each"
        )
    return ep if nodes == 1 else (nodes, ep // nodes)


def batch_spec(mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Return the PartitionSpec of a batch, [microbatches, microbatch size, ...], on a mesh."""
    return PartitionSpec(None, tuple(axis for axis in BATCH_AXES if axis in mesh.shape))


def slow_links(mesh: Mesh | AbstractMesh) -> dict[str, float]:
    """Return the relative cost of links between nodes, by mesh axis: a byte's time there over its time inside a node.

    It is empty for a mesh of one node or of other devices than GPUs. On H100s the ratio is 9 (NVLink's 450 GB/s over
    the network's 50 GB/s), corrected for the part of either exchange that stays on its device.
    """
    nodes, local = mesh.shape.get(NODE, 1), mesh.shape.get(EP, 1)
    gpus = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "gpu"
    if nodes == 1 or not gpus:
        return {}
    return {NODE: 9 * (1 - 1 / nodes) / (1 - 1 / max(local, 2))}


@typechecked
def make_mesh(
    pp: int,
    ep: int | tuple[int, int] = 1,
    devices: Sequence[Any] | None = None,
    *,
    dp: int = 1,
) -> Mesh:
    """Lay ``dp x pp x ep`` devices out as a mesh with the axes ("dp", "pp", "ep").

    With ep = (nodes, devices of a node) the axes are ("dp", "pp", "node", "ep"), for dispatch in two hops.

    Devices are taken in the order given, "ep" varying fastest and "dp" slowest: the devices that share a pipeline rank
    are neighbours. JAX orders GPUs by nodes, so that "ep" lies inside a node if it fits; with an axis "node" it must.
    A TPU slice, if it is whole and alone, is taken in another order: "ep" (and "node" by "ep") fills boxes of the
    torus, of the shape whose all-to-alls load their busiest link least, and consecutive ranks are boxes next to each
    other.

    The axis types are Auto (``jax.make_mesh`` would make them Explicit, which ``shard_map``'s specs then contradict).

    >>> from dualpipe_jax import make_mesh
    >>> dict(make_mesh(1).shape)
    {'dp': 1, 'pp': 1, 'ep': 1}

    Args:
      pp: the number of pipeline ranks, at least 1.
      ep: the number of expert-parallel devices of each rank, at least 1; or (nodes, devices of a node), whose product
        is that number.
      devices: the devices to lay out; ``jax.devices()`` if None. Devices beyond the first ``dp * pp * ep`` are left
        out.
      dp: the number of replicas of the pipeline, at least 1.

    Raises:
      TypeError: a device is not one of JAX's.
      ValueError: a size is below 1, there are too few devices, or the devices given for one node are on several.

    """
    sizes = {DP: dp, PP: pp, **expert_axis_sizes(ep)}
    if min(sizes.values()) < 1:
        given = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(f"make_mesh: sizes must be at least 1, got {given}.")
    found = list(jax.devices() if devices is None else devices)
    needed = math.prod(sizes.values())
    if wrong := [device for device in found if not hasattr(device, "platform")]:
        raise TypeError(
            f"make_mesh: devices must be JAX's, as jax.devices() gives them, got {wrong[0]!r:.60}."
        )
    if len(found) < needed:
        raise ValueError(_too_few_devices_message(sizes, found, given=devices is not None))
    local = sizes[EP]
    grid = np.array(_order_by_proximity(found[:needed], local, sizes.get(NODE, 1)), dtype=object)
    if NODE in sizes:
        _check_nodes(grid.reshape(-1, local).tolist(), ep)
    grid = grid.reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _order_by_proximity(devices: list[jax.Device], local: int, nodes: int) -> list[jax.Device]:
    """Order a whole TPU slice's devices so that those of an expert axis are near each other; leave others unchanged."""
    if any(device.platform != "tpu" or getattr(device, "coords", None) is None for device in devices):
        return devices
    # Each slice has coordinates of its own: those of several slices are equal.
    if len({getattr(device, "slice_index", None) for device in devices}) > 1:
        return devices
    chips: dict[tuple[int, ...], list[jax.Device]] = {}
    for device in devices:
        chips.setdefault(tuple(device.coords), []).append(device)
    (first, *rest), cores = zip(*chips, strict=True), len(next(iter(chips.values())))
    shape = tuple(1 + max(places) for places in (first, *rest))
    whole = math.prod(shape) == len(chips) and all(len(chip) == cores for chip in chips.values())
    if not whole or local % cores:
        return devices
    order = near_order(shape, local // cores, nodes)
    if order is None:
        return devices
    return [device for place in order.tolist() for device in chips[tuple(place)]]


def _check_nodes(groups: list[list[jax.Device]], ep: object) -> None:
    """Raise ValueError if the devices given for one node lie on several, as far as JAX shows it.

    A node is a slice, or a process that has several GPUs.
    """
    devices = [device for group in groups for device in group]
    for kind, where in (("slice", "slice_index"), ("process", "process_index")):
        numbers = [getattr(device, where, None) for device in devices]
        if len(set(numbers)) > 1 and (kind == "slice" or _has_several(devices, numbers)):
            break
    else:
        return
    for group in groups:
        there = sorted({getattr(device, where) for device in group})
        if len(there) > 1:
            raise ValueError(
                f"make_mesh: ep {ep}: the {len(group)} devices of a node ({group[0]} to {group[-1]}) lie on "
                f"{len(there)} nodes ({kind} {', '.join(map(str, there))}), and their exchange would cross between "
                f"them: give ep as (nodes, devices of a node), of which {kind} {there[0]} has "
                f"{numbers.count(there[0])}."
            )


def _has_several(devices: list[jax.Device], numbers: list[int | None]) -> bool:
    """Return whether a process has several of these GPUs; processes of one GPU each say nothing about nodes."""
    return devices[0].platform == "gpu" and len(set(numbers)) < len(numbers)


def expert_axis_sizes(ep: int | tuple[int, int]) -> dict[str, int]:
    """Return the size of each axis that shards experts; ``ep`` as in ``make_mesh``."""
    return {NODE: ep[0], EP: ep[1]} if isinstance(ep, tuple) else {EP: ep}


def _too_few_devices_message(sizes: dict[str, int], found: list[jax.Device], *, given: bool) -> str:
    needed = math.prod(sizes.values())
    product = " x ".join(f"{name} {size}" for name, size in sizes.items() if name != "dp" or size > 1)
    platforms = sorted({device.platform for device in found})
    where = "were given" if given else "are visible to JAX"
    kind = f" (platform {', '.join(platforms)})" if platforms else ""
    return (
        f"make_mesh: {product} = {needed} devices, but {len(found)} {where}{kind}.\n\n"
        "For virtual CPU devices, set these before JAX is imported:\n"
        f'  JAX_PLATFORMS=cpu XLA_FLAGS="--xla_force_host_platform_device_count={needed}"'
    )
