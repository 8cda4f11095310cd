"""Tables of text: columns that line up, the same in a terminal and in a file."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

Thing = TypeVar("Thing")


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text under a head: ``str`` of it is aligned with spaces, rich prints it with colours and lines.

    Attributes:
      head: titles of the columns.
      rows: as many cells each.
      best, bad: indices of a row, and of rows, to bring out in a terminal.
      left: the columns that stand to the left; all others stand to the right.
      foldable: the columns that a narrow terminal may break; all but the first if None.
      ruled: whether a line stands under the head of the plain one.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: int | None = None
    _: dataclasses.KW_ONLY
    bad: Sequence[int] = ()
    left: Sequence[int] = (0,)
    foldable: Sequence[int] | None = None
    ruled: bool = False

    @classmethod
    def of(cls, columns: Mapping[str, Callable[[Thing], str]], things: Iterable[Thing], **how: Any) -> Self:
        """A row for each thing: what each column, by its title, says of it."""
        rows = (tuple(cell(thing) for cell in columns.values()) for thing in things)
        return cls(tuple(columns), tuple(rows), **how)

    def __str__(self) -> str:
        return self.plain()

    def plain(self, between: str = "  ") -> str:
        """Aligned with spaces, so that programs can split it too."""
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]
        head, *rows = (
            between.join(
                cell.ljust(width) if column in self.left else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in (self.head, *self.rows)
        )
        rule = [between.join("-" * width for width in widths)] if self.ruled else []
        return "\n".join(line.rstrip() for line in (head, *rule, *rows))

    def markdown(self) -> str:
        rule = ("---" if column in self.left else "---:" for column in range(len(self.head)))
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.head, rule, *self.rows))

    def __rich__(self) -> Any:
        from rich import box
        from rich.table import Table as RichTable

        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for column, title in enumerate(self.head):
            folds = column > 0 if self.foldable is None else column in self.foldable
            table.add_column(
                title, justify="left" if column in self.left else "right", overflow="fold", no_wrap=not folds
            )
        for at, row in enumerate(self.rows):
            table.add_row(*row, style="bold green" if at == self.best else "red" if at in self.bad else None)
        return table
