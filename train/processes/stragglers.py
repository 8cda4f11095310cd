"""Which process holds the others up.

In one program all steps take equally long on all processes, for everyone waits for the slowest. What differs is what
each does while nobody waits for it: its own work on the host, and a product on its own devices, measured apart.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from dualpipe_jax.probe.place import seconds
from train.processes.group import Processes

SIZE = 512
"""Rows and columns of the probed product: long against a dispatch, short against a step."""

REPEATS = 3


class Stragglers:
    """Measures this process, and reports the slowest of all.

    Args:
      processes: all of them; alone, nothing is measured.
      every: steps between reports; 0 for none.
    """

    def __init__(self, processes: Processes, every: int):
        self._processes, self._every = processes, every if processes.count > 1 else 0
        self._host, self._steps = 0.0, 0
        self._probe: Callable[[], float] | None = None

    @contextmanager
    def host(self) -> Iterator[None]:
        """Around what this process does for a step by itself, such as drawing its batch."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._host += time.perf_counter() - began

    def report(self, step: int) -> dict[str, Any] | None:
        """After a step: on process 0, every so many steps, a record for the metrics; None otherwise.

        The record holds, in seconds, for the host's work per step and for the product: the slowest process, its
        excess over the median, and the median.
        """
        self._steps += 1
        if not self._every or step % self._every:
            return None
        if self._probe is None:
            self._probe = make_probe()
        mine = {"host": self._host / self._steps, "device": self._probe()}
        self._host, self._steps = 0.0, 0
        found = self._processes.gather(mine)
        if not found:
            return None
        record: dict[str, Any] = {"step": step}
        for name in mine:
            slowest, excess, median = excess_over_median([one[name] for one in found])
            record |= {
                f"slowest_{name}": slowest,
                f"slowest_{name}_excess_s": excess,
                f"median_{name}_s": median,
            }
        return record


def excess_over_median(seconds: list[float]) -> tuple[int, float, float]:
    """(slowest, its excess over the median, the median). Of two, the median is the quicker one."""
    slowest = max(range(len(seconds)), key=lambda number: seconds[number])
    median = statistics.median_low(seconds)
    return slowest, seconds[slowest] - median, median


def describe(record: dict[str, Any]) -> str:
    parts = [
        f"{what} process {record[f'slowest_{name}']}, {1000 * record[f'slowest_{name}_excess_s']:.1f} ms over the "
        f"median of {1000 * record[f'median_{name}_s']:.1f} ms"
        for name, what in (("host", "host work of a step:"), ("device", "a product on its devices:"))
    ]
    return f"slowest    {'; '.join(parts)}"


def make_probe() -> Callable[[], float]:
    """``probe()``: seconds that a product takes on this process's slowest device, at best."""
    factors = [jax.device_put(jnp.ones((SIZE, SIZE), jnp.float32), device) for device in jax.local_devices()]
    square = jax.jit(lambda factor: factor @ factor)
    return lambda: max(seconds(functools.partial(square, factor), REPEATS) for factor in factors)
