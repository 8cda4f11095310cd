"""Which tests are run: what `scripts/test --changed` and `--part` choose, and `scripts/mutants --part` of mutants."""

import ast
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

PACKAGES = ("dualpipe_jax", "models", "train")
_T = TypeVar("_T")
FOR_ALL = {"tests/conftest.py", "tests/quick.py", "pyproject.toml"}


def in_part(all_of_them: Sequence[_T], part: str) -> Sequence[_T]:
    """``K/N``: every N-th, from the K-th on. ValueError for another text, or K not in 1 to N."""
    found = re.fullmatch(r"(\d+)/(\d+)", part)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(
            f"--part {part}: expected K/N with K from 1 to N, such as 2/3: every third, from the second on"
        )
    return all_of_them[int(found[1]) - 1 :: int(found[2])]


def changed_files(root: Path, since: str) -> list[str]:
    """What differs from a revision, new files too: paths from the root. ValueError if git does not know it."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"--changed {since}: git says: {done.stderr.strip()}")
        return done.stdout.splitlines()

    return sorted(
        {*git("diff", "--name-only", since, "--"), *git("ls-files", "--others", "--exclude-standard")}
    )


def touched(root: Path, changed: Iterable[str]) -> set[Path]:
    """The test files of the changed modules' own rooms, and those that import or name a changed file themselves.

    A module ``dualpipe_jax/split/x.py`` has its room in ``tests/split``, ``train/x.py`` in ``tests/train``.
    """
    tests = sorted(root.glob("tests/**/test_*.py"))
    imported = {test: _imported(test) for test in tests}
    texts = {test: test.read_text() for test in tests}
    found: set[Path] = set()
    for name in changed:
        path = Path(name)
        if name in FOR_ALL:
            return set(tests)
        if path.parts[0] == "tests" and path.name.startswith("test_"):
            found |= {root / path} & set(tests)
        elif path.suffix == ".py" and path.parts[0] in (*PACKAGES, "tests"):
            module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
            found |= {test for test in tests if any(_within(known, module) for known in imported[test])}
            found |= {test for test in tests if (room := _room(root, path)) and room in test.parents}
        else:
            found |= {test for test in tests if path.name in texts[test]}
    return found


def _room(root: Path, path: Path) -> Path | None:
    """Where the tests of a source file are: the deepest folder under tests/ that mirrors its own."""
    if path.parts[0] == "tests":
        return None
    parts = path.parent.parts[1:] if path.parts[0] == "dualpipe_jax" else path.parent.parts
    for depth in range(len(parts), 0, -1):
        if (room := root.joinpath("tests", *parts[:depth])).is_dir():
            return room
    return None


def _within(imported: str, module: str) -> bool:
    """Whether a dotted name is a module or stands in it."""
    return imported == module or imported.startswith(module + ".")


def _imported(path: Path) -> set[str]:
    """The dotted names that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names
