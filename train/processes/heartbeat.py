"""Signs of life: a process tells its watcher what it does, and has a watchdog of its own.

The steps of all processes stall together, so a late step does not tell which process is at fault. Hence two signs: a
thread tells the watcher every second that the process runs (a stopped or dead process sends nothing); and a timer,
reset by each step, ends a process whose step does not end, and prints the stacks of all threads on stderr.
"""

import contextlib
import faulthandler
import os
import statistics
import threading
import time
from collections import deque

WATCHER = "TRAIN_PULSE"
"""Environment variable with the number of the file to write to, a pipe that the supervisor reads."""

PERIOD_S = 1.0
SHORTEST_LIMIT_S = 20.0
LIMIT_IN_MEDIANS = 10.0


class Heartbeat:
    """The signs of life of one process, from construction on.

    A process whose watcher is gone ends itself: nobody would end it otherwise.

    Args:
      watcher: the number of the file to write to, a pipe; None writes nothing.
      patience: the seconds that a step may take; None for ten median steps, but at least 20 s.
      watched: whether the timer runs at all.
    """

    def __init__(self, watcher: int | None = None, patience: float | None = None, *, watched: bool = True):
        self._watcher, self._patience, self._watched = watcher, patience, watched
        self._what, self._since = "starting", time.monotonic()
        self._steps: deque[float] = deque(maxlen=20)
        if watcher is not None:
            # Otherwise a watcher that is stopped would stop this process when the pipe is full.
            os.set_blocking(watcher, False)
            threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    def phase(self, what: str) -> None:
        """Tell the watcher what begins now. It may take any time: the timer is off until the next step begins."""
        self._what, self._since = what, time.monotonic()
        if self._watched:
            faulthandler.cancel_dump_traceback_later()
        self._send()

    def step(self, number: int, *, compiles: bool = False) -> None:
        """Tell the watcher that a step begins, and set the timer, unless the step is compiled first."""
        if compiles:
            self.phase(f"compiling step {number}")
            return
        now = time.monotonic()
        if self._what.startswith("step "):
            self._steps.append(now - self._since)
        self._what, self._since = f"step {number}", now
        if self._watched:
            faulthandler.dump_traceback_later(self.limit, exit=True)
        self._send()

    @property
    def limit(self) -> float:
        """Seconds after which the running step counts as stuck."""
        if self._patience is not None:
            return self._patience
        return (
            max(SHORTEST_LIMIT_S, LIMIT_IN_MEDIANS * statistics.median(self._steps))
            if self._steps
            else SHORTEST_LIMIT_S
        )

    def _send(self) -> None:
        if self._watcher is None:
            return
        try:
            os.write(self._watcher, f"{self._what}\n".encode())
        except BlockingIOError:
            pass
        except OSError:
            with contextlib.suppress(OSError):
                os.write(2, b"the supervisor is gone; this process ends too\n")
            os._exit(1)

    def _beat(self) -> None:
        while True:
            time.sleep(PERIOD_S)
            self._send()
