"""What moving and copying experts gains where routing is uneven: drops, padded rows, the busiest device's load.

The text and model are the defaults, with two layers and nothing that balances the routing: neither bias nor
loss. Each row is a run by the trainer's own command on four devices of ep; a run that these options and this
code have finished is not trained again. Figures are means over the last half of a run's steps.

    scripts/bench rebalance              # five runs of 80 steps: a few minutes on two cores
"""

import argparse
import functools
import hashlib
import json
import os
import statistics
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

import models
from benchmarks.on_trainer.runs import read_records, run_trainer
from dualpipe_jax.parallel import capacity_for

ROOT = Path(__file__).resolve().parent.parent
EP, MICROBATCHES, SIZE, SEQUENCE, LAYERS = 4, 2, 16, 64, 2
MOVED, COPIED = ("--rebalance-every", "10"), ("--rebalance-every", "10", "--redundant-experts", "4")
ROOM = ("--dispatch", "capacity", "--capacity-factor", "1.5")
ARMS = {
    "dropless, in order": (),
    "dropless, moved": MOVED,
    "dropless, moved, 4 redundant": COPIED,
    "capacity 1.5, in order": ROOM,
    "capacity 1.5, moved, 4 redundant": (*ROOM, *COPIED),
}
"""The arm's title in the table -> options of the trainer."""
SHARED = (
    *("--schedule", "gpipe", "--pp", "1", "--ep", str(EP), "--microbatches", str(MICROBATCHES)),
    *("--microbatch-size", str(SIZE), "--sequence", str(SEQUENCE), "--layers", str(LAYERS)),
    *("--bias-rate", "0", "--balance-factor", "0", "--eval-sequences", "64", "--checkpoint-minutes", "1000"),
)


@functools.cache
def code():
    """What a run depends on beside its options: the trainer's sources, and JAX."""
    found = hashlib.sha256(jax.__version__.encode())
    for room in ("dualpipe_jax", "models", "train"):
        for path in sorted((ROOT / room).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def trained(name, options, runs):
    """The records of a run, which is trained unless these options and this code have finished it; runs in one folder
    share compiled programs."""
    name = f"{name}-{hashlib.sha256(json.dumps([*options, code()]).encode()).hexdigest()[:8]}"
    # A run that was cut short has a report, too.
    finished = runs / name / "finished"
    if finished.exists():
        return read_records(runs / name)
    cache = {"JAX_COMPILATION_CACHE_DIR": str(runs / "cache"), "JAX_PLATFORMS": "cpu"}
    records = run_trainer(name, ["--resume", *options], runs, os.environ | cache)
    finished.touch()
    return records


def rows_with_room(options):
    """The rows that a step's experts multiply in all layers, padding included (None if dropless), and the
    rows that tokens ask for."""
    config = models.byte()
    asked = MICROBATCHES * SIZE * SEQUENCE * config.top_k * LAYERS
    if "capacity" not in options:
        return None, asked
    spare = int(options[options.index("--redundant-experts") + 1]) if "--redundant-experts" in options else 0
    held, tokens = config.num_experts + spare, SIZE // EP * SEQUENCE
    room = capacity_for(tokens, config.top_k, held, float(options[options.index("--capacity-factor") + 1]))
    return LAYERS * MICROBATCHES * EP * held * room, asked


def figures(records, options):
    """The cells of a row: dropped, padded rows as a share of all, the busiest device's load over the mean,
    the share of time that the others wait for it, moved experts, held-out loss."""
    steps = [record for record in records if "loss" in record]
    last = steps[len(steps) // 2 :]
    dropped = statistics.fmean(record["drop_rate"] for record in last)
    load = statistics.fmean(record["device_load"] for record in last)
    room, asked = rows_with_room(options)
    # Dropless experts have no padding; there the waste is that the other devices wait for the busiest one.
    padded = "" if room is None else f"{1 - asked * (1 - dropped) / room:.1%}"
    moved = sum(record.get("experts_moved", 0) for record in records)
    heldout = [record["heldout_loss"] for record in records if "heldout_loss" in record][-1]
    return f"{dropped:.2%}", padded, f"{load:.3f}", f"{1 - 1 / load:.1%}", str(moved), f"{heldout:.4f}"


def main():
    """Train the runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--runs", type=Path, default=Path("runs/rebalance"))
    given = parser.parse_args()
    table = Table(
        "experts", "dropped", "padded rows", "devices max/mean", "waiting", "moves", "held-out loss"
    )
    for number, (arm, options) in enumerate(ARMS.items()):
        records = trained(str(number), [*SHARED, *options, "--steps", str(given.steps)], given.runs)
        table.add_row(arm, *figures(records, options))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
