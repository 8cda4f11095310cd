"""One rank, a process of its own on one core: answers each command on stdin with a line of JSON on stdout.

check NAME: make the program, run it once and save its gradients in the folder; answers the loss, if this rank has it.
time NAME: run it again, all ranks at once; answers CPU seconds (all threads, spinning ones too) and wall seconds.

    rank.py torch|jax CASE RANK PORT FOLDER
"""

import json
import os
import sys
import time
from pathlib import Path


def main():
    framework, text, number, port, folder = sys.argv[1:]
    number, folder = int(number), Path(folder)
    cores = sorted(os.sched_getaffinity(0))
    # One core only, so that no thread pool can use a second one.
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    os.environ |= {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    sys.path.append(str(Path(__file__).parent.parent))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo prints messages to stdout
    import numpy as np

    from sides.case import Case

    if framework == "torch":
        from sides.in_torch import Side
    else:
        from sides.in_jax import Side

    side, programs = Side(Case.from_text(text), number, int(port), folder), {}

    def check(name):
        step, gradients = programs[name] = side.program(name)
        loss = step()
        np.savez(folder / f"{framework}.{name}.{number}.npz", **gradients())
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
