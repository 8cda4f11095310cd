"""How fast a run is: tokens and operations per second, their share of the peak, and the memory used."""

import dataclasses
import resource
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dualpipe_jax.inspect.compiler import tpu_generation
from dualpipe_jax.inspect.gpus import gpu_generation
from dualpipe_jax.inspect.target import DEVICES
from dualpipe_jax.probe.place import seconds

_TERA, _GIBI = 1e12, 2**30


@dataclasses.dataclass(frozen=True)
class Peak:
    """The peak rate of the devices of a run.

    Attributes:
      flops: floating-point operations per second, of all devices together.
      source: the origin of the number, in words.
    """

    flops: float
    source: str


@dataclasses.dataclass(frozen=True)
class Rates:
    """Turns the duration of a step into rates.

    Attributes:
      flops_per_token: the floating-point operations to train on one token, by the usual count.
      peak: the peak of all devices together; None if it is not known.
    """

    flops_per_token: float
    peak: Peak | None

    def of(self, seconds: float, tokens: int) -> dict[str, float]:
        """The rates of a step: tokens_per_s, tflops_per_s of all devices together, and mfu if the peak is known."""
        flops = tokens * self.flops_per_token / seconds
        found = {"tokens_per_s": tokens / seconds, "tflops_per_s": flops / _TERA}
        return found if self.peak is None else found | {"mfu": flops / self.peak.flops}


def find_peak(devices: Sequence[Any], stated: float | None, measure: bool) -> Peak | None:
    """The peak of a run's devices: as stated, else as published, else as measured; None without any of these.

    Args:
      devices: the devices of the run.
      stated: TFLOP/s of one device.
      measure: whether to time a matrix product on CPUs, for which nothing is published. Virtual devices share one
        machine, which is measured as a whole.
    """
    count, kind = len(devices), devices[0].device_kind
    if stated is not None:
        return Peak(count * stated * _TERA, f"stated, {stated:g} TFLOP/s a device")
    if published := published_flops(kind):
        return Peak(count * published, f"{kind}'s data sheet, {published / _TERA:g} TFLOP/s in bfloat16")
    if measure and devices[0].platform == "cpu":
        flops = measure_matmul()
        return Peak(flops, f"measured: a float32 matmul on this machine, {flops / _TERA:.2g} TFLOP/s")
    return None


def published_flops(kind: str) -> float | None:
    """Dense bfloat16 operations per second of a device, by JAX's name of its kind; None for an unknown kind."""
    generation = tpu_generation(kind) or gpu_generation(kind)
    return DEVICES[generation].flops if generation is not None and generation in DEVICES else None


def measure_matmul() -> float:
    """Operations per second of a float32 matrix product on one device, in the fastest of five repeats."""
    size = 1024
    a = jnp.asarray(np.random.default_rng(0).standard_normal((size, size), np.float32))
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / seconds(lambda: product(a, a), repeats=5)


def memory_gib(devices: Sequence[Any]) -> dict[str, float]:
    """The largest memory use so far, in GiB: of the fullest device, or of the process if devices do not tell it."""
    found = [stats.get("peak_bytes_in_use") for stats in (device.memory_stats() or {} for device in devices)]
    known = [float(peak) for peak in found if peak]
    if known:
        return {"device_memory_gib": max(known) / _GIBI}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"process_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIBI}
