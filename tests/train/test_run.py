"""A run from the command line to its files."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import models
from dualpipe_jax.schedule import dualpipe
from tests.quick import QUICK
from train.config import SCHEDULES

ROOT = Path(__file__).parents[2]
STEPS = 30
SHORT = (
    *("--pp", "2", "--ep", "2", "--microbatches", "4", "--microbatch-size", "2", "--sequence", "16"),
    *("--model", "tiny", "--layers", "1", "--steps", str(STEPS), "--eval-sequences", "10"),
    *("--data", "train/text.txt"),
)
"""Of all runs here, so that one program serves them all."""


def command(*arguments):
    return [sys.executable, "-P", "-m", "train", *arguments]


def around(folder):
    """Of the environment what a run needs; all of them compile alike, quickly, and one program once."""
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": QUICK,
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def train(folder, *arguments):
    said = dict(capture_output=True, text=True, timeout=600)
    return subprocess.run(command(*arguments), cwd=folder, env=around(folder), **said)


def records(folder, name):
    return list(map(json.loads, (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    (folder / "train").mkdir()  # not to be taken for the trainer
    text = "\n".join(f"line {number} of the text" for number in range(500))
    (folder / "train" / "text.txt").write_text(text)
    process = train(folder, *SHORT, "--name", "short", "--profile", "1", "--checkpoint-every", "10")
    assert (process.returncode, process.stderr) == (0, "")
    return folder, process


@pytest.mark.slow
def test_it_says_what_it_does_and_leaves_its_files(finished):
    folder, process = finished
    for words in (
        "M parameters",
        "1 documents",
        "pp 2 x ep 2, cpu",
        "rank 1: ",
        "step 30/30  loss",
        "held-out loss",
    ):
        assert words in process.stdout
    run = folder / "runs" / "short"
    assert sorted(path.name for path in run.iterdir()) == [
        *("checkpoints", "config.json", "environment.json", "metrics.jsonl"),
        *("profile", "report.html", "schedule.txt"),
    ]
    assert json.loads((run / "config.json").read_text())["mesh"]["schedule"] == "dualpipe"
    assert (run / "schedule.txt").read_text().startswith("# dualpipe, ranks 2, microbatches 4")
    before, *steps, after = records(folder, "short")
    assert [line["step"] for line in (before, *steps, after)] == [*range(STEPS + 1), STEPS]
    assert after["heldout_loss"] < before["heldout_loss"]
    assert before["heldout_loss"] == pytest.approx(5.545, abs=0.2)


@pytest.mark.slow
def test_its_metrics_agree_with_each_other(finished):
    """Parts of the gradient make up the whole; every token is given to top_k experts of each layer."""
    folder, _ = finished
    _, *steps, _ = records(folder, "short")
    for line in steps:
        whole = sum(norm**2 for norm in line["grad_norms"].values()) ** 0.5
        assert whole == pytest.approx(line["grad_norm"], rel=1e-4)
        assert 0.5 < line["load_entropy"] <= 1
    assert steps[0]["bias_range"] == pytest.approx(0.02), (
        "every bias moved once by the default rate, up or down"
    )
    numbers, tokens = models.tiny(), 4 * 2 * 16
    assert [line["step"] for line in steps if "load" in line] == [1, 11, 21, STEPS]
    for line in (steps[0], steps[-1]):
        assert [len(row) for row in line["load"]] == [numbers.num_experts]
        assert [sum(row) for row in line["load"]] == [tokens * numbers.top_k]


@pytest.mark.slow
def test_its_profile_is_of_the_schedules_every_action(finished):
    """The median of one traced step: of two ranks' timeline each action, forwards before their backwards."""
    folder, process = finished
    assert "measured        bubble" in process.stdout
    profile = folder / "runs" / "short" / "profile"
    costs = json.loads((profile / "costs.json").read_text())
    assert all(costs["costs"][name] > 0 for name in ("F", "I", "W", "FB")) and costs["units"] == {
        "time": "ms"
    }
    counts = {kind: times["count"] for kind, times in costs["measured"].items()}
    schedule = dualpipe(2, 4)
    actions = [action.op.value for order in schedule.orders for slot in order for action in slot]
    assert counts == {op: actions.count(op) for op in set(actions)}
    measured, theory = json.loads((profile / "timeline.json").read_text())
    assert len(measured["boxes"]) == len(theory["boxes"]) == len(actions)
    assert 0 <= measured["bubble"] < 1 and measured["makespan"] >= theory["makespan"] * 0.5


def test_every_schedule_is_on_offer():
    one_pipe = {"gpipe", "one_f_one_b", "interleaved_1f1b", "looped_bfs", "hanayo"}
    paired = {"interleaved_1f1b_overlap", "dualpipe", "dualpipe_v"}
    split = {"zb_h1", "zb_h2", "interleaved_zero_bubble", "zb_v", "v_half", "v_min"}
    assert set(SCHEDULES) == one_pipe | split | {"chimera"} | paired


def compared(folder, name):
    """Loss and gradient norm of each step, as they stand in the file."""
    lines = records(folder, name)
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if "loss" in line}


def num_steps(folder):
    """Steps in the file of the run that is stopped."""
    metrics = folder / "runs" / "stopped" / "metrics.jsonl"
    return metrics.read_text().count('"loss"') if metrics.exists() else 0


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_bit_for_bit(finished):
    """Killed after its first steps, wherever that is; then told to stop; then to its end."""
    folder, _ = finished
    expected = compared(folder, "short")
    options = (*SHORT, "--name", "stopped", "--checkpoint-every", "1", "--resume")
    for number in (signal.SIGKILL, signal.SIGTERM):
        line = command(*options)
        process = subprocess.Popen(line, cwd=folder, env=around(folder), stderr=subprocess.PIPE, text=True)
        before = num_steps(folder)
        while process.poll() is None and num_steps(folder) < before + 3:
            time.sleep(0.05)
        process.send_signal(number)
        said = process.communicate(timeout=300)[1]
        assert process.returncode == (-9 if number == signal.SIGKILL else 143)
        found = compared(folder, "stopped") if number == signal.SIGTERM else {}
        assert found.items() <= expected.items()
    assert "SIGTERM: saved at step" in said
    ended = train(folder, *options)
    assert ended.returncode == 0 and "resuming from step" in ended.stdout
    assert compared(folder, "stopped") == expected


@pytest.mark.slow
def test_a_run_goes_on_under_another_layout(finished):
    """Twenty steps of DualPipe on 2 x 2, then a V on one device: the same steps that would have come."""
    folder, _ = finished
    expected = compared(folder, "short")
    copy = folder / "runs" / "copy"
    shutil.copytree(folder / "runs" / "short", copy)
    shutil.rmtree(copy / "checkpoints" / "30")
    resumed = train(folder, "--name", "copy", "--resume", "--schedule", "zb_v", "--pp", "1", "--ep", "1")
    assert resumed.returncode == 0, resumed.stderr
    assert "warning: not bit for bit: layout changed" in resumed.stdout
    assert "resuming from step 20" in resumed.stdout
    found = compared(folder, "copy")
    assert found.keys() == expected.keys()
    assert found[21][0] == pytest.approx(expected[21][0], abs=2e-6), "the same parameters"
    for step in (22, 23):
        assert found[step][0] == pytest.approx(expected[step][0], abs=1e-4)
