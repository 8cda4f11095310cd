"""The CPU minutes of a search: those used so far, and whether another case would end in time."""

import contextlib
import math
import resource
from collections.abc import Iterator

from dualpipe_jax.pods.planner import Case, num_stages


class CpuBudget:
    """CPU minutes of this process and of its children that have ended, from now on, and those of each case.

    Args:
      minutes: the CPU minutes within which every case must be expected to end; None: no limit.
    """

    def __init__(self, minutes: float | None):
        self._limit = math.inf if minutes is None else minutes
        self._started = _minutes()
        # Of each case the number of its stages, and its minutes.
        self._taken: list[tuple[int, float]] = []

    def allows(self, case: Case) -> bool:
        """Whether a case would still end in time, if it takes as long as any so far, or longer if its stages are fewer.

        Fewer stages are longer ones, and take longer in proportion.
        """
        stages = num_stages(case.plan)
        longest = max((minutes * max(1.0, own / stages) for own, minutes in self._taken), default=0.0)
        return _minutes() - self._started + longest <= self._limit

    @contextlib.contextmanager
    def recording(self, case: Case) -> Iterator[None]:
        """A context in which a case is compiled: its minutes are recorded."""
        began = _minutes()
        try:
            yield
        finally:
            self._taken.append((num_stages(case.plan), _minutes() - began))


def _minutes() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)]
    return sum(each.ru_utime + each.ru_stime for each in used) / 60
