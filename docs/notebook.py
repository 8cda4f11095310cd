"""Make understand.ipynb of understand.md: `python docs/notebook.py`. A test compares the two."""

import json
import re
from pathlib import Path

PAGE = Path(__file__).with_name("understand.md")
FENCE = re.compile(r"^```(python|bash)\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", re.M | re.S)
FIRST = """Made of `docs/understand.md` by `docs/notebook.py`. Install the library once, in the repository's root:
`pip install -e '.[plot]'`. No `XLA_FLAGS` and no accelerator are needed. Run the cells from top to bottom."""


def cell(kind: str, source: str, **more) -> dict:
    """A cell of a notebook."""
    return {"cell_type": kind, "metadata": {}, "source": source.strip("\n").splitlines(keepends=True), **more}


def code(source: str, printed: str = "") -> dict:
    """A cell to run, with what it printed."""
    stream = {"output_type": "stream", "name": "stdout", "text": printed.splitlines(keepends=True)}
    return cell("code", source, execution_count=None, outputs=[stream] if printed else [])


def prose(text: str) -> list[dict]:
    """A cell to read, without the raw HTML that only the site shows; none of nothing."""
    text = re.sub(r"^<.*\n", "", text, flags=re.M)
    return [cell("markdown", re.sub(r"\n{3,}", "\n\n", text))] if text.strip() else []


def notebook(page: str) -> dict:
    """The notebook of a page: its blocks are cells to run, `dualpipe` commands too, and the rest is to read."""
    cells, at = [cell("markdown", FIRST), code("%matplotlib inline")], 0
    for match in FENCE.finditer(page):
        language, body, printed = match.groups()
        if language == "bash":  # through a pipe, where it writes text as the page shows it
            body = re.sub(r"^(dualpipe.*)$", r"!\1 | cat", body, flags=re.M)
        cells += [*prose(page[at : match.start()]), code(body, printed or "")]
        at = match.end()
    cells += prose(page[at:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}


def text_of(page: str) -> str:
    """The notebook's file."""
    return json.dumps(notebook(page), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PAGE.with_suffix(".ipynb").write_text(text_of(PAGE.read_text()), encoding="utf-8")
