"""The loop around a step: what it writes, and that nothing is lost when it is cut short."""

import collections
import io
import json
import signal
import types

import jax
import numpy as np
import pytest
from rich.console import Console

from dualpipe_jax.schedule import gpipe, one_f_one_b
from train import loop
from train.config import configure
from train.data import Corpus
from train.data.corpus import text_source
from train.data.vocabulary import BYTES
from train.errors import DivergedError, Stopped
from train.metrics import Display, MetricsFile, Pace, read_metrics
from train.processes import Processes
from train.rates import Rates
from train.stop import Stop
from train.watch import Watch

CONFIG = configure(pp=1, ep=1, microbatches=2, microbatch_size=1, sequence=4, steps=5, log_every=2, name="x")


State = collections.namedtuple("State", "step")


class FakeCheckpoints:
    """Remembers what it was asked to save."""

    seconds = 0.5

    def __init__(self, every=100):
        self.every, self.saved, self.finished = every, [], []

    def due(self, step):
        return step % self.every == 0

    def save(self, step, state, record, load):
        assert state.step == record["step"] == step and load == [[2, 0], [1, 1]]
        self.saved.append(step)

    def finish(self, step):
        assert step == self.saved[-1]
        self.finished.append(step)


def fake_run(losses, number=None):
    """A run whose step ``n`` returns ``losses[n]``, or raises it."""
    text = [bytes(range(1, 64))]
    corpus = Corpus((text_source("text", text, text, 1, BYTES),))

    def update(state, batch):
        expected = corpus.train_batch(CONFIG.seed, state.step, CONFIG.batch_shape)
        assert batch.keys() == expected.keys() >= {"inputs", "targets", "segment_ids", "positions"}
        jax.tree.map(np.testing.assert_array_equal, dict(batch), dict(expected))
        if isinstance(losses[state.step], BaseException):
            raise losses[state.step]
        if losses[state.step] == "signal":
            signal.raise_signal(number)
            losses[state.step] = 3.0
        metrics = {
            "loss": losses[state.step],
            "grad_norm": 1.0,
            "max_vio": 0.25,
            "dropped": 3,
            "drop_rate": 0.021,
        }
        metrics["counts"] = [[2, 0], [1, 1]]
        return State(state.step + 1), {name: np.asarray(value) for name, value in metrics.items()}

    return types.SimpleNamespace(
        config=CONFIG,
        batch=lambda number: corpus.train_batch(CONFIG.seed, number, CONFIG.batch_shape),
        update=update,
        learning_rate=lambda step: 0.5,
    )


def run(losses, path, saved=None, number=None):
    saved = FakeCheckpoints() if saved is None else saved
    out = io.StringIO()
    try:
        with MetricsFile(path) as file:
            watch = Watch(
                CONFIG, Rates(CONFIG.tokens_per_step, 1e6, 1, None), jax.devices()[:1], path.parent, 0
            )
            shown = Console(file=out, width=200)
            loop.train(fake_run(losses, number), State(0), file, shown, saved, watch, Processes())
    finally:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    return lines, out.getvalue()


def test_a_step_is_a_line_of_json(tmp_path):
    lines, _ = run([5.0, 4.0, 3.0, 2.0, 1.0], tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["loss"] for line in lines] == [5.0, 4.0, 3.0, 2.0, 1.0]
    assert {"grad_norm", "max_vio", "dropped", "learning_rate", "step_s", "data_wait_s"} <= lines[0].keys()
    assert {"tokens_per_s", "tflops_per_s", "process_memory_gib"} <= lines[0].keys()
    assert lines[0]["tokens_per_s"] == pytest.approx(CONFIG.tokens_per_step / lines[0]["step_s"])


def test_plain_output_is_a_line_now_and_then(tmp_path):
    _, said = run([5.0, 4.0, 3.0, 2.0, 1.0], tmp_path / "metrics.jsonl")
    assert [line.split()[1] for line in said.splitlines()] == ["1/5", "2/5", "4/5", "5/5"]
    words = (
        "loss 5.000",
        "tokens/s",
        "TFLOP/s",
        "MFU n/a",
        "s/step",
        "GiB",
        "left",
        "MaxVio 0.25",
        "dropped 2.1%",
    )
    for word in words:
        assert word in said.splitlines()[0]


def test_an_interrupted_run_keeps_its_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run([5.0, 4.0, KeyboardInterrupt()], path)
    assert len(path.read_text().splitlines()) == 2


def test_a_loss_that_is_no_number_ends_the_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(DivergedError, match="loss is nan at step 2; lower --learning-rate"):
        run([5.0, float("nan"), 3.0], path)
    assert json.loads(path.read_text().splitlines()[1])["loss"] is None


def test_a_terminal_gets_a_bar():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=180)
    record = {
        "loss": 2.0,
        "grad_norm": 1.0,
        "max_vio": 0.1,
        "dropped": 0,
        "drop_rate": 0.0,
        "tokens_per_s": 1e4,
        "step_s": 0.5,
    }
    record |= {"tflops_per_s": 1.25, "mfu": 0.125, "device_memory_gib": 3.5}
    pace = Pace()
    pace.add(60.0)
    pace.add(0.5)
    with Display(console, 10, 1) as display:
        display.step(2, record, pace)
    for words in ("2/10", "10,000 tokens/s", "1.25 TFLOP/s", "MFU 12.5%", "3.5 GiB", "0:04 left"):
        assert words in out.getvalue()


def test_the_pace_leaves_out_the_step_that_compiles():
    pace = Pace()
    pace.add(100.0)
    assert pace.remaining(10) == "-:--"
    pace.add(2.0)
    assert pace.remaining(45) == "1:30"
    assert pace.remaining(3700) == "2:03:20"


@pytest.mark.parametrize("recipe", [gpipe, one_f_one_b])
def test_the_bubble_is_the_simulated_idle_fraction(recipe):
    ranks, microbatches = 4, 12
    assert loop.bubble(recipe(ranks, microbatches)) == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


def test_what_is_due_and_the_last_step_are_saved(tmp_path):
    saved = FakeCheckpoints(every=2)
    lines, _ = run([5.0, 4.0, 3.0, 2.0, 1.0], tmp_path / "metrics.jsonl", saved)
    assert (saved.saved, saved.finished) == ([2, 4, 5], [5])
    assert [line["checkpoint_s"] for line in lines] == [0.0, 0.0, 0.5, 0.0, 0.5]


@pytest.mark.parametrize(
    ("number", "name", "code"), [(signal.SIGTERM, "SIGTERM", 143), (signal.SIGINT, "Ctrl-C", 130)]
)
def test_a_signal_saves_and_ends_the_run(number, name, code, tmp_path):
    saved, before = FakeCheckpoints(), signal.getsignal(number)
    with pytest.raises(
        Stopped, match=f"{name}: saved at step 2; --name x --resume goes on from there"
    ) as stopped:
        run([5.0, "signal", 3.0], tmp_path / "metrics.jsonl", saved, number)
    assert (saved.saved, saved.finished, stopped.value.code) == ([2], [2], code)
    assert signal.getsignal(number) is before


def test_a_second_signal_ends_it_at_once():
    with pytest.raises(KeyboardInterrupt), Stop() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.reason == "SIGTERM"
        signal.raise_signal(signal.SIGINT)


def test_metrics_go_on_where_a_checkpoint_is(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(6)) + '{"step": 6, "lo')
    with MetricsFile(path, upto=3) as file:
        assert [record["step"] for record in file.kept] == [0, 1, 2, 3]
        file.write({"step": 4, "loss": 2.0})
    assert [record["loss"] for record in read_metrics(path)] == [1.0] * 4 + [2.0]
    with MetricsFile(path):
        pass
    assert path.read_text() == ""
