"""Signs of life: what a process does, told to whoever watches over it; and its own watchdog.

Steps of all processes stall together, so a late step does not name the culprit. Hence two signs: a thread that says
every second that the process runs at all (one that is stopped or dead says nothing), and a timer, set anew with each
step, that ends a process whose step does not end, with every thread's stack on stderr.
"""

import contextlib
import faulthandler
import os
import statistics
import threading
import time
from collections import deque

WATCHER = "TRAIN_PULSE"
"""Variable of the environment: the number of the file to write to, a pipe that the supervisor reads."""

BEAT_S = 1.0
SLOWEST_S = 20.0
TIMES = 10.0


class Pulse:
    """The signs of life of one process, from construction on.

    A process whose watcher is gone ends itself: nobody would end it otherwise.

    Args:
      watcher: file to write to, a pipe; None writes nothing.
      patience: seconds that a step may take; None takes ten median steps, and 20 s at least.
      watched: whether the timer runs at all.
    """

    def __init__(self, watcher: int | None = None, patience: float | None = None, *, watched: bool = True):
        self._watcher, self._patience, self._watched = watcher, patience, watched
        self._what, self._since = "starting", time.monotonic()
        self._steps: deque[float] = deque(maxlen=20)
        if watcher is not None:
            os.set_blocking(watcher, False)  # a watcher that is stopped stops nobody else
            threading.Thread(target=self._beat, daemon=True, name="pulse").start()

    def phase(self, what: str) -> None:
        """Say what begins now; it may take any time, until the next step is begun."""
        self._what, self._since = what, time.monotonic()
        if self._watched:
            faulthandler.cancel_dump_traceback_later()
        self._say()

    def step(self, number: int, *, compiles: bool = False) -> None:
        """Say that a step begins, and set the timer, unless the step is compiled first."""
        if compiles:
            self.phase(f"compiling step {number}")
            return
        now = time.monotonic()
        if self._what.startswith("step "):
            self._steps.append(now - self._since)
        self._what, self._since = f"step {number}", now
        if self._watched:
            faulthandler.dump_traceback_later(self.limit, exit=True)
        self._say()

    @property
    def limit(self) -> float:
        """Seconds after which the step that runs counts as stuck."""
        if self._patience is not None:
            return self._patience
        return max(SLOWEST_S, TIMES * statistics.median(self._steps)) if self._steps else SLOWEST_S

    def _say(self) -> None:
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
            time.sleep(BEAT_S)
            self._say()
