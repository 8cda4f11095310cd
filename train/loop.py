"""A run: what it prints, the steps, the evaluations, the files it leaves."""

import dataclasses
import math
import signal
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from dualpipe_jax.schedule import CostModel, Schedule, simulate
from dualpipe_jax.schedule.formats.text import format_grid
from train.checkpoint import FOLDER, Checkpoints
from train.config import TrainConfig
from train.errors import DivergedError, Stopped
from train.facts import describe
from train.folder import METRICS, claimed, find, write_config
from train.metrics import Display, MetricsFile, Pace
from train.model import count_parameters, describe_dispatch, model_config
from train.processes import Processes, common
from train.setup import Run, prepare
from train.state import TrainState
from train.stop import Stop
from train.stragglers import Stragglers
from train.stragglers import describe as describe_stragglers


def run(config: TrainConfig, console: Console, processes: Processes, *, resume: bool = False) -> Path:
    """Train, measure the held-out loss before and after, say what came of it. Returns the run's folder.

    Raises:
      ConfigError, DataError: options or data that will not do.
      CheckpointError: what is to be resumed cannot be, or the last step could not be saved.
      DivergedError: the loss is no number any more.
      Stopped: a signal came, and the run was saved.
    """
    began = time.perf_counter()
    if processes.leads:
        find(config, resume=resume)  # before anything that takes time
    this = prepare(config)
    processes.agree(common(config, this.corpus.digest))
    processes.connect(this.layout.mesh)

    def note(text: str) -> None:
        say(console, text)

    with processes.entering(claimed(config, resume=resume)) as folder:
        config = dataclasses.replace(config, name=folder.name)
        this = dataclasses.replace(this, config=config)
        layout, numbers = this.layout, model_config(config)
        facts = describe(config, numbers, this.corpus.digest, layout.canonical)
        with Checkpoints(folder, config.checkpoint, layout, facts, note, processes) as checkpoints:
            if processes.leads:
                introduce(this, folder, console)
            state = checkpoints.restore() if resume else None
            if processes.leads:
                write_config(config, folder)
            if resume:
                note(f"resuming from step {0 if state is None else int(state.step)} of {folder}")
            state = this.init() if state is None else state
            path = folder / METRICS if processes.leads else None
            with MetricsFile(path, upto=int(state.step) if resume else -1) as file:
                conclude(this, state, folder, file, checkpoints, console, processes)
    say(console, f"wall time       {time.perf_counter() - began:.0f} s, compilation included")
    return folder


def conclude(
    this: Run,
    state: TrainState,
    folder: Path,
    file: MetricsFile,
    checkpoints: Checkpoints,
    console: Console,
    processes: Processes,
) -> None:
    """Train to the end and say what came of it."""
    num_steps = this.config.optimizer.steps
    if int(state.step) >= num_steps:
        say(console, f"all {num_steps} steps are done; --steps says how many there should be")
        return
    before = processes.first(lambda: held_out(file, 0))
    say(console, "\ncompiling ...")
    if before is None:
        before = this.evaluate(state.params)
        file.write({"step": 0, "heldout_loss": before})
    say(console, f"held-out loss before training: {before:.3f} nats per byte")
    state = train(this, state, file, console, checkpoints, processes)
    processes.pulse.phase("evaluating")
    after = this.evaluate(state.params)
    file.write({"step": num_steps, "heldout_loss": after})
    say(
        console,
        f"held-out loss   from {before:.3f} to {after:.3f} nats per byte\n"
        f"bubble          {bubble(this.schedule):.1%} of {this.schedule.name}'s step when F = I = W\n"
        f"files           {folder}/: config.json, schedule.txt, metrics.jsonl, {FOLDER}/\n"
        f"go on           scripts/train --name {folder.name} --resume --steps {2 * num_steps}",
    )


def train(
    this: Run,
    state: TrainState,
    file: MetricsFile,
    console: Console,
    checkpoints: Checkpoints,
    processes: Processes,
) -> TrainState:
    """The steps that are left of a run; each leaves a line in the metrics, the last one a checkpoint.

    Raises:
      CheckpointError, DivergedError, Stopped: see ``run``.
    """
    config, pace, first = this.config, Pace(), int(state.step)
    num_steps, waited = config.optimizer.steps, 0.0
    batch = this.batch(first)
    stragglers = Stragglers(processes, config.launch.straggler_every)
    display = Display(console, num_steps, config.log.every, first + 1)
    with display, Stop(processes.signals) as stop:
        for step in range(first, num_steps):
            processes.pulse.step(step + 1, compiles=step == first)
            started = time.perf_counter()
            state, on_device = this.update(state, *batch)
            with stragglers.host():
                batch = this.batch(step + 1)
            metrics = jax.device_get(on_device)
            load = in_layers(metrics.pop("counts"))
            seconds = time.perf_counter() - started
            pace.add(seconds)
            record = {
                "step": step + 1,
                **{name: value.item() for name, value in metrics.items()},
                "learning_rate": float(this.learning_rate(step)),
                "step_s": seconds,
                "tokens_per_s": config.tokens_per_step / seconds,
                "checkpoint_s": waited,
            }
            file.write(record)
            display.step(step + 1, record, pace)
            if not math.isfinite(record["loss"]):
                raise DivergedError(f"loss is {record['loss']} at step {step + 1}; lower --learning-rate")
            if (slowest := stragglers.report(step + 1)) is not None:
                file.write(slowest)
                say(console, describe_stragglers(slowest))
            if processes.preempted(step + 1):
                stop.note(signal.SIGTERM)
            waited, last = 0.0, step + 1 == num_steps
            if processes.decide(last or bool(stop.signal) or checkpoints.due(step + 1)):
                processes.pulse.phase(f"saving step {step + 1}")
                checkpoints.save(step + 1, state, record, load)
                waited = checkpoints.seconds
            if stop.signal and not last:
                checkpoints.finish(step + 1)
                told = f"{stop.reason}: saved at step {step + 1}; --name {config.name} --resume goes on from there"
                raise Stopped(told, code=128 + stop.signal)
    checkpoints.finish(num_steps)
    return state


def in_layers(counts: np.ndarray) -> list[list[int]]:
    """Loads of the layers in model order from int [num_stages, layers of a stage, experts], without empty places."""
    rows = counts.reshape(-1, counts.shape[-1])
    return rows[rows.sum(-1) > 0].tolist()


def held_out(file: MetricsFile, step: int) -> float | None:
    """The held-out loss at a step, if it was measured before the run was resumed."""
    found = [
        record["heldout_loss"] for record in file.kept if record["step"] == step and "heldout_loss" in record
    ]
    return found[-1] if found else None


def bubble(schedule: Schedule) -> float:
    """The fraction of a step that ranks wait, by simulation with equal costs of F, I and W."""
    played = simulate(schedule, CostModel())
    return sum(played.idle) / (schedule.num_ranks * played.makespan)


def introduce(this: Run, folder: Path, console: Console) -> None:
    """Say what will be trained on what and in which order; leave the order in the run's folder."""
    config, corpus = this.config, this.corpus
    picture = format_grid(this.schedule)
    (folder / "schedule.txt").write_text(picture + "\n")
    total, active = count_parameters(model_config(config))
    say(
        console,
        f"model      {config.model.name}: {total / 1e6:.2f} M parameters, {active / 1e6:.2f} M at work on a byte\n"
        f"experts    {describe_dispatch(config)}\n"
        f"data       {corpus.num_documents} documents: {len(corpus.train) / 1e6:.1f} MB to train on, "
        f"{len(corpus.heldout) / 1e6:.1f} MB held out\n"
        f"step       {' x '.join(map(str, config.batch_shape[:2]))} sequences of {config.data.sequence} bytes\n"
        f"devices    pp {config.mesh.pp} x ep {config.mesh.ep}, {jax.devices()[0].platform}\n"
        f"run        {folder}\n",
    )
    width = console.width if console.is_terminal else None  # cut off at the edge; the file has it whole
    say(console, "\n".join(line[:width] for line in picture.splitlines()))


def say(console: Console, text: str) -> None:
    """Print as it is: rich neither wraps nor colours it."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
