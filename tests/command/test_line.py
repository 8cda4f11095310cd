"""Command lines: where values go, what the help says and in which order."""

import dataclasses
import itertools
import os
import re
import shutil
import subprocess
import sys
from typing import Annotated, ClassVar, Literal

import pytest
import tyro

from dualpipe_jax.__main__ import COMMANDS, main, options_of
from dualpipe_jax.command import line
from train.__main__ import main as train_main
from train.generate.__main__ import main as generate_main
from train.generate.options import Options as GenerateOptions
from train.generate.serve import Options as ServeOptions
from train.generate.serve import main as serve_main
from train.options import Command
from train.prepare.__main__ import main as prepare_main
from train.prepare.options import Options as PrepareOptions

SCRIPTS = {
    "train": (train_main, Command),
    "generate": (generate_main, GenerateOptions),
    "serve": (serve_main, ServeOptions),
    "prepare": (prepare_main, PrepareOptions),
}
KINDS = {name: options_of(name) for name in COMMANDS} | {name: kind for name, (_, kind) in SCRIPTS.items()}
SPLIT = (
    "show", "compare", "choose", "search", "overlap", "dryrun", "plan", "train", "generate", "serve", "prepare",
)  # fmt: skip
"""Commands that have more options than one reads at once."""


@dataclasses.dataclass(frozen=True)
class Link:
    """What lies between."""

    HIDDEN: ClassVar = ("unseen",)

    speed: float = 2.0
    """Bytes of a second. If left out, two."""
    unseen: int = 3


@dataclasses.dataclass(frozen=True)
class Asked:
    """Ask for something.

    dualpipe asked --count 3 --names a b
    """

    COMMON: ClassVar = "count", "speed"

    names: tuple[str, ...] = ()
    """Names
    of all."""
    count: int | None = None
    """How many. If left out, all."""
    whole: bool = False
    """Take all of it."""
    split: bool = True
    """Cut it."""
    link: Annotated[Link, tyro.conf.arg(name="wire")] = Link()  # frozen


def helped(run, columns, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_: os.terminal_size((columns, 40)))
    with pytest.raises(SystemExit) as end:
        run()
    assert end.value.code == 0
    return capsys.readouterr().out


def help_of(name, columns, monkeypatch, capsys):
    run = (lambda: SCRIPTS[name][0](["--help"])) if name in SCRIPTS else (lambda: main([name, "--help"]))
    return helped(run, columns, monkeypatch, capsys)


def boxes(text):
    """Title -> its flags in order. A title is followed by a line; what is printed to no terminal has no frames."""
    found = {}
    for row, after in itertools.pairwise(text.splitlines()):
        if re.match(r" \S", row) and after.startswith(" -----"):
            found[row.strip()] = []
        elif found and (match := re.match(r"  (?:-\w [^-]*, |-h, |--model NAME, )?--(\w[\w-]*)", row)):
            [*found.values()][-1].append(match[1])
    return found


def test_values_go_where_their_fields_are():
    given = line.read(Asked, "asked", ["--names", "a", "b", "--speed", "3", "--no-split", "--whole"])
    assert given == Asked(("a", "b"), None, True, False, Link(3.0))
    assert line.read(Asked, "asked", []) == Asked()


def test_a_list_that_is_given_twice_is_refused_and_a_single_value_is_not(capsys):
    for second in (["--names", "b"], ["--names=b"]):
        with pytest.raises(SystemExit) as end:
            line.read(Asked, "asked", ["--names", "a", "--count", "3", *second])
        assert end.value.code == 2
        assert capsys.readouterr().err.startswith("error: --names: is given twice, and the last one alone")
    assert line.read(Asked, "asked", ["--count", "3", "--count", "4"]).count == 4


def test_what_is_left_out_is_the_defaults_that_are_given():
    default = Asked(("c",), 4, True, False, Link(5.0))
    assert line.read(Asked, "asked", [], default) == default
    given = line.read(Asked, "asked", ["--split", "--no-whole", "--count", "None"], default, paired=True)
    assert given == Asked(("c",), None, False, True, Link(5.0))


@dataclasses.dataclass(frozen=True)
class Step:
    """A step."""

    width: int = 4
    """How wide."""
    form: Literal["a", "b"] = "a"
    """Which form."""
    sizes: tuple[int, ...] = ()
    """Sizes of all."""
    link: Link = Link()  # frozen
    overlap: bool = True
    """Both at once."""


@dataclasses.dataclass(frozen=True)
class FromFile:
    """Read a file, or be told a step."""

    file: str = ""
    """The file. If left out, none."""
    step: Annotated[Step | None, tyro.conf.arg(name="own")] = None


def test_a_group_that_may_be_none_is_there_where_one_of_its_options_is_given(monkeypatch, capsys):
    assert line.read(FromFile, "asked", ["--file", "f"]) == FromFile("f", None)
    for given in ("--width 4", "--form a", "--speed 2"):
        assert line.read(FromFile, "asked", given.split()) == FromFile(step=Step()), given
    given = line.read(FromFile, "asked", ["--no-overlap", "--sizes", "1", "2"])
    assert given == FromFile(step=Step(sizes=(1, 2), overlap=False))
    said = helped(lambda: line.read(FromFile, "asked", ["--help"]), 80, monkeypatch, capsys)
    assert [*boxes(said)] == ["options", "own options", "link options"] and "None" not in said
    rows = {" ".join(row.split()) for row in said.splitlines()}
    assert {"--width INT How wide. (default: 4)", "--form {a,b} Which form. (default: a)"} <= rows


def test_common_options_stand_first_and_the_others_in_groups(monkeypatch, capsys):
    said = helped(lambda: line.read(Asked, "asked", ["--help"]), 80, monkeypatch, capsys)
    assert boxes(said) == {
        "options": ["help", "count", "speed"],
        "advanced options": ["names", "whole", "no-split"],
    }
    assert "  Ask for something.\n\nExample:\n  dualpipe asked --count 3 --names a b\n" in said
    rows = [row.strip() for row in said.splitlines()]
    assert "--names TEXT ...  Names of all." in rows
    assert "--count INT       How many. If left out, all." in rows
    assert "--speed FLOAT     Bytes of a second. (default: 2)" in rows, "the default is said once"
    paired = helped(
        lambda: line.read(Asked, "asked", ["--help"], Asked(link=Link(1e-7)), paired=True),
        80,
        monkeypatch,
        capsys,
    )
    assert re.search(r"Take all of it. \(default: off\)", paired) and "(default: on)" in paired
    assert "(default: 1e-07)" in paired


def test_a_group_says_what_it_is(monkeypatch, capsys):
    @dataclasses.dataclass(frozen=True)
    class Other(Asked):
        COMMON: ClassVar = ("count",)

    said = helped(lambda: line.read(Other, "asked", ["--help"]), 80, monkeypatch, capsys)
    assert "wire options" in boxes(said) and "\n  What lies between. " in said


def test_a_common_flag_that_is_none_is_told():
    @dataclasses.dataclass(frozen=True)
    class Wrong(Asked):
        COMMON: ClassVar = "count", "sped"

    with pytest.raises(
        TypeError, match=r"Wrong.COMMON: no option sped; there are names, count, whole, split, speed"
    ):
        line.read(Wrong, "wrong", [])


def test_two_options_of_one_flag_are_told():
    @dataclasses.dataclass(frozen=True)
    class Twice:
        speed: int = 1
        link: Link = Link()  # frozen

    with pytest.raises(TypeError, match=r"--speed names both speed and link.speed"):
        line.options_of(Twice)


@pytest.mark.parametrize("name", KINDS)
def test_every_common_flag_exists_and_every_option_says_what_it_does(name):
    options = line.options_of(KINDS[name])
    assert set(line.common_of(KINDS[name])) <= {option.flag for option in options}
    for option in options:
        assert re.match(r"[A-Z\-a-z].*\.$", option.text), f"--{option.flag}: {option.text!r} is no sentence"


@pytest.mark.parametrize("name", SPLIT)
def test_a_command_has_about_ten_common_options(name):
    assert 8 <= len(line.common_of(KINDS[name])) <= 14 < len(line.options_of(KINDS[name]))


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("name", KINDS)
def test_help_reads_well(name, columns, monkeypatch, capsys):
    said = help_of(name, columns, monkeypatch, capsys)
    assert max(map(len, said.splitlines())) <= columns
    assert "(default: )" not in said and "None" not in said
    assert not re.search(r"\(default: (True|False)\)", said)
    assert list(boxes(said))[-1] != "options" or name not in SPLIT
    joined = " ".join(said.split())
    for option in line.options_of(KINDS[name], Command() if name == "train" else None):
        first = option.text.split(" If left out,")[0]
        assert first in joined, f"--{option.flag}"
    # No line ends early: what follows would have fitted.
    inside = [row.rstrip()[2:] for row in said.splitlines() if row.startswith("  ")]
    for row, after in itertools.pairwise(inside):
        indent = len(after) - len(after.lstrip())
        if indent > 6 and len(row) - len(row.lstrip()) == indent:
            assert len(row) + 1 + len(after.split()[0]) > columns - 4, (row, after)


def test_a_reader_of_the_help_may_leave():
    """As ``head -1`` does: there was a traceback."""
    run = [sys.executable, "-m", "train", "--help"]
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
