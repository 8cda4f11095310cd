"""Tables of text: columns that line up, the same in a terminal and in a file."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

Thing = TypeVar("Thing")


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text under a head. ``str`` aligns the columns with spaces; rich prints the table with colours and lines.

    Attributes:
      head: the titles of the columns.
      rows: the cells of each row, one for each column.
      best: the index of a row to print in green in a terminal, or None.
      bad: the indices of rows to print in red.
      left: the columns that are aligned to the left; all others are aligned to the right.
      foldable: the columns whose text a narrow terminal may wrap; all but the first if None.
      ruled: whether plain text has a line under the head.
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
        """A table with a row for each thing; ``columns`` has, by title, the function from a thing to its cell."""
        rows = (tuple(cell(thing) for cell in columns.values()) for thing in things)
        return cls(tuple(columns), tuple(rows), **how)

    def __str__(self) -> str:
        """The table as text, aligned with two spaces, so that programs can split it too."""
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]
        head, *rows = (
            "  ".join(
                cell.ljust(width) if column in self.left else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in (self.head, *self.rows)
        )
        rule = ["  ".join("-" * width for width in widths)] if self.ruled else []
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
