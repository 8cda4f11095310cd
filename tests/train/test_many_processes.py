"""The trainer itself in several processes: the same curve, whatever their number, and whatever happens to one."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import models
from models.weights import native
from tests.quick import QUICK
from train.checkpoint import verify
from train.config import FLAGS, configure, option
from train.data import open_corpus

ROOT = Path(__file__).parents[2]
TEXT = "\n".join(f"line {number} of the text" for number in range(500))
TINY = dict(
    schedule="gpipe", pp=2, ep=1, microbatches=2, microbatch_size=2, model="tiny", layers=1, sequence=8,
    eval_sequences=4, steps=3, seed=3, straggler_every=2, checkpoint_every=2, data=("text.txt",),
)  # fmt: skip
LARGER = TINY | dict(ep=2, steps=24, checkpoint_every=10, straggler_every=0)


def written(options):
    """Options as the command line has them."""
    config = configure(**options)
    flags = [f"--{name.replace('_', '-')}" for name in options]
    assert set(flags) <= set(FLAGS)
    values = [option(config, flag) for flag in flags]
    return [
        part
        for flag, value in zip(flags, values, strict=True)
        for part in (flag, *map(str, value if isinstance(value, tuple) else (value,)))
    ]


def start(folder, name, options, *more):
    """Begin a run, or go on with it."""
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(ROOT), "XLA_FLAGS": QUICK}
    with (folder / f"{name}.out").open("a") as out:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "train", *written(options), "--name", name, *more],
            cwd=folder,
            env=environ,
            stdout=out,
            stderr=out,
        )


def ended(process, folder, name, code=0, seconds=500):
    """Wait for a run; what it printed."""
    try:
        found = process.wait(seconds)
    finally:
        process.terminate()  # a supervisor ends its own
        process.wait()
    said = (folder / f"{name}.out").read_text()
    assert found == code, said
    return said


def records(folder, name):
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def curve(folder, name, *keys):
    """(step, name, number) of each number of a run, in the order in which they were written."""
    keys = keys or ("loss", "grad_norm", "heldout_loss")
    return [
        (record["step"], key, record[key])
        for record in records(folder, name)
        for key in keys
        if key in record
    ]


def assert_close(found, expected):
    """The same steps, and numbers that differ by a millionth of themselves at most."""
    assert [point[:2] for point in found] == [point[:2] for point in expected]
    assert [point[2] for point in found] == pytest.approx([point[2] for point in expected], rel=1e-6)


def story(folder, name):
    return (folder / "runs" / name / "processes" / "story.log").read_text()


@pytest.mark.slow
def test_two_processes_are_one_run(tmp_path):
    """What they say, write and save; the loss of a step is that of the model in one piece, without a mesh."""
    (tmp_path / "text.txt").write_text(TEXT)
    two = start(tmp_path, "two", TINY, "--processes", "2", "--restarts", "0", "--export", "weights")
    said, run = ended(two, tmp_path, "two"), tmp_path / "runs" / "two"
    assert [step for step, _, _ in curve(tmp_path, "two")] == [0, 1, 1, 2, 2, 3, 3, 3]
    assert said.count("step 3/3  loss") == 1 and said.count("held-out loss before") == 1, "one process prints"
    assert "all processes ended well" in story(tmp_path, "two")
    assert [record["step"] for record in records(tmp_path, "two") if "slowest_host" in record] == [2]
    verdicts = list(verify(run))
    assert [(verdict.step, verdict.problem) for verdict in verdicts] == [(2, None), (3, None)]
    assert verdicts[0].facts["layout"]["processes"] == 2

    config, params, _ = native.read(run / "checkpoints" / "2")
    batch = open_corpus((str(tmp_path / "text.txt"),)).train_batch(TINY["seed"], 2, (2, 2, 8))
    inputs, targets, segments, positions = (
        batch[name].reshape(4, 8) for name in ("inputs", "targets", "segment_ids", "positions")
    )
    logits = jax.jit(functools.partial(models.logits, config))
    found = logits(params, inputs, positions=positions, segment_ids=segments)
    expected = optax.softmax_cross_entropy_with_integer_labels(found, targets).mean()
    assert curve(tmp_path, "two", "loss")[2][2] == pytest.approx(float(expected), rel=2e-6)

    _, exported = models.weights.load(tmp_path / "weights")
    _, last, _ = native.read(run / "checkpoints" / "3")
    jax.tree.map(np.testing.assert_array_equal, exported, last)
    assert len(list((tmp_path / "weights").glob("*-of-00002.safetensors"))) == 2, "each wrote its part"


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """A folder where one process trains alone."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT)
    ended(start(folder, "alone", LARGER), folder, "alone")
    return folder


def worker(parent, number):
    """The id of a process that a supervisor has started, once it is there."""
    while True:
        found = subprocess.run(
            ["ps", "-ww", "--ppid", str(parent), "-o", "pid=,args="], capture_output=True, text=True
        ).stdout
        ids = [line.split()[0] for line in found.splitlines() if line.endswith(f"--process-id {number}")]
        if ids:
            return int(ids[0])
        time.sleep(0.1)


def at_step(step, process, folder, name):
    """Return as soon as a running run has done a step."""
    metrics = folder / "runs" / name / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count('"loss"') >= step):
        assert process.poll() is None, (folder / f"{name}.out").read_text()
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_process_leaves_no_trace_in_the_curve(larger):
    two = start(larger, "two", LARGER, "--processes", "2", "--restarts", "1")
    try:
        victim = worker(two.pid, 1)
        at_step(12, two, larger, "two")
        os.kill(victim, signal.SIGKILL)
        before = curve(larger, "two")
    finally:
        said = ended(two, larger, "two")
    told = story(larger, "two")
    assert "process 1 died of SIGKILL" in told and "restart 1 of 1" in told, told
    back = int(re.search(r"resuming from step (\d+)", said)[1])
    assert back % 10 == 0 and back < before[-1][0], "some steps were done again"
    after = curve(larger, "two")
    assert after[: len(before)] == before, "and gave the same, bit for bit"
    assert_close(after, curve(larger, "alone"))


@pytest.mark.slow
def test_a_notice_ends_four_processes_and_one_goes_on(larger):
    four = start(larger, "four", LARGER, "--processes", "4")
    try:
        any_one = worker(four.pid, 2)
        at_step(5, four, larger, "four")
        os.kill(any_one, signal.SIGTERM)
    finally:
        said = ended(four, larger, "four", code=143)
    step = int(re.search(r"SIGTERM: saved at step (\d+)", said)[1])
    assert 5 <= step < 24 and "told to stop: process 0 ended with code 143" in story(larger, "four")
    said = ended(start(larger, "four", LARGER, "--resume"), larger, "four")
    assert f"resuming from step {step}" in said and "processes 4 -> 1" in said
    assert_close(curve(larger, "four"), curve(larger, "alone"))
