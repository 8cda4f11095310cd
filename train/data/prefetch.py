"""Batches made ahead of their step, in a thread of their own."""

import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """``get(step)`` is ``draw(step)``, made while earlier steps ran.

    Steps are expected one after the other; any other step may be asked for, and is then drawn anew.

    Args:
      draw: a pure function of the step. What it raises is raised by ``get`` of that step.
      first: the step that is asked for first.
      stop: no step from this one on is drawn ahead.
      depth: how many steps ahead, at least 1.

    Attributes:
      wait: seconds that the latest ``get`` waited.
    """

    def __init__(self, draw: Callable[[int], T], first: int = 0, stop: int | None = None, depth: int = 2):
        self._draw, self._stop, self._depth = draw, stop, depth
        self.wait, self._expected = 0.0, first
        self._start(first)

    def get(self, step: int) -> T:
        began = time.perf_counter()
        if step != self._expected or (self._stop is not None and step >= self._stop):
            self.restart(step)
        made, value = self._ready.get()
        self._expected += 1
        self.wait = time.perf_counter() - began
        if isinstance(value, _Raised):
            self._expected = -1  # whatever is asked for next is drawn anew
            raise value.error
        assert made == step
        return value

    def restart(self, step: int) -> None:
        """Forget what was drawn ahead, for ``draw`` has changed its mind, and go on at a step."""
        self.close()
        self._start(step)

    def close(self) -> None:
        """End the thread; it finishes the batch that it is at."""
        self._ended.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()  # it may be waiting for room
            except queue.Empty:
                self._thread.join(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, step: int) -> None:
        self._expected = step
        self._ready: queue.Queue = queue.Queue(self._depth)
        self._ended = threading.Event()
        work = (step, self._ready, self._ended)
        self._thread = threading.Thread(target=self._run, args=work, name="prefetch", daemon=True)
        self._thread.start()

    def _run(self, step: int, ready: queue.Queue, ended: threading.Event) -> None:
        first = step
        while not ended.is_set() and (self._stop is None or step < self._stop or step == first):
            try:
                ready.put((step, self._draw(step)))
            except BaseException as error:
                ready.put((step, _Raised(error)))
                return
            step += 1


class _Raised:
    def __init__(self, error: BaseException):
        self.error = error
