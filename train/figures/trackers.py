"""Trackers that receive the metrics besides metrics.jsonl: TensorBoard and Weights & Biases, with one interface."""

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dualpipe_jax.installing import install_command
from train.config import ConfigError
from train.figures.folder import METRICS

Record = Mapping[str, Any]


class Tracker(Protocol):
    """Receives every record of a run, in order."""

    def write(self, record: Record) -> None:
        """Write a record: a dict of numbers by name, with "step" among them, and perhaps of records and lists."""

    def close(self) -> None:
        """Write what is not written yet. No record is written afterwards."""


class TensorBoard:
    """Scalars as TensorBoard reads them, in the run's folder: ``tensorboard --logdir runs``.

    Raises:
      ConfigError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path, config: Record, first: int = 0):
        # config.json is in the same folder.
        del config
        module = _load("tensorboardX", "tensorboard")
        # Steps that a resumed run repeats are shown once: TensorBoard drops events after the checkpoint, and all if
        # nothing was saved.
        resumes = any(folder.glob("events.out.tfevents.*"))
        again = {"purge_step": first + 1 if first else 0} if resumes else {}
        self._writer = module.SummaryWriter(str(folder), write_to_disk=True, **again)
        self._step = first

    def write(self, record: Record) -> None:
        if "loss" in record:
            if record["step"] <= self._step:
                self._drop_from(record["step"])
            self._step = record["step"]
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _drop_from(self, step: int) -> None:
        """Let TensorBoard drop the events of a run that went back, from ``step`` on, as of one that was resumed."""
        messages = importlib.import_module("tensorboardX.proto.event_pb2")
        start = messages.SessionLog(status=messages.SessionLog.START)
        self._writer.file_writer.add_event(messages.Event(step=step, session_log=start))


class WeightsAndBiases:
    """Scalars as Weights & Biases keeps them, offline, in the run's folder: ``wandb sync FOLDER/wandb/offline-*``.

    Raises:
      ConfigError: wandb is not installed.
    """

    def __init__(self, folder: Path, config: Record, first: int = 0):
        # wandb itself ignores steps that it already has.
        del first
        module = _load("wandb", "wandb")
        settings = module.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True)
        self._run = module.init(
            project="dualpipe-jax",
            name=folder.name,
            dir=str(folder),
            mode="offline",
            config=dict(config),
            settings=settings,
        )

    def write(self, record: Record) -> None:
        self._run.log(dict(scalars(record)), step=record["step"])

    def close(self) -> None:
        self._run.finish()


TRACKERS: Mapping[str, Callable[[Path, Record, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
"""Name for ``--track`` -> function that makes the tracker from (folder, options, number of steps done before)."""


class Trackers:
    """Several trackers as one: what is written goes to each.

    Args:
      file: the first tracker, metrics.jsonl.
      names: names in ``TRACKERS`` of the other trackers.
      folder: the folder of the run.
      config: the run's options, as ``train.options.options_as_dict`` gives them.
      first: the number of steps that an earlier part of the run did.
      say: called with messages for the user. A tracker that fails does not end the run; that is reported once, until
        the tracker works again.

    Raises:
      ConfigError: a tracker is not installed.
    """

    def __init__(
        self,
        file: Tracker,
        names: Sequence[str],
        folder: Path,
        config: Record,
        say: Callable[[str], None],
        first: int = 0,
    ):
        self._all: dict[str, Tracker] = {METRICS: file}
        self._say, self._failing = say, set[str]()
        try:
            self._all |= {name: TRACKERS[name](folder, config, first) for name in dict.fromkeys(names)}
        except BaseException:
            self.close()
            raise

    def write(self, record: Record) -> None:
        for name, tracker in self._all.items():
            try:
                tracker.write(record)
            except Exception as error:  # whatever a disk or a library does
                if name not in self._failing:
                    self._say(
                        f"warning: {name} cannot be written: {error}; training goes on, and tries again"
                    )
                self._failing.add(name)
                continue
            if name in self._failing:
                self._failing.remove(name)
                self._say(f"{name} is written again")

    def close(self) -> None:
        for name, tracker in self._all.items():
            try:
                tracker.close()
            except Exception as error:
                self._say(f"warning: {name} is not whole: {error}")


def scalars(record: Record, inside: str = "") -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a record by names: ``group/name``, or ``outer/inner`` for those of records in it.
    Lists, "step" and "time" are left out."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{inside}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            if not inside and name not in ("step", "time"):
                yield f"{_group(name)}/{name}", value
            elif inside:
                yield inside + name, value


def _group(name: str) -> str:
    return next((group for group, words in _GROUPS.items() if any(word in name for word in words)), "train")


_GROUPS = {
    "held out": ("heldout",),
    "experts": ("max_vio", "drop", "load", "bias", "moved"),
    "memory": ("gib",),
    "speed": ("_s", "mfu", "per_"),
}
"""Group -> words; a number is in the first group with a word that occurs in the number's name."""


def _load(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        run = install_command(module, extra=extra)
        raise ConfigError(f"--track {extra}: {module} is not installed; run: {run}") from None
