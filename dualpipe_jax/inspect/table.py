"""Tables of text: columns that line up, the same on a terminal and in a file."""

from collections.abc import Iterable, Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = ()) -> str:
    """Header, a rule, and rows; the columns in ``left`` to the left, all others to the right."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(header))]
    cells = [
        "  ".join(
            cell.ljust(w) if k in left else cell.rjust(w)
            for k, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    rule = "  ".join("-" * w for w in widths)
    return "\n".join(line.rstrip() for line in (cells[0], rule, *cells[1:]))


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
