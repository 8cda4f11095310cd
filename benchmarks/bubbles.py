"""Bubbles made visible: two ranks on two cores, wall time against the ideal.

Each rank is a process of its own, bound to one core (in one process XLA would lend an idle rank's core to the
other, and fill the bubble). The ideal is half the wall time of the plain program on one core, times the ratio
of the schedule's simulated makespan to its busy time (F = I = W): the time of a machine whose only loss is
the bubble. Linux only, two idle cores needed; the processes talk over gloo on the loopback.

    python benchmarks/bubbles.py [--rounds 5]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from dualpipe_jax.processes import free_port

RANKS, LAYERS, COUNTS = 2, 4, (4, 16)
NAMES = ("one_f_one_b", "zb_h1", "dualpipe", "dualpipe_v")


def wall_seconds(jax, step, *args):
    """Wall seconds of one call."""
    before = time.perf_counter()
    jax.block_until_ready(step(*args))
    return time.perf_counter() - before


def rank(process, port, rounds):
    """Run one of the processes; the first one prints {"name, count": [(plain, pipelined) seconds]}."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[process]})
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    # It sets flags of its own; of a flag that is given twice the last one counts.
    from benchmarks import step_cost

    os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=1"
    import jax
    from jax.experimental import multihost_utils

    from dualpipe_jax import schedule

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", RANKS, process)
    seconds = {}
    for name in NAMES:
        for count in COUNTS:
            table = getattr(schedule, name)(RANKS, count)
            plain = step_cost.plain_program(table, LAYERS)
            pipelined = step_cost.pipelined_program(table, LAYERS)
            pairs = []
            for _ in range(rounds + 1):
                alone = wall_seconds(jax, *plain)  # each process runs the whole plain program on its own core
                multihost_utils.sync_global_devices("start")
                pairs.append((alone, wall_seconds(jax, *pipelined)))
            seconds[f"{name}, {count}"] = pairs[1:]
    if process == 0:
        print(json.dumps(seconds))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, nargs=2, metavar=("PROCESS", "PORT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: needs at least 1 timed round")
    if options.rank:
        process, port = options.rank
        rank(process, port, options.rounds)
        return
    port = free_port()
    command = [sys.executable, __file__, "--rounds", str(options.rounds), "--rank"]
    processes = [
        subprocess.Popen([*command, str(i), str(port)], stdout=subprocess.PIPE, text=True)
        for i in range(RANKS)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a rank failed")
    lines = outputs[0].splitlines()  # some of them are gloo's messages
    show(json.loads(next(line for line in lines if line.startswith("{"))))


def show(seconds):
    """Print the table: medians, and the median ratio of neighbouring runs."""
    from rich.console import Console
    from rich.table import Table

    from dualpipe_jax import schedule

    table = Table("schedule, M", "plain s", "pipelined s", "ideal s", "over ideal", "bubble")
    for title, pairs in seconds.items():
        name, count = title.split(", ")
        timeline = schedule.simulate(getattr(schedule, name)(RANKS, int(count)), schedule.CostModel())
        stretch = timeline.makespan / (sum(timeline.busy) / RANKS)
        over = statistics.median(b / (a / RANKS * stretch) for a, b in pairs)
        alone, pipelined = (statistics.median(column) for column in zip(*pairs, strict=True))
        shown = [f"{v:.2f}" for v in (alone, pipelined, alone / RANKS * stretch, over)]
        table.add_row(title, *shown, f"{1 - 1 / stretch:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
