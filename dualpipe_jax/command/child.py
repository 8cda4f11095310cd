"""A process for work that takes long and may end badly: shows what it does, stops when asked, leaves nothing."""

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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dualpipe_jax.command.options import CommandError, Died
from dualpipe_jax.worker import PARTIAL

_EVERY = 15.0
"""Seconds between lines that say that it still goes on, where the output is no terminal."""

_NOISE = ("Linux version", "Failed to find host bounds")
_PATIENCE = 3.0
"""Seconds that a process has to end when asked to."""


Limit = Callable[[str], float]
"""Seconds that a stage may take, by its name."""


class Hung(Died):
    """A stage took longer than it may, and the process was ended."""


def ask(
    module: str,
    request: Mapping[str, Any],
    environment: Mapping[str, str],
    title: str,
    limit: Limit | None = None,
) -> dict[str, Any]:
    """Run ``python -m module`` with a request on its standard input; what it answers.

    Its lines on standard output are the stages of its work; they are shown on standard error with the seconds
    that have passed. On Ctrl-C, and on any other way out, it is ended with all that it has started; if this
    process is killed, it sees its standard input close and ends by itself.

    Arguments:
      module: takes the name of a file, reads the request from its standard input, prints a line for each stage
        of its work and writes its answer to the file.
      request: for JSON. "log", the file that the process's standard error goes to, is added.
      environment: variables besides this process's own.
      title: what to call the work.
      limit: how long each stage may take, the first is "starting"; None waits for as long as it goes on.

    Raises:
      CommandError: what it says cannot be done.
      Died: it ended without an answer.
      Hung: a stage passed its limit.
    """
    with tempfile.TemporaryDirectory(prefix="dualpipe-") as folder:
        answer, errors = Path(folder, "answer.json"), Path(folder, "errors.txt")
        with errors.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(answer)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **environment},
                start_new_session=True,  # so that Ctrl-C comes to us alone, and its whole group can be ended
            )
        with _ended(process):
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps({**request, "log": str(errors)}) + "\n")
                process.stdin.flush()
            stage, late = _follow(process, title, limit)
        if not answer.exists() or not answer.stat().st_size:
            partial = Path(f"{answer}{PARTIAL}")
            known = json.loads(partial.read_text()) if partial.exists() else {}
            if late is not None:
                raise Hung(f"no answer in {late:g} s while {stage}", stage, known)
            raise Died(_obituary(process.returncode, stage, errors.read_text(errors="replace")), stage, known)
        found = json.loads(answer.read_text())
    if "error" in found:
        raise CommandError(found["error"])
    return found


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever happens inside, the process and all of its group are gone afterwards."""
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]  # both are pipes


def _follow(process: subprocess.Popen[str], title: str, limit: Limit | None) -> tuple[str, float | None]:
    """Show stages until there are no more; the last one, and its limit if it passed that."""
    lines: queue.Queue[str | None] = queue.Queue()

    def listen() -> None:
        for line in process.stdout or ():
            lines.put(line.strip())
        lines.put(None)

    threading.Thread(target=listen, daemon=True).start()
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
                progress.show(stage, time.monotonic() - started)
                continue
            if line is None:
                try:
                    process.wait(allowed)  # it may hang on its way out
                except subprocess.TimeoutExpired:
                    return stage, allowed
                return stage, None
            stage, begun = line, time.monotonic()
            progress.show(stage, begun - started, new=True)


class _Progress:
    """A line that changes in a terminal; elsewhere a line a stage, and one now and then."""

    def __init__(self, title: str):
        self.title, self.last = title, 0.0
        self.status: Any = None

    def __enter__(self) -> "_Progress":
        if sys.stderr.isatty():
            from rich.console import Console

            self.status = Console(stderr=True, highlight=False).status(self.title)
            self.status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is not None:
            self.status.stop()

    def show(self, stage: str, elapsed: float, *, new: bool = False) -> None:
        """The stage and the seconds since the start."""
        text = f"{self.title}: {stage} ({elapsed:.0f} s)"
        if self.status is not None:
            self.status.update(text)
        elif new or elapsed - self.last >= _EVERY:
            self.last = elapsed
            print(text, file=sys.stderr, flush=True)


def _obituary(status: int, stage: str, errors: str) -> str:
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    said = [line for line in errors.splitlines() if line.strip() and not any(n in line for n in _NOISE)]
    # A crash prints its reason first and then, at length, where it was.
    reason = [line for line in said if re.match(r"F\d{4} |\w*Error|.*(Check failed|terminate called)", line)]
    words = "\n".join(f"  {line[:300]}" for line in (reason or said)[-8:])
    return f"the process {how} while {stage}" + (f"; its last words:\n{words}" if words else "")
