"""Numbers as text, in one form for output, tables, pictures and pages; and the units of times and sizes."""

import dataclasses
import itertools
from collections.abc import Sequence

BYTES = "B"
"""The unit of memory whose amounts are written in KiB, MiB and GiB."""


@dataclasses.dataclass(frozen=True)
class Units:
    """The units of times and of sizes; empty if they are not known.

    Attributes:
      time: the unit written after times, such as "ms".
      memory: the unit written after sizes; "B" is bytes, which are written in B, KiB, MiB, GiB or TiB.

    Raises:
      ValueError: a unit is not printable text of at most 12 characters.
    """

    time: str = ""
    memory: str = ""

    def __post_init__(self):
        for name, unit in dataclasses.asdict(self).items():
            if not isinstance(unit, str) or not unit.isprintable() or len(unit) > 12:
                raise ValueError(
                    f"Units: {name}={unit!r}; give a short word, such as ms for times, B for memory"
                )

    def duration(self, value: float) -> str:
        """A time with its unit: 165.5 ms."""
        return f"{number(value)} {self.time}".rstrip()

    def size(self, value: float) -> str:
        """An amount of memory with its unit: 1.55G, 17 activations, 40.5 GiB."""
        return format_bytes(value) if self.memory == BYTES else f"{amount(value)} {self.memory}".rstrip()

    def of_time(self, title: str) -> str:
        """The title of a column of times, with their unit: "makespan, ms"."""
        return f"{title}, {self.time}" if self.time else title

    def of_memory(self, title: str) -> str:
        """The title of a column of sizes, with their unit; not with bytes, since each number of bytes has its own."""
        return f"{title}, {self.memory}" if self.memory not in ("", BYTES) else title


def how_many(number: int, noun: str, plural: str = "s") -> str:
    """A number with its noun: 1 rank, 2 ranks, or 2 batches with ``plural`` "es"."""
    return f"{number} {noun}{'' if number == 1 else plural}"


def number(value: float, decimals: int = 3, of: float = 0.0) -> str:
    """A number with at most ``decimals`` decimals, or below 1 with three digits: 165.5, 33, 0.333, 0.0625.

    If the value is a difference of numbers as large as ``of``, it is 0 when it is at most 1e-9 of them: such
    differences come from the order of sums.
    """
    if abs(value) <= 1e-9 * abs(of):
        value = 0.0
    if abs(value) < 1:
        return f"{value + 0.0:.3g}"  # + 0.0 turns -0 into 0
    return f"{round(value, decimals):.12g}"


def in_runs(values: Sequence[int]) -> str:
    """Whole numbers in order, with runs of equal ones counted: "3, 14 x 4, 2" for a 3, fourteen 4s and a 2."""
    runs = ((value, len(list(run))) for value, run in itertools.groupby(values))
    return ", ".join(str(value) if count == 1 else f"{count} x {value}" for value, count in runs)


def amount(value: float) -> str:
    """Four digits below 1000 and, with a letter T, G or M, from a million on; whole in between: 5.5, 12345, 1.55G."""
    for letter, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= unit:
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def format_bytes(value: float) -> str:
    """Bytes in the largest binary unit in which the number is at least 1: 40.5 GiB, 512 B."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:.4g} B"


def gib(value: float) -> str:
    """Bytes in GiB with two decimals, without the unit: 14.00."""
    return f"{value / 2**30:.2f}"


def scale(cycles: float) -> tuple[str, float]:
    """The letter with which a number of cycles is written (G, M, k, or none), and the number that it stands for."""
    return next(
        ((letter, unit) for letter, unit in (("G", 1e9), ("M", 1e6), ("k", 1e3)) if abs(cycles) >= unit),
        ("", 1.0),
    )


def format_cycles(cycles: float | None) -> str:
    """Cycles as text, in thousands, millions or billions if large: 640, 3.52 k, 1.10 M; ``?`` if unknown."""
    if cycles is None:
        return "?"
    letter, unit = scale(cycles)
    return f"{cycles / unit:.2f} {letter}" if letter else f"{cycles:.0f}"


def percent(share: float | None) -> str:
    """A share, of which 1 is the whole, in percent; ``?`` if unknown."""
    return "?" if share is None else f"{round(100 * share, 1) + 0.0:.1f} %"


def as_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: 0-3 8 12-15."""
    runs: list[list[int]] = []
    for value in numbers:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
