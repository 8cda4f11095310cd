"""Requests to stop: a signal is noted, the loop looks after each step, saves, and ends."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Stop:
    """While it is entered, the first Ctrl-C or SIGTERM is noted instead of ending the process; the second is not.

    Attributes:
      signal: the signal that came, None as long as none did.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def reason(self) -> str | None:
        """Who asked, in words; None as long as nobody did."""
        return None if self.signal is None else NAMES[self.signal]

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # nobody else may set handlers
            self._before = {number: signal.signal(number, self._note) for number in NAMES}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal is not None:
            raise KeyboardInterrupt  # asked twice: at once, and nothing is saved
        self.signal = signal.Signals(number)
