"""A run from the command line to its files, whatever happens to it: killed, under another layout, in two processes."""

import collections
import functools
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from rich.console import Console

import models
from dualpipe_jax.schedule import dualpipe, gpipe
from dualpipe_jax.schedule.names import SCHEDULES
from models.weights import native
from tests.quick import QUICK
from tests.train.data.test_tokens import of_bytes
from train.config import configure
from train.data import open_corpus
from train.errors import CheckpointError
from train.options import options_as_dict, parse
from train.processes.group import Processes
from train.run import resume_command, train_and_report
from train.run import run as whole_run
from train.state.checkpoint import verify

ROOT = Path(__file__).parents[2]
STEPS = 20
SHORT = shlex.split(
    "--pp 2 --ep 2 --microbatches 4 --microbatch-size 2 --sequence 16 --model tiny --layers 1 "
    f"--steps {STEPS} --eval-sequences 10 --data train/text.txt"
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
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    (folder / "train").mkdir()  # not to be taken for the trainer
    text = "\n".join(f"line {number} of the text" for number in range(500))
    (folder / "train" / "text.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def finished(folder):
    process = train(folder, *SHORT, "--name", "short", "--profile", "1", "--checkpoint-every", "10")
    assert (process.returncode, process.stderr) == (0, "")
    return folder, process


@pytest.mark.slow
def test_it_says_what_it_does_and_leaves_its_files(finished):
    folder, process = finished
    for words in ("M parameters", "1 document:", "pp 2 x ep 2, cpu", "rank 1: ", "held-out loss"):
        assert words in process.stdout
    assert f"step {STEPS}/{STEPS}  loss" in process.stdout
    run = folder / "runs" / "short"
    assert sorted(path.name for path in run.iterdir()) == [
        *("checkpoints", "config.json", "environment.json", "lock", "metrics.jsonl"),
        *("profile", "report.html", "schedule.txt"),
    ]
    assert json.loads((run / "config.json").read_text())["step"]["schedule"] == "dualpipe"
    assert (run / "schedule.txt").read_text().startswith("# dualpipe, ranks 2, microbatches 4")
    before, *steps, after = records(folder, "short")
    assert [line["step"] for line in (before, *steps, after)] == [*range(STEPS + 1), STEPS]
    assert after["heldout_loss"] < before["heldout_loss"]
    assert before["heldout_loss"] == pytest.approx(5.545, abs=0.2)


@pytest.mark.parametrize(
    ("folder", "where"), [("runs/mine", []), ("/tmp/my runs/mine", ["--runs", "/tmp/my runs"])]
)
def test_how_to_go_on_finds_the_run(folder, where):
    rest = shlex.split("--name mine --resume --steps 24")
    assert resume_command(Path(folder), 24) == ["scripts/train", *where, *rest]


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
    assert [line["step"] for line in steps if "load" in line] == [1, 11, STEPS]
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
    assert all(costs["costs"][name] > 0 for name in ("F", "I", "W", "FB"))
    assert costs["units"] == {"time": "ms"}
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


def curve(folder, name):
    """Each number of a run by step and name, as it stands in the file."""
    keys = ("loss", "grad_norm", "heldout_loss")
    return {(line["step"], key): line[key] for line in records(folder, name) for key in keys if key in line}


def wait_for_step(number, process, folder, name):
    """Return as soon as a running run has done so many steps."""
    metrics = folder / "runs" / name / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count('"loss"') >= number):
        assert process.poll() is None, f"{name} ended before step {number}"
        time.sleep(0.02)


def go_on_here(folder, name, *flags):
    """The rest of a run in this process; what it said."""
    text = str(folder / "train" / "text.txt")
    given = parse(["--runs", str(folder / "runs"), "--name", name, "--resume", "--data", text, *flags])
    said = Console(file=io.StringIO(), width=200)
    whole_run(given.options, said, Processes(), resume=given.resume)
    return said.file.getvalue()


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_bit_for_bit(finished):
    """After its first steps, wherever that is, and with nothing left but its checkpoints."""
    folder, _ = finished
    options = (*SHORT, "--name", "killed", "--resume")
    (folder / "runs" / "killed").mkdir()  # what a start with another seed left, which saved nothing
    (folder / "runs" / "killed" / "metrics.jsonl").write_text('{"step": 0, "heldout_loss": 99.0}\n')
    line = command(*options, "--checkpoint-every", "1")
    with subprocess.Popen(line, cwd=folder, env=around(folder), stderr=subprocess.DEVNULL) as process:
        try:
            wait_for_step(3, process, folder, "killed")
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    before, whole = curve(folder, "killed"), curve(folder, "short")
    for path in (folder / "runs" / "killed").iterdir():  # what a resume needs is in the checkpoints
        if path.name != "checkpoints":
            path.unlink() if path.is_file() else shutil.rmtree(path)
    ended = train(folder, *options)
    assert ended.returncode == 0 and "resuming from step" in ended.stdout, ended.stderr
    assert "held-out loss   from" in ended.stdout and "99.000" not in ended.stdout
    assert before | curve(folder, "killed") == whole and before.items() <= whole.items()


@pytest.mark.slow
def test_a_finished_run_keeps_the_options_that_it_had(finished):
    """What did not train it is not written down as though it had."""
    folder, _ = finished
    own = folder / "runs" / "ended"
    shutil.copytree(folder / "runs" / "short", own)
    before = {name: (own / name).read_bytes() for name in ("config.json", "schedule.txt", "environment.json")}
    other = shlex.split("--schedule zb_v --pp 1 --ep 1 --learning-rate 1e-9 --steps 18")
    assert "the last step, 18, is done" in go_on_here(folder, "ended", *other)
    assert before == {name: (own / name).read_bytes() for name in before}
    assert curve(folder, "ended") == curve(folder, "short")
    of_bytes().save(str(folder / "other.json"))
    with pytest.raises(CheckpointError, match="is of another run: .*the tokenizer"):
        go_on_here(folder, "ended", "--tokenizer", str(folder / "other.json"), "--steps", "30")
    assert not (own / "tokenizer.json").exists() and before == {
        name: (own / name).read_bytes() for name in before
    }
    (own / "config.json").unlink()
    go_on_here(folder, "ended", *SHORT[:-2])
    assert (own / "report.html").exists() and json.loads((own / "config.json").read_text())


@pytest.mark.parametrize(
    ("now", "before", "told"),
    [
        (dict(eval_sequences=512), "from 5.000 to 2.000 nats", ""),
        (
            dict(eval_sequences=8),
            "from 3.000 at step 6 to 2.000 nats",
            "--eval-sequences was 512 and is 8 now: the held-out loss is measured anew at step 6",
        ),
        (
            dict(sequence=32),
            "from 3.000 at step 6 to 2.000 nats",
            "--sequence was 16 and is 32 now: the held-out loss is measured anew at step 6",
        ),
    ],
)
def test_held_out_losses_are_compared_of_one_text(now, before, told, tmp_path, monkeypatch):
    """A run of 6 steps had 5.0 at first; at step 6 it has 3.0 of today's text, and at the end 2.0."""
    was = configure(pp=1, ep=1, schedule="gpipe", steps=6, sequence=16)
    config, losses, lines = configure(was, steps=8, **now), [2.0] if not told else [2.0, 3.0], []
    this = types.SimpleNamespace(config=config, schedule=gpipe(1, 2))
    this.corpus = types.SimpleNamespace(vocabulary=types.SimpleNamespace(unit="byte"))
    this.held_out = lambda params: {"heldout_loss": losses.pop(), "heldout_bits_per_byte": 1.0}
    carried = {"before": 5.0, "skipped": 0}
    checkpoints = types.SimpleNamespace(restored={"carried": carried, "options": options_as_dict(was)})
    kept = []

    def train(this, state, file, console, checkpoints, watch, processes, carried):
        kept.append(carried)
        return state._replace(step=8)

    monkeypatch.setattr("train.run.train", train)
    monkeypatch.setattr("train.run.watch_run", lambda *_: io.StringIO())
    said, file = Console(file=io.StringIO(), width=300), types.SimpleNamespace(write=lines.append)
    state = collections.namedtuple("State", "step params")(6, None)
    train_and_report(this, state, tmp_path, file, checkpoints, said, [], Processes())
    out = said.file.getvalue()
    assert f"held-out loss   {before}" in out and losses == []
    first = "held-out loss at step 6: 3.000" if told else "held-out loss before training: 5.000"
    assert first in out and told in out and ("warning" in out) == bool(told)
    assert [line.get("anew", False) for line in lines if "heldout_loss" in line] == [True, False][not told :]
    assert [line["event"][: len(told)] for line in lines if "event" in line] == ([told] if told else [])
    assert (kept[0]["before"], kept[0].get("since", 0)) == ((3.0, 6) if told else (5.0, 0))


@pytest.mark.parametrize("first", [6, 7])
def test_a_profile_of_an_earlier_start_is_not_taken_for_ones_own(first, tmp_path, monkeypatch):
    """A resumed run keeps --profile; of one step, which is compiled in, nothing is traced."""
    config = configure(pp=1, ep=1, schedule="gpipe", steps=8, profile=2)
    this = types.SimpleNamespace(config=config, schedule=gpipe(1, 2))
    this.corpus = types.SimpleNamespace(vocabulary=types.SimpleNamespace(unit="byte"))
    this.held_out = lambda params: {"heldout_loss": 2.0, "heldout_bits_per_byte": 1.0}
    restored = {"carried": {"before": 5.0, "skipped": 0}, "options": options_as_dict(config)}
    monkeypatch.setattr("train.run.train", lambda this, state, *_: state)
    monkeypatch.setattr("train.run.watch_run", lambda *_: io.StringIO())
    monkeypatch.setattr("train.run.read_profile", lambda *_: "profile         read")
    said, file = Console(file=io.StringIO(), width=300), types.SimpleNamespace(write=lambda record: None)
    state, saved = (
        collections.namedtuple("State", "step params")(first, None),
        types.SimpleNamespace(restored=restored),
    )
    train_and_report(this, state, tmp_path, file, saved, said, [], Processes())
    told = (
        "profile         read"
        if first == 6
        else "profile         none: the only step was one that is compiled in"
    )
    assert told in said.file.getvalue().splitlines()


@pytest.mark.parametrize("measured", [[], [6], [8]])
def test_a_run_that_was_killed_before_its_last_evaluation_makes_up_for_it(measured, tmp_path):
    """Its steps are all done and saved."""
    config, lines = configure(steps=8), []
    this = types.SimpleNamespace(config=config, held_out=lambda params: {"heldout_loss": 2.5})
    this.corpus = types.SimpleNamespace(vocabulary=types.SimpleNamespace(unit="byte"))
    earlier = [{"step": 8, "loss": 3.0}, *({"step": step, "heldout_loss": 9.0} for step in measured)]
    said, file = Console(file=io.StringIO(), width=300), types.SimpleNamespace(write=lines.append)
    state = collections.namedtuple("State", "step params")(8, None)
    train_and_report(this, state, tmp_path, file, None, said, earlier, Processes())
    assert lines == ([] if measured == [8] else [{"step": 8, "heldout_loss": 2.5}])
    assert ("held-out loss   2.500 nats per byte" in said.file.getvalue()) == bool(lines)


@pytest.mark.slow
def test_a_run_goes_on_under_another_layout(finished):
    """Ten steps of DualPipe on 2 x 2, then a V on one device: the same steps that would have come."""
    folder, _ = finished
    shutil.copytree(folder / "runs" / "short", folder / "runs" / "copy")
    shutil.rmtree(folder / "runs" / "copy" / "checkpoints" / str(STEPS))
    said = go_on_here(folder, "copy", "--schedule", "zb_v", "--pp", "1", "--ep", "1")
    assert "warning: not bit for bit: layout changed" in said and "resuming from step 10" in said
    found, expected = curve(folder, "copy"), curve(folder, "short")
    assert found.keys() == expected.keys()
    assert found[11, "loss"] == pytest.approx(expected[11, "loss"], abs=2e-6), "the same parameters"
    for step in (12, 13):
        assert found[step, "loss"] == pytest.approx(expected[step, "loss"], abs=1e-4)


@pytest.mark.slow
def test_a_run_whose_batches_grow_goes_on_bit_for_bit(folder):
    """From the middle of the ramp."""
    options = shlex.split(
        "--schedule one_f_one_b --pp 1 --ep 1 --microbatches 2 --microbatch-size 2 --sequence 16 "
        "--model tiny --layers 1 --steps 7 --eval-sequences 4 --checkpoint-every 1 --keep 9 --warmup 1 "
        f"--first-microbatches 1 --ramp-tokens 128 --data {folder}/train/text.txt --runs {folder}/runs"
    )

    def run(name, *more):
        given = parse([*options, "--name", name, *more])
        whole_run(given.options, Console(file=io.StringIO(), width=200), Processes(), resume=given.resume)
        return curve(folder, name)

    whole = run("grown")
    counts = [line["tokens"] for line in records(folder, "grown") if "tokens" in line]
    assert counts == [32, 64, 96, 128, 192, 256, 320]
    shutil.copytree(folder / "runs" / "grown", folder / "runs" / "regrown")
    for step in (3, 4, 5, 6, 7):
        shutil.rmtree(folder / "runs" / "regrown" / "checkpoints" / str(step))
    assert run("regrown", "--resume") == whole


TWO = shlex.split(
    "--schedule gpipe --pp 2 --ep 2 --microbatches 2 --microbatch-size 2 --model tiny --layers 1 "
    "--sequence 8 --eval-sequences 4 --steps 20 --seed 3 --straggler-every 7 --checkpoint-every 6 "
    "--data train/text.txt --name two --processes 2 --restarts 1 --export weights"
)


def worker(parent, number):
    """The id of a process that a supervisor has started, once it is there."""
    line = ["ps", "-ww", "--ppid", str(parent), "-o", "pid=,args="]
    while True:
        found = subprocess.run(line, capture_output=True, text=True).stdout.splitlines()
        ids = [one.split()[0] for one in found if one.endswith(f"--process-id {number}")]
        if ids:
            return int(ids[0])
        time.sleep(0.1)


@pytest.mark.slow
def test_two_processes_are_one_run_though_one_is_killed(folder):
    """What they say, write and save; the loss of a step is that of the model in one piece, without a mesh."""
    with (folder / "two.out").open("w") as out:
        two = subprocess.Popen(command(*TWO), cwd=folder, env=around(folder), stdout=out, stderr=out)
    try:
        victim = worker(two.pid, 1)
        wait_for_step(8, two, folder, "two")
        os.kill(victim, signal.SIGKILL)
        before = curve(folder, "two")
        code = two.wait(500)
    finally:
        two.terminate()  # a supervisor ends its own
        two.wait()
    said = (folder / "two.out").read_text()
    assert code == 0, said
    told = (folder / "runs" / "two" / "processes" / "story.log").read_text()
    assert "process 1 died of SIGKILL" in told and "restart 1 of 1" in told, told
    assert "all processes ended well" in told
    back = int(re.search(r"resuming from step (\d+)", said)[1])
    assert back % 6 == 0 and back < max(step for step, _ in before), "some steps were done again"
    after = curve(folder, "two")
    assert before.items() <= after.items(), "and gave the same, bit for bit"
    assert said.count("step 20/20  loss") == 1, "one process prints"
    assert [record["step"] for record in records(folder, "two") if "slowest_host" in record] == [7, 14]
    run = folder / "runs" / "two"
    verdicts = list(verify(run))
    assert [(verdict.step, verdict.problem) for verdict in verdicts] == [(12, None), (18, None), (20, None)]
    assert verdicts[0].facts["layout"]["processes"] == 2

    config, params, _ = native.read(run / "checkpoints" / "18")
    batch = open_corpus((str(folder / "train" / "text.txt"),)).train_batch(3, 18, (2, 2, 8))
    inputs, targets, segments, positions = (
        batch[name].reshape(4, 8) for name in ("inputs", "targets", "segment_ids", "positions")
    )
    logits = jax.jit(functools.partial(models.logits, config))
    found = logits(params, inputs, positions=positions, segment_ids=segments)
    expected = optax.softmax_cross_entropy_with_integer_labels(found, targets).mean()
    assert curve(folder, "two")[19, "loss"] == pytest.approx(float(expected), rel=2e-6)

    _, exported = models.weights.load(folder / "weights")
    _, last, _ = native.read(run / "checkpoints" / "20")
    jax.tree.map(np.testing.assert_array_equal, exported, last)
    assert len(list((folder / "weights").glob("*-of-00002.safetensors"))) == 2, "each wrote its part"

    shutil.copytree(run, folder / "runs" / "one")
    for step in ("18", "20"):
        shutil.rmtree(folder / "runs" / "one" / "checkpoints" / step)
    said = go_on_here(folder, "one")
    assert "resuming from step 12" in said and "processes 2 -> 1" in said
    assert curve(folder, "one") == pytest.approx(after, rel=1e-6), "one process goes on"
