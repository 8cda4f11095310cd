"""The loop around a step: what it writes, and that nothing is lost when it is cut short."""

import io
import json
import types

import numpy as np
import pytest
from rich.console import Console

from dualpipe_jax.schedule import gpipe, one_f_one_b
from train import loop
from train.config import configure
from train.data import Corpus
from train.errors import DivergedError
from train.metrics import Display, MetricsFile, Pace

CONFIG = configure(pp=1, ep=1, microbatches=2, microbatch_size=1, sequence=4, steps=5, log_every=2)


def fake_run(losses):
    """A run whose step ``n`` returns ``losses[n]``, or raises it."""

    def update(state, inputs, targets):
        assert inputs.shape == targets.shape == CONFIG.batch_shape
        if isinstance(losses[state], BaseException):
            raise losses[state]
        metrics = {"loss": losses[state], "grad_norm": 1.0, "max_vio": 0.25, "dropped": 3}
        return state + 1, {name: np.asarray(value) for name, value in metrics.items()}

    tokens = np.arange(64, dtype=np.uint8)
    return types.SimpleNamespace(
        config=CONFIG,
        corpus=Corpus(tokens, tokens, 1),
        state=0,
        update=update,
        learning_rate=lambda step: 0.5,
    )


def run(losses, path):
    out = io.StringIO()
    try:
        with MetricsFile(path) as file:
            loop.train(fake_run(losses), file, Console(file=out, width=200))
    finally:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    return lines, out.getvalue()


def test_a_step_is_a_line_of_json(tmp_path):
    lines, _ = run([5.0, 4.0, 3.0, 2.0, 1.0], tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["loss"] for line in lines] == [5.0, 4.0, 3.0, 2.0, 1.0]
    assert {"grad_norm", "max_vio", "dropped", "learning_rate", "step_s", "tokens_per_s"} <= lines[0].keys()


def test_plain_output_is_a_line_now_and_then(tmp_path):
    _, said = run([5.0, 4.0, 3.0, 2.0, 1.0], tmp_path / "metrics.jsonl")
    assert [line.split()[1] for line in said.splitlines()] == ["1/5", "2/5", "4/5", "5/5"]
    for word in ("loss 5.000", "tokens/s", "s/step", "left", "MaxVio 0.25", "dropped 3"):
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
    console = Console(file=out, force_terminal=True, width=120)
    record = {"loss": 2.0, "grad_norm": 1.0, "max_vio": 0.1, "dropped": 0, "tokens_per_s": 1e4, "step_s": 0.5}
    pace = Pace()
    pace.add(60.0)
    pace.add(0.5)
    with Display(console, 10, 1) as display:
        display.step(2, record, pace)
    assert "2/10" in out.getvalue() and "10,000 tokens/s" in out.getvalue() and "0:04 left" in out.getvalue()


def test_the_pace_leaves_out_the_step_that_compiles():
    pace = Pace()
    pace.add(100.0)
    assert pace.remaining(10) == "-:--"
    pace.add(2.0)
    assert pace.remaining(45) == "1:30"


@pytest.mark.parametrize("recipe", [gpipe, one_f_one_b])
def test_the_bubble_is_the_simulated_idle_fraction(recipe):
    ranks, microbatches = 4, 12
    assert loop.bubble(recipe(ranks, microbatches)) == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
