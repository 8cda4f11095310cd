"""The device mesh: data-parallel replicas by pipeline ranks by expert-parallel devices."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

DP = "dp"
"""The mesh axis of replicas: each has a part of every microbatch and, but for what is stored cut, all parameters."""

PP = "pp"
"""The mesh axis that the pipeline's ranks lie on."""

EP = "ep"
"""The mesh axis that the experts lie on; each of its devices also holds an equal part of every microbatch."""

NODE = "node"
"""The mesh axis of nodes where experts lie on several and dispatch goes in two hops; "ep" then has the devices of one."""

BATCH_AXES = (DP, NODE, EP)
"""Axes over which a microbatch is cut, the first one varying slowest; a mesh need not have all."""

AXES = (DP, PP, NODE, EP)
"""All axes that a mesh may have, in its order."""


def expert_axes(nodes: int = 1) -> str | tuple[str, str]:
    """What experts lie over, as ``PartitionSpec`` and collectives take it: of ``make_mesh``'s mesh for so many nodes."""
    return EP if nodes == 1 else (NODE, EP)


def over_nodes(ep: int, nodes: int = 1) -> int | tuple[int, int]:
    """So many devices on so many nodes, as ``make_mesh`` takes them: a number if on one. Raises ValueError."""
    if nodes < 1 or ep % nodes:
        raise ValueError(f"ep {ep} on {nodes} nodes: give a number of nodes that divides it, as many devices on each")
    return ep if nodes == 1 else (nodes, ep // nodes)


def batch_spec(mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """How a batch, [microbatches, microbatch size, ...], lies on a mesh."""
    return PartitionSpec(None, tuple(axis for axis in BATCH_AXES if axis in mesh.shape))


def make_mesh(
    pp: int,
    ep: int | tuple[int, int] = 1,
    devices: Sequence[jax.Device] | None = None,
    *,
    dp: int = 1,
) -> Mesh:
    """Lay ``dp x pp x ep`` devices out as a mesh with the axes ("dp", "pp", "ep").

    An ep of (nodes, devices of a node) makes two axes of it, ("dp", "pp", "node", "ep"), for dispatch in two hops.

    Devices are taken in the order given, "ep" varying fastest and "dp" slowest: the devices that share a pipeline rank
    are neighbours. The axis types are Auto (``jax.make_mesh`` would make them Explicit, which ``shard_map``'s
    specs then contradict).

    Args:
      pp: pipeline ranks, at least 1.
      ep: expert-parallel devices of each rank, at least 1; or (nodes, devices of a node) that they are.
      devices: what to lay out; ``jax.devices()`` if None. Devices beyond the first ``dp * pp * ep`` are left out.
      dp: replicas of the whole, at least 1.

    Raises:
      ValueError: a size is below 1, or there are too few devices.

    """
    sizes = {DP: dp, PP: pp, **_over_nodes(ep)}
    if min(sizes.values()) < 1:
        given = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(f"make_mesh: sizes must be at least 1, got {given}.")
    found = list(jax.devices() if devices is None else devices)
    needed = math.prod(sizes.values())
    if len(found) < needed:
        raise ValueError(_too_few(sizes, found, given=devices is not None))
    grid = np.array(found[:needed], dtype=object).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _over_nodes(ep: int | tuple[int, int]) -> dict[str, int]:
    if isinstance(ep, int):
        return {EP: ep}
    if len(ep) != 2:
        raise ValueError(f"make_mesh: ep must be a number or (nodes, devices of a node), got {ep}.")
    return {NODE: ep[0], EP: ep[1]}


def _too_few(sizes: dict[str, int], found: list[jax.Device], *, given: bool) -> str:
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
