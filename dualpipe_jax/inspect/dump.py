"""Finds the compiled program among the files that XLA dumps.

``XLA_FLAGS="--xla_dump_to=FOLDER --xla_dump_hlo_as_text"`` makes XLA write each program at several points of its
compilation. The last of them says most: after code generation on a TPU, after all optimizations elsewhere.
"""

import re
from pathlib import Path
from typing import NamedTuple

from dualpipe_jax.inspect.collectives import KINDS

HOW = 'XLA_FLAGS="--xla_dump_to=FOLDER --xla_dump_hlo_as_text"'
"""What makes XLA write what can be read here."""

_PROGRAM = re.compile(r"(module_\d+\.[^.]+)\.(?:.*\.)?(?:[\w.]*_)?(after_\w+)\.txt$")
_PASSES = "after_codegen", "after_optimizations"
"""The points that are read, the best one first."""
_SENDS = re.compile(rf" (?:{'|'.join(KINDS)})(?:-start)?\(")


class Found(NamedTuple):
    """The file of the program that communicates most, and those of all others."""

    file: Path
    others: tuple[Path, ...] = ()


def find_program(path: Path) -> Found:
    """A file itself; of a folder the program with the most collectives, of equal ones the longest.

    Raises:
      ValueError: the folder holds no compiled program as text.
    """
    if not path.is_dir():
        return Found(path)
    programs: dict[str, Path] = {}
    for point in _PASSES:
        for file in sorted(path.iterdir()):
            match = _PROGRAM.match(file.name)
            if match and match[2] == point:
                programs.setdefault(match[1], file)
    files = sorted(programs.values(), key=_communicates, reverse=True)
    if not files:
        raise ValueError(
            f"no compiled program in this folder's {len(list(path.iterdir()))} files; compile with {HOW}, or name a "
            "file with the text of what jax.jit(f).lower(...).compile() returns"
        )
    return Found(files[0], tuple(files[1:]))


def _communicates(file: Path) -> tuple[int, int]:
    return len(_SENDS.findall(file.read_text(errors="replace"))), file.stat().st_size
