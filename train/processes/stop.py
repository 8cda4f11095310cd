"""Requests to stop: a signal is noted; after each step the loop checks for it, and then saves and ends."""

import signal
import threading
from collections.abc import Collection
from types import FrameType
from typing import Any, Self

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Handlers:
    """A context in which signals are passed to ``handle``; afterwards their former handlers are restored.

    Args:
      numbers: the signals.
    """

    def __init__(self, numbers: Collection[signal.Signals]) -> None:
        self._numbers = numbers
        self._before: dict[signal.Signals, Any] = {}

    def handle(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        # Python lets only the main thread set handlers.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self.handle) for number in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Stop(Handlers):
    """A context in which the first Ctrl-C or SIGTERM is noted and does not end the process; the second one ends it.

    Args:
      numbers: the signals that are noted; none with several processes, where JAX notes them (``Processes.preempted``).

    Attributes:
      signal: the signal that came; None before.
    """

    def __init__(self, numbers: Collection[signal.Signals] = tuple(NAMES)) -> None:
        super().__init__(numbers)
        self.signal: signal.Signals | None = None

    @property
    def reason(self) -> str | None:
        """The name of the signal that came, in words; None before."""
        return None if self.signal is None else NAMES[self.signal]

    def note(self, number: int) -> None:
        """Note that a signal came. Raises KeyboardInterrupt for a second one."""
        if self.signal is not None:
            # Asked twice: end at once, without saving.
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)

    def handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.note(number)
