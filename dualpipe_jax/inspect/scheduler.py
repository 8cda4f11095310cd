"""Read the TPU compiler's own statistics of its latency-hiding scheduler.

The scheduler prints, for every computation, the cycles that it expects the core to waste waiting for
collectives, before and after it has ordered the instructions. They go to the process's standard error if
``STATISTICS_ENVIRONMENT`` is set when libtpu is loaded, so before the process first uses a TPU topology.

Passes after the scheduler (memory space assignment, collectives made synchronous again) can still move instructions:
only the text of the compiled program, which ``overlap`` reads, has the final order.
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
class WaitStatistics:
    """One computation's statistics, before or after scheduling.

    Attributes:
      cycles: cycles from its first instruction to its last, waits included.
      wasted: the part of these cycles in which the core waits, by kind of collective; kinds without waits are left
        out.
      peak_bytes: the most bytes of memory that are live at once.
    """

    cycles: float
    wasted: Mapping[str, float]
    peak_bytes: int

    @property
    def total_wasted(self) -> float:
        """Cycles of waits for all kinds of collectives."""
        return sum(self.wasted.values())


@dataclasses.dataclass(frozen=True)
class SchedulerStatistics:
    """Statistics of a computation before and after latency hiding.

    Attributes:
      module, computation: their names in the compiled program.
      before, after: statistics of the first order (for least memory, overlap only by chance) and of the scheduled one.
    """

    module: str
    computation: str
    before: WaitStatistics
    after: WaitStatistics


def parse_statistics(text: str) -> tuple[SchedulerStatistics, ...]:
    """Read the statistics out of a libtpu log, in the order in which computations were scheduled.

    Other lines are ignored. For a computation that was scheduled several times, the last statistics count. A
    computation is left out if the log ends before its second half.
    """
    phase, key = "", ("", "")
    found: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for line in text.splitlines():
        if match := _PHASE.search(line):
            phase, key = match[1], ("", "")
        elif phase and (match := _COMPUTATION.search(line)):
            # The number after the module's name is a new one each time, and is dropped.
            key = (match[2] or "", match[1])
            found.setdefault(key, {})[phase] = {}
        elif key[1] and (match := _FIELD.search(line)):
            found[key][phase][match[1]] = float(match[2])
    return tuple(
        SchedulerStatistics(
            module, computation, _wait_statistics(phases["before"]), _wait_statistics(phases["after"])
        )
        for (module, computation), phases in found.items()
        if {"before", "after"} <= phases.keys()
    )


def _wait_statistics(fields: Mapping[str, float]) -> WaitStatistics:
    prefix = "Wasted cycles for "
    wasted = {name.removeprefix(prefix): n for name, n in fields.items() if name.startswith(prefix) and n}
    peak = int(fields.get("Memory pressure peak (bytes)", 0))
    return WaitStatistics(fields.get("Total cycles", 0.0), wasted, peak)
