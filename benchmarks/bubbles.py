"""Bubbles made visible: two ranks on two cores, one thread each, wall time against the ideal.

The ideal is half the wall time of the plain program on one thread, times what the schedule's simulated makespan
has over its busy time (F = I = W): the wall time of a machine whose only loss is the bubble. Needs two idle
cores. The plain program and the pipelined one take turns; ratios are of neighbours, the median is quoted.

    python benchmarks/bubbles.py [--rounds 5]
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"

import argparse
import statistics
import time

import step_cost
from rich.console import Console
from rich.table import Table

from dualpipe_jax.schedule import CostModel, dualpipe, dualpipe_v, one_f_one_b, simulate, zb_h1

step_cost.RANKS = RANKS = 2


def wall_seconds(step, *args):
    """Wall seconds of one call."""
    before = time.perf_counter()
    step_cost.jax.block_until_ready(step(*args))
    return time.perf_counter() - before


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    table = Table(
        "schedule, microbatches", "plain, s", "pipelined, s", "ideal, s", "over ideal", "bubble, ideal"
    )
    for make in (one_f_one_b, zb_h1, dualpipe, dualpipe_v):
        for num_microbatches in (4, 16):
            schedule = make(RANKS, num_microbatches)
            plain, pipelined = step_cost.both(schedule, num_layers=4)
            costs = CostModel()
            timeline = simulate(schedule, costs)
            stretch = timeline.makespan / (sum(timeline.busy) / RANKS)
            pairs = [(wall_seconds(*plain), wall_seconds(*pipelined)) for _ in range(rounds + 1)][1:]
            over = statistics.median(b / (a / RANKS * stretch) for a, b in pairs)
            seconds = [statistics.median(column) for column in zip(*pairs, strict=True)]
            shown = [f"{v:.2f}" for v in (*seconds, seconds[0] / RANKS * stretch, over)]
            table.add_row(f"{schedule.name}, {num_microbatches}", *shown, f"{1 - 1 / stretch:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
