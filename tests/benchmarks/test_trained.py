"""Runs of the trainer that benchmarks start, or take as they are."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import predicted, rebalance


@pytest.fixture
def asked(monkeypatch):
    """The steps of each call of a trainer, which writes a report, too, as the real one does when it is cut short."""
    calls = []

    def trainer(command, **how):
        value = dict(itertools.pairwise(command))
        folder, steps = Path(value["--runs"], value["--name"]), int(value["--steps"])
        calls.append(steps)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": n}) + "\n" for n in range(steps)))
        (folder / "report.html").touch()
        return SimpleNamespace(returncode=how.get("code", 0), stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", trainer)
    return calls


def test_a_run_of_other_options_or_other_code_is_trained(asked, tmp_path, monkeypatch):
    """Or its figures would be those of the earlier run, and would get today's date."""
    for steps in (80, 3, 80):
        assert len(rebalance.trained("0", ["--steps", str(steps)], tmp_path)) == steps
    assert asked == [80, 3]
    monkeypatch.setattr(rebalance, "code", lambda: "another commit's")
    rebalance.trained("0", ["--steps", "80"], tmp_path)
    assert asked == [80, 3, 80]


def test_a_run_that_was_cut_short_goes_on(asked, tmp_path, monkeypatch):
    """Its report is written, too, and its last held-out loss is that before training."""
    done = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *words, **how: done(*words, **how, code=130))
    with pytest.raises(SystemExit):
        rebalance.trained("0", ["--steps", "80"], tmp_path)
    monkeypatch.setattr(subprocess, "run", done)
    assert len(rebalance.trained("0", ["--steps", "80"], tmp_path)) == 80 and asked == [80, 80]


WRITES = """
import json, sys, time
file = open(sys.argv[1], "w")
for step, told, seconds in ((0, "heldout_loss", 1.0), *((n, "loss", 0.1) for n in range(1, 6)), (5, "event", 0.1)):
    print(json.dumps({"step": step, told: 5.5}), file=file, flush=True)
    time.sleep(seconds)
"""


def test_the_first_step_is_not_among_those_that_are_held_against_a_prediction(tmp_path):
    """It is compiled in, and comes after the line of the held-out loss."""
    metrics = tmp_path / "metrics.jsonl"
    process = subprocess.Popen([sys.executable, "-c", WRITES, str(metrics)])
    follower = predicted.follow(process, metrics)
    next(follower)
    assert '"loss"' in metrics.read_text()
    assert 1 + len([*follower]) <= 5


def test_a_folder_named_train_where_one_stands_is_not_run():
    """Another checkout has one, and its figures would be taken for this one's."""
    told = []
    for path in sorted((Path(__file__).parents[2] / "benchmarks").rglob("*.py")):
        text = path.read_text()
        found = re.findall(r'("-P",\s+)?"-m",\s+"(?:train|dualpipe_jax)\b', text)
        told += [(path.name, bool(first) or "cwd=ROOT" in text) for first in found]
    assert len(told) >= 7 and all(ours for _, ours in told), told
