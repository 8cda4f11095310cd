"""The device mesh: pipeline ranks by expert-parallel devices."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

DP = "dp"
"""The mesh axis of replicas: each works on a part of every microbatch."""

PP = "pp"
"""The mesh axis that the pipeline's ranks lie on."""

EP = "ep"
"""The mesh axis that the experts lie on; each of its devices also holds an equal part of every microbatch."""


def make_mesh(num_pp: int, num_ep: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Lay ``num_pp x num_ep`` devices out as a mesh with the axes ("pp", "ep").

    Devices are taken in the order given, "ep" varying fastest: the devices that share a pipeline rank are
    neighbours. The axis types are Auto (``jax.make_mesh`` would make them Explicit, which ``shard_map``'s
    specs then contradict).

    Args:
      num_pp: pipeline ranks, at least 1.
      num_ep: expert-parallel devices of each rank, at least 1.
      devices: what to lay out; ``jax.devices()`` if None. Devices beyond the first ``num_pp * num_ep`` are
        left out.

    Raises:
      ValueError: a size is below 1, or there are too few devices.

    """
    if num_pp < 1 or num_ep < 1:
        raise ValueError(f"make_mesh: num_pp and num_ep must be at least 1, got {num_pp} and {num_ep}.")
    found = list(jax.devices() if devices is None else devices)
    needed = num_pp * num_ep
    if len(found) < needed:
        raise ValueError(_too_few(num_pp, num_ep, found, given=devices is not None))
    grid = np.array(found[:needed], dtype=object).reshape(num_pp, num_ep)
    return Mesh(grid, (PP, EP), axis_types=(AxisType.Auto, AxisType.Auto))


def _too_few(num_pp: int, num_ep: int, found: list[jax.Device], *, given: bool) -> str:
    needed = num_pp * num_ep
    platforms = sorted({device.platform for device in found})
    where = "were given" if given else "are visible to JAX"
    kind = f" (platform {', '.join(platforms)})" if platforms else ""
    return (
        f"make_mesh: num_pp {num_pp} x num_ep {num_ep} = {needed} devices, "
        f"but {len(found)} {where}{kind}.\n\n"
        "For virtual CPU devices, set these before JAX is imported:\n"
        f'  JAX_PLATFORMS=cpu XLA_FLAGS="--xla_force_host_platform_device_count={needed}"'
    )
