"""Apply each edit of tests/mutants/*.toml to a copy of the tree and run the tests that should notice.

An edit that no test notices survives: then a test is missing. The quick tests run first, the slow ones only if those
pass. The test that fails runs again without the edit, because a test that fails anyway notices nothing.

The text `find`, which occurs once in `file`, is replaced by `put`. A group names the file and the tests of its mutants,
unless a mutant names its own.

    scripts/mutants                      # all mutants
    scripts/mutants adamw clip           # mutants with one of these words in their names
    scripts/mutants --part 3/20          # every twentieth, from the third on
    scripts/mutants --quick              # with quick tests alone
    scripts/mutants --list
    scripts/mutants --collect            # does pytest find tests for each? it runs none
"""

import argparse
import contextlib
import functools
import io
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.chosen import in_part  # noqa: E402

LISTS = ROOT / "tests" / "mutants"
# Pytest's exit code if it finds no tests.
NO_TESTS = 5
# Pytest's options: nothing is known of earlier runs; only what failed in the last one.
FROM_NOW, FAILED = "--cache-clear", "--last-failed"
# Compiling keeps only one core busy.
WORKERS = 2
COPIED = (
    "dualpipe_jax",
    "models",
    "train",
    "tests",
    "scripts",
    "benchmarks",
    "docs",
    "README.md",
    "pyproject.toml",
)


class Mutant(NamedTuple):
    """One edit: in ``file`` the text ``find``, which occurs once, becomes ``put``; ``tests`` are pytest's arguments."""

    name: str
    file: str
    find: str
    put: str
    tests: str


def read() -> list[Mutant]:
    """All mutants. A mutant without ``file`` or ``tests`` has those of its group."""
    found = []
    for path in sorted(LISTS.glob("*.toml")):
        for group in tomllib.loads(path.read_text())["group"]:
            for mutant in group["mutant"]:
                found.append(Mutant(**({"file": group.get("file"), "tests": group.get("tests")} | mutant)))
    names = [mutant.name for mutant in found]
    if len(set(names)) != len(names):
        raise SystemExit(
            f"{LISTS}: a name stands there twice: {sorted(n for n in names if names.count(n) > 1)}"
        )
    return found


def stale(mutant: Mutant) -> str | None:
    """The reason why an edit cannot be made any more; None if it can."""
    path = ROOT / mutant.file
    count = path.read_text().count(mutant.find) if path.exists() else 0
    return None if count == 1 else f"{mutant.file} has {mutant.find!r} {count} times, must have it once"


def without_tests(mutants: list[Mutant]) -> list[Mutant]:
    """The mutants for which pytest finds no test or cannot read one, for example because ``-k`` has an old name."""
    import pytest

    @functools.cache
    def collect(tests: str) -> int:
        with contextlib.redirect_stdout(io.StringIO()):
            return pytest.main(["--collect-only", "--all", "-n", "0", *shlex.split(tests)])

    return [mutant for mutant in mutants if collect(mutant.tests) != 0]


def run_tests(tree: Path, tests: str, part: str, which: str) -> int:
    """Pytest's exit code for the quick or the slow ones of some tests: 0 all passed, 1 one failed, 5 no such test.

    The first that fails is the last. ``which`` is ``FROM_NOW`` for all of them, or ``FAILED`` for the one that failed
    in the run before.
    """
    command = [sys.executable, "-m", "pytest", which, "-x", "-q", "-n", "0", "--no-header", "--tb=no"]
    command += ["-m", {"quick": "not slow", "slow": "slow"}[part], *shlex.split(tests)]
    environ = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=tree, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return done.returncode


def try_one(mutant: Mutant, tree: Path, parts: list[str]) -> str:
    """The result of an edit: "caught (quick)", "caught (slow)", "SURVIVED", or the reason why there is no result."""
    if problem := stale(mutant):
        return f"STALE: {problem}"
    path, ran = tree / mutant.file, False
    text = path.read_text()
    for part in parts:
        path.write_text(text.replace(mutant.find, mutant.put))
        try:
            code = run_tests(tree, mutant.tests, part, FROM_NOW)
        finally:
            path.write_text(text)
        # 2: after the edit a test file cannot even be imported.
        if code in (1, 2):
            code = run_tests(tree, mutant.tests, part, FAILED)
            if code == 0:
                return f"caught ({part})"
            return f"BROKEN: without the edit the {part} ones of {mutant.tests} end with {code}"
        if code not in (0, NO_TESTS):
            return f"BROKEN: pytest ended with {code}"
        ran |= code == 0
    return "SURVIVED" if ran else f"BROKEN: no {' or '.join(parts)} test in {mutant.tests}"


def copy_tree(tree: Path) -> Path:
    """Copy the checkout to ``tree``, which shares its build folder: what its tests compiled is not compiled again."""
    tree.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    (ROOT / "build").mkdir(exist_ok=True)
    (tree / "build").symlink_to(ROOT / "build")
    return tree


def try_in_some_tree(mutant: Mutant, trees: SimpleQueue, parts: list[str], interrupted: Event) -> str:
    """The result of a mutant, tried in a copy that nobody else is using; "" after Ctrl-C."""
    if interrupted.is_set():
        return ""
    tree, began = trees.get(), time.monotonic()
    told = try_one(mutant, tree, parts)
    trees.put(tree)
    # Ctrl-C ends the tests first, so their exit code means nothing.
    if interrupted.wait(0.1):
        return ""
    print(f"{mutant.name}: {told} ({time.monotonic() - began:.0f} s)", flush=True)
    return told


def main() -> int:
    """Run from the command line. Returns the exit code: 1 unless all mutants were caught, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of names; all mutants if left out")
    parser.add_argument("--part", help="K/N: every Nth, from the Kth on")
    parser.add_argument(
        "--quick", action="store_true", help="by the quick tests alone, as scripts/test runs them"
    )
    parser.add_argument(
        "--list", action="store_true", help="list names, and edits that do not fit the code any more"
    )
    parser.add_argument("--collect", action="store_true", help="list mutants without tests")
    given = parser.parse_args()
    mutants = [m for m in read() if not given.words or any(word in m.name for word in given.words)]
    if not mutants:
        parser.error(f"no name has {' or '.join(given.words)} in it; --list alone has all names")
    if given.part is not None:
        try:
            mutants = list(in_part(mutants, given.part))
        except ValueError as error:
            parser.error(str(error))
    if given.collect:
        lost = without_tests(mutants)
        print("".join(f"{mutant.name}: no test in {mutant.tests}\n" for mutant in lost), end="")
        return int(bool(lost))
    if given.list:
        problems = [(m.name, stale(m)) for m in mutants]
        print("\n".join(f"{name}{f'  STALE: {problem}' if problem else ''}" for name, problem in problems))
        return int(any(problem for _, problem in problems))
    parts = ["quick"] if given.quick else ["quick", "slow"]
    with tempfile.TemporaryDirectory(prefix="mutants") as folder, ThreadPoolExecutor(WORKERS) as workers:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(WORKERS):
            trees.put(copy_tree(Path(folder) / str(number)))
        interrupted = Event()
        tried = workers.map(lambda mutant: try_in_some_tree(mutant, trees, parts, interrupted), mutants)
        try:
            told = dict(zip(mutants, tried, strict=True))
        except BaseException:
            interrupted.set()
            raise
    bad = [mutant.name for mutant, one in told.items() if not one.startswith("caught")]
    by_quick = sum(one == "caught (quick)" for one in told.values())
    print(f"{len(mutants) - len(bad)} of {len(mutants)} caught, {by_quick} of them by quick tests", end="")
    print(f"; not: {', '.join(bad)}" if bad else "")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
