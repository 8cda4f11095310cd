"""One rank, a process of its own on one core: answers each command on stdin with a line of JSON on stdout.

check NAME: make the program, run it once and save its gradients in the folder; answers the loss, if this rank has it.
time NAME: run it again, all ranks at once; answers CPU seconds (all threads, spinning ones too) and wall seconds.

    rank.py torch|jax CASE RANK PORT FOLDER
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.sides import in_jax, in_torch
    from benchmarks.sides.case import Case


def make_side(
    framework: str, case: "Case", number: int, port: int, folder: Path
) -> "in_torch.Side | in_jax.Side":
    """The side of a framework; the other framework is not imported."""
    if framework == "torch":
        from benchmarks.sides import in_torch

        return in_torch.Side(case, number, port, folder)
    from benchmarks.sides import in_jax

    return in_jax.Side(case, number, port, folder)


def main():
    framework, text = sys.argv[1:3]
    number, port = map(int, sys.argv[3:5])
    folder = Path(sys.argv[5])
    cores = sorted(os.sched_getaffinity(0))
    # One core only, so that no thread pool can use a second one.
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    os.environ |= {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo prints messages to stdout
    import numpy as np

    from benchmarks.sides.case import Case

    side = make_side(framework, Case.from_text(text), number, port, folder)
    programs: dict[str, tuple[Callable[[], float | None], Callable[[], dict[str, np.ndarray]]]] = {}

    def check(name):
        step, gradients = programs[name] = side.program(name)
        loss = step()
        leaves: dict[str, Any] = gradients()
        np.savez(folder / f"{framework}.{name}.{number}.npz", **leaves)
        return loss

    def measure(name):
        if name != "plain":
            side.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        programs[name][0]()
        return time.process_time() - cpu, time.perf_counter() - wall

    for line in sys.stdin:
        verb, name = line.split()
        print(json.dumps({"check": check, "time": measure}[verb](name)), file=answers, flush=True)


if __name__ == "__main__":
    main()
