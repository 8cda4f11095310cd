"""Docstrings as this project writes them, for Sphinx: ``name: text`` lists become definition lists."""

import re

SECTION = re.compile(r"(Args|Arguments|Attributes|Returns|Raises|Yields|Examples?):$")
ITEM = re.compile(r"(?P<names>[A-Za-z_][\w.]*(?:, (?:[\w.]+|\.\.\.))*): +(?P<text>\S.*)$")


def listed(lines: list[str]) -> list[str]:
    """A docstring whose lists of ``name: text``, outside the sections that napoleon reads, are definition lists.

    A list begins behind an empty line or a line that ends in a colon, has two items or more and nothing else; an item's
    further lines are indented.
    """
    found: list[str] = []
    section, at = None, 0  # the indentation of the section that is being read
    while at < len(lines):
        line = lines[at]
        indent = _indent(line)
        if section is not None and line.strip() and indent <= section:
            section = None
        if section is None and SECTION.match(line.strip()):
            section = indent
        begins = section is None and (not found or not found[-1].strip() or found[-1].endswith(":"))
        block = _block(lines[at:]) if begins else []
        heads = [ITEM.match(each.strip()) for each in block if _indent(each) == indent]
        if len(heads) < 2 or not all(heads):
            found.append(line)
            at += 1
            continue
        found += [""] if found and found[-1].strip() else []
        for each in block:
            match = ITEM.match(each.strip()) if _indent(each) == indent else None
            pair = [" " * indent + match["names"], " " * (indent + 2) + match["text"]] if match else [each]
            found += pair
        found.append("")
        at += len(block)
    return found


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _block(lines: list[str]) -> list[str]:
    """The lines up to an empty one, or to one that is indented less than the first."""
    ends = (n for n, line in enumerate(lines) if not line.strip() or _indent(line) < _indent(lines[0]))
    return lines[: next(ends, len(lines))]
