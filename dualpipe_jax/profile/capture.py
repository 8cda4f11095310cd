"""Which steps are traced, and the trace of them read back."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax


class Event(NamedTuple):
    """An instruction of a compiled program, run once by a device.

    Attributes:
      device: its number.
      run: of the program, one for each call.
      op: the instruction's name in the compiled program.
      start, end: milliseconds.
      program: the name of the compiled program; empty where the trace does not tell.
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
            options.python_tracer_level = 0  # Python's own calls are many and of no interest
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
        """Stop a trace that is still running, of a run that was cut short."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()


def read_events(folder: Path) -> Iterator[Event]:
    """All instructions in the newest trace under a folder, in no order.

    CPU devices are threads of the host, and each event says of which device it is; a GPU or TPU has a plane of its own.

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
            continue  # no device: libtpu, installed, adds planes such as "/device:CUSTOM:Megascale Trace"
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
    """Has JAX's reader make its type of events' statistics, which it does at the first event that is asked for them."""
    with warnings.catch_warnings():
        # From Python 3.12 on the reader of JAX 0.12 warns of this type. Where warnings are errors its C++ aborts the
        # process, so no "except" would help.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in profile.planes:
            for line in plane.lines:
                for event in line.events:
                    _ = event.stats
                    return
