"""Losses that are not to be trusted: what counts as one, and that a run goes back and skips what led there."""

import collections
import functools
import io
import json
import types

import jax
import numpy as np
import pytest
from rich.console import Console

from train import loop
from train.config import configure
from train.data import Corpus
from train.data.corpus import text_source
from train.data.vocabulary import BYTES
from train.errors import DivergedError
from train.metrics import MetricsFile
from train.processes import Processes
from train.rates import Rates
from train.report import RunFolder
from train.trouble import Trouble
from train.watch import Watch

CONFIG = configure(
    pp=1, ep=1, microbatches=2, microbatch_size=1, sequence=4, steps=6, name="x", on_trouble="skip"
)
TEXT = [np.random.default_rng(0).integers(1, 255, 4096).astype(np.uint8).tobytes()]
CORPUS = Corpus((text_source("text", TEXT, TEXT, 1, BYTES),))
State = collections.namedtuple("State", "step")


class Checkpoints:
    """Every second step is kept."""

    seconds = 0.0

    def __init__(self):
        self.saved, self.restored = [], 0

    def due(self, step):
        return step % 2 == 0

    def save(self, step, state, record, load):
        self.saved.append(state)

    def wait(self):
        pass

    def restore(self):
        self.restored += 1
        return self.saved[-1] if self.saved else None

    def finish(self, step):
        pass


def train(path, bad, config=CONFIG, start=0, skipped=0, name="loss"):
    """Train where the batches of some numbers give NaN; the numbers of batches learnt from, and what was told."""
    draw = functools.partial(CORPUS.train_batch, config.seed, shape=config.batch_shape)
    batches = {draw(n)["inputs"].tobytes(): n for n in range(40)}
    learnt, out, checkpoints = [], io.StringIO(), Checkpoints()

    def update(state, batch):
        learnt.append(batches[batch["inputs"].tobytes()])
        metrics = {"loss": 2.0, "grad_norm": 1.0, "max_vio": 0.25, "dropped": 0, "counts": [[[2, 0]]]}
        if learnt[-1] in bad:
            metrics[name] = float("nan")
        return State(state.step + 1), {key: np.asarray(value) for key, value in metrics.items()}

    this = types.SimpleNamespace(
        config=config,
        batch=draw,
        update=update,
        learning_rate=lambda step: 0.5,
        init=lambda: State(0),
    )
    rates = Rates(config.tokens_per_step, 1e6, 1, None)
    watch = Watch(config, rates, jax.devices()[:1], path.parent, start)
    with MetricsFile(path) as file:
        console = Console(file=out, width=300)
        state = loop.train(this, State(start), file, console, checkpoints, watch, Processes(), skipped)
    assert state.step == config.optimizer.steps
    return learnt, out.getvalue(), [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_run_goes_back_and_skips_the_batches_that_led_to_trouble(tmp_path, name):
    learnt, said, lines = train(tmp_path / "metrics.jsonl", {3}, name=name)
    assert learnt == [0, 1, 2, 3, 4, 5, 6, 7], "steps 3 and 4 are done again, from batches 4 and 5"
    told = f"{name} is nan at step 4; back to step 2, skipping the 2 batches since"
    assert told in said
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4, 3, 4, 5, 6]
    assert lines[4] == {"step": 4, "event": told}
    assert [line.get("skipped", 0) for line in lines if "loss" in line] == [0, 0, 0, 0, 2, 2, 2, 2]


def test_the_report_shows_what_was_kept_and_why(tmp_path):
    from train.options import plain

    train(tmp_path / "metrics.jsonl", {3})
    (tmp_path / "config.json").write_text(json.dumps(plain(CONFIG)))
    found = RunFolder.read(tmp_path)
    assert found.series("loss") == ([1, 2, 3, 4, 5, 6], [2.0] * 6)
    assert [event["step"] for event in found.events] == [4]


def test_without_a_checkpoint_it_begins_anew(tmp_path):
    learnt, said, _ = train(tmp_path / "metrics.jsonl", {1})
    assert learnt == [0, 1, 2, 3, 4, 5, 6, 7]
    assert "loss is nan at step 2; back to step 0, skipping the 2 batches since" in said


def test_a_resumed_run_draws_on_where_it_skipped(tmp_path):
    learnt, _, lines = train(tmp_path / "metrics.jsonl", set(), start=2, skipped=2)
    assert learnt == [4, 5, 6, 7]
    assert loop.skipped_before([*lines, {"step": 6, "heldout_loss": 1.0}]) == 2
    assert loop.skipped_before([{"step": 0, "heldout_loss": 1.0}]) == loop.skipped_before([]) == 0


def test_it_gives_up_where_going_back_does_not_help(tmp_path):
    with pytest.raises(DivergedError, match="going back to step 0 did not help; lower --learning-rate"):
        train(tmp_path / "metrics.jsonl", set(range(40)))


def test_unless_asked_to_it_stops_and_says_what_would_help(tmp_path):
    message = "grad_norm is nan at step 3; lower --learning-rate, or --on-trouble skip goes back"
    with pytest.raises(DivergedError, match=message):
        train(tmp_path / "metrics.jsonl", {2}, configure(CONFIG, on_trouble="stop"), name="grad_norm")


def spikes(losses, spike):
    """Against NumPy: which losses stand out from up to 32 before them that did not."""
    calm, found = [], []
    for step, loss in enumerate(losses, 1):
        latest = np.array(calm[-32:])
        if len(latest) >= 8:
            middle = np.median(latest)
            spread = max(1.4826 * np.median(np.abs(latest - middle)), abs(middle) / 100)
            if loss > middle + spike * spread:
                found.append(step)
                continue
        calm.append(loss)
    return found


@pytest.mark.parametrize("spike", [3.0, 6.0])
def test_spikes_stand_out_from_the_losses_before(spike):
    random = np.random.default_rng(1)
    losses = 2 + 2 * np.exp(-np.arange(200) / 30) + 0.05 * random.standard_normal(200)
    losses[[3, 60, 61, 150]] += 1.5
    losses[180] += 0.25
    trouble = Trouble(spike)
    reasons = {
        n: trouble.reason({"step": n, "loss": loss, "grad_norm": 1.0}) for n, loss in enumerate(losses, 1)
    }
    found = [step for step, reason in reasons.items() if reason]
    assert found == spikes(losses, spike)
    assert set(found) >= {61, 62, 151} and 4 not in found, "none before there is anything to compare with"
    assert "spreads above the median" in reasons[61]


def test_falling_losses_and_small_steps_up_are_no_spikes():
    trouble = Trouble(6.0)
    for step, loss in enumerate([*np.linspace(5, 2, 40), *[2.0] * 40, 2.1], 1):
        assert trouble.reason({"step": step, "loss": loss, "grad_norm": 1.0}) is None
    assert Trouble(None).reason({"step": 1, "loss": 1e30, "grad_norm": 1.0}) is None
