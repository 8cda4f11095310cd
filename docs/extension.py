"""What Sphinx does not know of itself: the command's help, the schedule player, and lists in docstrings."""

import contextlib
import importlib
import io
import os
from pathlib import Path

from docstrings import listed
from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.util import logging

from dualpipe_jax.schedule import CostModel, dualpipe, html_page

LOG = logging.getLogger(__name__)


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
        # Napoleon takes what stands before a colon there for a type.
        if what in ("attribute", "data", "property"):
            lines[:0] = ["..", ""]

    def skip(app, what, name, obj, skipped, options) -> bool | None:
        # The class describes it.
        return True if (obj.__doc__ or "").startswith("Alias for field number") else None

    app.add_directive("command-help", CommandHelp)
    app.connect("autodoc-process-docstring", process, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", skip)
    app.connect("env-check-consistency", check_reference)
    app.connect("build-finished", write_player)
