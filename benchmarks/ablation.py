"""Bias-balanced routing against an auxiliary loss: DeepSeek-V3's ablation (its table 5), on the default model and text.

Every arm is trained with several seeds, each by the trainer's own command on one device; a run that these
options and this code have finished is not trained again. The results are a table and a picture of loss and
MaxVio.

    scripts/bench ablation               # 4 arms of 3 seeds: about half an hour on two cores
    scripts/bench ablation --picture docs/pictures/ablation.png
"""

import argparse
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from benchmarks.rebalance import trained

ARMS = {
    "bias, and a loss of 0.0001 (V3)": ("--bias-rate", "0.01", "--balance-factor", "0.0001"),
    "auxiliary loss of 0.001": ("--bias-rate", "0", "--balance-factor", "0.001"),
    "auxiliary loss of 0.01": ("--bias-rate", "0", "--balance-factor", "0.01"),
    "neither": ("--bias-rate", "0", "--balance-factor", "0"),
}
"""The arm's title in the figure -> options of the trainer."""
# Okabe and Ito's colours, which colour-blind people can tell apart.
COLOURS = ("#0072b2", "#e69f00", "#d55e00", "#666666")
SHARED = (
    *("--schedule", "gpipe", "--pp", "1", "--ep", "1", "--microbatches", "1", "--microbatch-size", "64"),
    *("--checkpoint-minutes", "1000"),
)
LAST = 50  # the number of last steps over which a row's MaxVio is averaged


def train(name, options, runs):
    """Train one run, unless that is done; return its records of steps and its losses of held-out text."""
    records = trained(name, options, runs)
    return [r for r in records if "loss" in r], [r["heldout_loss"] for r in records if "heldout_loss" in r]


def smooth(values, window=20):
    """The mean of each value and the values before it, of up to ``window`` values."""
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def draw(found, file):
    """Draw loss and MaxVio of every seed as thin lines, and their mean."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for (arm, runs), colour in zip(found.items(), COLOURS, strict=True):
        for axis, metric in zip(axes, ("loss", "max_vio"), strict=True):
            curves = [smooth([record[metric] for record in steps]) for steps, _ in runs]
            for curve in curves:
                axis.plot(range(1, len(curve) + 1), curve, color=colour, linewidth=0.6, alpha=0.5)
            mean = [statistics.fmean(values) for values in zip(*curves, strict=True)]
            axis.plot(range(1, len(mean) + 1), mean, color=colour, linewidth=1.8, label=arm)
    start = len(mean) // 5  # the steep fall at the beginning would hide the differences
    shown = [
        v for runs in found.values() for steps, _ in runs for v in smooth([r["loss"] for r in steps])[start:]
    ]
    axes[0].set(xlabel="step", ylabel="loss, nats a byte", ylim=(min(shown) * 0.98, max(shown) * 1.02))
    axes[1].set(xlabel="step", ylabel="MaxVio: busiest expert over the mean, less 1", ylim=(0, None))
    axes[1].legend(frameon=False)
    figure.suptitle("Routing balanced by a bias or by an auxiliary loss (means of 20 steps; thin: one seed)")
    figure.savefig(file, dpi=110)


def main():
    """Train, print the table, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/ablation"))
    parser.add_argument(
        "--picture", type=Path, help="file for the picture; in the folder of the runs if not given"
    )
    given = parser.parse_args()
    found = {
        arm: [
            train(
                f"{number}-{seed}",
                [*SHARED, *options, "--steps", str(given.steps), "--seed", str(seed)],
                given.runs,
            )
            for seed in range(given.seeds)
        ]
        for number, (arm, options) in enumerate(ARMS.items())
    }
    table = Table(
        "routing", "held-out loss, each seed", "mean", f"MaxVio, last {LAST} steps, each seed", "mean"
    )
    for arm, runs in found.items():
        losses = [heldout[-1] for _, heldout in runs]
        vio = [statistics.fmean(record["max_vio"] for record in steps[-LAST:]) for steps, _ in runs]
        row = [f"{' '.join(f'{v:.3f}' for v in of)}|{statistics.fmean(of):.3f}" for of in (losses, vio)]
        table.add_row(arm, *row[0].split("|"), *row[1].split("|"))
    Console(width=120).print(table)
    draw(found, given.picture or given.runs / "ablation.png")


if __name__ == "__main__":
    main()
