"""What subcommands print: drawn by rich in a terminal, plain anywhere else."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any

from dualpipe_jax.present.table import Table


@dataclasses.dataclass(frozen=True)
class Reasons:
    """Why not: a sentence for each name."""

    title: str
    of: Mapping[str, str]

    def __str__(self) -> str:
        width = max(map(len, self.of), default=0)
        return "\n".join([self.title, *(f"  {name:<{width}}  {why}" for name, why in self.of.items())])

    def __rich__(self) -> Any:
        """Wrapped beside the names."""
        from rich.console import Group
        from rich.table import Table as RichTable

        grid = RichTable.grid(padding=(0, 2))
        for name, why in self.of.items():
            grid.add_row(f" {name}", why, style="dim")
        return Group(self.title, grid)


def in_terminal() -> bool:
    """Whether a person reads standard output."""
    return sys.stdout.isatty()


def show(*parts: str | Table | Reasons) -> None:
    """Print text and tables in order."""
    if in_terminal():
        console = make_console()
        for part in parts:
            console.print(part)
    else:
        print(*parts, sep="\n")


def make_console() -> Any:
    """Rich's console on standard output."""
    from rich.console import Console

    return Console(highlight=False, markup=False)


def waiting(what: str) -> contextlib.AbstractContextManager[Any]:
    """While this lasts, a terminal shows that something goes on."""
    return make_console().status(what) if in_terminal() else contextlib.nullcontext()


def show_json(value: Mapping[str, Any]) -> None:
    """Print for programs."""
    print(json.dumps(value, indent=2))
