"""Durations that a compiled text leaves out: those of collectives, copies and kernels."""

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.inspect.fabric import Fabric, Groups, Nodes
from dualpipe_jax.inspect.gpus import GPUS
from dualpipe_jax.inspect.hlo import Computation, Instruction, Module
from dualpipe_jax.inspect.roofline import flops, traffic

_TORUS: Mapping[str, float] = {
    "all-to-all": 2,
    "ragged-all-to-all": 2,
    "all-gather": 1 / 2,
    "reduce-scatter": 1 / 2,
    "all-reduce": 1,
}
_SWITCH: Mapping[str, float] = {**dict.fromkeys(_TORUS, 1), "all-reduce": 2}
"""By kind of collective, how many times the payload crosses a link, before the factor (n - 1) / n for n devices in a
group. ``_TORUS`` is for a torus or ring in both directions, ``_SWITCH`` for links that meet in a switch."""

LINK_BYTES_PER_CYCLE: Mapping[str, float] = {
    "v4": 42.67,
    "v5e": 31.10,
    "v5p": 53.34,
    "v6e": 53.34,
    "tpu7x": 49.13,
}
"""Bytes per cycle that one device sends to a neighbour, as the TPU compiler assumes.

They were read from the scheduler's statistics (libtpu 0.0.42.1) of programs that only permute 1 to 64 MiB: the
time is proportional to the bytes, with no latency. A tpu7x chip counts as two devices.
"""


MEMORY_BYTES_PER_CYCLE: Mapping[str, float] = {
    "v4": 297.0,
    "v5e": 287.0,
    "v5p": 572.0,
    "v6e": 474.0,
    "tpu7x": 732.0,
}
"""Bytes per cycle, read plus written, of a copy of 64 MiB from one layout to another, as the TPU compiler assumes.

They are from the ``estimated_cycles`` of such copies (libtpu 0.0.42.1); on tpu7x, which runs copies on the SparseCore,
from those of a multiplication by a constant.
"""


FLOPS_PER_CYCLE: Mapping[str, float] = {
    "v4": 131072,
    "v5e": 131072,
    "v5p": 262144,
    "v6e": 524288,
    "tpu7x": 524288,
}
"""Multiplications and additions per cycle of one device's matrix units: 4 units of 128 x 128, from v6e on of 256 x 256;
the two cores of v5p count as one device. For a product of matrices of width 8192 the compiler estimates 70 % (v6e) to
90 % of this rate.
"""


@typechecked
def tpu_rates(generation: str) -> "Rates":
    """Return the rates of the TPU compiler itself for collectives and copies, for ``v5e`` or a target ``v5e:4x4``.

    The compiler gives Pallas kernels no price. They take the time of the arithmetic that they state, at the full rate
    of the matrix units, which is a lower bound.

    Raises:
      ValueError: if the generation is not known.
    """
    name = generation.partition(":")[0]
    if name not in LINK_BYTES_PER_CYCLE:
        known = ", ".join(LINK_BYTES_PER_CYCLE)
        raise ValueError(
            f"tpu_rates: generation {generation!r} is none of {known}; for other devices use Rates(link=...)"
        )
    return Rates(
        link=LINK_BYTES_PER_CYCLE[name], memory=MEMORY_BYTES_PER_CYCLE[name], flops=FLOPS_PER_CYCLE[name]
    )


@typechecked
def gpu_rates(
    generation: str = "h100", network: float | None = None, node: int = 8, published: bool = False
) -> "Rates":
    """Return a roofline model of NVIDIA's GPUs, in cycles of a device's ``clock``; XLA:GPU gives no cycles itself.

    >>> from dualpipe_jax.inspect import gpu_rates
    >>> round(gpu_rates("h100").link)  # bytes a cycle inside a node: 450 GB/s at 1.83 GHz
    246

    For h100 and h200, the rates of products, attention and memory (read plus written), and the times of launches and
    of the host's reads of conditions, are as measured, ``gpus.Gpu.reached``. For the other GPUs, and with
    ``published``, they are those of data sheets, which no program reaches: programs took 1.3 to 1.5 times as long.
    A product takes the time of its arithmetic plus that of its bytes, so a small one reaches less than a large one.
    Attention, which reaches least, has its own rate. Links are as published: NVLink inside a node, the network between
    nodes, see ``fabric.Nodes``; a permute with unknown devices counts as between nodes.

    Args:
      generation: a100, h100, h200, b200 or gb200.
      network: bytes per second, each way, of a GPU's share of the network between nodes; by default as published.
      node: number of GPUs that NVLink joins; consecutive devices are on one node.
      published: whether to take data sheets even if there are measurements.

    Raises:
      ValueError: if the generation is not known.
    """
    if generation not in GPUS:
        raise ValueError(
            f"gpu_rates: generation {generation!r} is none of {', '.join(GPUS)}; "
            "for other devices use Rates(link=...)"
        )
    gpu = GPUS[generation]
    network = gpu.network if network is None else network
    link, peak = gpu.nvlink / gpu.clock, gpu.flops / gpu.clock
    reached = gpu.published if published or gpu.reached is None else gpu.reached
    forward, backward = reached.attention
    return Rates(
        fabric=Nodes(node, link, network / gpu.clock),
        link=link,
        switched=True,
        collectives={"collective-permute": network / gpu.clock},
        memory=reached.memory * gpu.bandwidth / gpu.clock,
        flops=reached.products * peak,
        kernel_flops=gpu_kernels(forward * peak, backward * peak, reached.grouped * peak),
        operands=reached.operands and reached.operands / gpu.clock,
        launch=reached.launch * gpu.clock,
        host=reached.host * gpu.clock,
    )


def gpu_kernels(forward: float | None, backward: float | None, grouped: float | None) -> dict[str, float]:
    """Return ``Rates.kernel_flops`` of cuDNN's attention, ``parallel.mosaic`` and ``triton``, without those of None."""
    known = {"fmha.*Backward": backward, "fmha": forward, r"mosaic_gpu|gpu\.triton": grouped}
    return {pattern: rate for pattern, rate in known.items() if rate is not None}


@dataclasses.dataclass(frozen=True)
class Rates:
    """Durations in the device's cycles (or in any unit, if the compiler gives no cycles itself).

    >>> Rates(link=32.0).collective("collective-permute", 4096, None)
    128.0
    >>> Rates(link=32.0).collective("all-to-all", 4096, 4)
    192.0
    >>> Rates(collectives={"all-to-all": 20.0}, latency=500).collective("all-to-all", 4096, 4)
    704.8
    >>> Rates().collective("all-to-all", 4096, 4) is None
    True

    Attributes:
      link: bytes per cycle from a device to a neighbour. With n devices in a group and P the payload, a permute
        takes P / link, an all-to-all 2 (n - 1) / n of that (as the TPU compiler counts, whatever the shape of
        the torus), a gather or a reduce-scatter (n - 1) / 2n and an all-reduce (n - 1) / n (a ring in both
        directions).
      switched: whether the links meet in a switch, as NVLink's do: then all of these but a permute take (n - 1) / n of
        P / link, and an all-reduce twice that.
      collectives: payload bytes per cycle by kind, for kinds for which link gives nothing or a wrong duration.
      latency: cycles that every collective takes in addition.
      latencies: the same by kind, for kinds that take longer or less long.
      memory: bytes per cycle, read plus written. An instruction that the compiler does not price (on TPU copies between
        memories, gathers, sorts; on GPU everything) takes its traffic over memory, or its arithmetic over flops if that
        is longer. None leaves it unpriced.
      flops: multiplications and additions per cycle of matrix products that the compiler does not price, and of
        kernels that state their cost (``pl.CostEstimate``).
      products: the rates of products by size, in place of flops: ascending pairs of a product's operations and its
        operations per cycle. Rates in between are interpolated over the logarithm of the operations; outside, the
        nearest rate holds.
      kernels: cycles of custom calls that the compiler does not price (Pallas kernels), by a regular
        expression searched in the call's target and op_name; the first match counts.
      kernel_flops: like flops, for custom calls that are known to reach less, by a regular expression searched in the
        call's target; the first match counts.
      operands: bytes per cycle at which a matrix product reads operands and writes its result, added to the time of its
        arithmetic; None: hidden behind the arithmetic.
      launch: cycles that each kernel priced by memory or flops takes in addition.
      host: cycles for which a device idles while its host reads a condition: before each trip of a loop with an unknown
        number of trips, once more to end the loop, and before a conditional.
      measured: whether memory and flops were measured on real devices; they then also replace the compiler's prices.
      fabric: the network between devices. A collective with known groups takes at least the fabric's cycles, and
        exactly these if ``collectives`` has its kind.
    """

    link: float | None = None
    switched: bool = False
    collectives: Mapping[str, float] = dataclasses.field(default_factory=dict)
    latency: float = 0.0
    memory: float | None = None
    flops: float | None = None
    products: tuple[tuple[float, float], ...] = ()
    kernels: Mapping[str, float] = dataclasses.field(default_factory=dict)
    kernel_flops: Mapping[str, float] = dataclasses.field(default_factory=dict)
    operands: float | None = None
    launch: float = 0.0
    host: float = 0.0
    measured: bool = False
    fabric: Fabric | None = None
    latencies: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def collective(
        self, kind: str, payload: int, group_size: int | None, groups: Groups | None = None
    ) -> float | None:
        """Return the cycles of a collective of payload bytes, alone on its links; None if not known.

        A group_size of None, if the text does not say it, counts as a very large group. The ``groups`` of a permute are
        its pairs of a source and a target.
        """
        placed, latency = 0.0, self.latencies.get(kind, self.latency)
        if self.fabric is not None and groups:
            placed = self.fabric.collective(kind, payload, groups)
        if kind in self.collectives:
            return latency + (placed or payload / self.collectives[kind])
        if self.link is None:
            return None
        factor = (_SWITCH if self.switched else _TORUS).get(kind)
        others = 1 - 1 / group_size if group_size else 1.0
        alone = payload * (1.0 if factor is None else factor * others) / self.link
        return latency + max(alone, placed)

    def instruction(self, module: Module, within: Computation, instruction: Instruction) -> float | None:
        """Return the cycles of an instruction that runs no other computation line by line; None without any price."""
        if self.measured and (priced := self._priced(module, within, instruction)) is not None:
            return priced
        if instruction.cycles is not None:
            return float(instruction.cycles)
        return self._priced(module, within, instruction)

    def _priced(self, module: Module, within: Computation, instruction: Instruction) -> float | None:
        if instruction.opcode == "custom-call":
            text = f"{instruction.target} {instruction.op_name}"
            for pattern, cycles in self.kernels.items():
                if re.search(pattern, text):
                    return cycles
        return self._roofline(module, within, instruction)

    def _roofline(self, module: Module, within: Computation, instruction: Instruction) -> float | None:
        arithmetic = flops(module, within, instruction)
        if self.memory is None or (arithmetic and self.flops is None):
            return None
        if instruction.opcode == "custom-call" and not arithmetic:
            return None  # Nothing is known of this kernel.
        moved = traffic(module, within, instruction)
        busy = moved / self.memory
        if arithmetic:
            operand_cycles = moved / self.operands if self.operands else 0.0
            busy = max(busy, arithmetic / self._flops_rate(instruction, arithmetic) + operand_cycles)
        return busy + self.launch if busy else 0.0

    def _flops_rate(self, instruction: Instruction, arithmetic: int) -> float:
        """Return the multiplications and additions per cycle of a matrix product or kernel."""
        assert self.flops is not None
        target = instruction.target if instruction.opcode == "custom-call" else ""
        for name, rate in self.kernel_flops.items():
            if re.search(name, target):
                return rate
        if not (self.products and arithmetic):
            return self.flops
        sizes, reached = zip(*self.products, strict=True)
        return float(np.interp(math.log(arithmetic), np.log(sizes), reached))
