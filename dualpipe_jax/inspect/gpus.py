"""NVIDIA's GPUs: their description for the compiler, the published rates of them and their links, and the part of these
rates that programs reach, as measured on those GPUs that were available.
"""

import dataclasses
import re
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """The part of a GPU's published rates that compiled programs reach.

    Attributes:
      attention: shares of its peak FLOP/s that the best kernel known here reaches in causal attention over
        sequences of some thousand tokens: forward, backward.
      products: share of its peak FLOP/s that matrix products reach, in addition to the time of ``operands``.
      grouped: the same share for grouped products of unequal groups, by the kernels of ``parallel.mosaic``.
      operands: bytes per second at which products read operands and write results, added to the time of the arithmetic;
        None: hidden behind the arithmetic. With the same share for all, a product reaches more of the peak the more it
        multiplies for each byte.
      memory: share of its memory bandwidth, read plus written.
      launch: seconds that every kernel takes in addition.
      host: seconds until the host has read a number and continues: before each iteration of a loop that may end, and
        before a conditional.
      source: who measured these figures, and on which GPU.
    """

    attention: tuple[float, float]
    products: float = 1.0
    grouped: float = 1.0
    operands: float | None = None
    memory: float = 1.0
    launch: float = 0.0
    host: float = 0.0
    source: str = "nobody here: all but attention is as published"


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One model of GPU.

    Attributes:
      name: the GPU's name as its driver reports it.
      capability: the major version of its CUDA compute capability.
      multiprocessors: number of streaming multiprocessors that are not fused off.
      boost: the highest clock in hertz.
      size: bytes of memory as its driver reports them; programs get ``memory``.
      l2_cache: bytes of the L2 cache.
      memory: bytes that a program may take: the size in its name, because contexts and libraries take part of ``size``.
      flops: floating-point operations per second in bfloat16, dense.
      bandwidth: bytes per second of its memory, read plus written.
      clock: hertz at which its matrix units reach ``flops``; times are given in cycles of this clock.
      nvlink: bytes per second, each way, to the other GPUs of its node.
      network: bytes per second, each way, of its own network card, to other nodes.
      source: the source of ``flops``, ``bandwidth`` and the links.
      published: the reached rates if all but attention is as published.
      reached: the reached rates as measured; None if this GPU was not measured here.
    """

    name: str
    capability: int
    multiprocessors: int
    boost: float
    size: int
    l2_cache: int
    memory: int
    flops: float
    bandwidth: float
    clock: float
    nvlink: float
    network: float
    source: str
    published: Efficiency
    reached: Efficiency | None = None

    def target_config(self) -> str:
        """Return XLA's GpuTargetConfigProto as text, to compile where no such GPU is present.

        Sizes of blocks, registers and shared memory are those of the table of compute capabilities in the CUDA
        programming guide.
        """
        hopper_or_later = self.capability >= 9
        shared = (228 if hopper_or_later else 164) * 1024
        features = "ACCELERATED_FEATURES" if hopper_or_later else "NONE"
        return f"""
platform_name: "CUDA"
device_description_str: "{self.name}"
gpu_device_info {{
  name: "{self.name}"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {self.capability}.0{"a" if hopper_or_later else ""}"
  cuda_compute_capability {{ major: {self.capability} feature_extension: {features} }}
  core_count: {self.multiprocessors}
  fpus_per_core: {128 if hopper_or_later else 64}
  clock_rate_ghz: {self.boost / 1e9}
  device_memory_size: {self.size}
  memory_bandwidth: {int(self.bandwidth)}
  l2_cache_size: {self.l2_cache}
  ecc_enabled: true
  device_address_bits: 64
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared - 1024}
  shared_memory_per_core: {shared}
  pcie_bandwidth: 34359738368
  device_interconnect_info {{ active_links: {18 if hopper_or_later else 12} }}
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
"""


_HOPPER = Efficiency(
    attention=(0.53, 0.41),
    products=0.80,
    grouped=0.72,
    operands=4.7e12,
    memory=0.88,
    launch=2.5e-6,
    host=8e-6,
    source="benchmarks/gpu.py on an H200, 2026-11-26; its host on an H100, 2026-11-22; docs/gpu.md",
)

_H100 = Gpu(
    name="NVIDIA H100 80GB HBM3",
    capability=9,
    multiprocessors=132,
    boost=1.98e9,
    size=84942979072,
    l2_cache=52428800,
    memory=80 * 10**9,
    flops=989e12,
    bandwidth=3350e9,
    clock=1.83e9,
    nvlink=450e9,
    network=50e9,
    source="NVIDIA's data sheets of the H100 SXM and of the DGX H100",
    published=Efficiency(
        attention=(0.55, 0.5)
    ),  # Shah et al. 2024, FlashAttention-3, figures 5 and 6, of cuDNN
    reached=dataclasses.replace(
        _HOPPER,
        memory=0.725,
        source=f"an H100's memory on 2026-11-22; all else of its multiprocessors' like: {_HOPPER.source}",
    ),
)

_BLACKWELL = Efficiency(attention=(0.55, 0.5))
"""The forward's share is that of cuDNN 9.13 on a B200 (arXiv 2603.05451, FlashAttention-4). The backward's share is the
H100's, because none is published for a B200. A GB200 has the shares of a B200."""

GPUS: Mapping[str, Gpu] = {
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        capability=8,
        multiprocessors=108,
        boost=1.41e9,
        size=85100068864,
        l2_cache=41943040,
        memory=80 * 10**9,
        flops=312e12,
        bandwidth=2039e9,
        clock=1.41e9,
        nvlink=300e9,
        network=25e9,
        source="NVIDIA's data sheets of the A100 80GB SXM and of the DGX A100",
        published=Efficiency(attention=(0.73, 0.63)),  # Dao 2023, FlashAttention-2, its fastest cases
    ),
    "h100": _H100,
    "h200": dataclasses.replace(
        _H100,
        name="NVIDIA H200",
        size=150754820096,
        l2_cache=62914560,
        memory=141 * 10**9,
        bandwidth=4800e9,
        source="NVIDIA's data sheets of the H200 SXM and of the DGX H200",
        reached=_HOPPER,
    ),
    "b200": Gpu(
        name="NVIDIA B200",
        capability=10,
        multiprocessors=148,
        boost=1.965e9,
        size=191514411008,
        l2_cache=132644864,
        memory=180 * 10**9,
        flops=2250e12,
        bandwidth=8000e9,
        clock=1.856e9,
        nvlink=900e9,
        network=50e9,
        source="NVIDIA's Blackwell architecture brief (HGX B200) and data sheet of the DGX B200",
        published=_BLACKWELL,
    ),
    "gb200": Gpu(
        name="NVIDIA GB200",
        capability=10,
        multiprocessors=152,
        boost=2.062e9,
        size=197897748480,
        l2_cache=135528448,
        memory=186 * 10**9,
        flops=2500e12,
        bandwidth=8000e9,
        clock=2.008e9,
        nvlink=900e9,
        network=50e9,
        source="NVIDIA's Blackwell architecture brief and data sheet of the GB200 NVL72",
        published=_BLACKWELL,
    ),
}
"""GPUs by the name of their target. Multiprocessors, clocks, caches and sizes are those of XLA's own target files; the
size and cache of an H200 are those that its driver and PyTorch reported.
"""


def gpu_generation(device_kind: str) -> str | None:
    """Return the name in ``GPUS`` of a GPU from ``jax.devices()[0].device_kind``, None if it is not known.

    >>> gpu_generation("NVIDIA H100 80GB HBM3"), gpu_generation("NVIDIA GB200"), gpu_generation("NVIDIA L4")
    ('h100', 'gb200', None)
    """
    words = re.findall(r"[a-z0-9]+", device_kind.lower())
    return next((name for name in GPUS if name in words), None)
