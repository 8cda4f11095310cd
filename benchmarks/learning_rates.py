"""Learning rates by width, and rates of selection biases, on short runs: the basis of the rules of models/recipes.py.

Every run is one of scripts/train on one device: two layers with experts, 80 steps of 8 x 64 bytes of the
standard library, all with one seed. The held-out loss is measured; a single row cannot show how much of it is
rounding or chance.

    scripts/bench learning_rates              # four widths, three rates, two rates of biases: ten minutes on two cores
    scripts/bench learning_rates --dims 64
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.on_trainer.runs import run_trainer
from models.recipes import rate_for

FACTORS = 0.5, 1.0, 2.0
BIAS_RATES = 0.001, 0.01
SAME = (
    *("--schedule", "one_f_one_b", "--pp", "1", "--ep", "1", "--microbatches", "2", "--microbatch-size", "4"),
    *("--sequence", "64", "--model", "tiny", "--layers", "2", "--eval-sequences", "128"),
)


def figures(runs: Path, dim: int, rate: float, bias_rate: float, steps: int) -> tuple[float, float, float]:
    """Held-out loss in nats a byte at the end; largest MaxVio and its mean over the last half."""
    name = f"{dim}-{rate:g}-{bias_rate:g}"
    own = [f"--steps={steps}", f"--learning-rate={rate}", f"--bias-rate={bias_rate}"]
    sizes = ["--set", f"dim={dim}", f"dense_hidden={2 * dim}", f"expert_hidden={dim // 2}"]
    lines = run_trainer(name, [*SAME, *own, *sizes], runs)
    unevenness = [line["max_vio"] for line in lines if "max_vio" in line]
    return lines[-1]["heldout_loss"], max(unevenness), float(np.mean(unevenness[steps // 2 :]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--steps", type=int, default=80)
    asked = parser.parse_args()
    print("| width | learning rate | bias rate | held-out loss | largest MaxVio | of the last half |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for dim in asked.dims:
            cases = (
                *((factor, 0.01) for factor in FACTORS),
                *((1.0, bias) for bias in BIAS_RATES if bias != 0.01),
            )
            for factor, bias_rate in cases:
                rate = factor * rate_for(dim)
                loss, largest, later = figures(Path(folder), dim, rate, bias_rate, asked.steps)
                said = f"{rate:.2g} = {factor:g} x the rule's"
                print(
                    f"| {dim} | {said} | {bias_rate:g} | {loss:.3f} | {largest:.2f} | {later:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
