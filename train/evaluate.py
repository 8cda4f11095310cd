"""Held-out loss, independent of the layout: the same windows, no dropped tokens, every window counted once."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import models
from dualpipe_jax.engine import Pipeline
from dualpipe_jax.schedule import Schedule
from train.data import Batch
from train.processes.group import batch_sharding, make_global_batch

Tree = Any


def make_evaluate(
    model: models.Model,
    schedule: Schedule,
    mesh: Mesh,
    batches: Sequence[tuple[Batch, np.ndarray]],
    storage_specs: Tree = None,
) -> Callable[[Tree], float]:
    """``evaluate(params)``: mean loss of the sequences of ``batches``, in nats per token.

    Args:
      model: a model that drops no tokens.
      schedule: the schedule; only its forwards are run.
      mesh: the mesh of devices to run on.
      batches: batches, each with the weights of its sequences: 1, or 0 for a sequence that only fills up the batch; see
        ``Corpus.heldout_batches``. How sequences are grouped into batches makes no difference.
      storage_specs: the specs by which parameters are stored; see ``Layout.storage_specs``.
    """
    pipeline = Pipeline(
        model.staged,
        schedule,
        mesh,
        param_specs=model.param_specs,
        storage_specs=storage_specs,
        compute_dtype=model.compute_dtype,
    )

    @jax.jit
    def total(params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        report = pipeline.apply(params, batch).report
        tokens = report.metrics["tokens"]
        return report.losses["lm"] * tokens.astype(report.losses["lm"].dtype), tokens

    def global_batch(batch: Batch, weights: np.ndarray) -> Tree:
        mask = np.broadcast_to(weights[..., None] > 0, batch["targets"].shape)
        whole = {**batch, "mask": mask}

        def draw(rows: tuple[slice, ...]) -> Tree:
            return jax.tree.map(lambda values: values[rows], whole)

        return make_global_batch(draw, weights.shape, batch_sharding(mesh))

    def evaluate(params: Tree) -> float:
        sums = [jax.device_get(total(params, global_batch(batch, weights))) for batch, weights in batches]
        return float(sum(float(loss) for loss, _ in sums) / sum(int(tokens) for _, tokens in sums))

    return evaluate
