"""A run from its options to its report: what it prints, evaluates and writes; ``loop`` has its steps."""

import dataclasses
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from dualpipe_jax.present.numbers import how_many
from dualpipe_jax.schedule import simulate
from dualpipe_jax.schedule.formats.text import format_grid
from models.kernels import Kernels
from train.config import FLAGS, ConfigError, TrainConfig
from train.data.text import describe_skipped
from train.export import check_export, export
from train.figures.folder import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    SCHEDULE,
    claimed_folder,
    planned_folder,
    reporting_write_errors,
    write_config,
)
from train.figures.metrics import MetricsFile, say
from train.figures.trackers import Tracker, Trackers
from train.loop import train
from train.model import count_parameters, describe_dispatch, has_selection_bias
from train.options import options_as_dict
from train.processes.group import Processes, common_facts
from train.recipe import describe as describe_recipe
from train.report import write_report
from train.setup import Run, prepare
from train.state.checkpoint import Checkpoints
from train.state.facts import describe
from train.state.layout import TrainState, without_biases
from train.watch import read_profile, watch_run


def run(config: TrainConfig, console: Console, processes: Processes, *, resume: bool = False) -> Path:
    """Train, measure the held-out loss before and after, and print the results. Returns the run's folder.

    Raises:
      ConfigError, DataError: options or data are invalid.
      CheckpointError: the run cannot be resumed, or its last step or its weights could not be saved.
      DivergedError: the loss or the gradient was not finite, or the loss spiked.
      Stopped: a signal came, and the run was saved.
    """
    began = time.perf_counter()
    if processes.leads:
        planned_folder(config, resume=resume)  # before anything that takes time
    this = prepare(config)
    config = this.config
    if processes.leads:
        check_export(config, this.layout.model.config)
    processes.check_equal(common_facts(config, this.corpus.fingerprint))
    processes.connect(this.layout.mesh)

    def note(text: str) -> None:
        say(console, text)

    with processes.entered_by_leader(claimed_folder(config, resume=resume)) as folder:
        config = dataclasses.replace(config, name=folder.name)
        this = dataclasses.replace(this, config=config)
        layout, corpus = this.layout, this.corpus
        numbers, vocabulary = layout.model.config, corpus.vocabulary
        facts = describe(
            config,
            numbers,
            corpus.fingerprint,
            layout.canonical,
            vocabulary.fingerprint,
            vocabulary.separator,
        )
        with Checkpoints(folder, config.checkpoint, layout, facts, note, processes) as checkpoints:
            if processes.leads:
                print_summary(this, folder, console)
            state = checkpoints.restore() if resume else None
            mended = None if state is None or has_selection_bias(numbers) else without_biases(state)
            if mended is not None:
                state = mended
                note(
                    f"warning: the routers of {config.model.name} have no selection bias; those that an earlier "
                    "trainer moved are zero from here on, so that the weights can be exported"
                )
            ended = state is not None and int(state.step) >= config.optimizer.steps
            if processes.leads and not (ended and (folder / CONFIG).exists()):
                with reporting_write_errors(folder):
                    vocabulary.write(folder)
                    write_config(config, folder)
                    (folder / SCHEDULE).write_text(format_grid(this.schedule) + "\n")
            if resume:
                note(f"resuming from step {0 if state is None else int(state.step)} of {folder}")
            # Of a start that saved nothing no record stays: it may have had another seed, model or text.
            upto = -1 if state is None else int(state.step)
            state = this.init() if state is None else state
            path = folder / METRICS if processes.leads else None
            with reporting_write_errors(folder):
                file = MetricsFile(path, upto)
            if file.damage:
                note(f"warning: {file.damage}")
            names = config.log.track if processes.leads and not ended else ()
            try:
                trackers = Trackers(file, names, folder, options_as_dict(config), note, int(state.step))
                with closing(trackers):
                    train_and_report(
                        this, state, folder, trackers, checkpoints, console, file.earlier_records, processes
                    )
            finally:
                if processes.leads:
                    # Also for a run that was cut short.
                    try_write_report(folder, note)
    say(console, f"wall time       {time.perf_counter() - began:.0f} s, compilation included")
    return folder


def try_write_report(folder: Path, note: Callable[[str], None]) -> None:
    """Write report.html. A full disk or a damaged file is only reported, to leave the run's own end as it is."""
    try:
        write_report(folder)
    except (OSError, ConfigError) as error:
        note(
            f"warning: no report.html: {error}; scripts/train --report {folder} writes it once that is mended"
        )


def train_and_report(
    this: Run,
    state: TrainState,
    folder: Path,
    file: Tracker,
    checkpoints: Checkpoints,
    console: Console,
    earlier_records: Sequence[Mapping[str, Any]],
    processes: Processes,
) -> None:
    """Train to the end and print the results. ``earlier_records`` are the metrics of an earlier part of the run."""
    num_steps, unit = this.config.optimizer.steps, this.corpus.vocabulary.unit
    if int(state.step) >= num_steps:
        say(console, f"the last step, {num_steps}, is done; --steps says how many there should be")
        # A run that is killed between its last save and its last evaluation leaves that to the next start.
        if int(state.step) == num_steps and not processes.broadcast(
            lambda: any(r["step"] == num_steps and "heldout_loss" in r for r in earlier_records)
        ):
            processes.heartbeat.phase("evaluating")
            found = this.held_out(state.params)
            file.write({"step": num_steps, **found})
            say(console, f"held-out loss   {found['heldout_loss']:.3f} nats per {unit}")
        export_weights(this, state, console, processes)
        return
    first, carried = int(state.step), {"skipped": 0, **checkpoints.restored.get("carried", {})}
    say(console, "\ncompiling ...")
    changed = held_out_changes(checkpoints.restored.get("options", {}), this.config)
    if "before" not in carried or changed:
        found = this.held_out(state.params)
        carried["before"], carried["since"] = found["heldout_loss"], first
        file.write({"step": first, **found, **({"anew": True} if changed else {})})
    if changed:
        text = f"{changed}: the held-out loss is measured anew at step {first}, and compared with that"
        file.write({"step": first, "event": text})
        say(console, f"warning: {text}")
    before, since = carried["before"], carried.get("since", 0)
    place = f"at step {since}" if since else "before training"
    say(console, f"held-out loss {place}: {before:.3f} nats per {unit}")
    with closing(watch_run(this, folder, int(state.step), processes.leads)) as watch:
        state = train(this, state, file, console, checkpoints, watch, processes, carried)
    processes.heartbeat.phase("evaluating")
    if this.config.log.profile and num_steps - first > 1:
        say(console, read_profile(this, state, folder, processes.leads))
    elif this.config.log.profile:
        # What lies in the folder is of an earlier start, perhaps under another schedule.
        say(console, "profile         none: the only step was one that is compiled in")
    found = this.held_out(state.params)
    after, bits = found["heldout_loss"], found["heldout_bits_per_byte"]
    file.write({"step": num_steps, **found})
    export_weights(this, state, console, processes)
    say(
        console,
        f"held-out loss   from {before:.3f}{f' {place}' if since else ''} to {after:.3f} nats per {unit}, "
        f"{bits:.3f} bits per byte\n"
        f"bubble          {simulate(this.schedule).bubble:.1%} of {this.schedule.name}'s step when F = I = W\n"
        f"files           {folder}/: report.html, {METRICS}, {CONFIG}, environment.json, {SCHEDULE}, {CHECKPOINTS}/\n"
        f"go on           {shlex.join(resume_command(folder, 2 * num_steps))}",
    )


def resume_command(folder: Path, num_steps: int) -> list[str]:
    """The words of a command that continues a run up to ``num_steps`` steps."""
    where = [] if folder.parent == TrainConfig().runs else ["--runs", str(folder.parent)]
    return ["scripts/train", *where, "--name", folder.name, "--resume", "--steps", str(num_steps)]


def export_weights(this: Run, state: TrainState, console: Console, processes: Processes) -> None:
    processes.heartbeat.phase("exporting")
    if (text := export(this, state, processes)) is not None:
        say(console, text)


def held_out_changes(saved: Mapping[str, Any], config: TrainConfig) -> str:
    """The options that have changed since a checkpoint and change the held-out text, in words; "" if there are none."""
    now = options_as_dict(config)
    return ", ".join(
        f"{flag} was {then} and is {now[section][name]} now"
        for flag in ("--eval-sequences", "--sequence")
        for section, name in (FLAGS[flag],)
        if (then := saved.get(section, {}).get(name, now[section][name])) != now[section][name]
    )


def print_summary(this: Run, folder: Path, console: Console) -> None:
    """Print what will be trained, on which data and devices, and the schedule."""
    config, corpus = this.config, this.corpus
    picture = format_grid(this.schedule)
    unit = corpus.vocabulary.unit
    numbers = this.layout.model.config
    total, active = count_parameters(numbers)
    platform, chosen = jax.devices()[0].platform, Kernels(config.step.attention, config.step.matmul)
    text = "" if platform == "cpu" else chosen.describe(platform, numbers, config.step.dispatch)
    kernels = text and f"kernels    {text}\n"
    say(
        console,
        f"model      {config.model.name}: {total / 1e6:.2f} M parameters, {active / 1e6:.2f} M active for a {unit}\n"
        f"experts    {describe_dispatch(config)}\n"
        f"data       {how_many(corpus.num_documents, 'document')}: {corpus.num_tokens / 1e6:.1f} M {unit}s to train "
        f"on, {corpus.num_heldout / 1e6:.1f} M held out\n"
        f"step       {' x '.join(map(str, config.batch_shape[:2]))} sequences of {config.sequence} {unit}s\n"
        f"recipe     {describe_recipe(config, this.recipe)}\n"
        f"devices    {config.step.layout}, {jax.devices()[0].platform}\n"
        f"{kernels}"
        f"run        {folder}\n",
    )
    if corpus.skipped:
        say(console, describe_skipped(corpus.skipped) + "\n")
    # Lines are cut off at the edge of a terminal; schedule.txt has them whole.
    width = console.width if console.is_terminal else None
    say(console, "\n".join(line[:width] for line in picture.splitlines()))
