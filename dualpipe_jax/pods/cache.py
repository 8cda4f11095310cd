"""Answers of earlier runs on disk, one file each, named by a hash of all that decides the answer. Loads no JAX."""

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from dualpipe_jax.pods.plain import filled, plain
from dualpipe_jax.pods.request import Request
from dualpipe_jax.pods.results import Answer
from dualpipe_jax.processes import num_cores

_PACKAGES = "jax", "jaxlib", "libtpu", "jax-cuda13-pjrt", "jax-cuda12-pjrt"
_ENVIRONMENT = "XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION"
_UNRELATED_PACKAGES = "command", "present", "probe", "balance"
"""Packages of ``dualpipe_jax`` on which no compiled program depends."""


def default_folder() -> Path:
    """The folder of the user's caches in which this package keeps its own."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dualpipe"


class Cache:
    """Answers to requests, in a folder that several processes may use.

    A key is made of the request, the measured rates, the versions of JAX and its compilers, the variables
    of the environment that change what they make, and two sets of sources: those of this package, and those
    of the program (a file's folder, a module's top-level package, or for a plain name the trainer and its
    models). Modules that these import from elsewhere are not part of it. Where units are timed, the machine
    is part of it, with the cores that this process may use.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def file(self, request: Request) -> Path:
        """The file of a request's answer, whether or not it exists yet."""
        asked: dict[str, Any] = plain(request)
        del asked["files"], asked["log"]
        rates = "" if request.rates is None else Path(request.rates).read_text()
        environment = {name: os.environ.get(name) for name in _ENVIRONMENT}
        parts: list[Any] = [asked, _versions(), environment, _digest(request.plan.model), rates]
        if (request.target or "").startswith("cpu:"):  # timed on this machine
            parts += [platform.node(), platform.processor(), num_cores()]
        key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{key[:32]}.json"

    def get(self, request: Request) -> Answer | None:
        """The stored answer; None if there is none, or its file is damaged."""
        try:
            return filled(Answer, json.loads(self.file(request).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def put(self, request: Request, answer: Answer) -> None:
        """Store an answer. The file is replaced atomically, so no reader sees a part of it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.file(request)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(plain(answer)))
        new.replace(file)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


@functools.cache
def _digest(program: str) -> str:
    """A digest of all sources that a program is made from."""
    found = hashlib.sha256()
    for path in (*_package_sources(), *_program_sources(program)):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def _package_sources() -> Iterator[Path]:
    room = Path(__file__).parents[1]
    for path in sorted(room.rglob("*.py")):
        if path.relative_to(room).parts[0] not in _UNRELATED_PACKAGES:
            yield path


def _program_sources(name: str) -> Iterator[Path]:
    where, colon, _ = name.rpartition(":")
    if where.endswith(".py"):
        yield from sorted(Path(where).absolute().parent.glob("*.py"))
        return
    for package in (where.partition(".")[0],) if colon else ("models", "train"):
        spec = _find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield from sorted(Path(folder).rglob("*.py"))
        if spec is not None and spec.origin is not None and spec.submodule_search_locations is None:
            yield Path(spec.origin)


def _find_spec(package: str) -> ModuleSpec | None:
    """Where the child process finds a package: ``python -m`` looks first in the folder in which it is started."""
    return PathFinder.find_spec(package, [os.getcwd(), *sys.path]) or importlib.util.find_spec(package)
