"""What a compiled text leaves unsaid: how long collectives, copies and kernels take."""

import dataclasses
import re
from collections.abc import Callable, Mapping

from dualpipe_jax.inspect.hlo import Instruction

_LINK_SHARE: Mapping[str, Callable[[float], float]] = {
    "all-to-all": lambda others: 2 * others,
    "ragged-all-to-all": lambda others: 2 * others,
    "all-gather": lambda others: others / 2,
    "reduce-scatter": lambda others: others / 2,
    "all-reduce": lambda others: others,
}
"""Payloads that cross a link, by the share of the group that is not the device itself."""

LINK_BYTES_PER_CYCLE: Mapping[str, float] = {
    "v4": 42.67,
    "v5e": 31.10,
    "v5p": 53.34,
    "v6e": 53.34,
    "tpu7x": 49.13,
}
"""Bytes a cycle that the TPU compiler takes one device to send to a neighbour.

Read from the scheduler's statistics (libtpu 0.0.42.1) of programs that do nothing but permute 1 to 64 MiB: the
time is proportional to the bytes, with no latency. tpu7x counts two devices a chip.
"""


MEMORY_BYTES_PER_CYCLE: Mapping[str, float] = {
    "v4": 297.0,
    "v5e": 287.0,
    "v5p": 572.0,
    "v6e": 474.0,
    "tpu7x": 732.0,
}
"""Bytes a cycle, read plus written, that the TPU compiler takes to copy 64 MiB from one layout to another.

From the ``estimated_cycles`` of such copies (libtpu 0.0.42.1); on tpu7x, which gives them to the SparseCore, of a
product with a constant.
"""


def tpu_rates(generation: str) -> "Rates":
    """Rates by which the TPU compiler itself prices collectives and copies, for ``v5e`` or a target ``v5e:4x4``.

    Raises:
      ValueError: if the generation is not known.
    """
    name = generation.partition(":")[0]
    if name not in LINK_BYTES_PER_CYCLE:
        known = ", ".join(LINK_BYTES_PER_CYCLE)
        raise ValueError(
            f"tpu_rates: {generation!r} is none of {known}; for other devices use Rates(link=...)"
        )
    return Rates(link=LINK_BYTES_PER_CYCLE[name], memory=MEMORY_BYTES_PER_CYCLE[name])


@dataclasses.dataclass(frozen=True)
class Rates:
    """Durations in the device's cycles (any unit will do where the compiler gives no cycles itself).

    >>> Rates(link=32.0).collective("collective-permute", 4096, None)
    128.0
    >>> Rates(link=32.0).collective("all-to-all", 4096, 4)
    192.0
    >>> Rates(collectives={"all-to-all": 20.0}, latency=500).collective("all-to-all", 4096, 4)
    704.8
    >>> Rates().collective("all-to-all", 4096, 4) is None
    True

    Attributes:
      link: bytes a cycle from a device to a neighbour. With n devices in a group and P the payload, a permute
        takes P / link, an all-to-all 2 (n - 1) / n of that (as the TPU compiler counts, whatever the shape of
        the torus), a gather or a reduce-scatter (n - 1) / 2n and an all-reduce (n - 1) / n (a ring in both
        directions).
      collectives: payload bytes a cycle for kinds for which link says nothing or the wrong thing.
      latency: cycles that every collective takes besides.
      memory: bytes a cycle, read plus written, for what the compiler does not price: copies between memories,
        gathers, sorts. They are taken to read and write as much as they make, which is the least they do.
        None leaves them unpriced.
      kernels: cycles of custom calls that the compiler does not price (Pallas kernels), by a regular
        expression searched in the call's target and op_name; the first that is found counts.
    """

    link: float | None = None
    collectives: Mapping[str, float] = dataclasses.field(default_factory=dict)
    latency: float = 0.0
    memory: float | None = None
    kernels: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def collective(self, kind: str, payload: int, group_size: int | None) -> float | None:
        """Cycles of a collective that moves payload bytes, alone on its links; None if not known.

        A group_size of None, for a group whose size the text does not say, counts as a very large one.
        """
        if kind in self.collectives:
            return self.latency + payload / self.collectives[kind]
        if self.link is None:
            return None
        others = 1 - 1 / group_size if group_size else 1.0
        return self.latency + payload * _LINK_SHARE.get(kind, lambda others: 1.0)(others) / self.link

    def instruction(self, instruction: Instruction) -> float | None:
        """Cycles of one instruction that runs no other computation line by line; None if nobody prices it."""
        if instruction.cycles is not None:
            return float(instruction.cycles)
        if instruction.opcode == "custom-call":
            text = f"{instruction.target} {instruction.op_name}"
            return next((c for pattern, c in self.kernels.items() if re.search(pattern, text)), None)
        return 2 * instruction.nbytes / self.memory if self.memory else None
