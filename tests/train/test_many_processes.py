"""The trainer itself in several processes: the same curve, whatever their number, and whatever happens to one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPTIONS = (
    *("--schedule", "one_f_one_b", "--pp", "2", "--ep", "2", "--microbatches", "2", "--microbatch-size", "2"),
    *("--model", "tiny", "--layers", "2", "--sequence", "8", "--eval-sequences", "4", "--steps", "30"),
    *("--checkpoint-every", "10", "--data", "text.txt"),
)


def start(folder, name, *options):
    environ = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # compiles in half the time
    }
    with (folder / f"{name}.out").open("w") as out:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "train", *OPTIONS, "--name", name, *options],
            cwd=folder,
            env=environ,
            stdout=out,
            stderr=out,
        )


def curve(folder, name):
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "loss" in record or "heldout_loss" in record]
    return [
        (record["step"], key, record[key])
        for record in records
        for key in ("loss", "grad_norm", "heldout_loss")
        if key in record
    ]


def worker(name, number):
    """The id of a running process of a run."""
    found = subprocess.run(
        ["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True
    ).stdout
    lines = [line for line in found.splitlines() if f"--name {name} " in line]
    (line,) = [line for line in lines if line.endswith(f"--process-id {number}")]
    return int(line.split()[0])


@pytest.mark.slow
def test_a_killed_process_leaves_no_trace_in_the_curve(tmp_path):
    text = "\n".join(f"line {number} of the text" for number in range(500))
    (tmp_path / "text.txt").write_text(text)
    name = f"two-{os.getpid()}"
    alone, two = start(tmp_path, "one"), start(tmp_path, name, "--processes", "2", "--restarts", "1")
    try:
        deadline = time.monotonic() + 400
        metrics = tmp_path / "runs" / name / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count('"loss"') >= 12):
            assert two.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(worker(name, 1), signal.SIGKILL)
        killed = curve(tmp_path, name)
        assert (alone.wait(400), two.wait(400)) == (0, 0)
    finally:
        for process in (alone, two):
            process.terminate()  # the supervisor ends its own
            process.wait()
    story = (tmp_path / "runs" / name / "processes" / "story.log").read_text()
    assert "process 1 died of SIGKILL" in story and "restart 1 of 1" in story
    assert "resuming from step" in (tmp_path / f"{name}.out").read_text()
    one, other = curve(tmp_path, "one"), curve(tmp_path, name)
    assert len(one) == 2 * 30 + 2
    assert other == one, "bit for bit, in one process and in two, of which one was killed"
    assert len(killed) > 2 * 10 + 1 and killed == one[: len(killed)], "steps were done again"
