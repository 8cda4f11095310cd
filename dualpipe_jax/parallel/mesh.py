"""The device mesh: data-parallel replicas by pipeline ranks by expert-parallel devices."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

DP = "dp"
"""The mesh axis of replicas: each has a part of every microbatch and, but for what is stored sharded, all parameters."""

PP = "pp"
"""The mesh axis that the pipeline's ranks lie on."""

EP = "ep"
"""The mesh axis that the experts lie on; each of its devices also holds an equal part of every microbatch."""


def make_mesh(pp: int, ep: int = 1, devices: Sequence[jax.Device] | None = None, *, dp: int = 1) -> Mesh:
    """Lay ``dp x pp x ep`` devices out as a mesh with the axes ("dp", "pp", "ep").

    Devices are taken in the order given, "ep" varying fastest and "dp" slowest: the devices that share a pipeline rank
    are neighbours. The axis types are Auto (``jax.make_mesh`` would make them Explicit, which ``shard_map``'s
    specs then contradict).

    Args:
      pp: pipeline ranks, at least 1.
      ep: expert-parallel devices of each rank, at least 1.
      devices: what to lay out; ``jax.devices()`` if None. Devices beyond the first ``dp * pp * ep`` are left out.
      dp: replicas of the whole, at least 1.

    Raises:
      ValueError: a size is below 1, or there are too few devices.

    """
    sizes = {"dp": dp, "pp": pp, "ep": ep}
    if min(sizes.values()) < 1:
        given = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(f"make_mesh: sizes must be at least 1, got {given}.")
    found = list(jax.devices() if devices is None else devices)
    needed = dp * pp * ep
    if len(found) < needed:
        raise ValueError(_too_few(sizes, found, given=devices is not None))
    grid = np.array(found[:needed], dtype=object).reshape(dp, pp, ep)
    return Mesh(grid, (DP, PP, EP), axis_types=(AxisType.Auto,) * 3)


def _too_few(sizes: dict[str, int], found: list[jax.Device], *, given: bool) -> str:
    needed = int(np.prod(list(sizes.values())))
    product = " x ".join(f"{name} {size}" for name, size in sizes.items() if name != "dp" or size > 1)
    platforms = sorted({device.platform for device in found})
    where = "were given" if given else "are visible to JAX"
    kind = f" (platform {', '.join(platforms)})" if platforms else ""
    return (
        f"make_mesh: {product} = {needed} devices, but {len(found)} {where}{kind}.\n\n"
        "For virtual CPU devices, set these before JAX is imported:\n"
        f'  JAX_PLATFORMS=cpu XLA_FLAGS="--xla_force_host_platform_device_count={needed}"'
    )
