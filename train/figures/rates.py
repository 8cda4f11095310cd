"""How fast a run is: tokens and operations a second, their share of the peak, and the memory it takes."""

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
    """What the devices of a run could do at most.

    Attributes:
      flops: floating-point operations a second, of all devices together.
      source: where the number is from, in words.
    """

    flops: float
    source: str


@dataclasses.dataclass(frozen=True)
class Rates:
    """What turns a step's duration into rates.

    Attributes:
      flops_per_token: that one token's training needs, the customary count.
      peak: of all devices together; None if nobody knows.
    """

    flops_per_token: float
    peak: Peak | None

    def of(self, seconds: float, tokens: int) -> dict[str, float]:
        """Rates of a step: tokens_per_s, tflops_per_s of all devices together, mfu where there is a peak."""
        flops = tokens * self.flops_per_token / seconds
        found = {"tokens_per_s": tokens / seconds, "tflops_per_s": flops / _TERA}
        return found if self.peak is None else found | {"mfu": flops / self.peak.flops}


def find_peak(devices: Sequence[Any], stated: float | None, measure: bool) -> Peak | None:
    """The peak of a run's devices: as stated, else as published, else as measured; None if none of these is to be had.

    Args:
      devices: of the run.
      stated: TFLOP/s of one device.
      measure: whether to time a matrix product where nothing is published. Virtual devices share one machine: it is
        measured as a whole.
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
    """Operations a second, in bfloat16 and dense, of a device by JAX's name of its kind; None for unknown ones."""
    generation = tpu_generation(kind) or gpu_generation(kind)
    return DEVICES[generation].flops if generation is not None and generation in DEVICES else None


def measure_matmul() -> float:
    """Operations a second of a float32 matrix product on one device: the quickest of some."""
    size = 1024
    a = jnp.asarray(np.random.default_rng(0).standard_normal((size, size), np.float32))
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / seconds(lambda: product(a, a), repeats=5)


def memory_gib(devices: Sequence[Any]) -> dict[str, float]:
    """The most memory taken so far, in GiB: of the fullest device, or of the process where devices do not tell."""
    found = [stats.get("peak_bytes_in_use") for stats in (device.memory_stats() or {} for device in devices)]
    known = [float(peak) for peak in found if peak]
    if known:
        return {"device_memory_gib": max(known) / _GIBI}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"process_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIBI}
