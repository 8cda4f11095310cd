"""Requests to stop: a signal is noted, the loop looks after each step, saves, and ends."""

import signal
import threading
from collections.abc import Collection
from types import FrameType
from typing import Any, Self

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Handlers:
    """While it is entered, these signals come to ``handle``; afterwards to whom they came before.

    Args:
      numbers: of the signals.
    """

    def __init__(self, numbers: Collection[signal.Signals]) -> None:
        self._numbers = numbers
        self._before: dict[signal.Signals, Any] = {}

    def handle(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # nobody else may set handlers
            self._before = {number: signal.signal(number, self.handle) for number in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Stop(Handlers):
    """While it is entered, the first Ctrl-C or SIGTERM is noted instead of ending the process; the second is not.

    Args:
      numbers: the signals that are noted; with several processes JAX does that (``Processes.preempted``).

    Attributes:
      signal: the signal that came, None as long as none did.
    """

    def __init__(self, numbers: Collection[signal.Signals] = tuple(NAMES)) -> None:
        super().__init__(numbers)
        self.signal: signal.Signals | None = None

    @property
    def reason(self) -> str | None:
        """Who asked, in words; None as long as nobody did."""
        return None if self.signal is None else NAMES[self.signal]

    def note(self, number: int) -> None:
        """Note that a signal came. Raises KeyboardInterrupt for a second one."""
        if self.signal is not None:
            raise KeyboardInterrupt  # asked twice: at once, and nothing is saved
        self.signal = signal.Signals(number)

    def handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.note(number)
