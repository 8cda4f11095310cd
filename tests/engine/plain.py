"""The engine's oracle in plain JAX: a ``PipelineModel`` run stage after stage by a scan, on one device."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec


def plain_loss(model, has_aux=False):
    """``loss(params, inputs, targets)``, or ``(loss, aux)``; collectives see axes of size one.

    Gradients are summed over microbatches in float32 at least: the loop sums those of what it reads, in its dtype.
    """

    def microbatch(params, inputs, targets):
        def one_stage(x, own):
            return model.stage(own, x) if has_aux else (model.stage(own, x), ())

        x, aux = jax.lax.scan(one_stage, model.embed(params["embed"], inputs), params["stages"])
        total = jax.tree.map(lambda a: a.sum(0, dtype=a.dtype), aux)
        return model.head_loss(params["head"], x, targets), total

    def loss(params, inputs, targets):
        def widened(leaf):
            narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
            return leaf.astype(jnp.float32) if narrow else leaf

        wide = jax.tree.map(widened, params)

        def one(data):
            return microbatch(jax.tree.map(lambda w, p: w.astype(p.dtype), wide, params), *data)

        losses, aux = jax.lax.map(one, (inputs, targets))
        total = jax.tree.map(lambda a: a.sum(0, dtype=a.dtype), aux)
        return (jnp.mean(losses), total) if has_aux else jnp.mean(losses)

    def on_one_device(*arguments):
        axes = "dp", "pp", "node", "ep"
        mesh = jax.make_mesh((1,) * 4, axes, (AxisType.Auto,) * 4, devices=jax.devices()[:1])
        spec = PartitionSpec()
        return jax.shard_map(loss, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(*arguments)

    return on_one_device


def plain_value_and_grad(model, has_aux=False):
    return jax.value_and_grad(plain_loss(model, has_aux), has_aux=has_aux, allow_int=True)
