"""Batches made ahead of their step, in a thread of their own."""

import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """``get(step)`` is ``draw(step)``, made while earlier steps ran.

    Steps are expected one after the other; any other step may be asked for, and is then drawn anew.

    Args:
      draw: a pure function of the step. What it raises is raised by ``get`` of that step.
      first: the step that is asked for first.
      stop: no step from this one on is drawn ahead.
      depth: the number of steps that are drawn ahead, at least 1.

    Attributes:
      wait: the seconds that the latest ``get`` waited.
    """

    def __init__(self, draw: Callable[[int], T], first: int = 0, stop: int | None = None, depth: int = 2):
        self._draw, self._stop, self._depth = draw, math.inf if stop is None else stop, depth
        self._pool = ThreadPoolExecutor(1, "prefetch")
        self._ahead: deque[Future[T]] = deque()
        self.wait = 0.0
        self.restart(first)

    def get(self, step: int) -> T:
        began = time.perf_counter()
        if step != self._expected or not self._ahead:
            self.restart(step)
        made = self._ahead.popleft()
        self._expected += 1
        self._draw_ahead()
        try:
            return made.result()
        finally:
            self.wait = time.perf_counter() - began

    def restart(self, step: int) -> None:
        """Discard what was drawn ahead, because ``draw`` has changed, and continue at ``step``."""
        for made in self._ahead:
            made.cancel()
        self._expected, self._ahead = step, deque([self._pool.submit(self._draw, step)])
        self._draw_ahead()

    def close(self) -> None:
        """End the thread, after the batch that it is drawing."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draw_ahead(self) -> None:
        """Draw until ``depth`` steps wait and one more is being drawn."""
        while len(self._ahead) <= self._depth and (step := self._expected + len(self._ahead)) < self._stop:
            self._ahead.append(self._pool.submit(self._draw, step))
