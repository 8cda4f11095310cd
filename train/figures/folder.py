"""A run's folder: to which run it belongs, and a lock so that only one process writes into it."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

from train.config import ConfigError, TrainConfig
from train.figures.metrics import read_records
from train.lock import LockHeld, hold_lock
from train.options import options_as_dict, without_start_options

METRICS = "metrics.jsonl"
CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
SCHEDULE = "schedule.txt"
LOCK = "lock"


def planned_folder(config: TrainConfig, *, resume: bool) -> Path | None:
    """The folder that a run will have, which is not made here; None if its name is found only when it is made.

    Raises:
      ConfigError: another run has that name.
    """
    if config.name is None:
        return None
    folder = config.runs / config.name
    if not resume and has_begun(folder):
        raise _taken(folder)
    return folder


def has_begun(folder: Path) -> bool:
    """Whether a run has done a step in a folder or left unreadable files there. A start that failed does not count."""
    saved, metrics = folder / CHECKPOINTS, folder / METRICS
    try:
        if os.path.isdir(saved) and os.listdir(saved):
            return True
        records, damaged = read_records(metrics) if os.path.exists(metrics) else ([], [])
    except OSError:
        return True
    return bool(damaged) or any(record["step"] for record in records)


def make_folder(config: TrainConfig, *, resume: bool) -> Path:
    """The run's folder, made if it does not exist.

    Raises:
      ConfigError: it cannot be made, or another run has that name.
    """
    folder = planned_folder(config, resume=resume)
    try:
        if folder is None:
            return make_unnamed_folder(config)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--runs: cannot make {folder or config.runs}: {error.strerror}") from None
    return folder


@contextmanager
def claimed_folder(config: TrainConfig, *, resume: bool) -> Iterator[Path]:
    """The run's folder, made by ``make_folder`` and locked by ``locked_folder``.

    Raises:
      ConfigError: it cannot be made or belongs to another run, ended or running.
    """
    folder = make_folder(config, resume=resume)
    with locked_folder(folder, folder / LOCK):
        # Another run may have begun since ``make_folder``.
        if not resume and has_begun(folder):
            raise _taken(folder)
        yield folder


@contextmanager
def locked_folder(folder: Path, lock: Path) -> Iterator[None]:
    """Hold a run's folder by a lock file; see ``hold_lock``.

    Raises:
      ConfigError: another process holds it, or the file cannot be written.
    """
    with ExitStack() as holding:
        with reporting_write_errors(folder):
            try:
                holding.enter_context(hold_lock(lock))
            except LockHeld as by:
                raise ConfigError(
                    f"--name {folder.name}: {by} is at work in {folder}; let it end, or stop it there with SIGTERM, "
                    "at which it saves"
                ) from None
        yield


@contextmanager
def reporting_write_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError at the start of a run into an error of one line.

    Raises:
      ConfigError: the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--runs: cannot write into {folder}: {error.strerror or error}") from None


def write_config(config: TrainConfig, folder: Path) -> None:
    """Write all options except those of one start into a folder, in the form that --config reads."""
    new = folder / f"{CONFIG}.new"
    new.write_text(json.dumps(options_as_dict(without_start_options(config)), indent=2) + "\n")
    os.replace(new, folder / CONFIG)


def make_unnamed_folder(config: TrainConfig) -> Path:
    """Make a folder that no other run has, even if two runs begin in the same second."""
    config.runs.mkdir(parents=True, exist_ok=True)
    name = f"{config.step.schedule}-{datetime.now():%Y%m%d-%H%M%S}"
    for number in range(1, 1000):
        folder = config.runs / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise OSError(0, "a thousand runs began in this second")


def _taken(folder: Path) -> ConfigError:
    return ConfigError(
        f"--name {folder.name}: {folder} holds a run already; pick another name, remove it, or go on with it: --resume"
    )
