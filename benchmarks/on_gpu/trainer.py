"""The trainer on one GPU: v2-lite with 4 layers of experts, 8 microbatches of 2 sequences of 2,048 tokens, bfloat16.

The trainer runs in a process of its own, as users start it; the figures are from its metrics.jsonl, medians
after the first steps.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.on_trainer.runs import read_records

ROOT = Path(__file__).resolve().parents[2]
STEPS, SKIPPED = 12, 4
COMMAND = (
    "--devices accelerator --model v2-lite --layers 4 --schedule one_f_one_b --pp 1 --ep 1 --microbatches 8 "
    "--microbatch-size 2 --sequence 2048 --precision bfloat16 --seed 0"
)
CASES = {"dropless": "--dispatch dropless", "capacity 1.25": "--dispatch capacity --capacity-factor 1.25"}


def trainer(say: Callable[..., None], end: float) -> None:
    """Run each case until it has done its steps, or the monotonic clock says ``end``."""
    for name, options in CASES.items():
        with tempfile.TemporaryDirectory() as runs:
            command = [sys.executable, "-m", "train", *COMMAND.split(), *options.split()]
            command += ["--steps", "1000", "--runs", runs, "--name", "run"]
            log = Path(runs) / "log"
            with log.open("w") as out:
                # It is killed after its steps, because at its end it would save 30 GB.
                process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
                steps: list[dict] = []
                while len(steps) < STEPS and process.poll() is None and time.monotonic() < end:
                    time.sleep(0.5)
                    steps = [r for r in read_records(Path(runs) / "run") if "tokens_per_s" in r]
                process.kill()
                process.wait()
            if len(steps) < STEPS:
                say(name, failed=f"{len(steps)} steps", tail=log.read_text().splitlines()[-12:])
                continue
            last = steps[SKIPPED:]
            keys = ("tokens_per_s", "mfu", "tflops_per_s")
            found = {k: statistics.median(r[k] for r in last) for k in keys if all(k in r for r in last)}
            say(name, **found, loss=last[-1].get("loss"), options=f"{COMMAND} {options}")
