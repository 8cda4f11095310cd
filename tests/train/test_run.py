"""A run from the command line to its files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from train.config import SCHEDULES

ROOT = Path(__file__).parents[2]
SHORT = (
    *("--pp", "2", "--ep", "2", "--microbatches", "4", "--microbatch-size", "2", "--sequence", "16"),
    *("--model", "tiny", "--layers", "2", "--steps", "3", "--eval-sequences", "10", "--name", "short"),
)


def train(folder, *arguments):
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-P", "-m", "train", *arguments],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    (folder / "train").mkdir()  # not to be taken for the trainer
    text = "\n".join(f"line {number} of the text" for number in range(500))
    (folder / "train" / "text.txt").write_text(text)
    return folder, train(folder, *SHORT, "--data", "train/text.txt")


def test_a_short_run_succeeds(finished):
    _, process = finished
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""


def test_it_says_what_it_does(finished):
    _, process = finished
    for words in (
        "M parameters",
        "1 documents",
        "pp 2 x ep 2, cpu",
        "rank 1: ",
        "step 3/3  loss",
        "held-out loss",
    ):
        assert words in process.stdout


def test_it_leaves_its_files(finished):
    folder, _ = finished
    run = folder / "runs" / "short"
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints",
        "config.json",
        "metrics.jsonl",
        "schedule.txt",
    ]
    assert json.loads((run / "config.json").read_text())["mesh"]["schedule"] == "dualpipe"
    assert (run / "schedule.txt").read_text().startswith("# dualpipe, ranks 2, microbatches 4")
    before, *steps, after = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in (before, *steps, after)] == [0, 1, 2, 3, 3]
    assert after["heldout_loss"] < before["heldout_loss"]
    assert before["heldout_loss"] == pytest.approx(5.545, abs=0.2)


def test_every_schedule_is_on_offer():
    one_pipe = {"gpipe", "one_f_one_b", "interleaved_1f1b", "looped_bfs", "hanayo", "dualpipe_v"}
    split = {"zb_h1", "zb_h2", "interleaved_zero_bubble", "zb_v", "v_half", "v_min"}
    assert set(SCHEDULES) == one_pipe | split | {"chimera", "dualpipe"}
