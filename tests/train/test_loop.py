"""The loop around a step: what it draws and writes, that nothing is lost when it is cut short, and what is trouble."""

import collections
import functools
import io
import json
import math
import signal
import types
from contextlib import closing

import jax
import numpy as np
import pytest
from rich.console import Console

from dualpipe_jax.parallel import make_mesh
from train import loop
from train.config import configure
from train.data import Corpus
from train.data.corpus import text_source
from train.data.vocabulary import BYTES
from train.errors import DivergedError, Stopped
from train.figures.metrics import Display, MetricsFile
from train.figures.rates import Rates
from train.model import model_config
from train.options import options_as_dict
from train.processes.group import Processes
from train.processes.stop import Stop
from train.progress import Progress
from train.recipe import follow, run_recipe
from train.report import RunFolder
from train.setup import Run
from train.trouble import TroubleDetector
from train.watch import Watch

CONFIG = configure(pp=1, ep=1, microbatches=2, microbatch_size=1, sequence=4, steps=5, log_every=2, seed=5)
CONFIG = follow(configure(CONFIG, name="x"))
SKIP = configure(CONFIG, steps=6, on_trouble="skip")
TEXT = [np.random.default_rng(0).integers(1, 128, 4096).astype(np.uint8).tobytes()]
HELD_OUT = [bytes(range(128, 256))]
CORPUS = Corpus((text_source("text", TEXT, HELD_OUT, 1, BYTES),))
SEQUENCES = {
    CORPUS.train_batch(5, n, (1, 1, length))["inputs"].tobytes(): n for length in (4, 8) for n in range(80)
}
"""Numbers of the sequences to train on, by their bytes."""
NAN = float("nan")

State = collections.namedtuple("State", "step params", defaults=(None,))


class FakeCheckpoints:
    """Remembers what it was asked to save."""

    blocked_seconds = 0.5

    def __init__(self, every=100):
        self.every, self.saved, self.finished, self.states, self.carried = every, [], [], [], {}
        self.restored, self.written = {}, True

    def due(self, step):
        return step % self.every == 0

    def save(self, step, state, record, load, balance, carried):
        assert carried["skipped"] == record.get("skipped", 0)
        assert state.step == record["step"] == step and load == [[2, 0], [1, 1]]
        self.saved.append(step)
        self.states.append(state)
        self.carried = json.loads(json.dumps(carried))
        self.restored, self.written = {"balance": balance}, False

    def wait(self):
        self.written = True

    def restore(self):
        assert self.written, "it may be half there"
        return self.states[-1] if self.states else None

    def finish(self, step):
        assert step == self.saved[-1]
        self.finished.append(step)


Found = collections.namedtuple("Found", "lines said learnt read")


def run(losses, path, saved=None, *, config=CONFIG, start=0, carried=None, name="loss", heartbeat=None):
    """Train where batch ``n`` gives ``losses[n]``, 3 if there is none, raises it, or is interrupted by that signal.

    A batch of two sequences is numbered by its first; ``read`` is what each step read.
    """
    learnt, read, out = [], [], io.StringIO()
    losses = dict(enumerate(losses)) if isinstance(losses, list) else losses

    def update(state, batch):
        shape = batch["inputs"].shape
        read.append([SEQUENCES[row.tobytes()] for row in np.asarray(batch["inputs"]).reshape(-1, shape[-1])])
        expected = CORPUS.train_batch(config.seed, 0, shape, begin=read[-1][0])
        assert batch.keys() == expected.keys() >= {"inputs", "targets", "segment_ids", "positions"}
        jax.tree.map(np.testing.assert_array_equal, dict(batch), dict(expected))
        learnt.append(number := read[-1][0] // 2)
        loss = losses.get(number, 3.0)
        if isinstance(loss, BaseException):
            raise loss
        if isinstance(loss, signal.Signals):
            signal.raise_signal(loss)
            loss = 3.0
        metrics = {"loss": 3.0, "grad_norm": 1.0, "max_vio": 0.25, "dropped": 3, "drop_rate": 0.021}
        metrics |= {"counts": [[2, 0], [1, 1]], name: loss}
        return State(state.step + 1), {key: np.asarray(value) for key, value in metrics.items()}

    this = types.SimpleNamespace(config=config, corpus=CORPUS, update=update)
    this.recipe, this.init = run_recipe(config, model_config(config)), lambda: State(0)
    this.compiles = functools.partial(Run.compiles, this)
    model = types.SimpleNamespace(config=this.recipe.config)
    this.layout = types.SimpleNamespace(mesh=make_mesh(1, 1), model=model)
    this.batch = functools.partial(Run.batch, this)
    this.held_out = lambda params: {"heldout_loss": 2.0}
    rates = Rates(1e6, None)
    watch = Watch(config, this.recipe, rates, jax.devices()[:1], path.parent, start)
    console, saved = Console(file=out, width=300), saved or FakeCheckpoints()
    with closing(MetricsFile(path)) as file:
        carried = carried or {"skipped": 0}
        state = loop.train(
            this, State(start), file, console, saved, watch, Processes(heartbeat=heartbeat), carried
        )
    assert state.step == config.optimizer.steps
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return Found(lines, out.getvalue(), learnt, read)


def test_a_step_is_a_line_of_json_and_now_and_then_one_of_plain_output(tmp_path):
    lines, said, learnt, _ = run([5.0, 4.0, 3.0, 2.0, 1.0], tmp_path / "metrics.jsonl")
    assert learnt == [0, 1, 2, 3, 4]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["loss"] for line in lines] == [5.0, 4.0, 3.0, 2.0, 1.0]
    assert [line["step"] for line in lines if "load" in line] == [1, 5] and "device_load" not in lines[0]
    two_devices = configure(CONFIG, steps=4, ep=2, load_every=2)
    found = run([], tmp_path / "two.jsonl", config=two_devices).lines
    assert [(line["device_load"], "load" in line) for line in found] == [
        (1.5, n in (0, 2, 3)) for n in range(4)
    ]
    assert {"grad_norm", "max_vio", "dropped", "learning_rate", "step_s", "data_wait_s"} <= lines[0].keys()
    assert {"tokens_per_s", "tflops_per_s", "process_memory_gib"} <= lines[0].keys()
    assert lines[0]["tokens_per_s"] == pytest.approx(math.prod(CONFIG.batch_shape) / lines[0]["step_s"])
    assert [line.split()[1] for line in said.splitlines()] == ["1/5", "2/5", "4/5", "5/5"]
    first, later = said.splitlines()[:2]
    assert all(word in later for word in ("loss 4.000", "tokens/s", "TFLOP/s", "MFU n/a", "s/step", "GiB"))
    assert all(word in later for word in ("left", "MaxVio 0.25", "dropped 2.1%"))
    assert "loss 5.000" in first and "s with compiling" in first
    assert not any(rate in first for rate in ("tokens/s", "TFLOP/s", "MFU", "s/step"))


def test_a_run_that_is_cut_short_keeps_its_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run([5.0, 4.0, KeyboardInterrupt()], path)
    assert len(path.read_text().splitlines()) == 2
    with pytest.raises(DivergedError, match="loss is nan at step 2; lower --learning-rate"):
        run([5.0, NAN, 3.0], path)
    assert json.loads(path.read_text().splitlines()[1])["loss"] is None


def test_a_terminal_gets_a_bar():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=180)
    record = {"loss": 2.0, "grad_norm": 1.0, "max_vio": 0.1, "dropped": 0, "drop_rate": 0.0}
    record |= {"tokens_per_s": 1e4, "step_s": 0.5}
    record |= {"tflops_per_s": 1.25, "mfu": 0.125, "device_memory_gib": 3.5}
    with Display(console, 10, 1) as display:
        display.step(1, record | {"step_s": 60.0})
        display.step(2, record)
    for words in ("2/10", "10,000 tokens/s", "1.25 TFLOP/s", "MFU 12.5%", "3.5 GiB", "0:04 left"):
        assert words in out.getvalue()


def test_the_pace_leaves_out_the_step_that_compiles():
    record = {
        "loss": 2.0,
        "grad_norm": 1.0,
        "max_vio": 0.1,
        "dropped": 0,
        "tokens_per_s": 1e4,
        "tflops_per_s": 1.0,
    }
    out = io.StringIO()
    display = Display(Console(file=out, width=300), 3702, 1)
    for step, seconds in ((1, 100.0), (2, 2.0), (3657, 2.0)):
        display.step(step, record | {"step_s": seconds})
    for line, left in zip(out.getvalue().splitlines(), ("-:--", "2:03:20", "1:30"), strict=True):
        assert f"  {left} left" in line


def test_what_is_due_and_the_last_step_are_saved(tmp_path):
    saved = FakeCheckpoints(every=2)
    lines, *_ = run([], tmp_path / "metrics.jsonl", saved)
    assert (saved.saved, saved.finished) == ([2, 4, 5], [5])
    assert [line["checkpoint_s"] for line in lines] == [0.0, 0.0, 0.5, 0.0, 0.5]


@pytest.mark.parametrize(
    ("number", "name", "code"), [(signal.SIGTERM, "SIGTERM", 143), (signal.SIGINT, "Ctrl-C", 130)]
)
def test_a_signal_saves_and_ends_the_run(number, name, code, tmp_path):
    saved, before = FakeCheckpoints(), signal.getsignal(number)
    told = f"{name}: saved at step 2; --name x --resume goes on from there"
    with pytest.raises(Stopped, match=told) as stopped:
        run([5.0, number, 3.0], tmp_path / "metrics.jsonl", saved)
    assert (saved.saved, saved.finished, stopped.value.code) == ([2], [2], code)
    assert signal.getsignal(number) is before


def test_a_notice_to_any_process_saves_and_ends_the_run(tmp_path, monkeypatch):
    saved, told = FakeCheckpoints(), iter([False, True])
    monkeypatch.setattr(Processes, "preempted", lambda self: next(told))
    with pytest.raises(Stopped, match="SIGTERM: saved at step 2") as stopped:
        run([], tmp_path / "metrics.jsonl", saved)
    assert (saved.saved, saved.finished, stopped.value.code) == ([2], [2], 143)


def test_a_signal_while_the_last_step_is_written_waits_for_it(tmp_path):
    """Nobody else would say that the steps since the checkpoint before are lost."""

    class Slow(FakeCheckpoints):
        def finish(self, step):
            signal.raise_signal(signal.SIGTERM)
            super().finish(step)

    saved, came = Slow(), []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append("the process would have died"))
    try:
        run([], tmp_path / "metrics.jsonl", saved)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (saved.saved, saved.finished, came) == ([5], [5], [])


def test_a_second_signal_ends_it_at_once():
    with pytest.raises(KeyboardInterrupt), Stop() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.reason == "SIGTERM"
        signal.raise_signal(signal.SIGINT)


def test_metrics_go_on_where_a_checkpoint_is(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(6)) + '{"step": 6, "lo')
    with closing(MetricsFile(path, upto=3)) as file:
        assert [record["step"] for record in file.earlier_records] == [0, 1, 2, 3]
        file.write({"step": 4, "loss": 2.0})
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [1.0] * 4 + [2.0]
    MetricsFile(path).close()
    assert path.read_text() == ""


def test_that_a_run_went_back_stays_told_where_it_goes_on(tmp_path):
    """It gave up steps 3 and 4, did step 3 again, saved it and was killed in the next one."""
    told, path = (
        [(1, ""), (2, ""), (3, ""), (4, ""), (4, "back to 2"), (3, ""), (4, "")],
        tmp_path / "metrics.jsonl",
    )
    records = [{"step": step} | ({"event": event} if event else {"loss": 1.0}) for step, event in told]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with closing(MetricsFile(path, upto=3)) as file:
        assert file.earlier_records == records[:-1]
    with closing(MetricsFile(path, upto=2)) as file:
        assert file.earlier_records == records[:2], "its skipping was not saved, and is undone"


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_run_goes_back_and_skips_the_batches_that_led_to_trouble(tmp_path, name):
    path = tmp_path / "metrics.jsonl"
    lines, said, learnt, _ = run({3: NAN}, path, FakeCheckpoints(every=2), config=SKIP, name=name)
    assert learnt == [0, 1, 2, 3, 4, 5, 6, 7], "steps 3 and 4 are done again, from batches 4 and 5"
    told = f"{name} is nan at step 4; back to step 2, skipping the 2 batches since"
    assert told in said
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4, 3, 4, 5, 6]
    assert lines[4] == {"step": 4, "event": told}
    assert [line.get("skipped", 0) for line in lines if "loss" in line] == [0, 0, 0, 0, 2, 2, 2, 2]
    (tmp_path / "config.json").write_text(json.dumps(options_as_dict(SKIP)))
    report = RunFolder.read(tmp_path)
    assert report.series("loss") == ([1, 2, 3, 4, 5, 6], [3.0] * 6), "what was kept"
    assert [event["step"] for event in report.events] == [4]


def test_without_a_checkpoint_it_begins_anew_and_gives_up_where_that_does_not_help(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _, said, learnt, _ = run({1: NAN}, path, config=SKIP)
    assert learnt == [0, 1, 2, 3, 4, 5, 6, 7]
    assert "loss is nan at step 2; back to step 0, skipping the 2 batches since" in said
    lines, said, _, _ = run({2: NAN}, path, FakeCheckpoints(every=2), config=SKIP)
    assert [line["checkpoint_s"] for line in lines if "loss" in line] == [0, 0, 0.5, 0, 0, 0.5, 0]
    assert "loss is nan at step 3; back to step 2, skipping the 1 batch since" in said
    with pytest.raises(DivergedError, match="going back to step 0 did not help; lower --learning-rate"):
        run([NAN] * 40, path, config=SKIP)
    message = "grad_norm is nan at step 3; lower --learning-rate, or --on-trouble skip goes back"
    with pytest.raises(DivergedError, match=message):
        run({2: NAN}, path, name="grad_norm")


def test_a_run_that_goes_on_in_other_batches_reads_on_where_it_was(tmp_path):
    """Three steps of two sequences, the second of them skipped, then steps of four, then of one: each once."""
    saved, path = FakeCheckpoints(every=1), tmp_path / "metrics.jsonl"
    first = run({1: NAN}, path, saved, config=configure(SKIP, steps=3))
    assert first.read == [[0, 1], [2, 3], [4, 5], [6, 7]]
    larger = configure(SKIP, steps=5, microbatch_size=4, microbatches=1)
    then = run([], path, saved, config=larger, start=3, carried=saved.carried)
    assert then.read == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert [line["tokens"] for line in then.lines] == [24 + 16, 24 + 32]
    smaller = configure(larger, steps=7, microbatch_size=1)
    last = run([], path, saved, config=smaller, start=5, carried=saved.carried)
    assert last.read == [[16], [17]] and "warning" not in then.said + last.said
    assert [line["tokens"] for line in last.lines] == [24 + 32 + 4, 24 + 32 + 8]


def test_a_run_that_goes_on_in_other_sequences_says_that_text_comes_again(tmp_path):
    """Six sequences of 4 tokens are three of 8, from a cut of its own; five are two and a half."""
    saved, path = FakeCheckpoints(), tmp_path / "metrics.jsonl"
    run([], path, saved, config=configure(CONFIG, steps=3))
    longer = configure(CONFIG, steps=4, sequence=8)
    lines, said, _, read = run([], path, saved, config=longer, start=3, carried=saved.carried)
    assert read == [[3, 4]] and [line["tokens"] for line in lines] == [24 + 16]
    assert "warning: --sequence was 4 and is 8 now: the text is cut and ordered anew, so that some" in said
    carried = {"progress": {"sequences": 5, "sequence": 4, "tokens": 20}}
    progress = Progress.resumed(run_recipe(longer, model_config(longer)), 3, carried)
    assert (progress.sequences_read(3), progress.trained_tokens(3)) == (3, 20)


def test_growing_batches_are_of_their_step_though_batches_were_skipped(tmp_path):
    """Steps of 1, 1 and then 2 sequences; the third is trouble, and all three are done anew from further on."""
    growing = configure(SKIP, steps=4, first_microbatches=1, ramp_tokens=8)
    lines, _, _, read = run({1: NAN}, tmp_path / "metrics.jsonl", config=growing)
    assert read == [[0], [1], [2, 3], [4], [5], [6, 7], [8, 9]]
    steps = [line for line in lines if "loss" in line]
    assert [line["tokens"] for line in steps] == [4, 8, 16, 4, 8, 16, 24]
    for line, sequences in zip(steps, read, strict=True):
        assert line["tokens_per_s"] * line["step_s"] == pytest.approx(4 * len(sequences))


def test_the_watcher_is_told_what_may_take_longer_than_a_step(tmp_path):
    """Or the timer of a step would end the process: of one that compiles, an evaluation or a checkpoint."""
    told = []

    class Spy:
        def step(self, number, *, compiles):
            told.append(f"{'compiling ' if compiles else ''}step {number}")

        phase = staticmethod(told.append)

    growing = configure(SKIP, steps=4, first_microbatches=1, ramp_tokens=8, eval_every=3)
    run({1: NAN}, tmp_path / "metrics.jsonl", FakeCheckpoints(every=3), config=growing, heartbeat=Spy())
    first = ["compiling step 1", "step 2", "compiling step 3"]
    last = ["evaluating", "saving step 3", "step 4", "saving step 4"]
    assert told == [*first, "going back", *first, *last]


def test_experts_move_as_they_did_wherever_a_run_goes_on(tmp_path, monkeypatch):
    """Back to the beginning, where there was no checkpoint, and then to step 3; at the end nothing moves."""

    class FakeBalancer:
        added, told = 0, []

        def add(self, counts):
            self.added += 1

        def due(self, step):
            return step % 2 == 0

        def rebalance(self, state, step):
            self.told.append(f"moved at {step}")
            return state, {"step": step, "event": "experts rebalanced"}

        def to_json(self):
            return self.added

        def resume(self, state, saved):
            self.added = saved or 0
            self.told.append(f"resumed at {state.step} with {saved}")
            return state

    monkeypatch.setattr(loop, "make_balancer", lambda this: FakeBalancer())
    saved, path = FakeCheckpoints(every=3), tmp_path / "metrics.jsonl"
    lines, *_ = run({1: NAN, 6: NAN}, path, saved, config=SKIP)
    first = ["resumed at 0 with None", "moved at 2", "moved at 4"]
    assert FakeBalancer.told == [*first, "resumed at 3 with 3", "moved at 4"]
    assert saved.saved == [3, 6] and saved.restored == {"balance": 6}
    assert [line["step"] for line in lines if line.get("event") == "experts rebalanced"] == [2, 4, 4]
    FakeBalancer.told.clear()
    run([], path, saved, config=configure(SKIP, steps=8), start=6, carried=saved.carried)
    assert FakeBalancer.told == ["resumed at 6 with 6"]


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
    trouble = TroubleDetector(spike)
    records = ({"step": step, "loss": loss, "grad_norm": 1.0} for step, loss in enumerate(losses, 1))
    reasons = {record["step"]: trouble.reason(record) for record in records}
    found = [step for step, reason in reasons.items() if reason]
    assert found == spikes(losses, spike)
    assert set(found) >= {61, 62, 151} and 4 not in found, "none before there is anything to compare with"
    assert "spreads above the median" in reasons[61]


def test_falling_losses_and_small_steps_up_are_no_spikes():
    trouble = TroubleDetector(6.0)
    for step, loss in enumerate([*np.linspace(5, 2, 40), *[2.0] * 40, 2.1], 1):
        assert trouble.reason({"step": step, "loss": loss, "grad_norm": 1.0}) is None
    assert TroubleDetector(None).reason({"step": 1, "loss": 1e30, "grad_norm": 1.0}) is None


@pytest.mark.parametrize("at", [3, 20, 50])
def test_what_was_seen_outlives_the_process(at):
    """Through JSON, as a checkpoint has it: the same verdicts as without an end in between."""
    losses = np.random.default_rng(1).normal(3, 0.1, 80) + 2 * (np.arange(80) % 17 == 16)
    records = [{"loss": float(loss), "grad_norm": 1.0, "step": step} for step, loss in enumerate(losses, 1)]
    alone, first, second = TroubleDetector(3.0), TroubleDetector(3.0), TroubleDetector(3.0)
    expected = [alone.reason(record) for record in records]
    assert sum(reason is not None for reason in expected) >= 4
    assert [first.reason(record) for record in records[:at]] == expected[:at]
    assert first.may_return(at) and first.may_return(at)
    second.resume(json.loads(json.dumps(first.to_json())))
    assert [second.reason(record) for record in records[at:]] == expected[at:]
    assert second.may_return(at) and not second.may_return(at)


@pytest.mark.parametrize(("every", "back"), [(100, 0), (5, 15)])
def test_losses_that_are_learnt_again_are_no_spikes(tmp_path, every, back):
    """One spike costs one return, though the loss has fallen far since the step that the run goes back to."""
    curve = [3 + 3 * math.exp(-step / 2) for step in range(20)]
    losses = [*curve[:18], 9.0, *curve[back:]]
    config, path = configure(SKIP, steps=20, spike=6.0), tmp_path / "metrics.jsonl"
    lines, *_ = run(losses, path, FakeCheckpoints(every), config=config)
    (event,) = [line["event"] for line in lines if "event" in line]
    assert event.startswith("loss is 9 at step 19") and f"back to step {back}, skipping" in event
    assert [line["loss"] for line in lines if "loss" in line] == losses


def test_the_held_out_loss_is_measured_on_the_way(tmp_path):
    """Not at the last step, after which it is measured anyway."""
    lines, said, *_ = run([], tmp_path / "metrics.jsonl", config=configure(CONFIG, steps=4, eval_every=2))
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 4]
    assert lines[2] == {"step": 2, "heldout_loss": 2.0} and "held-out loss at step 2: 2.000 nats" in said
    steps = [line for line in lines if "loss" in line]
    assert [line["tokens"] for line in steps] == [n * math.prod(CONFIG.batch_shape) for n in (1, 2, 3, 4)]
    assert sorted(line["time"] for line in steps) == [line["time"] for line in steps]


def test_bits_per_byte_are_those_of_the_text():
    """Two tokens of three bytes and one of two: 8 bytes; what only fills up is left out."""
    sizes = np.array([0, 3, 2, 99])
    inputs, targets = np.array([[[2, 1, 1], [3, 3, 3]]]), np.array([[[1, 1, 2], [3, 3, 3]]])
    batch = {"inputs": inputs, "targets": targets}, np.array([[1.0, 0.0]])

    def count_bytes(tokens, before):
        assert before.tolist() == [2, 1, 1]
        return sizes[tokens].sum()

    corpus = types.SimpleNamespace(
        vocabulary=types.SimpleNamespace(file="tokenizer.json", count_bytes=count_bytes),
        heldout_batches=lambda num_sequences, shape: [batch],
    )
    this = types.SimpleNamespace(config=CONFIG, corpus=corpus, evaluate=lambda params: 2.5)
    this.bytes_per_token = Run.bytes_per_token.func(this)
    assert this.bytes_per_token == pytest.approx(8 / 3)
    assert Run.held_out(this, None) == {
        "heldout_loss": 2.5,
        "heldout_bits_per_byte": pytest.approx(2.5 * 3 / 8 / np.log(2)),
    }
    this.corpus = CORPUS
    assert Run.bytes_per_token.func(this) == 1.0
