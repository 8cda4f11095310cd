"""Find the process that slows the others down.

In one program all steps take equally long on all processes, because all wait for the slowest. What differs is the time
of work in which a process waits for no other: its own work on the host, and a matrix product on its own devices, which
are measured separately.
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
"""Rows and columns of the matrices of the probe, whose product takes much longer than a dispatch and much shorter than
a step."""

REPEATS = 3


class Stragglers:
    """Measures this process, and reports the slowest of all processes.

    Args:
      processes: the processes; if there is only one, nothing is reported.
      every: the number of steps between reports; 0 for none.
    """

    def __init__(self, processes: Processes, every: int):
        self._processes, self._every = processes, every if processes.count > 1 else 0
        self._host, self._steps = 0.0, 0
        self._probe: Callable[[], float] | None = None

    @contextmanager
    def timing_host_work(self) -> Iterator[None]:
        """A context around work that this process does for a step by itself, such as drawing its batch."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._host += time.perf_counter() - began

    def report(self, step: int) -> dict[str, Any] | None:
        """Call it after each step. Returns a record for the metrics on process 0 every ``every`` steps, else None.

        The record holds, for the host's work per step and for the product, the number of the slowest process, its
        excess over the median in seconds, and the median in seconds.
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
    """(slowest, its excess over the median, the median). Of an even number, the lower median: of two, the quicker."""
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
    """``probe()``: the seconds of a matrix product on this process's slowest device, the shortest of some repeats."""
    factors = [jax.device_put(jnp.ones((SIZE, SIZE), jnp.float32), device) for device in jax.local_devices()]
    square = jax.jit(lambda factor: factor @ factor)
    return lambda: max(seconds(functools.partial(square, factor), REPEATS) for factor in factors)
