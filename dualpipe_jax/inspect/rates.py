"""What a compiled text leaves unsaid: how long collectives, copies and kernels take."""

import dataclasses
import re
from collections.abc import Mapping

from dualpipe_jax.inspect.hlo import Computation, Instruction


@dataclasses.dataclass(frozen=True)
class Rates:
    """Durations in the device's cycles (any unit will do where the compiler gives no cycles itself).

    >>> Rates(collectives={"all-to-all": 20.0}, latency=500).collective("all-to-all", 4096)
    704.8
    >>> Rates().collective("all-to-all", 4096) is None
    True

    Attributes:
      collectives: payload bytes a cycle, one number for all kinds or one for each; a kind that is not there
        has no known duration.
      latency: cycles that every collective takes besides.
      memory: bytes a cycle, read plus written, of copies that the compiler does not price; None counts them
        as 0.
      kernels: cycles of custom calls that the compiler does not price (Pallas kernels), by a regular
        expression searched in the call's target and op_name; the first that is found counts.
    """

    collectives: float | Mapping[str, float] | None = None
    latency: float = 0.0
    memory: float | None = None
    kernels: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def collective(self, kind: str, payload: int) -> float | None:
        """Cycles of a collective that moves payload bytes, alone on its links; None if not known."""
        rate = self.collectives.get(kind) if isinstance(self.collectives, Mapping) else self.collectives
        return None if rate is None else self.latency + payload / rate

    def instruction(self, computation: Computation, instruction: Instruction) -> float | None:
        """Cycles of one instruction that runs no other computation line by line; None if nobody prices it."""
        if instruction.cycles is not None:
            return float(instruction.cycles)
        if instruction.opcode == "custom-call":
            text = f"{instruction.target} {instruction.op_name}"
            return next((c for pattern, c in self.kernels.items() if re.search(pattern, text)), None)
        if instruction.opcode == "copy" and self.memory:
            read = sum(
                computation.by_name[n].nbytes for n in instruction.operands if n in computation.by_name
            )
            return (read + instruction.nbytes) / self.memory
        return None
