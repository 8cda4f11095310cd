"""A run: what it prints, the steps, the evaluations, the files it leaves."""

import json
import math
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from dualpipe_jax.schedule import CostModel, Schedule, simulate
from dualpipe_jax.schedule.formats.text import format_grid
from train.config import ConfigError, TrainConfig
from train.data import draw_batch, even_batches
from train.errors import DivergedError
from train.metrics import Display, MetricsFile, Pace
from train.model import count_parameters, model_config
from train.options import plain
from train.setup import Run, prepare
from train.step import TrainState


def run(config: TrainConfig, console: Console) -> Path:
    """Train, measure the held-out loss before and after, say what came of it. Returns the run's folder."""
    began = time.perf_counter()
    folder = pick_folder(config)
    this = prepare(config)
    make_folder(folder)
    introduce(this, folder, console)
    with MetricsFile(folder / "metrics.jsonl") as file:
        say(console, "\ncompiling ...")
        before = evaluate(this, this.state.params)
        file.write({"step": 0, "heldout_loss": before})
        say(console, f"held-out loss before training: {before:.3f} nats per byte")
        state = train(this, file, console)
        after = evaluate(this, state.params)
        file.write({"step": config.optimizer.steps, "heldout_loss": after})
    say(
        console,
        f"held-out loss   from {before:.3f} to {after:.3f} nats per byte\n"
        f"bubble          {bubble(this.schedule):.1%} of {this.schedule.name}'s step when F = I = W\n"
        f"wall time       {time.perf_counter() - began:.0f} s, compilation included\n"
        f"files           {folder}/: config.json, schedule.txt, metrics.jsonl",
    )
    return folder


def train(this: Run, file: MetricsFile, console: Console) -> TrainState:
    """All steps of a run; each leaves a line in the metrics."""
    config, state, pace = this.config, this.state, Pace()
    batch = draw_batch(this.corpus.train, config.seed, 0, config.batch_shape)
    with Display(console, config.optimizer.steps, config.log.every) as display:
        for step in range(config.optimizer.steps):
            started = time.perf_counter()
            state, on_device = this.update(state, *batch)
            batch = draw_batch(this.corpus.train, config.seed, step + 1, config.batch_shape)
            metrics = {name: value.item() for name, value in jax.device_get(on_device).items()}
            seconds = time.perf_counter() - started
            pace.add(seconds)
            record = {
                "step": step + 1,
                **metrics,
                "learning_rate": float(this.learning_rate(step)),
                "step_s": seconds,
                "tokens_per_s": config.tokens_per_step / seconds,
            }
            file.write(record)
            display.step(step + 1, record, pace)
            if not math.isfinite(metrics["loss"]):
                raise DivergedError(f"loss is {metrics['loss']} at step {step + 1}; lower --learning-rate")
    return state


def evaluate(this: Run, params: Any) -> float:
    """Mean loss on held-out text, in nats per byte; the same text for every run on the same data."""
    batches = even_batches(this.corpus.heldout, this.config.data.eval_batches, this.config.batch_shape)
    losses = []
    for batch in batches:
        (loss, _), _ = this.apply(params, *batch)
        losses.append(loss.item())
    return sum(losses) / len(losses)


def bubble(schedule: Schedule) -> float:
    """The fraction of a step that ranks wait, by simulation with equal costs of F, I and W."""
    played = simulate(schedule, CostModel())
    return sum(played.idle) / (schedule.num_ranks * played.makespan)


def pick_folder(config: TrainConfig) -> Path:
    """The run's own folder, not made yet. Raises ConfigError if another run has that name."""
    name = config.name or f"{config.mesh.schedule}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = config.runs / name
    if (folder / "metrics.jsonl").exists():
        raise ConfigError(f"--name {name}: {folder} holds a run already; pick another name or remove it")
    return folder


def make_folder(folder: Path) -> None:
    """Raises ConfigError where it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--runs: cannot make {folder}: {error.strerror}") from None


def introduce(this: Run, folder: Path, console: Console) -> None:
    """Say what will be trained on what and in which order; leave the same in the run's folder."""
    config, corpus = this.config, this.corpus
    picture = format_grid(this.schedule)
    (folder / "schedule.txt").write_text(picture + "\n")
    (folder / "config.json").write_text(json.dumps(plain(config), indent=2) + "\n")
    total, active = count_parameters(model_config(config))
    say(
        console,
        f"model      {config.model.name}: {total / 1e6:.2f} M parameters, {active / 1e6:.2f} M at work on a byte\n"
        f"data       {corpus.num_documents} documents: {len(corpus.train) / 1e6:.1f} MB to train on, "
        f"{len(corpus.heldout) / 1e6:.1f} MB held out\n"
        f"step       {' x '.join(map(str, config.batch_shape[:2]))} sequences of {config.data.sequence} bytes\n"
        f"devices    pp {config.mesh.pp} x ep {config.mesh.ep}, {jax.devices()[0].platform}\n",
    )
    width = console.width if console.is_terminal else None  # cut off at the edge; the file has it whole
    say(console, "\n".join(line[:width] for line in picture.splitlines()))


def say(console: Console, text: str) -> None:
    """Print as it is: rich neither wraps nor colours it."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
