"""Watch processes of this machine until all have ended, and find out which failed and how. Imports no JAX."""

import dataclasses
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from train.errors import DIVERGED, PEER_LOST
from train.processes.heartbeat import WATCHER
from train.processes.stop import NAMES, Handlers

SILENT_S = 15.0
"""Seconds without a sign of life, which is sent every second, after which a process fails if the system says that it is
stopped or cannot tell. One that is not stopped may be silent as long on an overloaded machine."""

STARTING_S = 180.0
"""Seconds for which a process that is not stopped may give no sign of life: Python imports and traces slowly if many
processes do so at once."""

GRACE_S = 3.0
"""Seconds that the other processes have to say what they noticed, once one has failed."""

STOPPING_S = 600.0
"""Seconds that saving may take, when all processes were told to stop."""

NO_RESTART = {2: "options or data that will not do", DIVERGED: "the loss is no number"}
"""Exit codes that another start would only repeat -> their meaning."""

STOPPED_CODES = {130, 143}
"""Exit codes of a process that was told to stop, and has saved."""

NOTHING_LOST = STOPPED_CODES | {0, -signal.SIGTERM}
"""Exit codes of which one, of any process, tells that a request to stop loses nothing: all leave a save together, and
SIGTERM itself ends a process only before its first step and after the last one is saved."""


@dataclasses.dataclass
class Worker:
    """A process, and what its signs of life tell."""

    id: int
    process: subprocess.Popen[bytes]
    pipe: int
    log: Path
    log_start: int
    last_sign_s: float
    phase: str = ""

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self.process.poll()

    def read_signs(self) -> bool:
        """Read the signs of life that came; False if no more will come."""
        said = os.read(self.pipe, 1 << 16)
        lines = said.decode(errors="replace").split("\n")
        if len(lines) > 1:
            self.last_sign_s, self.phase = time.monotonic(), lines[-2]
        return bool(said)

    def log_tail(self, count: int = 12) -> str:
        """The last lines that it wrote into its log, indented, without those of gloo about connections, which tell
        nothing. What was there before is of an earlier start, perhaps one that saved or failed."""
        written = self.log.read_bytes()[self.log_start :] if self.log.exists() else b""
        lines = written.decode(errors="replace").splitlines()
        lines = [line for line in lines if line.strip() and not line.startswith("[Gloo]")]
        return "\n".join(f"    {line[:300]}" for line in lines[-count:])

    def is_silent(self) -> bool:
        """Whether the process has been silent for longer than a process that runs; see ``SILENT_S``, ``STARTING_S``."""
        seconds = time.monotonic() - self.last_sign_s
        return seconds > SILENT_S and (seconds > STARTING_S or self.is_stopped() is not False)

    def is_stopped(self) -> bool | None:
        """Whether the system says that the process is stopped (by a signal or a tracer); None if it cannot tell."""
        try:
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2][:1]
        except OSError:
            return None
        return state in "Tt"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one start of all processes ended.

    Attributes:
      code: the exit code of the supervisor; None for a failure after which another start may help.
      why: the reason, in words.
      failed: the numbers of the processes that failed by themselves.
    """

    code: int | None
    why: str
    failed: tuple[int, ...] = ()


class StopRequests(Handlers):
    """The requests to stop that the supervisor received: a context in which signals are noted and do nothing else."""

    def __init__(self) -> None:
        super().__init__(tuple(NAMES))
        self.count = 0
        self.code = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.count += 1
        self.code = 128 + number


def run_once(
    commands: Sequence[Sequence[str]],
    logs: Path,
    requests: StopRequests,
    environ: Mapping[str, str],
    own_environ: Callable[[int], Mapping[str, str]] = lambda number: {},
) -> Outcome:
    """Start a process for each command and watch until all have ended. None is left running, whatever happens.

    Args:
      commands: one command for each process.
      logs: ``logs.I.log`` receives the output of process I, except the standard output of process 0.
      requests: the requests to stop that the supervisor received.
      environ: the environment of all processes.
      own_environ: a function from a process's number to the environment variables of this process alone.
    """
    workers: list[Worker] = []
    try:
        for number, command in enumerate(commands):
            workers.append(
                _start(number, command, Path(f"{logs}.{number}.log"), {**environ, **own_environ(number)})
            )
        return _watch(workers, requests)
    finally:
        for worker in workers:
            worker.process.kill()  # also ends one that is stopped
        for worker in workers:
            worker.process.wait()
            os.close(worker.pipe)


def _start(number: int, command: Sequence[str], log: Path, environ: Mapping[str, str]) -> Worker:
    pipe, write_end = os.pipe()
    with log.open("ab") as file:
        log_start = file.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=None if number == 0 else file,
            stderr=file,
            env={**environ, WATCHER: str(write_end)},
            pass_fds=(write_end,),
            start_new_session=True,  # Ctrl-C is for the supervisor, which tells them to save
        )
    os.close(write_end)
    return Worker(number, process, pipe, log, log_start, time.monotonic())


def _watch(workers: Sequence[Worker], requests: StopRequests) -> Outcome:
    passed_on, deadline = 0, float("inf")
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.pipe, selectors.EVENT_READ, worker)
        while True:
            _read_signs(selector, 0.2)
            if requests.count > passed_on:
                passed_on, deadline = requests.count, min(deadline, time.monotonic() + STOPPING_S)
                for worker in workers:
                    worker.process.send_signal(signal.SIGTERM if requests.count == 1 else signal.SIGKILL)
            codes = [worker.code for worker in workers]
            if all(code is not None for code in codes) or any(codes):
                if any(codes):
                    _wait_for_end(workers, selector)
                return _outcome(workers, requests)
            silent = [worker for worker in workers if worker.code is None and worker.is_silent()]
            if silent:
                return Outcome(
                    1 if requests.count else None,
                    "; ".join(
                        f"process {worker.id} gave no sign of life for {time.monotonic() - worker.last_sign_s:.0f} s"
                        f"{' (it is stopped)' if worker.is_stopped() else ''}, last "
                        f"in {worker.phase or 'its start'}"
                        for worker in silent
                    ),
                    tuple(worker.id for worker in silent),
                )
            if time.monotonic() > deadline:
                return Outcome(1, f"told to stop, and not done after {STOPPING_S:.0f} s")


def _wait_for_end(workers: Sequence[Worker], selector: selectors.BaseSelector) -> None:
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(worker.code is None for worker in workers):
        _read_signs(selector, 0.1)
    _read_signs(selector, 0)


def _read_signs(selector: selectors.BaseSelector, seconds: float) -> None:
    if not selector.get_map():
        time.sleep(seconds)
        return
    for key, _ in selector.select(seconds):
        if not key.data.read_signs():
            selector.unregister(key.fileobj)


def _outcome(workers: Sequence[Worker], requests: StopRequests) -> Outcome:
    codes = {worker.id: worker.code for worker in workers}
    if not any(codes.values()) and None not in codes.values():
        return Outcome(0, "all processes ended well")
    known = [code for code in codes.values() if code is not None]
    # Told twice, they were killed.
    is_lost = requests.count == 1 and not NOTHING_LOST.intersection(known)
    if not is_lost and (requests.count or set(known) <= STOPPED_CODES):
        how = "told to stop: " + ", ".join(
            f"process {number} {_describe_exit(code)}" for number, code in codes.items()
        )
        words = workers[0].log_tail(1)  # which step was saved
        return Outcome(requests.code or max(known), f"{how}\n{words}" if words else how)
    final = [worker for worker in workers if worker.code in NO_RESTART]
    if final:
        code = final[0].code
        assert code is not None
        why = f"process {final[0].id} gave up ({NO_RESTART[code]}):\n{final[0].log_tail()}"
        return Outcome(code, why, (final[0].id,))
    failed = _first_failed(workers)
    why = "; ".join(
        f"process {worker.id} {'was stopped' if worker.code is None else _describe_exit(worker.code)} "
        f"in {worker.phase or 'its start'}"
        for worker in failed
    )
    rest = [worker for worker in workers if worker not in failed]
    if rest:
        why += "; then " + ", ".join(f"process {worker.id} {_describe_exit(worker.code)}" for worker in rest)
    words = failed[0].log_tail()
    why = f"told to stop, and not saved: {why}" if is_lost else why
    return Outcome(1 if is_lost else None, f"{why}\n{words}" if words else why, tuple(w.id for w in failed))


def _first_failed(workers: Sequence[Worker]) -> list[Worker]:
    """The processes that failed first, as far as exit codes tell: stopped or killed ones before those that raised or
    exceeded ``--patience``, and these before those that noticed that another was gone, or that JAX then aborted."""
    stopped = [worker for worker in workers if worker.code is None and worker.is_stopped()]
    failed = [worker for worker in workers if worker.code]
    killed = [worker for worker in failed if worker.code is not None and worker.code < 0]
    by_hand = [worker for worker in killed if worker.code != -signal.SIGABRT]
    raised = [worker for worker in failed if worker not in killed and worker.code != PEER_LOST]
    return [*stopped, *by_hand] or raised or failed


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "was still there and was ended"
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    return f"ended with code {code}" if code else "ended well"
