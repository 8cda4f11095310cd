"""Find the compiled program among the files that XLA dumps.

``XLA_FLAGS="--xla_dump_to=FOLDER --xla_dump_hlo_as_text"`` makes XLA write each program at several points of its
compilation. The last text has the most information: after code generation on a TPU, after all optimizations elsewhere.
"""

import re
from pathlib import Path

from dualpipe_jax.inspect.collectives import KINDS

DUMP_FLAGS = 'XLA_FLAGS="--xla_dump_to=FOLDER --xla_dump_hlo_as_text"'
"""The setting with which XLA writes text that this package can read."""

_PROGRAM = re.compile(r"(module_\d+\.[^.]+)\.(?:.*\.)?(?:[\w.]*_)?(after_\w+)\.txt$")
_DUMP_POINTS = "after_codegen", "after_optimizations"
"""The points of compilation whose texts are read, the best one first."""
_COLLECTIVE = re.compile(rf" (?:{'|'.join(KINDS)})(?:-start)?\(")


def find_program(path: Path) -> tuple[Path, list[Path]]:
    """Return a file as it is; for a folder, its program with the most collectives, the longest one if several have.

    The second result is the files of the folder's other programs.

    Raises:
      ValueError: if the folder holds no compiled program as text.
    """
    if not path.is_dir():
        return path, []
    programs: dict[str, Path] = {}
    for point in _DUMP_POINTS:
        for file in sorted(path.iterdir()):
            match = _PROGRAM.match(file.name)
            if match and match[2] == point:
                programs.setdefault(match[1], file)
    files = sorted(programs.values(), key=_collectives_and_size, reverse=True)
    if not files:
        raise ValueError(
            f"no compiled program in this folder's {len(list(path.iterdir()))} files; compile with {DUMP_FLAGS}, or "
            "name a file with the text of what jax.jit(f).lower(...).compile() returns"
        )
    return files[0], files[1:]


def _collectives_and_size(file: Path) -> tuple[int, int]:
    return len(_COLLECTIVE.findall(file.read_text(errors="replace"))), file.stat().st_size
