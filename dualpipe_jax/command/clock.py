"""CPU minutes: what was used, and whether a case of a search still ends in time."""

import contextlib
import math
import resource
from collections.abc import Iterator

from dualpipe_jax.pods.planner import Case, num_stages


class Clock:
    """CPU minutes of this process and of those that it asked, from now on, and what cases took of them.

    Args:
      minutes: after which no case is begun; None: no such limit.
    """

    def __init__(self, minutes: float | None):
        self._limit = math.inf if minutes is None else minutes
        self._started = _minutes()
        self._taken: list[tuple[int, float]] = []  # stages of a case, and its minutes

    def lasts(self, case: Case) -> bool:
        """Whether a case would still end in time, if it takes as long as any so far: longer stages take longer."""
        stages = num_stages(case.plan)
        longest = max((minutes * max(1.0, own / stages) for own, minutes in self._taken), default=0.0)
        return _minutes() - self._started + longest <= self._limit

    @contextlib.contextmanager
    def runs(self, case: Case) -> Iterator[None]:
        """While a case is compiled: its minutes are kept."""
        began = _minutes()
        try:
            yield
        finally:
            self._taken.append((num_stages(case.plan), _minutes() - began))


def _minutes() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)]
    return sum(each.ru_utime + each.ru_stime for each in used) / 60
