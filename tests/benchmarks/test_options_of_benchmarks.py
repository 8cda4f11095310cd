"""Options of benchmarks that are wrong are told before anything runs, and what is left out is told."""

import re
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run(monkeypatch, name, *options):
    monkeypatch.setattr(sys, "argv", [name, *options])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("lowering", ["dualpip"], "no schedule is called dualpip; there are chimera, dualpipe"),
        ("lockstep", ["dualpip"], "no schedule is called dualpip; there are chimera, dualpipe"),
        ("foreign", ["moe", "v9:2x2x2"], "target 'v9:2x2x2': did you mean v4?"),
        ("foreign", ["moe", "v5p:2x2x2", "--option", "fast"], "--option fast: write NAME=VALUE"),
        ("peers", ["--ranks", "2", "3"], "--ranks 3: two stages a rank must share 8 layers: 2 or 4"),
        ("bubbles", ["--rounds", "0"], "--rounds 0: needs at least 1 timed round"),
        ("peers", ["--rounds", "-1"], "--rounds -1: needs at least 1 timed round"),
        ("step_cost", ["--rounds", "0"], "--rounds 0: needs at least 1 timed round"),
        ("decode_compiled", ["--target", "a10"], "target 'a10:1x1': did you mean a100?"),
    ],
)
def test_a_wrong_option_is_told_at_once(name, options, said, monkeypatch, capsys):
    monkeypatch.setattr("dualpipe_jax.inspect.target.Target.check_compiler", lambda target: None)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, name, *options)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_each_benchmark_reads_its_options():
    """Without that --help runs all of it."""
    reads = re.compile(r"parse_(known_)?args\(|tyro\.cli\(")
    assert not [path.name for path in FOLDER.glob("*.py") if not reads.search(path.read_text())]


def test_a_schedule_that_these_counts_do_not_have_is_told_and_the_next_one_is_made(monkeypatch, capsys):
    run(monkeypatch, "schedules", "--ranks", "3", "--microbatches", "4")
    printed = capsys.readouterr()
    assert "left out: chimera: got 3 ranks" in printed.err and "left out: dualpipe: got" in printed.err
    assert printed.out.splitlines()[-1].startswith("dualpipe_v ")
