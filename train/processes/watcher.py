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

from train.errors import BEREFT, DIVERGED
from train.processes.pulse import WATCHER
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

FINAL = {2: "options or data that will not do", DIVERGED: "the loss is no number"}
"""Exit codes that another start would only repeat -> their meaning."""

STOPPED = {130, 143}
"""Exit codes of a process that was told to stop, and has saved."""


@dataclasses.dataclass
class Worker:
    """A process, and what its signs of life tell."""

    id: int
    process: subprocess.Popen[bytes]
    pulse: int
    log: Path
    heard: float
    doing: str = ""

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self.process.poll()

    def listen(self) -> bool:
        """Read the signs of life that came; False if no more will come."""
        said = os.read(self.pulse, 1 << 16)
        lines = said.decode(errors="replace").split("\n")
        if len(lines) > 1:
            self.heard, self.doing = time.monotonic(), lines[-2]
        return bool(said)

    def silent(self) -> bool:
        """Whether the process has been silent for longer than a process that runs; see ``SILENT_S``, ``STARTING_S``."""
        seconds = time.monotonic() - self.heard
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
      culprits: the numbers of the processes that failed by themselves.
    """

    code: int | None
    why: str
    culprits: tuple[int, ...] = ()


class Told(Handlers):
    """Whether the supervisor was told to stop: a context in which signals are noted and do nothing else."""

    def __init__(self) -> None:
        super().__init__(tuple(NAMES))
        self.times = 0
        self.code = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.times += 1
        self.code = 128 + number


def run_once(
    commands: Sequence[Sequence[str]],
    logs: Path,
    told: Told,
    environ: Mapping[str, str],
    own: Callable[[int], Mapping[str, str]] = lambda number: {},
) -> Outcome:
    """Start a process for each command and watch until all have ended. None is left running, whatever happens.

    Args:
      commands: one command for each process.
      logs: ``logs.I.log`` receives the output of process I, except the standard output of process 0.
      told: whether the supervisor was told to stop.
      environ: the environment of all processes.
      own: a function from a process's number to the environment variables of this process alone.
    """
    workers: list[Worker] = []
    try:
        for number, command in enumerate(commands):
            workers.append(_start(number, command, Path(f"{logs}.{number}.log"), {**environ, **own(number)}))
        return _watch(workers, told)
    finally:
        for worker in workers:
            if worker.code is None:
                worker.process.kill()  # also ends one that is stopped
        for worker in workers:
            worker.process.wait()
            os.close(worker.pulse)


def _start(number: int, command: Sequence[str], log: Path, environ: Mapping[str, str]) -> Worker:
    pulse, said = os.pipe()
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=None if number == 0 else file,
            stderr=file,
            env={**environ, WATCHER: str(said)},
            pass_fds=(said,),
            start_new_session=True,  # Ctrl-C is for the supervisor, which tells them to save
        )
    os.close(said)
    return Worker(number, process, pulse, log, time.monotonic())


def _watch(workers: Sequence[Worker], told: Told) -> Outcome:
    passed_on, deadline = 0, float("inf")
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.pulse, selectors.EVENT_READ, worker)
        while True:
            _listen(selector, 0.2)
            if told.times > passed_on:
                passed_on, deadline = told.times, min(deadline, time.monotonic() + STOPPING_S)
                _signal(workers, signal.SIGTERM if told.times == 1 else signal.SIGKILL)
            codes = [worker.code for worker in workers]
            if all(code is not None for code in codes) or any(codes):
                if any(codes):
                    _let_end(workers, selector)
                return _ended(workers, told)
            silent = [worker for worker in workers if worker.code is None and worker.silent()]
            if silent:
                return Outcome(
                    told.code or None,
                    "; ".join(
                        f"process {worker.id} gave no sign of life for {time.monotonic() - worker.heard:.0f} s"
                        f"{' (it is stopped)' if worker.is_stopped() else ''}, last "
                        f"in {worker.doing or 'its start'}"
                        for worker in silent
                    ),
                    tuple(worker.id for worker in silent),
                )
            if time.monotonic() > deadline:
                return Outcome(told.code, f"told to stop, and not done after {STOPPING_S:.0f} s")


def _let_end(workers: Sequence[Worker], selector: selectors.BaseSelector) -> None:
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(worker.code is None for worker in workers):
        _listen(selector, 0.1)
    _listen(selector, 0)


def _listen(selector: selectors.BaseSelector, seconds: float) -> None:
    if not selector.get_map():
        time.sleep(seconds)
        return
    for key, _ in selector.select(seconds):
        if not key.data.listen():
            selector.unregister(key.fileobj)


def _ended(workers: Sequence[Worker], told: Told) -> Outcome:
    codes = {worker.id: worker.code for worker in workers}
    if not any(codes.values()) and None not in codes.values():
        return Outcome(0, "all processes ended well")
    known = [code for code in codes.values() if code is not None]
    if told.times or set(known) <= STOPPED:
        how = "told to stop: " + ", ".join(f"process {number} {_how(code)}" for number, code in codes.items())
        words = last_words(workers[0].log, 1)  # which step was saved
        return Outcome(told.code or max(known), f"{how}\n{words}" if words else how)
    final = [worker for worker in workers if worker.code in FINAL]
    if final:
        code = final[0].code
        assert code is not None
        why = f"process {final[0].id} gave up ({FINAL[code]}):\n{last_words(final[0].log)}"
        return Outcome(code, why, (final[0].id,))
    culprits = _culprits(workers)
    why = "; ".join(
        f"process {worker.id} {'was stopped' if worker.code is None else _how(worker.code)} "
        f"in {worker.doing or 'its start'}"
        for worker in culprits
    )
    rest = [worker for worker in workers if worker not in culprits]
    if rest:
        why += "; then " + ", ".join(f"process {worker.id} {_how(worker.code)}" for worker in rest)
    words = last_words(culprits[0].log)
    return Outcome(None, f"{why}\n{words}" if words else why, tuple(worker.id for worker in culprits))


def _culprits(workers: Sequence[Worker]) -> list[Worker]:
    """The processes that failed first, as far as exit codes tell: stopped or killed ones before those that raised or
    exceeded ``--patience``, and these before those that noticed that another was gone, or that JAX then aborted."""
    stopped = [worker for worker in workers if worker.code is None and worker.is_stopped()]
    failed = [worker for worker in workers if worker.code]
    killed = [worker for worker in failed if worker.code is not None and worker.code < 0]
    by_hand = [worker for worker in killed if worker.code != -signal.SIGABRT]
    raised = [worker for worker in failed if worker not in killed and worker.code != BEREFT]
    return [*stopped, *by_hand] or raised or failed


def _how(code: int | None) -> str:
    if code is None:
        return "was still there and was ended"
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    return f"ended with code {code}" if code else "ended well"


def _signal(workers: Sequence[Worker], number: signal.Signals) -> None:
    for worker in workers:
        if worker.code is None:
            worker.process.send_signal(number)


def last_words(log: Path, count: int = 12) -> str:
    """The last lines of a process's log, indented, without those of gloo about connections, which tell nothing."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    lines = [line for line in lines if line.strip() and not line.startswith("[Gloo]")]
    return "\n".join(f"    {line[:300]}" for line in lines[-count:])
