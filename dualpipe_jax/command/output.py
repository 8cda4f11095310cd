"""What subcommands print: drawn by rich in a terminal, plain anywhere else."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text under a head; the first column is flush left, the rest flush right.

    Attributes:
      head: titles of the columns.
      rows: as many cells each.
      best: index of a row to bring out in a terminal.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: int | None = None

    def plain(self, between: str = "  ") -> str:
        """Aligned with spaces, so that programs can split it too."""
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]
        lines = (
            between.join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in (self.head, *self.rows)
        )
        return "\n".join(lines)

    def markdown(self) -> str:
        """A table of GitHub's Markdown."""
        rule = ("---", *("---:" for _ in self.head[1:]))
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.head, rule, *self.rows))

    def rich(self) -> Any:
        """A table of rich."""
        from rich import box
        from rich.table import Table as RichTable

        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for index, title in enumerate(self.head):
            table.add_column(title, justify="right" if index else "left", overflow="fold", no_wrap=not index)
        for index, row in enumerate(self.rows):
            table.add_row(*row, style="bold green" if index == self.best else None)
        return table


@dataclasses.dataclass(frozen=True)
class Reasons:
    """Why not: a sentence for each name."""

    title: str
    of: Mapping[str, str]

    def plain(self) -> str:
        """A line for each."""
        width = max(map(len, self.of), default=0)
        return "\n".join([self.title, *(f"  {name:<{width}}  {why}" for name, why in self.of.items())])

    def rich(self) -> Any:
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
            console.print(part if isinstance(part, str) else part.rich())
    else:
        print("\n".join(part if isinstance(part, str) else part.plain() for part in parts))


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


def together(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: 0-3 8 12-15."""
    runs: list[list[int]] = []
    for value in numbers:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
