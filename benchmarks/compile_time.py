"""Compile time against the number of microbatches: CPU seconds of lowering and compiling a step.

python benchmarks/compile_time.py
"""

import argparse
import time

from rich.console import Console
from rich.table import Table

from benchmarks import step_cost
from dualpipe_jax.schedule import dualpipe, one_f_one_b

step_cost.WIDTH, step_cost.SIZE = 64, 1


def compile_seconds(make, num_microbatches):
    """CPU seconds from the call to the executable, and the number of lines of the program."""
    schedule = make(step_cost.RANKS, num_microbatches)
    step, *arguments = step_cost.pipelined_program(schedule, num_layers=8)
    before = time.process_time()
    program = step.lower(*arguments).compile()
    return time.process_time() - before, len(program.as_text().splitlines())


def main():
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    table = Table("schedule", "microbatches", "CPU s", "over 16 microbatches", "HLO lines")
    for make in (one_f_one_b, dualpipe):
        runs = {count: [compile_seconds(make, count) for _ in range(3)] for count in (16, 64)}
        best = {count: min(seconds for seconds, _ in tries) for count, tries in runs.items()}
        for count, seconds in best.items():
            table.add_row(
                make.__name__,
                str(count),
                f"{seconds:.2f}",
                f"{seconds / best[16]:.2f}",
                str(runs[count][0][1]),
            )
    Console().print(table)


if __name__ == "__main__":
    main()
