"""Predicted steps against measured ones: `dualpipe plan --target cpu:8` and the trainer, schedule by schedule.

The planner times the units of a model on virtual CPU devices and predicts steps from them; then each plan is
run by scripts/train's own command, in a process of its own, on the trainer's own text. Both are counted in
core seconds, and neither is fitted to the other. A machine that others share may be a quarter slower at one
time than at another: so units are timed before the runs and again after them, and the prediction is the mean.
Printed are both times and the error, how far apart the two predictions are, the pairs of schedules in the
wrong order, and how far apart these were measured.

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

from dualpipe_jax.command.answers import Answers
from dualpipe_jax.command.plan import Search, as_file
from dualpipe_jax.inspect import Target
from dualpipe_jax.pods import Plan
from dualpipe_jax.pods.cache import Cache
from dualpipe_jax.pods.planner import Choice, Wanted, cases, ranked
from dualpipe_jax.present.table import Table

SCHEDULES = "gpipe", "one_f_one_b", "zb_h1", "dualpipe", "dualpipe_v", "zb_v"
BYTES = "vocab=256"
"""The change that the trainer makes to a model for text that is read byte by byte."""


def predict(target, wanted):
    """Each plan's choice and its core seconds of a step: the planner's seconds times the cores that it assumes busy."""
    with tempfile.TemporaryDirectory() as folder:
        search = Search(Answers(target, Cache(Path(folder)), None))
        search.explore(wanted)
        cores: dict[Plan, float | None] = {}
        for case in cases(wanted, Target.parse(target).num_devices)[0]:
            compiled = search.answers.ask(case.plan, "units", "").compiled
            # Its units were asked for.
            assert compiled is not None
            cores |= dict.fromkeys(case.plans, compiled.cores)
    for choice in search.choices:
        if choice.refused:
            print(f"{choice.plan.schedule}: {choice.refused}", file=sys.stderr)
    found: dict[Plan, tuple[Choice, float]] = {}
    for choice in ranked(search.choices):
        shared = cores[choice.plan]
        # What is ranked was timed, and on this machine all devices share its cores.
        assert choice.seconds is not None and shared is not None
        found[choice.plan] = choice, choice.seconds * shared
    return found


def measure(choice, target, steps):
    """The median seconds of the trainer's steps with a plan, without the first step: of all cores, and on the clock."""
    # The trainer gets the model by its name, and the vocabulary from the text.
    plan = dataclasses.replace(choice.plan, set=())
    with tempfile.TemporaryDirectory() as folder:
        file, metrics = Path(folder, "plan.json"), Path(folder, "runs", "measured", "metrics.jsonl")
        file.write_text(json.dumps(as_file(dataclasses.replace(choice, plan=plan), target)))
        options = {"--plan": file, "--runs": metrics.parents[1], "--name": "measured", "--steps": 1000}
        options["--eval-sequences"] = plan.num_microbatches * plan.batch
        command = [
            sys.executable,
            "-P",
            "-m",
            "train",
            *(str(word) for pair in options.items() for word in pair),
        ]
        with Path(folder, "log").open("w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                ends = list(itertools.islice(follow(process, metrics), steps + 1))
            finally:
                process.terminate()
                process.wait()
            if len(ends) <= steps:
                raise SystemExit(f"{plan.schedule}: {Path(log.name).read_text()[-3000:]}")
    spans = [
        [after - before for before, after in zip(*pair, strict=True)] for pair in itertools.pairwise(ends)
    ]
    return dict(zip(("cores", "wall"), map(statistics.median, zip(*spans, strict=True)), strict=True))


def follow(process, metrics):
    """Yield the core seconds that a process has spent, and the clock, each time that it has recorded a step."""
    seen = 0
    while process.poll() is None:
        # Held-out losses and events have lines of their own, the first one before any step.
        steps = metrics.read_bytes().count(b'"loss":') if metrics.exists() else 0
        if steps > seen:
            seen = steps
            spent = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            yield (int(spent[11]) + int(spent[12])) / os.sysconf("SC_CLK_TCK"), time.perf_counter()
        time.sleep(0.005)


def swapped(predicted, measured):
    """Pairs of schedules whose predicted order is not the measured one, and the relative difference of their steps."""
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
    given = parser.parse_args()
    target = f"cpu:{given.pp * given.ep}"
    wanted = Wanted(
        Plan(given.model, set=(BYTES,), sequence=given.sequence, capacity_factor=1.0),
        tokens=given.microbatches * given.ep * given.sequence,
        pp=(given.pp,),
        per_device=(1,),
        schedules=tuple(given.schedules),
        remats=("none",),
        dispatches=("capacity",),
        stashes=(None,),
    )
    predicted, drifts = {}, []
    measured: dict[Plan, dict[str, float]] = {}
    for case in cases(wanted, Target.parse(target).num_devices)[0]:
        only = dataclasses.replace(wanted, schedules=tuple(plan.schedule for plan in case.plans))
        before = predict(target, only)
        measured |= {plan: measure(choice, target, given.steps) for plan, (choice, _) in before.items()}
        after = predict(target, only)
        for plan, (_, cores) in before.items():
            predicted[plan] = (cores + after[plan][1]) / 2
            drifts.append(abs(after[plan][1] / cores - 1))
    rows = [
        (
            plan.schedule,
            f"{cores:.3f}",
            f"{measured[plan]['cores']:.3f}",
            f"{100 * (cores / measured[plan]['cores'] - 1):+.1f} %",
            f"{measured[plan]['wall']:.3f}",
        )
        for plan, cores in predicted.items()
    ]
    head = ("schedule", "predicted, core s", "measured, core s", "error", "measured, s on the clock")
    print(Table(head, tuple(rows)).markdown())
    wrong = swapped(
        {plan.schedule: cores for plan, cores in predicted.items()},
        {plan.schedule: took["cores"] for plan, took in measured.items()},
    )
    pairs = len(predicted) * (len(predicted) - 1) // 2
    errors = [100 * (cores / measured[plan]["cores"] - 1) for plan, cores in predicted.items()]
    print(
        f"\nerror: {statistics.fmean(map(abs, errors)):.1f} % on average ({statistics.fmean(errors):+.1f} % with its "
        f"sign), {max(map(abs, errors)):.1f} % at most"
    )
    print(f"two predictions, before the runs and after them: up to {100 * max(drifts):.1f} % apart")
    print(f"pairs in the measured order: {pairs - len(wrong)} of {pairs}")
    for a, b, apart in wrong:
        print(f"  {a} and {b} are swapped; measured they are {100 * apart:.1f} % apart")


if __name__ == "__main__":
    main()
