"""The oracle: the plain model, one device, no cleverness."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from dualpipe_jax.engine.model import PipelineModel, Tree


def sequential_loss(model: PipelineModel, *, has_aux: bool = False) -> Callable[[Tree, Tree, Tree], Tree]:
    """``loss(params, inputs, targets)``, or ``(loss, aux)``: each microbatch through every stage; the mean.

    Same arguments and results as the pipelined loss, on one device. The model's collectives over "ep" see an
    axis of size one. Differentiable as any JAX function; microbatches are accumulated by a scan.
    """

    def microbatch_loss(params, inputs, targets):
        def one_stage(x, stage_params):
            return model.stage(stage_params, x) if has_aux else (model.stage(stage_params, x), ())

        x, aux = jax.lax.scan(one_stage, model.embed(params["embed"], inputs), params["stages"])
        return model.head_loss(params["head"], x, targets), jax.tree.map(
            lambda a: a.sum(0, dtype=a.dtype), aux
        )

    def loss(params, inputs, targets):
        losses, aux = jax.lax.map(lambda pair: microbatch_loss(params, *pair), (inputs, targets))
        total = jax.tree.map(lambda a: a.sum(0, dtype=a.dtype), aux)
        return (jnp.mean(losses), total) if has_aux else jnp.mean(losses)

    def on_one_device(params, inputs, targets):
        mesh = jax.make_mesh((1, 1), ("pp", "ep"), (AxisType.Auto,) * 2, devices=jax.devices()[:1])
        run = jax.shard_map(
            loss, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
        )
        return run(params, inputs, targets)

    return on_one_device


def sequential_value_and_grad(
    model: PipelineModel, *, has_aux: bool = False
) -> Callable[[Tree, Tree, Tree], Tree]:
    """The step that every pipelined step is compared with: same signature and results, one device.

    Gradients by ``jax.value_and_grad`` of the plain model over all microbatches.
    """
    return jax.value_and_grad(sequential_loss(model, has_aux=has_aux), has_aux=has_aux, allow_int=True)
