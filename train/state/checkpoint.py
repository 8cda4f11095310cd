"""Checkpoints: the canonical state and the facts about it, written by Orbax and verified when they are read.

Orbax writes a step under a temporary name and renames it when it is complete, so a killed process leaves the earlier
steps. But Orbax does not notice bits that flipped on the disk, loads other dtypes without a warning, and deletes old
steps file by file, so that a kill may leave half of one. Hence every array has a fingerprint, which is computed on the
devices before writing and compared after reading, and the facts have a hash.
"""

import contextlib
import errno
import functools
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import SingleDeviceSharding

from models.weights.faults import root_cause, silence_orbax
from models.weights.native import digest_mismatch
from train.config import CheckpointConfig
from train.errors import CheckpointError, Stopped
from train.figures.folder import CHECKPOINTS
from train.processes.group import Processes
from train.state.facts import FORMAT, Facts, describe_changes, refuse_foreign, step_facts
from train.state.fingerprint import fingerprints
from train.state.layout import Layout, TrainState

DAMAGED_FOLDER = "damaged"
"""Name of the folder, within a run's folder, for steps that could not be used; they are kept to find out why."""

SAVE_TIMEOUT_S = 600
"""Seconds after which a save that has not ended is given up."""

RETRY_S = 30
"""Seconds after which a save that failed is tried again, even if no checkpoint is due."""

NOT_WHOLE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
"""Error numbers of a checkpoint that is not whole; all others are of the disk or the network, and may be temporary."""

READ_RETRY_WAITS_S = (0.5, 2.0, 8.0)
"""Seconds to wait before each further attempt to read a checkpoint that could not be read."""


class CheckpointStatus(NamedTuple):
    """Whether a step can be used.

    Attributes:
      step: the number of the step.
      problem: what is wrong with it, in words; None if it is whole.
      facts: the facts stored with it, as far as they can be read.
    """

    step: int
    problem: str | None
    facts: Facts


class Checkpoints:
    """The checkpoints of one run; a context manager whose end waits for what is still being written.

    Args:
      folder: the folder of the run.
      config: when to save, and which checkpoints to keep.
      layout: the layout of the state.
      facts: the facts of the run; see ``train.state.facts.describe``.
      say: called with messages for the user.
      processes: the processes of the run, all of which write and read.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        layout: Layout,
        facts: Facts,
        say: Callable[[str], None],
        processes: Processes,
    ):
        self._processes = processes
        self._folder, self._config, self._layout, self._facts, self._say = folder, config, layout, facts, say
        self._last_time = time.monotonic()
        self._saved: int | None = None
        self._failing = False
        self._writing: tuple[int, Any] | None = None
        self._quiet = contextlib.ExitStack()
        self.blocked_seconds = 0.0
        """Seconds for which the latest save kept the run waiting."""
        self.restored: Facts = {}
        """The facts stored with the step that was restored."""
        self._store = self._open()

    def due(self, step: int) -> bool:
        """Whether a finished step should be saved: by the options' steps and minutes, or because a save has failed."""
        every, minutes = self._config.every, self._config.minutes
        if self._failing and time.monotonic() - self._last_time >= RETRY_S:
            return True
        by_step = every is not None and step % every == 0
        return by_step or (minutes is not None and time.monotonic() - self._last_time >= 60 * minutes)

    def save(
        self,
        step: int,
        state: TrainState,
        record: Mapping[str, Any],
        load: Any,
        balance: Any = None,
        carried: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin to write a step, and return as soon as the arrays are copied. For the arguments see ``step_facts``.

        A failure, such as a full disk, is only reported and costs this checkpoint alone. With several processes it
        raises CheckpointError.
        """
        began = time.monotonic()
        self.wait()
        flat = self._layout.to_canonical(state)
        facts = step_facts(self._facts, step, fingerprints(flat), record, load, balance, carried)
        try:
            self._writing = step, self._store.save_async(step, flat, force=True, custom_metadata=facts)
        except Exception as error:  # Orbax raises whatever the file system did
            self._failed(step, error)
        self._last_time = time.monotonic()
        self.blocked_seconds = self._last_time - began

    def wait(self) -> None:
        """Wait until nothing is being written any more."""
        if self._writing is None:
            return
        step, writing = self._writing
        self._writing = None
        try:
            writing.result(SAVE_TIMEOUT_S)
        except Exception as error:
            self._failed(step, error)
        else:
            self._saved, self._failing = step, False

    def finish(self, step: int) -> None:
        """Wait, and raise CheckpointError unless ``step`` is on the disk."""
        self.wait()
        if self._saved != step:
            left = "no step" if self._saved is None else f"step {self._saved}"
            raise CheckpointError(
                f"step {step} could not be saved, as said above; the newest that was is {left}. With room "
                f"and rights in {self._folder / CHECKPOINTS}, --resume trains on from there"
            )

    def restore(self) -> TrainState | None:
        """The run's state of the newest whole step; None if nothing was ever saved.

        Newer steps, which are damaged, are put aside, with a warning.

        Raises:
          CheckpointError: the checkpoints are of another run or cannot be read, or none of them is whole.
        """
        steps: list[int] = self._processes.broadcast(
            lambda: sorted((stored.step for stored in self._store.checkpoints), reverse=True)
        )
        damaged: list[int] = []
        for step in steps:
            where = f"{self._folder / CHECKPOINTS / str(step)}"
            expected_arrays = functools.partial(self._expected_arrays, where)
            status, flat = _read(self._store, step, expected_arrays, self._processes.any_problem)
            if status.problem is None:
                self._move_newer_aside(step)
                for text in describe_changes(status.facts, self._facts):
                    self._say(f"warning: {text}")
                self._saved, self.restored = step, status.facts
                return self._layout.from_canonical(flat)
            self._say(f"warning: {where} is damaged: {status.problem}")
            damaged.append(step)
        if damaged:
            raise CheckpointError(
                f"none of the checkpoints in {self._folder / CHECKPOINTS} is whole (steps "
                f"{', '.join(map(str, damaged))}); begin anew under another --name"
            )
        return None

    def __enter__(self) -> Self:
        self._quiet.enter_context(silence_orbax())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._quiet:
            if self._processes.count > 1 and kind is not None and not issubclass(kind, Stopped):
                # Another process that writes may be gone, and then waiting would never end.
                return
            self.wait()
            self._store.close()

    def _open(self) -> Any:
        folder = self._folder / CHECKPOINTS
        try:
            folder.mkdir(exist_ok=True)
            # Fails now if the folder is read-only.
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise CheckpointError(f"cannot write into {folder}: {error.strerror or error}") from None
        with silence_orbax():
            return _open_store(folder, self._config)

    def _expected_arrays(self, where: str, facts: Facts) -> Mapping[str, Any]:
        refuse_foreign(facts, self._facts, where)
        return self._layout.canonical

    def _failed(self, step: int, error: Exception) -> None:
        # The other processes do not know of the failure.
        if self._processes.count > 1:
            raise CheckpointError(f"step {step} could not be saved: {root_cause(error)}") from error
        if not self._failing:
            self._say(
                f"warning: step {step} could not be saved: {root_cause(error)}; training goes on, and tries again"
            )
        self._failing = True
        for thread in threading.enumerate():
            # After the first thread that failed Orbax waits for no others.
            if type(thread).__module__.startswith("orbax."):
                # Orbax's own ``join`` would raise the same error again.
                threading.Thread.join(thread, SAVE_TIMEOUT_S)
        # ``close`` raises the same error again.
        with contextlib.suppress(Exception):
            self._store.close()
        self._store = _open_store(self._folder / CHECKPOINTS, self._config)

    def _move_newer_aside(self, whole: int) -> None:
        """Move all steps newer than the whole one: they will be written again, and Orbax does not overwrite a step.

        They are listed from the folder, because Orbax does not list the remains of a step that it was deleting.
        """
        folder, aside = self._folder / CHECKPOINTS, self._folder / DAMAGED_FOLDER
        newer = [path for path in folder.iterdir() if path.name.isdigit() and int(path.name) > whole]
        # Until here all processes list the folder as it was.
        self._processes.barrier()
        if not newer:
            return
        if self._processes.leads:
            aside.mkdir(exist_ok=True)
            for path in newer:
                path.rename(aside / f"{path.name}.{time.time_ns()}")
        self._processes.barrier()
        self._store.reload()
        gone = ", ".join(sorted((path.name for path in newer), key=int))
        self._say(f"warning: put aside in {aside}: step {gone}; going on from step {whole}")


def verify(folder: Path) -> Iterator[CheckpointStatus]:
    """Read every step of a run, oldest first, and compare its fingerprints; on one device, whatever devices wrote it.

    Raises:
      CheckpointError: there is no checkpoint.
    """
    found = folder / CHECKPOINTS
    if not os.path.isdir(found):
        raise CheckpointError(
            f"--check {folder}: no checkpoints there, or none that may be read; a run's folder, such as runs/NAME, "
            "has them"
        )
    here = SingleDeviceSharding(jax.devices()[0])

    def described(facts: Facts) -> Mapping[str, Any]:
        if facts.get("format") != FORMAT:
            raise ValueError(f"format {facts.get('format')}, this trainer reads {FORMAT}")
        return {
            name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=here)
            for name, (shape, dtype) in facts["arrays"].items()
        }

    with silence_orbax(), _open_store(found, CheckpointConfig(), clean=False) as store:
        steps = sorted(step.step for step in store.checkpoints)
        if not steps:
            raise CheckpointError(f"--check {folder}: no whole step in {found}")
        for step in steps:
            status, _ = _read(store, step, described)
            # A run that goes on meanwhile takes old steps away.
            if status.problem is None or os.path.isdir(found / str(step)):
                yield status


def _read(
    store: Any,
    step: int,
    describe: Callable[[Facts], Mapping[str, Any]],
    any_problem: Callable[[str | None], str | None] = lambda problem: problem,
) -> tuple[CheckpointStatus, dict[str, jax.Array]]:
    """Load a step and verify it. Returns its status and its arrays, {} unless it is whole.

    ``describe`` returns the arrays to expect, from the step's facts, or raises. ``any_problem`` turns the problem of
    this process into one of any process. All processes repeat a read together: in Orbax they wait for each other.
    """
    facts: Facts = {}
    flat: dict[str, jax.Array] = {}
    problem: str | None
    temporary: str | None
    with silence_orbax():
        for wait in (*READ_RETRY_WAITS_S, None):
            problem = temporary = None
            try:
                facts = store.metadata(step).custom_metadata or _read_facts(Path(store.directory) / str(step))
                if not facts:
                    problem = "its _CHECKPOINT_METADATA says nothing about it"
                elif (problem := digest_mismatch(facts)) is None:
                    flat = store.load(step, describe(facts))
            except CheckpointError:
                raise
            # Half a folder or a flipped bit makes Orbax raise errors of many types.
            except Exception as error:
                if _is_temporary(error):
                    temporary = root_cause(error)
                else:
                    problem = root_cause(error)
            problem, temporary = any_problem(problem), any_problem(temporary)
            if problem is not None or temporary is None:
                break
            if wait is not None:
                time.sleep(wait)
    if problem is not None:
        return CheckpointStatus(step, problem, facts), {}
    if temporary is not None:
        raise CheckpointError(
            f"step {step} cannot be read: {temporary}; tried {len(READ_RETRY_WAITS_S) + 1} times. It is left where it "
            "is: resume again when the disk can be read"
        )
    prints, saved = fingerprints(flat), facts.get("fingerprints", {})
    wrong = [name for name, value in prints.items() if saved.get(name) != value]
    if wrong:
        problem = f"{len(wrong)} of {len(prints)} arrays are not what was saved, such as {wrong[0]}"
        return CheckpointStatus(step, problem, facts), {}
    return CheckpointStatus(step, None, facts), flat


def _read_facts(step: Path) -> Facts:
    """The facts in a step's folder, without Orbax, which takes a file that the disk cannot read for an empty one."""
    try:
        found = json.loads((step / "_CHECKPOINT_METADATA").read_bytes())
    except ValueError:
        return {}
    return (found.get("custom_metadata") if isinstance(found, dict) else None) or {}


def _open_store(folder: Path, config: CheckpointConfig, *, clean: bool = True) -> Any:
    context = ocp.Context()
    # With True the first save compiles a slice for every shape.
    context.array.saving.use_replica_parallel = False
    context.asynchronous.timeout_secs = SAVE_TIMEOUT_S
    keep = ocp.training.preservation_policies
    kept = [keep.LatestN(config.keep)]
    if config.keep_every is not None:
        kept.append(keep.EveryNSteps(config.keep_every))
    try:
        return ocp.training.Checkpointer(
            folder.absolute(),
            context=context,
            preservation_policy=keep.AnyPreservationPolicy(kept),
            # This also deletes the folders of a process that is writing.
            cleanup_tmp_directories=clean,
        )
    # One step's file is damaged; Orbax does not tell which.
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: the _CHECKPOINT_METADATA of a step is damaged: {root_cause(error)}; move that step out of it, "
            "the newest one first"
        ) from error


def _is_temporary(error: BaseException | None) -> bool:
    """Whether an error may be temporary: input, output or the wait for another process failed, and what is stored may
    be whole."""
    while error is not None:
        if isinstance(error, TimeoutError):
            return True
        if isinstance(error, OSError) and error.errno is not None and error.errno not in NOT_WHOLE_ERRNOS:
            return True
        error = error.__cause__ or error.__context__
    return False
