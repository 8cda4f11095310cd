"""Held-out loss, whatever the layout: the same windows, no token dropped, every window counted once."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import models
from dualpipe_jax.engine import PipelineModel, pipeline_apply
from dualpipe_jax.parallel import EP
from dualpipe_jax.schedule import Schedule
from train.data import Batch

Tree = Any


def make_evaluate(
    model: models.Model,
    schedule: Schedule,
    mesh: Mesh,
    batches: Sequence[tuple[Batch, np.ndarray]],
    batch_shape: tuple[int, int, int],
) -> Callable[[Tree], float]:
    """``evaluate(params)``: mean loss of the sequences of ``batches``, in nats per token.

    Args:
      model: one that drops nothing.
      schedule: whose forwards are run.
      mesh: where.
      batches: with the weight of each sequence, 0 for one that only fills up; see ``Corpus.heldout_batches``. How
        sequences are grouped into batches makes no difference.
      batch_shape: (num_microbatches, microbatch size, sequence) of a batch.
    """
    functions = PipelineModel(*model.functions)

    def head_loss(params: Tree, x: Tree, targets: tuple[jax.Array, jax.Array]) -> jax.Array:
        tokens_BS, weights_B = targets
        one = jax.vmap(functions.head_loss, in_axes=(None, 0, 0))  # the mean over tokens of each window alone
        losses_B = one(params, jax.tree.map(lambda leaf: leaf[:, None], x), tokens_BS[:, None])
        return jnp.sum(losses_B * weights_B)

    apply = pipeline_apply(
        functions._replace(head_loss=head_loss), schedule, mesh, param_specs=model.param_specs, has_aux=True
    )
    # The engine's loss is the mean over these of what head_loss gives.
    parts = batch_shape[0] * mesh.shape[EP]

    @jax.jit
    def total(params: Tree, inputs: jax.Array, targets: Tree) -> jax.Array:
        (loss, _), _ = apply(params, inputs, targets)  # outputs that nobody takes are not gathered
        return loss * parts

    num_sequences = sum(float(weights.sum()) for _, weights in batches)

    def evaluate(params: Tree) -> float:
        sums = [
            total(params, batch["inputs"], (batch["targets"], weights)).item() for batch, weights in batches
        ]
        return sum(sums) / num_sequences

    return evaluate
