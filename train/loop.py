"""A run: what it prints, the steps, the evaluations, the files it leaves."""

import dataclasses
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from dualpipe_jax.schedule import CostModel, Schedule, simulate
from dualpipe_jax.schedule.formats.text import format_grid
from train.config import TrainConfig
from train.data import Batch, Prefetch
from train.data.text import describe_skipped
from train.errors import DivergedError, Stopped
from train.figures.folder import METRICS, claimed, find, write_config, writing
from train.figures.metrics import Display, MetricsFile, Pace
from train.figures.step import expert_load
from train.figures.trackers import Tracker, Trackers
from train.figures.watch import Watch, read_profile, watch_run
from train.model import count_parameters, describe_dispatch, has_selection_bias, model_config
from train.options import plain
from train.processes.group import Processes, common
from train.processes.stop import Stop
from train.processes.stragglers import Stragglers
from train.processes.stragglers import describe as describe_stragglers
from train.recipe import describe as describe_recipe
from train.report import write_report
from train.setup import Run, prepare
from train.state.checkpoint import FOLDER, Checkpoints
from train.state.export import check_export, export
from train.state.facts import describe
from train.state.layout import TrainState, without_biases
from train.state.rebalance import make_balancer
from train.trouble import Trouble


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
    config = this.config
    if processes.leads:
        check_export(config, model_config(config, this.corpus.vocab))
    processes.agree(common(config, this.corpus.fingerprint))
    processes.connect(this.layout.mesh)

    def note(text: str) -> None:
        say(console, text)

    with processes.entering(claimed(config, resume=resume)) as folder:
        config = dataclasses.replace(config, name=folder.name)
        this = dataclasses.replace(this, config=config)
        layout, numbers = this.layout, model_config(config, this.corpus.vocab)
        read = this.corpus
        facts = describe(config, numbers, read.fingerprint, layout.canonical, read.vocabulary.fingerprint)
        with Checkpoints(folder, config.checkpoint, layout, facts, note, processes) as checkpoints:
            if processes.leads:
                with writing(folder):
                    introduce(this, folder, console)
            state = checkpoints.restore() if resume else None
            if (
                state is not None
                and not has_selection_bias(numbers)
                and (mended := without_biases(state)) is not None
            ):
                state = mended
                note(
                    f"warning: the routers of {config.model.name} have no selection bias; those that an earlier "
                    "trainer moved are zero from here on, so that the weights can be exported"
                )
            if processes.leads:
                with writing(folder):
                    write_config(config, folder)
            if resume:
                note(f"resuming from step {0 if state is None else int(state.step)} of {folder}")
            state = this.init() if state is None else state
            path = folder / METRICS if processes.leads else None
            with writing(folder):
                file = MetricsFile(path, upto=int(state.step) if resume else -1)
            if file.damage:
                note(f"warning: {file.damage}")
            told = config.log.track if processes.leads else ()
            try:
                with Trackers(file, told, folder, plain(config), note, int(state.step)) as trackers:
                    conclude(this, state, folder, trackers, checkpoints, console, file.kept, processes)
            finally:
                if processes.leads:
                    report(folder, note)  # of a run that was cut short too
    say(console, f"wall time       {time.perf_counter() - began:.0f} s, compilation included")
    return folder


def report(folder: Path, note: Callable[[str], None]) -> None:
    """Write report.html; that the disk is full, or the like, is said."""
    try:
        write_report(folder)
    except OSError as error:
        note(
            f"warning: no report.html: {error}; scripts/train --report {folder} writes it when there is room"
        )


def conclude(
    this: Run,
    state: TrainState,
    folder: Path,
    file: Tracker,
    checkpoints: Checkpoints,
    console: Console,
    kept: Sequence[Mapping[str, Any]],
    processes: Processes,
) -> None:
    """Train to the end and say what came of it; ``kept`` are the records of an earlier part of the run."""
    num_steps, unit = this.config.optimizer.steps, this.corpus.vocabulary.unit
    if int(state.step) >= num_steps:
        say(console, f"all {num_steps} steps are done; --steps says how many there should be")
        export_weights(this, state, console, processes)
        return
    first, carried = int(state.step), dict(checkpoints.restored.get("carried", {}))
    if not carried:  # nothing restored, or by a trainer that left these to metrics.jsonl
        carried["before"], carried["skipped"] = processes.first(
            lambda: (held_out(kept, 0), skipped_before(kept))
        )
    say(console, "\ncompiling ...")
    since = "before training" if carried["before"] is not None or not first else f"at step {first}"
    if carried["before"] is None:
        found = this.held_out(state.params)
        carried["before"] = found["heldout_loss"]
        file.write({"step": first, **found})
    before = carried["before"]
    say(console, f"held-out loss {since}: {before:.3f} nats per {unit}")
    with watch_run(this, folder, int(state.step), processes.leads) as watch:
        state = train(this, state, file, console, checkpoints, watch, processes, carried)
    processes.pulse.phase("evaluating")
    if this.config.log.profile:
        say(console, read_profile(this, state, folder, processes.leads))
    found = this.held_out(state.params)
    after, bits = found["heldout_loss"], found["heldout_bits_per_byte"]
    file.write({"step": num_steps, **found})
    export_weights(this, state, console, processes)
    say(
        console,
        f"held-out loss   from {before:.3f} to {after:.3f} nats per {unit}, {bits:.3f} bits per byte\n"
        f"bubble          {bubble(this.schedule):.1%} of {this.schedule.name}'s step when F = I = W\n"
        f"files           {folder}/: report.html, {METRICS}, config.json, environment.json, schedule.txt, {FOLDER}/\n"
        f"go on           scripts/train --name {folder.name} --resume --steps {2 * num_steps}",
    )


def export_weights(this: Run, state: TrainState, console: Console, processes: Processes) -> None:
    """What --export asks for."""
    processes.pulse.phase("exporting")
    if (told := export(this, state, processes)) is not None:
        say(console, told)


def train(
    this: Run,
    state: TrainState,
    file: Tracker,
    console: Console,
    checkpoints: Checkpoints,
    watch: Watch,
    processes: Processes,
    carried: Mapping[str, Any] | None = None,
) -> TrainState:
    """The steps that are left of a run; each leaves a line in the metrics, the last one a checkpoint.

    ``carried`` is what checkpoints keep beside the state: the held-out loss "before"; how many batches were "skipped",
    so that step n, from 0 on, learns from batch n + skipped; and what "trouble" has seen.

    Raises:
      CheckpointError, DivergedError, Stopped: see ``run``.
    """
    config, pace, first = this.config, Pace(), int(state.step)
    num_steps, waited, step = config.optimizer.steps, 0.0, first
    carried = carried or {"skipped": 0}
    trouble, skipped = Trouble(config.log.spike), carried["skipped"]
    if "trouble" in carried:
        trouble.resume(carried["trouble"])
    stragglers = Stragglers(processes, config.launch.straggler_every)

    def draw(step: int) -> Batch:
        return this.batch(step + skipped)

    balancer = make_balancer(this)
    if balancer is not None and first:
        state = balancer.resume(state, checkpoints.restored.get("balance"))
    display = Display(console, num_steps, config.log.every, first + 1)
    with display, Stop(processes.signals) as stop, Prefetch(draw, first, num_steps) as ahead:
        while step < num_steps:
            processes.pulse.step(step + 1, compiles=step == first or this.compiles(step + skipped))
            watch.begin(step)
            started = time.perf_counter()
            with stragglers.host():
                batch = ahead.get(step)
            state, on_device = this.update(state, batch)
            metrics = jax.device_get(on_device)
            seconds = time.perf_counter() - started
            pace.add(seconds)
            more = {"learning_rate": float(this.recipe.learning_rate(step)), "data_wait_s": ahead.wait}
            record = watch.end(step, metrics, seconds, checkpoint_s=waited, **more)
            if skipped:
                record["skipped"] = skipped
            file.write(record)
            display.step(step + 1, record, pace)
            if (slowest := stragglers.report(step + 1)) is not None:
                file.write(slowest)
                say(console, describe_stragglers(slowest))
            if processes.preempted():
                stop.note(signal.SIGTERM)
            last = step + 1 == num_steps
            due = last or bool(stop.signal) or checkpoints.due(step + 1)
            reason, due = processes.decide((trouble.reason(record), due))
            if reason is not None:
                processes.pulse.phase("going back")
                state = go_back(this, checkpoints, reason, trouble)
                back = int(state.step)
                if balancer is not None:
                    state = balancer.resume(state, checkpoints.restored.get("balance") if back else None)
                told = f"{reason}; back to step {back}, skipping the {step + 1 - back} batches since"
                file.write({"step": step + 1, "event": told})
                say(console, f"warning: {told}")
                skipped, step, waited = skipped + step + 1 - back, back, 0.0
                ahead.restart(step)
                continue
            step, waited = step + 1, 0.0
            if balancer is not None:
                balancer.add(metrics["counts"])
                if balancer.due(step) and not last:
                    processes.pulse.phase("rebalancing")
                    state, moved = balancer.rebalance(state, step)
                    file.write(moved)
            if config.log.eval_every and step % config.log.eval_every == 0 and not last:
                processes.pulse.phase("evaluating")
                found = this.held_out(state.params)
                file.write({"step": step, **found})
                say(console, f"held-out loss at step {step}: {found['heldout_loss']:.3f} nats")
            if due:
                processes.pulse.phase(f"saving step {step}")
                own = None if balancer is None else balancer.saved()
                kept = {**carried, "skipped": skipped, "trouble": trouble.saved()}
                checkpoints.save(step, state, record, expert_load(metrics["counts"]).tolist(), own, kept)
                waited = checkpoints.seconds
            if stop.signal and not last:
                checkpoints.finish(step)
                told = (
                    f"{stop.reason}: saved at step {step}; --name {config.name} --resume goes on from there"
                )
                raise Stopped(told, code=128 + stop.signal)
    checkpoints.finish(num_steps)
    return state


def go_back(this: Run, checkpoints: Checkpoints, reason: str, trouble: Trouble) -> TrainState:
    """The state of the latest checkpoint, or the first state where there is none.

    Raises:
      DivergedError: this is not wanted, or did not help.
    """
    if this.config.log.on_trouble == "stop":
        raise DivergedError(
            f"{reason}; lower --learning-rate, or --on-trouble skip goes back and skips its batches"
        )
    checkpoints.wait()
    state = checkpoints.restore()
    state = this.init() if state is None else state
    if not trouble.may_return(int(state.step)):
        raise DivergedError(
            f"{reason}; going back to step {int(state.step)} did not help; lower --learning-rate"
        )
    return state


def skipped_before(kept: Sequence[Mapping[str, Any]]) -> int:
    """How many batches an earlier part of the run skipped."""
    return next((record.get("skipped", 0) for record in reversed(kept) if "loss" in record), 0)


def held_out(kept: Sequence[Mapping[str, Any]], step: int) -> float | None:
    """The held-out loss at a step, if it was measured before the run was resumed."""
    found = [record["heldout_loss"] for record in kept if record["step"] == step and "heldout_loss" in record]
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
    unit = corpus.vocabulary.unit
    total, active = count_parameters(model_config(config, corpus.vocab))
    say(
        console,
        f"model      {config.model.name}: {total / 1e6:.2f} M parameters, {active / 1e6:.2f} M at work on a {unit}\n"
        f"experts    {describe_dispatch(config)}\n"
        f"data       {corpus.num_documents} documents: {corpus.num_tokens / 1e6:.1f} M {unit}s to train on, "
        f"{corpus.num_heldout / 1e6:.1f} M held out\n"
        f"step       {' x '.join(map(str, config.batch_shape[:2]))} sequences of {config.sequence} {unit}s\n"
        f"recipe     {describe_recipe(config, this.recipe)}\n"
        f"devices    {layout_of(config)}, {jax.devices()[0].platform}\n"
        f"run        {folder}\n",
    )
    if corpus.skipped:
        say(console, describe_skipped(corpus.skipped) + "\n")
    width = console.width if console.is_terminal else None  # cut off at the edge; the file has it whole
    say(console, "\n".join(line[:width] for line in picture.splitlines()))


def layout_of(config: TrainConfig) -> str:
    """The mesh in words."""
    mesh = config.mesh
    return (f"dp {mesh.dp} x " if mesh.dp > 1 else "") + f"pp {mesh.pp} x ep {mesh.ep}"


def say(console: Console, text: str) -> None:
    """Print as it is: rich neither wraps nor colours it."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
