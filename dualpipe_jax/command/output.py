"""Print what subcommands found: with rich in a terminal, as plain text anywhere else."""

import contextlib
import dataclasses
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dualpipe_jax.present.table import Table

_QUIET_SECONDS = 5.0
"""Seconds of silence after which a line says what is going on."""


@dataclasses.dataclass(frozen=True)
class Refusals:
    """Why schedules are refused: a title, and a reason for each name."""

    title: str
    reasons: Mapping[str, str]

    def __str__(self) -> str:
        width = max(map(len, self.reasons), default=0)
        return "\n".join([self.title, *(f"  {name:<{width}}  {why}" for name, why in self.reasons.items())])

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table as RichTable

        grid = RichTable.grid(padding=(0, 2))
        for name, why in self.reasons.items():
            grid.add_row(f" {name}", why, style="dim")
        return Group(self.title, grid)


def in_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()


def show(*parts: str | Table | Refusals) -> None:
    """Print text and tables in order."""
    if in_terminal():
        console = make_console()
        for part in parts:
            console.print(part)
    else:
        print(*parts, sep="\n")


def make_console() -> Any:
    """A console of rich that prints text unchanged."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def waiting(what: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which a terminal shows that work goes on; elsewhere a line says so if it takes long."""
    return make_console().status(what) if in_terminal() else print_if_long(what)


@contextlib.contextmanager
def print_if_long(what: str) -> Iterator[None]:
    """Print a line on standard error if the context lasts for more than ``_QUIET_SECONDS`` seconds."""
    timer = threading.Timer(_QUIET_SECONDS, lambda: print(f"{what} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def say_written(*files: Path) -> None:
    """Print a line on standard error for each file that was written: standard output is for results."""
    for file in files:
        print(f"wrote {file}", file=sys.stderr)


def show_json(value: Mapping[str, Any]) -> None:
    """Print what was found for other programs."""
    print(json.dumps(value, indent=2))


def discard_output() -> None:
    """Write nothing more: the reader of stdout has left, and Python would complain of what is flushed at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
