"""Tables of text: columns that line up, the same on a terminal and in a file."""

from typing import Any, Literal, NamedTuple

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Table(NamedTuple):
    """Header and rows of text; the columns in ``left`` stand to the left, all others to the right."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: tuple[int, ...] = (0,)

    def __str__(self) -> str:
        lines = (self.header, *self.rows)
        widths = [max(len(line[k]) for line in lines) for k in range(len(self.header))]
        header, *rows = ["  ".join(map(self._aligned, range(len(widths)), line, widths)) for line in lines]
        rule = "  ".join("-" * width for width in widths)
        return "\n".join(line.rstrip() for line in (header, rule, *rows))

    def __rich__(self) -> Any:
        """What rich prints: the same, with colours and lines."""
        import rich.box
        import rich.table

        table = rich.table.Table(
            box=rich.box.SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False
        )
        for k, name in enumerate(self.header):
            side: Literal["left", "right"] = "left" if k in self.left else "right"
            # Names at both ends may break; figures must not.
            table.add_column(name, justify=side, overflow="fold", no_wrap=0 < k < len(self.header) - 1)
        for row in self.rows:
            table.add_row(*row, style="red" if "sync" in row else None)
        return table

    def _aligned(self, column: int, cell: str, width: int) -> str:
        return cell.ljust(width) if column in self.left else cell.rjust(width)


def format_bytes(count: float) -> str:
    """Bytes with a binary unit: 4194304 -> ``4.0 MiB``."""
    power = 0
    while abs(count) >= 1024 and power < len(_UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f} B" if power == 0 else f"{count:.1f} {_UNITS[power]}"


def format_cycles(cycles: float | None) -> str:
    """Cycles in thousands or millions; ``?`` if unknown."""
    if cycles is None:
        return "?"
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(cycles) >= unit:
            return f"{cycles / unit:.2f} {name}"
    return f"{cycles:.0f}"


def format_share(share: float | None) -> str:
    """A share in percent; ``?`` if unknown."""
    return "?" if share is None else f"{100 * share:.1f} %"
