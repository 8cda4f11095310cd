"""Kill the trainer with SIGKILL at random moments and resume it: does it continue bit for bit as if it had not died?

One run is never killed. Another is killed again and again, while it starts, trains, and saves, and the same
command with --resume continues it. After each kill every line of its metrics.jsonl is compared with the line of
the run that was not killed: loss and gradient norm must be equal in every bit.

    scripts/bench kills                  # 100 kills of a small run, a checkpoint at every step
    scripts/bench kills --kills 10 --keep-every 50
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.on_trainer.runs import read_records

SMALL = (
    *("--model", "tiny", "--layers", "1", "--schedule", "gpipe"),
    *("--pp", "1", "--ep", "1", "--microbatches", "1"),
    *("--microbatch-size", "1", "--sequence", "16", "--eval-sequences", "2", "--checkpoint-every", "1"),
)
COMPARED = ("loss", "grad_norm")
MADE = {"text.txt", "log.txt", "runs", "cache"}
"""What lies in the folder of an earlier start, which the next one removes."""


class Trainer:
    """The command line of one run; its programs are compiled once for all its starts."""

    def __init__(self, folder: Path, name: str, options: list[str]):
        self.run = folder / "runs" / name
        paths = ["--data", str(folder / "text.txt"), "--runs", str(folder / "runs")]
        self.command = [sys.executable, "-P", "-m", "train", *paths, "--name", name, *options]
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        self.environ = os.environ | cache

    def start(self, log: Path) -> subprocess.Popen:
        """Start the run, or resume it."""
        with log.open("ab") as file:
            return subprocess.Popen([*self.command, "--resume"], env=self.environ, stdout=file, stderr=file)

    def lines(self) -> dict[int, tuple[float, ...]]:
        """The loss and gradient norm of each step in metrics.jsonl; a line that a kill has cut off is left out."""
        steps = (record for record in read_records(self.run) if "loss" in record)
        return {record["step"]: tuple(record[name] for name in COMPARED) for record in steps}

    def is_saving(self) -> bool:
        """Whether there is a checkpoint that is only half written."""
        folder = self.run / "checkpoints"
        return folder.exists() and any(not path.name.isdigit() for path in folder.iterdir())


def live_and_die(trainer: Trainer, log: Path, chance: random.Random, window: float) -> str:
    """Run the trainer from its start to SIGKILL; return what it was doing then."""
    process, before = trainer.start(log), max(trainer.lines(), default=0)
    early = chance.random() < 0.15
    deadline = time.monotonic() + (chance.uniform(0, 15) if early else 600)
    while time.monotonic() < deadline and process.poll() is None:
        # When it resumes, it removes the lines beyond the checkpoint.
        if max(trainer.lines(), default=0) > before:
            break
        before = min(before, max(trainer.lines(), default=0))
        time.sleep(0.05)
    if not early:
        time.sleep(chance.uniform(0, window))
    if process.poll() is not None:
        raise SystemExit(f"the trainer ended by itself with {process.returncode}:\n{log.read_text()[-2000:]}")
    process.send_signal(signal.SIGKILL)
    process.wait()
    if max(trainer.lines(), default=0) <= before:
        return "starting"
    return "saving" if trainer.is_saving() else "training"


def main() -> None:
    """Compare the two runs and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    parser.add_argument(
        "--window",
        type=float,
        default=2.0,
        help="seconds after the first new step within which the kill comes",
    )
    parser.add_argument(
        "--steps", type=int, default=2000, help="number of steps of the run that is not killed"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/kills"))
    given, options = parser.parse_known_args()
    found = {path.name for path in given.folder.iterdir()} if given.folder.is_dir() else set()
    if others := sorted(found - MADE):
        parser.error(f"{given.folder} has {others[0]}, which is not of this benchmark, and would be removed")
    shutil.rmtree(given.folder, ignore_errors=True)
    given.folder.mkdir(parents=True)
    (given.folder / "text.txt").write_text("".join(f"line {n} of {n * n}\n" for n in range(2000)))
    shared, log = [*SMALL, *options, "--steps", str(given.steps)], given.folder / "log.txt"

    alone = Trainer(given.folder, "alone", [*shared, "--checkpoint-every", str(given.steps)])
    if (code := alone.start(log).wait()) != 0:
        raise SystemExit(f"the run that is left alone ended with {code}:\n{log.read_text()[-2000:]}")
    expected, killed = alone.lines(), Trainer(given.folder, "killed", shared)
    chance, doing, compared, wrong = random.Random(given.seed), [], 0, []
    for number in range(given.kills):
        doing.append(live_and_die(killed, log, chance, given.window))
        lines = killed.lines()
        wrong += [(number, step) for step, values in lines.items() if values != expected.get(step)]
        compared += len(lines)
        print(f"kill {number + 1}: {doing[-1]}, {len(lines)} steps written, {len(wrong)} differ", flush=True)

    last = killed.start(log)
    reached = max(killed.lines(), default=0)
    while max(killed.lines(), default=0) < reached + 5 and last.poll() is None:
        time.sleep(0.1)
    last.send_signal(signal.SIGTERM)
    code, lines = last.wait(), killed.lines()
    wrong += [(given.kills, step) for step, values in lines.items() if values != expected.get(step)]
    story = log.read_text()
    print(
        f"{given.kills} kills: " + ", ".join(f"{doing.count(what)} while {what}" for what in sorted(set(doing)))
        + f"; {story.count('is damaged')} damaged steps found, {story.count('put aside')} times put aside\n"
        f"{compared + len(lines)} lines compared, {len(wrong)} differ; it came to step {max(lines)} and ended "
        f"on SIGTERM with {code}"
    )  # fmt: skip
    if wrong or code != 143:
        raise SystemExit(f"differing (life, step): {wrong[:20]}")


if __name__ == "__main__":
    main()
