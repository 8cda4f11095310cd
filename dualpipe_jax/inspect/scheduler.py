"""The TPU compiler's own account of what its latency-hiding scheduler hid.

The scheduler prints, for every computation, the cycles that it expects the core to waste in waiting for
collectives, before and after it has ordered the instructions. They go to the process's standard error if libtpu is
loaded with ``STATISTICS_ENVIRONMENT`` set, so before the process first touches a TPU topology.

Passes after the scheduler (memory space assignment, collectives made synchronous again) can still move things:
the text of the compiled program, which ``overlap`` reads, has the last word on the order.
"""

import dataclasses
import re
from collections.abc import Mapping

STATISTICS_ENVIRONMENT: Mapping[str, str] = {
    "TPU_VMODULE": "latency_hiding_scheduler=1",
    "TPU_STDERR_LOG_LEVEL": "0",
    "TPU_MIN_LOG_LEVEL": "0",
}
"""Environment variables that make libtpu print the statistics."""

_PHASE = re.compile(r"Statistics (before|after) scheduling")
_COMPUTATION = re.compile(r"For computation: ([^\s,]+)(?:, module ([^\s,(]+)(\(\d+\))?)?")
_FIELD = re.compile(
    r"\] (Total cycles|Total wasted cycles|Wasted cycles for [\w\- ]+|Memory pressure peak \(bytes\)): ([\d.e+]+)"
)


@dataclasses.dataclass(frozen=True)
class Waste:
    """One computation's statistics at one point.

    Attributes:
      cycles: from its first instruction to its last, waits included.
      wasted: cycles of those in which the core waits, by kind of collective; kinds that waste none are left
        out.
      peak_bytes: most memory alive at once.
    """

    cycles: float
    wasted: Mapping[str, float]
    peak_bytes: int

    @property
    def total_wasted(self) -> float:
        """Waits for all kinds."""
        return sum(self.wasted.values())


@dataclasses.dataclass(frozen=True)
class SchedulerStatistics:
    """A computation before and after latency hiding.

    Attributes:
      module, computation: names in the compiled program.
      before, after: as first ordered (least memory, overlap by accident), and as scheduled.
    """

    module: str
    computation: str
    before: Waste
    after: Waste


def parse_statistics(text: str) -> tuple[SchedulerStatistics, ...]:
    """Read the statistics out of a libtpu log, in the order in which computations were scheduled.

    Other lines count for nothing. A computation scheduled several times gives its last statistics; one whose
    log breaks off before the second half is left out.
    """
    phase, key = "", ("", "")
    found: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for line in text.splitlines():
        if match := _PHASE.search(line):
            phase, key = match[1], ("", "")
        elif phase and (match := _COMPUTATION.search(line)):
            key = (match[2] or "", match[1])  # the number behind the module's name is a fresh one each time
            found.setdefault(key, {})[phase] = {}
        elif key[1] and (match := _FIELD.search(line)):
            found[key][phase][match[1]] = float(match[2])
    return tuple(
        SchedulerStatistics(module, computation, _waste(phases["before"]), _waste(phases["after"]))
        for (module, computation), phases in found.items()
        if {"before", "after"} <= phases.keys()
    )


def _waste(fields: Mapping[str, float]) -> Waste:
    prefix = "Wasted cycles for "
    wasted = {name.removeprefix(prefix): n for name, n in fields.items() if name.startswith(prefix) and n}
    peak = int(fields.get("Memory pressure peak (bytes)", 0))
    return Waste(fields.get("Total cycles", 0.0), wasted, peak)
