"""A run: what it prints, the steps, the evaluations, the files it leaves."""

import json
import math
import time
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from dualpipe_jax.inspect import read
from dualpipe_jax.schedule import CostModel, Schedule, simulate
from dualpipe_jax.schedule.formats.text import format_grid
from train.config import ConfigError, TrainConfig
from train.data import draw_batch, even_batches
from train.errors import DivergedError
from train.figures import step_record
from train.metrics import Display, MetricsFile, Pace
from train.model import count_parameters, model_config
from train.options import plain
from train.predict import model_flops
from train.profile import ProfileError, Profiler, measure, write_profile
from train.profile.capture import read_events
from train.rates import Rates, find_peak, memory_gib
from train.report import write_report
from train.report.folder import environment
from train.setup import Run, prepare
from train.step import TrainState
from train.trackers import Tracker, Trackers


def run(config: TrainConfig, console: Console) -> Path:
    """Train, measure the held-out loss before and after, say what came of it. Returns the run's folder."""
    began = time.perf_counter()
    folder = pick_folder(config)
    this = prepare(config)
    make_folder(folder)
    introduce(this, folder, console)
    rates = run_rates(config)
    describe_environment(this, rates, folder)
    metrics = MetricsFile(folder / "metrics.jsonl")
    try:
        with Trackers(metrics, config.log.track, folder, plain(config)) as file:
            say(console, "\ncompiling ...")
            before = evaluate(this, this.state.params)
            file.write({"step": 0, "heldout_loss": before})
            say(console, f"held-out loss before training: {before:.3f} nats per byte")
            profiler = make_profiler(config, folder)
            state = train(this, rates, file, console, profiler)
            if config.log.profile:
                say(console, read_profile(this, state, folder))
            after = evaluate(this, state.params)
            file.write({"step": config.optimizer.steps, "heldout_loss": after})
    finally:
        write_report(folder)  # of a run that was cut short too
    say(
        console,
        f"held-out loss   from {before:.3f} to {after:.3f} nats per byte\n"
        f"bubble          {bubble(this.schedule):.1%} of {this.schedule.name}'s step when F = I = W\n"
        f"wall time       {time.perf_counter() - began:.0f} s, compilation included\n"
        f"files           {folder}/: report.html, config.json, environment.json, schedule.txt, metrics.jsonl",
    )
    return folder


def train(
    this: Run, rates: Rates, file: Tracker, console: Console, profiler: Profiler | None = None
) -> TrainState:
    """All steps of a run; each leaves a line in the metrics."""
    config, state, pace = this.config, this.state, Pace()
    devices = used_devices(config)
    profiler = profiler or Profiler(Path(), 0, 0)
    batch = draw_batch(this.corpus.train, config.seed, 0, config.batch_shape)
    with closing(profiler), Display(console, config.optimizer.steps, config.log.every) as display:
        for step in range(config.optimizer.steps):
            profiler.before(step)
            started = time.perf_counter()
            state, on_device = this.update(state, *batch)
            dispatched = time.perf_counter()
            batch = draw_batch(this.corpus.train, config.seed, step + 1, config.batch_shape)
            drawn = time.perf_counter()
            metrics = jax.device_get(on_device)
            seconds = time.perf_counter() - started
            pace.add(seconds)
            profiler.after()
            with_load = step % config.log.load_every == 0 or step + 1 == config.optimizer.steps
            record = {
                "step": step + 1,
                **step_record(metrics, with_load=with_load),
                "learning_rate": float(this.learning_rate(step)),
                "step_s": seconds,
                "data_s": drawn - dispatched,
                **rates.of(seconds),
                **memory_gib(devices),
            }
            file.write(record)
            display.step(step + 1, record, pace)
            if not math.isfinite(record["loss"]):
                raise DivergedError(f"loss is {record['loss']} at step {step + 1}; lower --learning-rate")
    return state


def run_rates(config: TrainConfig) -> Rates:
    """What turns the duration of a run's steps into rates."""
    numbers, devices = model_config(config), used_devices(config)
    _, active = count_parameters(numbers)
    return Rates(
        tokens=config.tokens_per_step,
        flops_per_token=model_flops(numbers, active, config.data.sequence),
        num_devices=len(devices),
        peak=find_peak(devices, config.log.peak_tflops, config.log.measure_peak),
    )


def used_devices(config: TrainConfig) -> list[Any]:
    """The devices of a run's mesh."""
    return jax.devices()[: config.mesh.pp * config.mesh.ep]


def describe_environment(this: Run, rates: Rates, folder: Path) -> None:
    """Leave in the run's folder where it ran."""
    found = environment(used_devices(this.config))
    found["peak"] = "" if rates.peak is None else rates.peak.source
    (folder / "environment.json").write_text(json.dumps(found, indent=2) + "\n")


def make_profiler(config: TrainConfig, folder: Path) -> Profiler:
    """Of the steps after the third, or of the last ones of a run that has fewer; the first compiles."""
    skip = max(1, min(3, config.optimizer.steps - config.log.profile))
    return Profiler(folder / "profile", config.log.profile, skip)


def read_profile(this: Run, state: TrainState, folder: Path) -> str:
    """Measure the profiled steps and leave what was found in the run's folder; returns what to tell."""
    batch = draw_batch(this.corpus.train, this.config.seed, 0, this.config.batch_shape)
    update: Any = this.update
    program = update.lower(state, *batch).compile()  # compiled before: found again
    mesh = jax.tree.leaves(state.params)[0].sharding.mesh
    devices = [[device.id for device in rank] for rank in mesh.devices]
    try:
        measured = measure(read_events(folder / "profile"), read(program), this.schedule, devices)
    except ProfileError as error:
        return f"profile         {folder}/profile: the trace alone; no timeline: {error}"
    return write_profile(measured, folder / "profile", used_devices(this.config))


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
