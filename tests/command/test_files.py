"""Files that cannot be written are refused before anything is looked for: that may take minutes."""

import importlib.util
import os

import pytest

from dualpipe_jax.__main__ import main
from dualpipe_jax.command import answers, balance, probe, search, show
from dualpipe_jax.installing import install_command

COUNTS = ("--ranks", "2", "--microbatches", "4")
WRITERS = {
    "show": ("show", "gpipe", *COUNTS),
    "search": ("search", *COUNTS),
    "balance": ("balance", "loads.json", "--devices", "2"),
    "plan": ("plan", "--target", "v5e:2x2", "--program", "tiny"),
    "probe": ("probe",),
}


@pytest.fixture
def idle(monkeypatch, tmp_path):
    """A folder in which nobody may begin what takes long."""

    def begun(*_, **__):
        raise AssertionError("begun before the file was looked at")

    for module, name in (
        (show, "schedule_of"),
        (search.Search, "find"),
        (balance, "read_loads"),
        (answers, "ask_pods"),
        (probe.Probe, "explore"),
    ):
        monkeypatch.setattr(module, name, begun)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("writer", WRITERS)
def test_what_cannot_be_written_is_said_first(idle, monkeypatch, capsys, writer):
    (idle / "kept.json").mkdir()
    for file, message in (
        ("no/x.json", "--output no/x.json: there is no folder no"),
        ("kept.json", "--output kept.json: is a folder; give the name of a file"),
    ):
        assert main([*WRITERS[writer], "-o", file]) == 2
        assert capsys.readouterr().err == f"error: {message}\n"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert main([*WRITERS[writer], "-o", "x.json"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: --output x.json: may not be written here; give the name"
    )


@pytest.mark.parametrize("writer", ["show", "search", "balance"])
def test_a_picture_without_matplotlib_is_refused_first(idle, monkeypatch, capsys, writer):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert main([*WRITERS[writer], "-o", "x.png"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: --output x.png: a picture needs matplotlib, which is not installed; run: ")
    assert err.endswith(f"{install_command(extra='plot')}\n")


def test_a_picture_for_a_terminal_is_refused_first(idle, monkeypatch, capsys):
    monkeypatch.setattr("dualpipe_jax.command.formats.in_terminal", lambda: True)
    assert main([*WRITERS["show"], "--format", "svg"]) == 2
    message = "--format svg is not for a terminal; add --output FILE.svg"
    assert capsys.readouterr().err == f"error: {message}\n"
