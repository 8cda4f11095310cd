"""The trainer itself in several processes: the same curve, whatever their number, and whatever happens to one."""

import functools
import io
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
from rich.console import Console

import models
from models.weights import native
from tests.quick import QUICK
from train import loop
from train.checkpoint import verify
from train.config import FLAGS, configure, option
from train.data import open_corpus
from train.processes import Processes

ROOT = Path(__file__).parents[2]
TEXT = "\n".join(f"line {number} of the text" for number in range(500))
OPTIONS = dict(
    schedule="gpipe", pp=2, ep=2, microbatches=2, microbatch_size=2, model="tiny", layers=1, sequence=8,
    eval_sequences=4, steps=32, seed=3, straggler_every=9, checkpoint_every=10,
)  # fmt: skip


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


def start(folder, name, *more):
    """Begin a run in processes of its own."""
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(ROOT), "XLA_FLAGS": QUICK}
    environ |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
    line = [sys.executable, "-P", "-m", "train", *written(OPTIONS), "--data", "text.txt", "--name", name]
    with (folder / f"{name}.out").open("a") as out:
        return subprocess.Popen([*line, *more], cwd=folder, env=environ, stdout=out, stderr=out)


def run_here(folder, name, resume=False):
    """A run, or what is left of it, in this process; what it said."""
    config = configure(**OPTIONS, name=name, runs=folder / "runs", data=(str(folder / "text.txt"),))
    out = Console(file=io.StringIO(), width=200)
    loop.run(config, out, Processes(), resume=resume)
    return out.file.getvalue()


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder where one process has trained alone."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "text.txt").write_text(TEXT)
    run_here(folder, "alone")
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
def test_two_processes_are_one_run_though_one_is_killed(folder):
    """What they say, write and save; the loss of a step is that of the model in one piece, without a mesh."""
    two = start(folder, "two", "--processes", "2", "--restarts", "1", "--export", "weights")
    try:
        victim = worker(two.pid, 1)
        at_step(12, two, folder, "two")
        os.kill(victim, signal.SIGKILL)
        before = curve(folder, "two")
    finally:
        said = ended(two, folder, "two")
    told = story(folder, "two")
    assert "process 1 died of SIGKILL" in told and "restart 1 of 1" in told, told
    assert "all processes ended well" in told
    back = int(re.search(r"resuming from step (\d+)", said)[1])
    assert back % 10 == 0 and back < before[-1][0], "some steps were done again"
    after = curve(folder, "two")
    assert after[: len(before)] == before, "and gave the same, bit for bit"
    assert_close(after, curve(folder, "alone"))
    assert said.count("step 32/32  loss") == 1, "one process prints"
    assert [record["step"] for record in records(folder, "two") if "slowest_host" in record] == [9, 18, 27]
    run = folder / "runs" / "two"
    verdicts = list(verify(run))
    assert [(verdict.step, verdict.problem) for verdict in verdicts] == [(20, None), (30, None), (32, None)]
    assert verdicts[0].facts["layout"]["processes"] == 2

    config, params, _ = native.read(run / "checkpoints" / "30")
    batch = open_corpus((str(folder / "text.txt"),)).train_batch(OPTIONS["seed"], 30, (2, 2, 8))
    inputs, targets, segments, positions = (
        batch[name].reshape(4, 8) for name in ("inputs", "targets", "segment_ids", "positions")
    )
    logits = jax.jit(functools.partial(models.logits, config))
    found = logits(params, inputs, positions=positions, segment_ids=segments)
    expected = optax.softmax_cross_entropy_with_integer_labels(found, targets).mean()
    assert curve(folder, "two", "loss")[30][2] == pytest.approx(float(expected), rel=2e-6)

    _, exported = models.weights.load(folder / "weights")
    _, last, _ = native.read(run / "checkpoints" / "32")
    jax.tree.map(np.testing.assert_array_equal, exported, last)
    assert len(list((folder / "weights").glob("*-of-00002.safetensors"))) == 2, "each wrote its part"


@pytest.mark.slow
def test_a_notice_ends_four_processes_and_one_goes_on(folder):
    four = start(folder, "four", "--processes", "4")
    try:
        any_one = worker(four.pid, 2)
        at_step(5, four, folder, "four")
        os.kill(any_one, signal.SIGTERM)
    finally:
        said = ended(four, folder, "four", code=143)
    step = int(re.search(r"SIGTERM: saved at step (\d+)", said)[1])
    assert 5 <= step < 32 and "told to stop: process 0 ended with code 143" in story(folder, "four")
    said = run_here(folder, "four", resume=True)
    assert f"resuming from step {step}" in said and "processes 4 -> 1" in said
    assert_close(curve(folder, "four"), curve(folder, "alone"))
