"""Just enough reading of compiled HLO text for tests."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.*?) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
_CALLED = re.compile(r"(calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class Instruction(NamedTuple):
    """One line: what it makes, by which opcode, and which computations it calls."""

    shape: str
    opcode: str
    called: dict[str, str]

    @property
    def elements(self) -> int:
        """Elements of its largest array."""
        return max(
            (math.prod(int(d) for d in dims.split(",") if d) for dims in _SHAPE.findall(self.shape)),
            default=0,
        )


def computations(text: str) -> dict[str, list[Instruction]]:
    """Instructions of each computation by name."""
    found: dict[str, list[Instruction]] = {}
    for line in text.splitlines():
        header = re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header:
            current = found.setdefault(header[1], [])
        elif match := _INSTRUCTION.match(line):
            branches = ",".join(_BRANCHES.findall(match[4])).replace("%", "").split(",")
            called = dict(_CALLED.findall(match[4])) | {
                f"branch{number}": branch.strip() for number, branch in enumerate(branches) if branch
            }
            current.append(Instruction(match[2], match[3], called))
    return found


def inside(module: dict[str, list[Instruction]], name: str, enter_loops: bool) -> Iterator[Instruction]:
    """Instructions of a computation and of what it calls, with or without the loops in it."""
    for instruction in module[name]:
        yield instruction
        for called in instruction.called.values():
            if enter_loops or instruction.opcode != "while":
                yield from inside(module, called, enter_loops)


def loop_bodies(module: dict[str, list[Instruction]]) -> list[str]:
    """The body of every loop."""
    return [i.called["body"] for instructions in module.values() for i in instructions if i.opcode == "while"]
