"""Predicted steps against measured ones: `dualpipe plan --target cpu:8` and the trainer, schedule by schedule.

The planner times the units of a model on virtual CPU devices and makes steps of them; then the trainer's own step of
each plan is run in a process of its own, on the trainer's own text. Both are counted in core seconds, which what else
the machine does hardly changes, and neither is fitted to the other. Printed: both times and the error, how many pairs
of schedules are in the wrong order, and of these how far apart their measured steps are.

    python benchmarks/predicted.py [SCHEDULE ...] [--model small] [--pp 4] [--ep 2] [--sequence 128] [--steps 6]
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dualpipe_jax.command.plan import Search, as_file
from dualpipe_jax.inspect import Target
from dualpipe_jax.pods import Plan
from dualpipe_jax.pods.cache import Cache
from dualpipe_jax.pods.planner import Wanted, cases, num_devices, ranked
from dualpipe_jax.present.table import Table

SCHEDULES = "gpipe", "one_f_one_b", "zb_h1", "dualpipe", "dualpipe_v", "zb_v"
BYTES = "vocab=256"
"""What the trainer makes of a model for text read byte by byte."""


def predict(target, wanted):
    """Core seconds of a step by plan: what the planner finds, times the cores that it takes to be at work."""
    with tempfile.TemporaryDirectory() as folder:
        search = Search(target, Cache(Path(folder)), None)
        search.explore(wanted)
        cores = {
            plan: search.ask(case.plan, "units", "").compiled.cores
            for case in cases(wanted, num_devices(target))[0]
            for plan in case.plans
        }
    for choice in search.choices:
        if choice.refused:
            print(f"{choice.plan.schedule}: {choice.refused}", file=sys.stderr)
    return {choice.plan: (choice, choice.seconds * cores[choice.plan]) for choice in ranked(search.choices)}


def measure(choice, target, steps):
    """Seconds of the trainer's steps with a plan, the first one left out: of all cores, and on the clock."""
    # The trainer knows the model by its name, and its vocabulary from the text.
    plan = dataclasses.replace(choice.plan, change=())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plan.json")
        file.write_text(json.dumps(as_file(dataclasses.replace(choice, plan=plan), target)))
        environment = os.environ | Target.parse(target).environment
        command = [sys.executable, __file__, "--measure", str(file), "--steps", str(steps)]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(f"{plan.schedule}: {found.stderr[-3000:]}")
    return json.loads(found.stdout.splitlines()[-1])


def run(file, steps):
    """In a process of its own: train, and print what each step took."""
    import jax

    from train.options import parse
    from train.setup import prepare

    ready = prepare(parse(["--plan", str(file), "--steps", str(steps)]).options)
    state, spent = ready.init(), []
    for number in range(steps):
        batch = ready.batch(number)
        jax.block_until_ready((state, batch))
        cores, wall = time.process_time(), time.perf_counter()
        state, metrics = ready.update(state, batch)
        jax.block_until_ready((state, metrics))
        spent.append((time.process_time() - cores, time.perf_counter() - wall))
    cores, wall = (statistics.median(each) for each in zip(*spent[1:], strict=True))
    print(json.dumps({"cores": cores, "wall": wall}))


def swapped(predicted, measured):
    """Pairs of schedules whose order is not the measured one; with the share by which their measured steps differ."""
    found = []
    for a, b in itertools.combinations(predicted, 2):
        if (predicted[a] - predicted[b]) * (measured[a] - measured[b]) < 0:
            found.append((a, b, abs(measured[a] / measured[b] - 1)))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("schedules", nargs="*", default=SCHEDULES)
    parser.add_argument("--model", default="small")
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure is not None:
        run(given.measure, given.steps)
        return
    target = f"cpu:{given.pp * given.ep}"
    wanted = Wanted(
        Plan(given.model, change=(BYTES,), sequence=given.sequence),
        tokens=given.microbatches * given.ep * given.sequence,
        pp=(given.pp,),
        per_device=(1,),
        schedules=tuple(given.schedules),
        remats=("none",),
        stashes=(None,),
    )
    predicted, rows = predict(target, wanted), []
    measured = {plan: measure(choice, target, given.steps) for plan, (choice, _) in predicted.items()}
    for plan, (_, cores) in predicted.items():
        took = measured[plan]
        rows.append(
            (
                plan.schedule,
                f"{cores:.3f}",
                f"{took['cores']:.3f}",
                f"{100 * (cores / took['cores'] - 1):+.1f} %",
                f"{took['wall']:.3f}",
            )
        )
    head = ("schedule", "predicted, core s", "measured, core s", "error", "measured, s on the clock")
    print(Table(head, tuple(rows)).markdown())
    wrong = swapped(
        {plan.schedule: cores for plan, (_, cores) in predicted.items()},
        {plan.schedule: took["cores"] for plan, took in measured.items()},
    )
    pairs = len(predicted) * (len(predicted) - 1) // 2
    errors = [abs(cores / measured[plan]["cores"] - 1) for plan, (_, cores) in predicted.items()]
    print(
        f"\nerror: {100 * statistics.median(errors):.1f} % at the median, {100 * max(errors):.1f} % at most"
    )
    print(f"pairs in the measured order: {pairs - len(wrong)} of {pairs}")
    for a, b, apart in wrong:
        print(f"  {a} and {b} are swapped; measured they are {100 * apart:.1f} % apart")


if __name__ == "__main__":
    main()
