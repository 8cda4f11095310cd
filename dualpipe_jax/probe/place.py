"""The mesh on which experiments run, and the settings that suit its devices."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dualpipe_jax.inspect import recommended_compiler_options
from dualpipe_jax.inspect.compiler import tpu_generation
from dualpipe_jax.parallel import EP, PP, make_mesh


@dataclasses.dataclass(frozen=True)
class Place:
    """The devices that are probed.

    Attributes:
      mesh: ("dp", "pp", "ep").
      options: the compiler's options.
      is_small: whether these are CPU devices, on which anything large takes minutes.
    """

    mesh: Mesh
    options: dict[str, str]
    is_small: bool

    @classmethod
    def make(cls, pp: int | None = None, ep: int | None = None) -> "Place":
        """Make the mesh; every size that is None follows from the number of devices.

        With neither given there are two ranks if the number of devices is even, else a rank for each device. With one
        given, the other takes the rest of the devices.

        Raises:
          ValueError: more devices are asked for than there are.
        """
        devices = jax.devices()
        count = len(devices)
        if pp is None:
            pp = max(1, count // ep) if ep else 2 if count % 2 == 0 else count
        ep = max(1, count // pp) if ep is None else ep
        platform = devices[0].platform
        options = recommended_compiler_options(platform, tpu_generation(devices[0].device_kind))
        return cls(make_mesh(pp, ep), options, platform == "cpu")

    @property
    def dtype(self) -> np.dtype:
        """The dtype of large computations: bfloat16, but float32 on CPU."""
        return np.dtype(jnp.float32 if self.is_small else jnp.bfloat16)

    @property
    def pp(self) -> int:
        return self.mesh.shape[PP]

    @property
    def ep(self) -> int:
        return self.mesh.shape[EP]

    @property
    def is_local(self) -> bool:
        """Whether this process drives one of the mesh's devices."""
        return any(device.process_index == jax.process_index() for device in self.mesh.devices.flat)

    def of_ranks(self, ranks: slice) -> "Place":
        """The place of some ranks alone: the other ranks take no part in its programs."""
        devices = self.mesh.devices[0, ranks]
        pp, ep = devices.shape
        return dataclasses.replace(self, mesh=make_mesh(pp, ep, [*devices.flat]))

    def on_devices(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function that runs on each device.

        Arguments and results are trees of arrays [pp, ep, ...], of which the function sees its device's [...].
        """
        spec = PartitionSpec(PP, EP)

        def on_device(*own: Any) -> Any:
            made = function(*jax.tree.map(lambda a: a[0, 0], own))
            return jax.tree.map(lambda a: a[None, None], made)

        run = jax.shard_map(on_device, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(run, compiler_options=self.options)

    def put(self, tree: Any) -> Any:
        """Shard arrays [pp, ep, ...] over the devices; each process puts the parts of its own devices."""
        sharding = NamedSharding(self.mesh, PartitionSpec(PP, EP))
        return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, a.__getitem__), tree)

    def fetch(self, tree: Any) -> Any:
        """Gather the devices' arrays as whole NumPy arrays, in every process."""
        if jax.process_count() > 1:
            everywhere = NamedSharding(self.mesh, PartitionSpec())
            tree = jax.jit(lambda tree: tree, out_shardings=everywhere)(tree)
        return jax.device_get(tree)


def seconds(call: Callable[[], Any], repeats: int = 3) -> float:
    """The shortest time of ``repeats`` calls in seconds, after one call that compiles."""
    jax.block_until_ready(call())
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - started)
    return min(taken)
