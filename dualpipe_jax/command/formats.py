"""A simulated schedule as the bytes of a file, in each format that the command writes."""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

# Functions that draw are imported at their first use.
from dualpipe_jax import schedule as schedules
from dualpipe_jax.command.options import CommandError, check_files
from dualpipe_jax.command.output import in_terminal, say_written
from dualpipe_jax.command.share_files import SHARE_ENTRY, RankShare
from dualpipe_jax.present.numbers import as_ranges, number, percent
from dualpipe_jax.present.table import Table
from dualpipe_jax.schedule import MemoryModel, Timeline
from dualpipe_jax.schedule.blame import Link, slack
from dualpipe_jax.schedule.formats.costs_text import describe
from dualpipe_jax.schedule.formats.text import format_timeline
from dualpipe_jax.schedule.ir import spelt

Format = Literal["text", "csv", "json", "trace", "svg", "png", "html"]
PICTURES = "svg", "png", "html"

Chain = Sequence[Link]
"""Slots, each of which waits for the next one: the last in time comes first."""


def format_of(asked: Format | None, json: bool, output: Path | None) -> Format:
    """The format that was asked for, or else that of the file's ending. Called before the schedule is made.

    Raises:
      CommandError: two formats were asked for, or a picture for a terminal, or the file cannot be written.
      ModuleNotFoundError: the file is a picture, and matplotlib is not installed.
    """
    if output is not None:
        check_files(output)
    if json and asked not in (None, "json"):
        raise CommandError(f"--json and --format {asked} are two formats; drop either")
    endings: dict[str, Format] = {f".{form}": form for form in get_args(Format)}
    ending = output.suffix.lower() if output else ""
    form = "json" if json else asked or endings.get(ending, "text")
    if output is None and form in PICTURES and in_terminal():
        raise CommandError(f"--format {form} is not for a terminal; add --output FILE.{form}")
    return form


def write(data: bytes, output: Path | None) -> None:
    """Write to the file and report it on standard error; without a file, write to standard output."""
    if output is not None:
        output.write_bytes(data)
        say_written(output)
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)


def encode(timeline: Timeline, form: Format, share: RankShare, chain: Chain | None = None) -> bytes:
    """The bytes of a file. The timeline's costs are a stage's. Pictures, pages and traces mark a chain, JSON lists it.

    Raises:
      CommandError: there is a chain, and the format is CSV, which has no place for it.
    """
    if chain is not None and form == "csv":
        raise CommandError(
            "--why: CSV holds orders alone; give a picture, a page, a trace or JSON, or no --output"
        )
    schedule, costs, sizes, units = timeline.schedule, *share
    match form:
        case "text":
            text = _text(timeline, share)
        case "json":
            text = _json(timeline, share, chain)
        case "csv":
            text = schedules.to_torch_csv(schedule)
        case "trace":
            from dualpipe_jax.schedule.formats.trace import MICROSECONDS

            unit_us = MICROSECONDS.get(units.time, MICROSECONDS[""])
            text = json.dumps(schedules.to_chrome_trace(timeline, unit_us, chain=chain))
        case "html":
            text = schedules.html_page(schedule, costs, sizes, units=units, chain=chain)
        case "svg" | "png":
            memory = sizes.for_schedule(schedule) if share.counts_memory else None
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, f"schedule.{form}")
                schedules.plot(timeline, path, memory=memory, units=units, chain=chain)
                return path.read_bytes()
    return f"{text.rstrip()}\n".encode()


def summary(timeline: Timeline, share: RankShare) -> tuple[str, Table]:
    """A line about the step, and a table of each rank's idle time and memory; equal ranks share a row.

    Activations are in units of those of a whole rank's share of the model.
    """
    schedule = timeline.schedule
    _, sizes, units = share
    counted = share.counts_memory
    activations = timeline.memory(MemoryModel().for_schedule(schedule))
    memory = timeline.memory(sizes.for_schedule(schedule))
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank, idle in enumerate(timeline.idle):
        part = percent(idle / timeline.makespan if timeline.makespan else 0.0)
        cells = number(idle, of=timeline.makespan), part, number(activations[rank])
        rows.setdefault((*cells, *([units.size(memory[rank])] if counted else [])), []).append(rank)
    line = f"makespan {units.duration(timeline.makespan)}, bubble {percent(timeline.bubble)}"
    if counted:
        line += f", memory {units.size(max(memory))}"
    memory_title = [units.of_memory("memory")] if counted else []
    head = "ranks", units.of_time("idle"), "of the step", "activations", *memory_title
    return line, Table(head, tuple((as_ranges(ranks), *cells) for cells, ranks in rows.items()))


def _text(timeline: Timeline, share: RankShare) -> str:
    line, table = summary(timeline, share)
    below = f"{line}\ncost of a stage: {describe(timeline.costs, share.units)}\n{table}"
    comments = "\n".join(f"# {row}" for row in below.splitlines())
    return f"{format_timeline(timeline)}\n{comments}\n{share.comment()}"


def _json(timeline: Timeline, share: RankShare, chain: Chain | None) -> str:
    schedule = timeline.schedule
    simulated: dict[str, Any] = {
        SHARE_ENTRY: share.entry(),
        "costs": dataclasses.asdict(timeline.costs),
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "idle": timeline.idle,
        "peak_activations": timeline.memory(MemoryModel().for_schedule(schedule)),
        "memory": timeline.memory(share.sizes.for_schedule(schedule)),
        "starts": timeline.starts,
        "ends": timeline.ends,
        "slack": slack(timeline),
    }
    if chain is not None:
        simulated["why"] = [dataclasses.asdict(link) | {"slot": spelt(link.slot)} for link in chain]
    return schedules.to_json(schedule, simulated)
