"""The error of gradients that are summed in bfloat16, by the number of microbatches of a step.

Printed are the relative error of all gradients together, and that of the worst leaf, against sums in float32.

    python benchmarks/rounding.py
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


def gradients(num_microbatches, dtype):
    """The gradients of a small model at its first step, summed in ``dtype``: a list of float64 leaves."""
    schedule, config = one_f_one_b(2, num_microbatches), models.tiny(num_layers=2)
    model = models.deepseek(config, 2, dispatch="dropless")
    pipeline = Pipeline(model.staged, schedule, make_mesh(2, 1), accumulate_dtype=dtype)
    tokens = jax.random.randint(jax.random.key(1), (2, num_microbatches, 4, 64), 0, config.vocab)
    params = pipeline.place(model.init(jax.random.key(0)))
    _, grads = pipeline.value_and_grad(params, {"inputs": tokens[0], "targets": tokens[1]})
    leaves = [leaf for leaf in jax.tree.leaves(grads) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return [np.asarray(leaf, np.float64) for leaf in leaves]


def error(found, wanted):
    """The norm of the difference over the norm of ``wanted``: of all leaves together, and of the worst leaf."""
    parts = [(np.sum((f - w) ** 2), np.sum(w**2)) for f, w in zip(found, wanted, strict=True)]
    of_all = np.sqrt(sum(d for d, _ in parts) / sum(n for _, n in parts))
    return of_all, max(np.sqrt(d / n) for d, n in parts if n > 0)


def main():
    """Print the table."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    table = Table("microbatches", "error of all gradients", "of the worst leaf", title="sums in bfloat16")
    for count in (4, 16, 64):
        of_all, worst = error(gradients(count, jnp.bfloat16), gradients(count, jnp.float32))
        table.add_row(str(count), f"{of_all:.1e}", f"{worst:.1e}")
    Console().print(table)


if __name__ == "__main__":
    main()
