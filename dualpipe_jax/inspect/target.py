"""Devices for compilation ahead of time: TPU pods and clusters of GPUs that are not present, and virtual CPU devices.

>>> from dualpipe_jax.inspect import Target
>>> target = Target.parse("v5p:8x8x16")
>>> target.num_devices
1024
>>> devices = target.devices()  # doctest: +SKIP

Make a mesh of these devices and ShapeDtypeStructs with shardings on it as arguments, then call
``jax.jit(f).lower(...)`` and ``.compile(...)``. The compilers come from PyPI and need neither TPU nor GPU nor driver.
"""

import dataclasses
import difflib
import importlib
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dualpipe_jax.inspect.fabric import Torus
from dualpipe_jax.inspect.gpus import GPUS
from dualpipe_jax.inspect.rates import Rates, gpu_rates, tpu_rates
from dualpipe_jax.installing import install_command

TPU_ENVIRONMENT: Mapping[str, str] = {
    "TPU_SKIP_MDS_QUERY": "1",  # Otherwise libtpu queries Google's metadata server for minutes.
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # Several processes may compile at once.
    "JAX_PLATFORMS": "cpu",  # Otherwise JAX searches for a TPU.
}
"""The environment variables that libtpu needs when it is loaded on a machine without TPU."""


@dataclasses.dataclass(frozen=True)
class Device:
    """The memory and published rates of one JAX device.

    Attributes:
      memory: bytes that a program may take. For a TPU, the bytes that its compiler allows (libtpu 0.0.42.1 names them
        when it refuses a program); for a GPU, the size in its name: contexts and libraries take part of the rest.
      flops: floating-point operations per second in bfloat16, dense, as published.
      bandwidth: bytes per second of its memory, as published.
      clock: hertz of the cycles in which the compiler counts; for a TPU, the clock at which its matrix units reach
        ``flops``. tpu7x would need 2.2 GHz for that; but the compiler's links, counted in cycles, have v5p's speed at
        exactly 1.9 GHz, so its clock here is 1.9 GHz.
      source: the source of ``flops``.
    """

    memory: int
    flops: float
    bandwidth: float
    clock: float
    source: str = "Google Cloud's page of this TPU"


_GIB = 1 << 30

DEVICES: Mapping[str, Device] = {
    # One device is one core on v4 and tpu7x, which have two a chip.
    "v4": Device(int(15.25 * _GIB), 137.5e12, 614e9, 1.05e9),
    "v5e": Device(int(15.75 * _GIB), 197e12, 819e9, 1.5e9),
    "v5p": Device(int(95.74 * _GIB), 459e12, 2765e9, 1.75e9),
    "v6e": Device(int(31.25 * _GIB), 918e12, 1640e9, 1.75e9),
    "tpu7x": Device(int(94.75 * _GIB), 1153.5e12, 3690e9, 1.9e9),
    **{
        name: Device(gpu.memory, gpu.flops, gpu.bandwidth, gpu.clock, gpu.source)
        for name, gpu in GPUS.items()
    },
}
"""Devices by generation, as published: TPUs from Google Cloud's page of each, GPUs from ``gpus.GPUS``."""

_TPU_DIMS = {"v4": (2, 3), "v5e": (2,), "v5p": (2, 3), "v6e": (2,), "tpu7x": (2, 3)}
_DIMS = {**_TPU_DIMS, **dict.fromkeys(GPUS, (2,)), "cpu": (1,)}
_DEVICES_PER_CHIP = {"v4": 2, "tpu7x": 2}
_EXAMPLES = "v5e:4x4, v5p:4x4x4, tpu7x:4x4x4, h100:8x8 (nodes x GPUs of a node), gb200:2x72, or cpu:8"
_CPU_TIMEOUT_FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)
"""XLA flags with longer timeouts: virtual devices wait for each other if there are few cores, and the defaults end the
process after seconds of waiting."""
_CUDA = ("xla_cuda13", "xla_cuda12")


class MissingCompiler(ModuleNotFoundError):
    """The compiler for a target is not installed; the message says how to install it."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices of one kind, by name.

    Attributes:
      generation: v4, v5e, v5p, v6e, tpu7x, a100, h100, h200, b200, gb200 or cpu.
      shape: for TPUs, the number of chips along each axis of the torus; for GPUs, the number of nodes and of GPUs per
        node, which are those that NVLink joins (72 in a GB200 NVL72); for cpu, the number of virtual devices.
    """

    generation: str
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, name: str) -> "Target":
        """Return the target of a name.

        >>> Target.parse("h100:8x8").num_devices
        64

        Raises:
          ValueError: if the name is not a generation and its sizes.
        """
        generation, _, shape = name.lower().partition(":")
        if generation not in _DIMS:
            near = difflib.get_close_matches(generation, _DIMS, n=1, cutoff=0.5)
            meant = f"did you mean {near[0]}? " if near else ""
            raise ValueError(
                f"target {name!r}: {meant}known are {', '.join(_DIMS)}; for instance {_EXAMPLES}"
            )
        sizes = tuple(map(int, shape.split("x"))) if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) else ()
        if len(sizes) not in _DIMS[generation]:
            dims = " or ".join(map(str, _DIMS[generation]))
            raise ValueError(
                f"target {name!r}: {generation} wants {dims} sizes with x between them, for instance "
                f"{_EXAMPLES}; got {shape or 'none'}"
            )
        return cls(generation, sizes)

    def __str__(self) -> str:
        return f"{self.generation}:{'x'.join(map(str, self.shape))}"

    @property
    def platform(self) -> Literal["tpu", "cuda", "cpu"]:
        """The platform as JAX's compilers call it."""
        if self.generation in GPUS:
            return "cuda"
        return "cpu" if self.generation == "cpu" else "tpu"

    @property
    def num_devices(self) -> int:
        """The number of JAX devices; two per chip on v4 and tpu7x."""
        return math.prod(self.shape) * _DEVICES_PER_CHIP.get(self.generation, 1)

    @property
    def device(self) -> Device:
        """The memory, peak rates and clock of one device.

        A virtual CPU device has its share of this machine's memory and a clock of 1 GHz, so its cycles are nanoseconds.
        Its rates are 0: they are not known before they are measured.
        """
        if self.platform == "cpu":
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            return Device(memory // self.num_devices, 0.0, 0.0, 1e9, "not measured")
        return DEVICES[self.generation]

    @property
    def rates(self) -> Rates:
        """Durations that compiled programs leave out, for ``overlap``; empty for CPU devices, which can be timed."""
        if self.platform == "cpu":
            return Rates()
        if self.platform == "cuda":
            return gpu_rates(self.generation, node=self.shape[-1])
        return tpu_rates(self.generation)

    def rates_on(self, devices: Sequence[Any]) -> Rates:
        """Return ``rates``; on TPUs, all-to-alls and permutes are timed by the places of a mesh's devices, in order."""
        if self.platform != "tpu":
            return self.rates  # Consecutive devices share a node, whatever the mesh.
        shape = (*self.shape, *(1,) * (3 - len(self.shape)))
        places = tuple(tuple(device.coords) for device in devices)
        return dataclasses.replace(self.rates, fabric=Torus(shape, places, self.rates.link or 1.0))

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that must be in the environment before JAX is imported."""
        if self.platform == "cpu":
            count = f"--xla_force_host_platform_device_count={self.num_devices}"
            flags = f"{os.environ.get('XLA_FLAGS', '')} {' '.join((count, *_CPU_TIMEOUT_FLAGS))}"
            return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
        return TPU_ENVIRONMENT if self.platform == "tpu" else {"JAX_PLATFORMS": "cpu"}

    def check_compiler(self) -> None:
        """Check that the compiler for these devices is installed, without loading it.

        Raises:
          MissingCompiler: if it is not installed.
        """
        if self.platform == "tpu" and not _is_installed("libtpu"):
            raise MissingCompiler(_install_message(self, "libtpu", "jax[tpu]", "tpu"))
        if self.platform == "cuda" and not any(_is_installed(f"jax_plugins.{name}") for name in _CUDA):
            raise MissingCompiler(_install_message(self, "JAX's CUDA plugin", "jax[cuda13]", "cuda"))

    def devices(self) -> list[Any]:
        """Return the target's devices. Programs can be compiled for these, but only CPU devices can hold arrays.

        Variables of ``environment`` that are not set are set, which has no effect if JAX has read them before. In one
        process Pallas' Mosaic kernels compile for only one GPU architecture, the first: use one process for each.

        Raises:
          MissingCompiler: if the compiler is not installed.
          ValueError: if the compiler knows no slice of this shape, or JAX was loaded with fewer CPU devices.
        """
        self.check_compiler()
        for name, value in self.environment.items():
            os.environ.setdefault(name, value)
        if self.platform == "cpu":
            import jax

            return _first_devices(self, jax.devices("cpu"))
        from jax.errors import JaxRuntimeError
        from jax.experimental import topologies

        try:
            if self.platform == "tpu":
                return list(topologies.get_topology_desc(platform="tpu", topology_name=str(self)).devices)
            plugin = next(name for name in _CUDA if _is_installed(f"jax_plugins.{name}"))
            importlib.import_module(f"jax_plugins.{plugin}")
            config = GPUS[self.generation].target_config()
            shape = "x".join(map(str, (1, *self.shape)))
            topology = topologies.get_topology_desc("", platform="cuda", target_config=config, topology=shape)
            return list(topology.devices)
        except JaxRuntimeError as error:
            raise ValueError(f"target {self}: {str(error).splitlines()[0]}") from None


def _first_devices(target: Target, devices: list[Any]) -> list[Any]:
    """Return as many of the devices as the target has. Raises ValueError if JAX was loaded with fewer."""
    if len(devices) < target.num_devices:
        flags = target.environment["XLA_FLAGS"]
        raise ValueError(
            f"target {target}: JAX has {len(devices)} CPU devices; set XLA_FLAGS={flags!r} before it loads"
        )
    return devices[: target.num_devices]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # The parent package is not installed either.
        return False


def _install_message(target: Target, what: str, package: str, extra: str) -> str:
    return (
        f"target {target}: to compile for it {what} is needed, which is not installed; it needs no device:\n"
        f"  {install_command(package, extra=extra)}"
    )
