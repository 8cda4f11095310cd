"""Record a trace of some steps of a run, and read its events."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax


class Event(NamedTuple):
    """An instruction of a compiled program, run once by a device.

    Attributes:
      device: the number of the device.
      run: the number of the program's run; each call is one run.
      op: the instruction's name in the compiled program.
      start, end: the times of its start and end in milliseconds.
      program: the name of the compiled program; empty where the trace does not give it.
    """

    device: int
    run: int
    op: str
    start: float
    end: float
    program: str = ""


class Profiler:
    """Traces some steps of a run, once: call ``before`` and ``after`` around each step.

    >>> import pathlib, tempfile
    >>> import jax, jax.numpy as jnp
    >>> from dualpipe_jax.profile import Profiler, read_events
    >>> folder, square, x = tempfile.TemporaryDirectory(), jax.jit(lambda x: x @ x), jnp.ones((64, 64))
    >>> profiler = Profiler(pathlib.Path(folder.name), num_steps=1, skip=1)
    >>> for step in range(3):
    ...     profiler.before(step)
    ...     y = jax.block_until_ready(square(x))
    ...     if profiler.after():
    ...         print("the last step of the trace:", step)
    the last step of the trace: 1
    >>> {event.program for event in read_events(pathlib.Path(folder.name))}
    {'jit__lambda'}
    >>> folder.cleanup()

    Args:
      folder: the folder to write the trace to.
      num_steps: number of steps to trace; 0 for none.
      skip: number of steps before these, which compile and warm up.
    """

    def __init__(self, folder: Path, num_steps: int, skip: int):
        self._folder, self._left, self._skip, self._running = folder, num_steps, skip, False

    def before(self, step: int) -> None:
        """Begin a step, numbered from 0; the trace starts with the first step that belongs to it."""
        if self._skip or not self._left:
            self._skip = max(0, self._skip - 1)
            return
        if not self._running:
            options = jax.profiler.ProfileOptions()
            # Python's own calls are many and of no interest.
            options.python_tracer_level = 0
            jax.profiler.start_trace(str(self._folder), profiler_options=options)
            self._running = True
        self._step = jax.profiler.StepTraceAnnotation("train", step_num=step)
        self._step.__enter__()

    def after(self) -> bool:
        """End a step; call it when the step's results are ready. Returns whether the step was the trace's last."""
        if not self._running:
            return False
        self._step.__exit__(None, None, None)
        self._left -= 1
        if self._left:
            return False
        self._running = False
        jax.profiler.stop_trace()
        return True

    def close(self) -> None:
        """Stop a trace that is still running because the run was cut short."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()


def read_events(folder: Path) -> Iterator[Event]:
    """Read all instructions in the newest trace under a folder, in no particular order.

    CPU devices are threads of the host, and each event names its device; a GPU or TPU has a plane of its own.

    Raises:
      FileNotFoundError: there is no trace.
    """
    traces = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not traces:
        raise FileNotFoundError(f"{folder}: no trace (*.xplane.pb)")
    profile = jax.profiler.ProfileData.from_file(str(traces[-1]))
    _make_type_of_stats(profile)
    for plane in profile.planes:
        own = plane.name.startswith("/device:")
        ordinal = plane.name.rpartition(":")[2].split()[0] if own else "0"
        if not ordinal.isdigit():
            # Not a device: where libtpu is installed, it adds planes such as "/device:CUSTOM:Megascale Trace".
            continue
        number = int(ordinal)
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                op = stats.get("hlo_op")
                if op is None and own and line.name == "XLA Ops":
                    op = event.name.partition(" = ")[0].lstrip("%")
                if op is None:
                    continue
                start = event.start_ns / 1e6
                yield Event(
                    device=int(stats.get("device_ordinal", number)),
                    run=int(stats.get("run_id", 0)),
                    op=str(op),
                    start=start,
                    end=start + event.duration_ns / 1e6,
                    program=str(stats.get("hlo_module", "")),
                )


def _make_type_of_stats(profile: jax.profiler.ProfileData) -> None:
    """Make JAX's reader create its type for the statistics of events, which it does when they are first read."""
    with warnings.catch_warnings():
        # From Python 3.12 on the reader of JAX 0.12 warns of this type. Where warnings are errors its C++ aborts the
        # process, so no "except" would help.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in profile.planes:
            for line in plane.lines:
                for event in line.events:
                    _ = event.stats
                    return
