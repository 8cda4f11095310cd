"""This project's engine against PyTorch's pipelines and JAX's GPipe by autodiff: same blocks, weights and schedules.

scripts/bench peers [--ranks 2 4] [--blocks mlp moe] [--rounds 5] [--microbatches 16]

Needs PyTorch: `pip install -e '.[torch]'`. Linux only. On each side a rank is a process of its own, bound to
one core (rank modulo cores), and talks over gloo on the loopback; one process of each side also runs the
plain step, gradient accumulation without a pipeline. Every program's loss and gradients are compared with the
plain step of the other framework before it is timed; a row that is off by more than TOLERANCE is void. Then
all programs take turns.

CPU seconds are those of all threads of all ranks in one step, including threads that spin while they wait,
divided by those of the plain step of the same framework in the same round. The ideal wall time is that of a
machine with these cores whose only loss is the bubble: the plain step's wall time times the larger of two
numbers, the ratio of the schedule's makespan to the work of all ranks (F = I = W), and one over the number of
cores. With more ranks than cores other ranks compute in a rank's bubble, and only CPU seconds say much.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.sides.case import BLOCKS, Case
from dualpipe_jax import schedule
from dualpipe_jax.processes import free_port

RANK = Path(__file__).parent / "sides" / "rank.py"
TOLERANCE = 1e-4
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_ARENA_MAX": "1"}
"""Environment variables by which glibc keeps memory. Otherwise it returns memory to the kernel after each
step, and XLA, which asks for all memory of a step at once, would pay for each of its pages again. Both sides
keep their memory, as they do on an accelerator."""
PLAIN = ("torch", "plain"), ("jax", "plain")
PROGRAMS = {
    ("torch", "1F1B"): "PyTorch 1F1B",
    ("torch", "ZBV"): "PyTorch ZBV",
    ("torch", "DualPipeV"): "PyTorch DualPipeV",
    ("jax", "autodiff"): "JAX GPipe by autodiff",
    ("jax", "autodiff-skip"): "the same, idle ticks skipped",
    ("jax", "GPipe"): "engine, GPipe",
    ("jax", "1F1B"): "engine, 1F1B",
    ("jax", "ZBV"): "engine, ZBV",
    ("jax", "DualPipeV"): "engine, DualPipeV",
}
HEAD = (
    "block, ranks",
    "program",
    "plain CPU s",
    "CPU s",
    "over plain: median (range)",
    "wall over ideal",
    "off by",
)


class Side:
    """The ranks of one framework, as processes that wait for commands."""

    def __init__(self, framework: str, case: Case, folder: str, cleanup: contextlib.ExitStack):
        port = free_port()
        command = [sys.executable, str(RANK), framework, case.text()]
        self.framework = framework
        self.ranks = [
            subprocess.Popen(
                [*command, str(rank), str(port), folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | KEEP_MEMORY,
            )
            for rank in range(case.ranks)
        ]
        for rank in self.ranks:
            cleanup.callback(rank.kill)

    def ask(self, verb: str, name: str) -> list:
        """Send a command and return each rank's answer; a plain step runs on the first rank alone."""
        print(f"{verb} {self.framework} {name}", file=sys.stderr, flush=True)
        asked = self.ranks[:1] if name == "plain" else self.ranks
        for rank in asked:
            print(verb, name, file=rank.stdin, flush=True)
        answers = []
        for rank in asked:
            assert rank.stdout is not None
            answers.append(rank.stdout.readline())
        if not all(answers):
            sys.exit(f"a rank of {self.framework} failed at {verb} {name}")
        return [json.loads(answer) for answer in answers]


def gradients(folder: str, framework: str, name: str) -> dict[str, np.ndarray]:
    """The gradients of all ranks, by leaf and layer."""
    found: dict[str, np.ndarray] = {}
    for path in Path(folder).glob(f"{framework}.{name}.*.npz"):
        found |= np.load(path)
    return found


def off_by(case: Case, folder: str, checked: dict) -> dict:
    """The largest relative error of each program's loss and gradients against the other framework's plain step."""
    plain = {framework: gradients(folder, framework, "plain") for framework, _ in PLAIN}
    assert len(plain["jax"]) == case.layers * len(case.shapes())
    errors = {}
    for (framework, name), losses in checked.items():
        other = "jax" if framework == "torch" else "torch"
        expected = checked[other, "plain"][0]
        worst = max(abs(loss / expected - 1) for loss in losses if loss is not None)
        found = gradients(folder, framework, name)
        assert found.keys() == plain[other].keys(), (framework, name)
        for leaf, value in plain[other].items():
            worst = max(worst, np.max(np.abs(found[leaf] - value)) / np.max(np.abs(value)))
        errors[framework, name] = float(worst)
    return errors


def stretch(case: Case, folder: str, name: str) -> float:
    """The ratio of a schedule's makespan to the work of one rank."""
    if name in ("ZBV", "DualPipeV"):
        table = schedule.from_torch_csv((Path(folder) / f"{name}.csv").read_text())
    else:
        table = (schedule.one_f_one_b if name == "1F1B" else schedule.gpipe)(case.ranks, case.microbatches)
    timeline = schedule.simulate(table, schedule.CostModel())
    return timeline.makespan / (sum(timeline.busy) / case.ranks)


def study(case: Case, rounds: int) -> list[tuple[str, ...]]:
    """The rows of one block and number of ranks."""
    with contextlib.ExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory())
        sides = {framework: Side(framework, case, folder, cleanup) for framework in ("torch", "jax")}
        every = (*PLAIN, *PROGRAMS)
        # PyTorch first, because it writes the tables that JAX's side reads.
        checked = {key: sides[key[0]].ask("check", key[1]) for key in every}
        errors = off_by(case, folder, checked)
        times: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in every}
        for _ in range(rounds):
            for framework, name in every:
                answers = sides[framework].ask("time", name)
                times[framework, name].append(
                    (sum(cpu for cpu, _ in answers), max(wall for _, wall in answers))
                )
        cores = len(os.sched_getaffinity(0))
        rows = []
        for (framework, name), title in PROGRAMS.items():
            plain, own = times[framework, "plain"], times[framework, name]
            share = max(stretch(case, folder, name) / case.ranks, 1 / cores)
            rows.append(
                (f"{case.block}, {case.ranks}", title, *figures(plain, own, share, errors[framework, name]))
            )
        return rows


def figures(plain: list, own: list, share: float, error: float) -> tuple[str, ...]:
    """The cells of a row from (CPU, wall) seconds of the plain step and of the program, round by round."""
    if not error < TOLERANCE:
        return ("void",) * 4 + (f"{error:.0e}",)
    pairs = list(zip(plain, own, strict=True))
    ratios = sorted(b[0] / a[0] for a, b in pairs)
    over = statistics.median(b[1] / (a[1] * share) for a, b in pairs)
    seconds = (f"{statistics.median(cpu for cpu, _ in column):.2f}" for column in (plain, own))
    spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
    return (*seconds, spread, f"{over:.2f}", f"{error:.0e}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--blocks", nargs="+", default=BLOCKS, choices=BLOCKS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--microbatches", type=int, default=16)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: needs at least 1 timed round")
    if unfit := [ranks for ranks in options.ranks if ranks < 2 or Case.layers % (2 * ranks)]:
        parser.error(f"--ranks {unfit[0]}: two stages a rank must share {Case.layers} layers: 2 or 4")
    if importlib.util.find_spec("torch") is None:
        sys.exit(
            "peers: PyTorch is not installed; pip install -e '.[torch]' beside what scripts/bench set up."
        )
    print("| " + " | ".join(HEAD) + " |", "| --- | --- |" + " ---: |" * (len(HEAD) - 2), sep="\n", flush=True)
    for block in options.blocks:
        for ranks in options.ranks:
            case = Case(block, ranks, options.microbatches)
            for row in study(case, options.rounds):
                print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
