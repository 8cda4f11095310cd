"""What bfloat16 costs where the trainer lets it stand for float32: sums of gradients, AdamW's moments.

Sums: the relative error of all gradients together, and that of the worst leaf, by how many microbatches a step has.
Moments: the loss after some steps of a small run beside that of the same run with float32.

    python benchmarks/rounding.py [--steps 100]
"""

import argparse
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import models
from dualpipe_jax import Pipeline, make_mesh
from dualpipe_jax.schedule import one_f_one_b
from train.config import configure
from train.setup import prepare
from train.state import trainable

SMALL = dict(model="tiny", schedule="one_f_one_b", pp=2, ep=1, microbatch_size=4, sequence=64)


def gradients(num_microbatches, dtype):
    """Of a small model at its first step, summed in ``dtype``; float64 [leaves]."""
    schedule, config = one_f_one_b(2, num_microbatches), models.tiny(num_layers=2)
    model = models.deepseek(config, 2, dispatch="dropless")
    pipeline = Pipeline(model.staged, schedule, make_mesh(2, 1), accumulate_dtype=dtype)
    tokens = jax.random.randint(jax.random.key(1), (2, num_microbatches, 4, 64), 0, config.vocab)
    params = pipeline.place(model.init(jax.random.key(0)))
    _, grads = pipeline.value_and_grad(params, {"inputs": tokens[0], "targets": tokens[1]})
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(trainable(pipeline.unplace(grads)))]


def error(found, wanted):
    """Norm of the difference over the norm."""
    parts = [(np.sum((f - w) ** 2), np.sum(w**2)) for f, w in zip(found, wanted, strict=True)]
    of_all = np.sqrt(sum(d for d, _ in parts) / sum(n for _, n in parts))
    return of_all, max(np.sqrt(d / n) for d, n in parts if n > 0)


def curve(steps, **options):
    """Losses of a small run."""
    run = prepare(configure(**SMALL, microbatches=4, steps=steps, **options))
    state, losses = run.init(), []
    for step in range(steps):
        state, metrics = run.update(state, run.batch(step))
        losses.append(metrics["loss"].item())
    return np.array(losses)


def main():
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    steps, console = parser.parse_args().steps, Console()
    table = Table("microbatches", "error of all gradients", "of the worst leaf", title="sums in bfloat16")
    for count in (4, 16, 64):
        of_all, worst = error(gradients(count, jnp.bfloat16), gradients(count, jnp.float32))
        table.add_row(str(count), f"{of_all:.1e}", f"{worst:.1e}")
    console.print(table)
    table = Table("kept in bfloat16", f"loss, mean of the last tenth of {steps} steps", "difference")
    plain = curve(steps)[-steps // 10 :].mean()
    table.add_row("nothing", f"{plain:.4f}", "")
    for name in ("moments", "gradient_sums"):
        loss = curve(steps, **{name: "bfloat16"})[-steps // 10 :].mean()
        table.add_row(name.replace("_", " "), f"{loss:.4f}", f"{loss - plain:+.4f}")
    console.print(table)


if __name__ == "__main__":
    main()
