"""A child process for work that takes long and may crash or hang: shows its stages, stops on Ctrl-C, leaves nothing."""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dualpipe_jax.command.options import ChildDied, CommandError
from dualpipe_jax.worker import PARTIAL

_REPORT_SECONDS = 15.0
"""Seconds between lines that say that the work still goes on, where standard error is not a terminal."""

_IGNORED_ERRORS = ("Linux version", "Failed to find host bounds")
_GRACE_SECONDS = 3.0
"""Seconds that a process has to end after a signal."""


Limit = Callable[[str], float]
"""A function from a stage's name to the seconds that it may take."""


class StageTimeout(ChildDied):
    """A stage took longer than its limit, and the process was ended."""


Job = tuple[Mapping[str, Any], Mapping[str, str]]
"""A process's request, and additional variables of its environment."""


def ask(
    module: str,
    request: Mapping[str, Any],
    environment: Mapping[str, str],
    title: str,
    limit: Limit | None = None,
    beside: Sequence[Job] = (),
) -> dict[str, Any]:
    """Run ``python -m module`` with a request on its standard input, and return its answer.

    The lines of its standard output are the stages of its work; they are shown on standard error with the seconds
    that have passed. On Ctrl-C and on every other exit, the process is ended with all processes that it started; if
    this process is killed, the child sees its standard input close and ends by itself.

    Args:
      module: the name of a module that takes the name of a file, reads the request from its standard input, prints a
        line for each stage of its work and writes its answer to the file.
      request: the request, which is sent as JSON. "log", the file of the process's standard error, is added.
      environment: environment variables in addition to this process's own.
      title: the name of the work in the lines about its stages.
      limit: how long each stage may take; the first is "starting". None: without limit.
      beside: more processes of the module that work with the first; their answers are not read. All are ended when one
        of them fails, and when the first has answered.

    Raises:
      CommandError: the answer is an error.
      ChildDied: the process ended without an answer, or one of the others failed.
      StageTimeout: a stage passed its limit.
    """
    with tempfile.TemporaryDirectory(prefix="dualpipe-") as folder:
        first, *others = (
            _ChildProcess(Path(folder, str(number)), *job)
            for number, job in enumerate([(request, environment), *beside])
        )
        with _ending([first, *others]):
            for child in (first, *others):
                child.start(module, pipes_stages=child is first)
            stage, late = _follow(first, others, title, limit)
            failed = [child for child in (*others, first) if child.process.poll() not in (None, 0)]
        known = first.partial()
        if late is not None and not first.answered():
            raise StageTimeout(f"no answer in {late:g} s while {stage}", stage, known)
        if not first.answered():
            # A process that a signal ended failed first; the others notice that it is gone, and raise or abort.
            late_ends = {-signal.SIGABRT, *range(256)}
            culprit = min(failed, key=lambda child: child.process.returncode in late_ends, default=first)
            stage = stage if culprit is first else culprit.last_stage()
            which = f" {[first, *others].index(culprit)} of {1 + len(others)}" if others else ""
            raise ChildDied(_failure_message(culprit, stage, which), stage, known)
        found = json.loads(first.answer.read_text())
    if "error" in found:
        raise CommandError(found["error"])
    return found


class _ChildProcess:
    """A child process and its files."""

    process: subprocess.Popen[str]

    def __init__(self, name: Path, request: Mapping[str, Any], environment: Mapping[str, str]):
        self.answer, self.errors, self._stages = (
            Path(f"{name}.{what}") for what in ("json", "errors", "stages")
        )
        self._request, self._environment = request, environment

    def start(self, module: str, *, pipes_stages: bool) -> None:
        """Start the process and send its request; its stages go to a pipe if ``pipes_stages``, else to a file."""
        with self.errors.open("wb") as log, self._stages.open("wb") as stages:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(self.answer)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if pipes_stages else stages,
                stderr=log,
                text=True,
                # Whatever a program prints must not end the thread that reads it.
                errors="replace",
                env={**os.environ, **self._environment},
                # So that Ctrl-C reaches this process alone, and the child's whole group can be ended.
                start_new_session=True,
            )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({**self._request, "log": str(self.errors)}) + "\n")
            self.process.stdin.flush()

    def answered(self) -> bool:
        return self.answer.exists() and self.answer.stat().st_size > 0

    def partial(self) -> dict[str, Any]:
        """The part of its answer that it had written before its end; empty if none."""
        partial = Path(f"{self.answer}{PARTIAL}")
        return json.loads(partial.read_text()) if partial.exists() else {}

    def last_stage(self) -> str:
        """The last stage of a process whose stages went to a file. gloo prints lines of its own among them."""
        lines = self._stages.read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line and not line.startswith("[Gloo]")), "starting")


@contextlib.contextmanager
def _ending(children: Sequence[_ChildProcess]) -> Iterator[None]:
    """On leaving the context, however it ends, end the processes and their whole groups."""
    try:
        yield
    finally:
        processes = [child.process for child in children if hasattr(child, "process")]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)
            end = time.monotonic() + _GRACE_SECONDS
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
        for process in processes:
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    if stream is not None:
                        stream.close()


def _follow(
    first: _ChildProcess, others: Sequence[_ChildProcess], title: str, limit: Limit | None
) -> tuple[str, float | None]:
    """Show the first process's stages until it ends, passes a limit, or another process fails.

    Returns its last stage, and that stage's limit if it was passed.
    """
    process = first.process
    lines: queue.Queue[str | None] = queue.Queue()

    def read_stages() -> None:
        for line in process.stdout or ():
            if not line.startswith("[Gloo]"):
                lines.put(line.strip())
        lines.put(None)

    threading.Thread(target=read_stages, daemon=True).start()
    started = begun = time.monotonic()
    stage = "starting"
    with _Progress(title) as progress:
        while True:
            allowed = None if limit is None else limit(stage)
            if allowed is not None and time.monotonic() - begun > allowed:
                return stage, allowed
            try:
                line = lines.get(timeout=0.5 if allowed is None else min(0.5, allowed))
            except queue.Empty:
                # One that it has started, and that outlives it, may hold its standard output open.
                if process.poll() is not None:
                    return stage, None
                if any(child.process.poll() not in (None, 0) for child in others):
                    return stage, None
                progress.show(stage, time.monotonic() - started)
                continue
            if line is None:
                try:
                    # It may hang while it exits.
                    process.wait(allowed)
                except subprocess.TimeoutExpired:
                    return stage, allowed
                return stage, None
            stage, begun = line, time.monotonic()
            progress.show(stage, begun - started, new=True)


class _Progress:
    """A line that changes in a terminal; elsewhere a line for each stage, and one every ``_REPORT_SECONDS`` seconds.

    Of several at once a terminal shows only one.
    """

    _terminal = threading.Lock()

    def __init__(self, title: str):
        self.title, self.last = title, 0.0
        self.status: Any = None

    def __enter__(self) -> "_Progress":
        self.in_terminal = sys.stderr.isatty()
        if self.in_terminal and self._terminal.acquire(blocking=False):
            from rich.console import Console

            self.status = Console(stderr=True, highlight=False).status(self.title)
            self.status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is not None:
            self.status.stop()
            self._terminal.release()

    def show(self, stage: str, elapsed: float, *, new: bool = False) -> None:
        """Show the stage and the seconds since the start."""
        text = f"{self.title}: {stage} ({elapsed:.0f} s)"
        if self.status is not None:
            self.status.update(text)
        elif not self.in_terminal and (new or elapsed - self.last >= _REPORT_SECONDS):
            self.last = elapsed
            print(text, file=sys.stderr, flush=True)


def _failure_message(child: _ChildProcess, stage: str, which: str) -> str:
    status, errors = child.process.returncode, child.errors.read_text(errors="replace")
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    said = [
        line for line in errors.splitlines() if line.strip() and not any(n in line for n in _IGNORED_ERRORS)
    ]
    # A crash prints its reason first and then a long stack trace.
    reason = [line for line in said if re.match(r"F\d{4} |\w*Error|.*(Check failed|terminate called)", line)]
    words = "\n".join(f"  {line[:300]}" for line in (reason or said)[-8:])
    return f"the process{which} {how} while {stage}" + (f"; its last words:\n{words}" if words else "")
