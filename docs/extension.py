"""What Sphinx does not know of itself: the command's help, figures, the schedule player, and lists in docstrings."""

import contextlib
import importlib
import io
import os
from pathlib import Path
from typing import ClassVar

from docstrings import listed
from docutils import nodes
from docutils.parsers.rst import Directive, directives
from results import STATUS, Row, Table, figure, number, tables
from sphinx.util import logging

from dualpipe_jax.schedule import CostModel, dualpipe, html_page

LOG = logging.getLogger(__name__)
RESULTS = tables()


class CommandHelp(Directive):
    """What ``dualpipe NAME --help`` prints, a section for every NAME that the command has."""

    def run(self) -> list[nodes.Node]:
        """The sections."""
        from dualpipe_jax.__main__ import COMMANDS, main

        os.environ |= {"COLUMNS": "96", "NO_COLOR": "1"}
        found: list[nodes.Node] = []
        for name in COMMANDS:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
                main([name, "--help"])
            text = printed.getvalue()
            section = nodes.section("", nodes.title("", f"dualpipe {name}"), ids=[name], names=[name])
            section.append(nodes.literal_block(text, text, language="text"))
            found.append(section)
        return found


def cited(role, rawtext, text, line, inliner, options=None, content=None):
    """A figure of results.json by its name; how it was had, when and at which commit appear where one points at it."""
    try:
        shown, row = figure(text, RESULTS)
    except ValueError as error:
        return [], [inliner.reporter.error(str(error), line=line)]
    said = f"{STATUS[row.status]}; {_had(row)}"
    return [nodes.raw("", f'<span class="result" title="{said}">{shown}</span>', format="html")], []


class ResultsTable(Directive):
    """A table of results.json, with the date and commit of each row and the commands that print them."""

    required_arguments = 1
    option_spec: ClassVar = {"columns": directives.unchanged, "rows": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """The table, what holds for all of it, and the commands."""
        try:
            table = RESULTS[self.arguments[0]]
            columns = self.options.get("columns", " ".join(table.columns)).split()
            rows = [table.rows[name] for name in self.options.get("rows", " ".join(table.rows)).split()]
            heads = ["", *(_head(*table.columns[name]) for name in columns), "of"]
        except KeyError as missing:
            return [self.state_machine.reporter.error(f"results.json has no {missing}", line=self.lineno)]
        group = nodes.tgroup(cols=len(heads))
        group += [nodes.colspec(colwidth=4 if n == 0 else 1) for n in range(len(heads))]
        group += nodes.thead("", _cells(heads))
        group += nodes.tbody(
            "", *(_cells([row.what, *_values(table, row, columns), _when(row)]) for row in rows)
        )
        shared = {(row.status, row.by) for row in rows}
        told = "; ".join(f"{STATUS[status]}{f' ({by})' if by else ''}" for status, by in sorted(shared))
        found = [nodes.table("", group), nodes.paragraph("", f"{told[0].upper()}{told[1:]}.")]
        if commands := list(dict.fromkeys(row.command for row in rows if row.command)):
            text = "\n".join(commands)
            found.append(nodes.raw("", "<details><summary>Commands</summary>", format="html"))
            found.append(nodes.literal_block(text, text, language="text"))
            found.append(nodes.raw("", "</details>", format="html"))
        return found


def _head(title: str, unit: str) -> str:
    return f"{title}, {unit}" if unit and not unit.startswith(":") else title


def _values(table: Table, row: Row, columns: list[str]) -> list[str]:
    key = row.name.rpartition(".")[2]
    return [
        table.shown(key, name) if table.columns[name][1].startswith(":") else number(row.values.get(name, ""))
        for name in columns
    ]


def _cells(texts: list[str]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", *_bold(text))) for text in texts))


def _bold(text: str) -> list[nodes.Node]:
    """Text in which **stars** are bold."""
    return [nodes.strong("", part) if n % 2 else nodes.Text(part) for n, part in enumerate(text.split("**"))]


def _had(row: Row) -> str:
    return row.source or ", ".join(filter(None, (row.by, row.date, row.commit)))


def _when(row: Row) -> str:
    return row.source or " ".join(filter(None, (row.date, row.commit)))


def write_player(app, error) -> None:
    """The schedule player, one page that holds all it needs."""
    if error is None:
        (Path(app.outdir) / "player.html").write_text(html_page(dualpipe(8, 20), CostModel(FB=2.25)))


def check_reference(app, env) -> None:
    """Warn, which ends the build, where a room that the reference has a page for exports what the page leaves out."""
    described = {name.rpartition(".")[2] for name, *_ in env.get_domain("py").get_objects()}
    rooms = {name for name, _, kind, *_ in env.get_domain("py").get_objects() if kind == "module"}
    for room in sorted(rooms):
        if missing := set(getattr(importlib.import_module(room), "__all__", ())) - described:
            LOG.warning("reference: %s exports %s, which no page describes", room, ", ".join(sorted(missing)))


def setup(app) -> None:
    """What Sphinx calls."""

    def process(app, what, name, obj, options, lines) -> None:
        lines[:] = listed(lines)
        if what in (
            "attribute",
            "data",
            "property",
        ):  # napoleon takes what stands before a colon there for a type
            lines[:0] = ["..", ""]

    def skip(app, what, name, obj, skipped, options) -> bool | None:
        return (
            True if (obj.__doc__ or "").startswith("Alias for field number") else None
        )  # the class describes it

    app.add_directive("command-help", CommandHelp)
    app.add_directive("results", ResultsTable)
    app.add_role("result", cited)
    app.connect("autodoc-process-docstring", process, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", skip)
    app.connect("env-check-consistency", check_reference)
    app.connect("build-finished", write_player)
