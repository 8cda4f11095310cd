"""The sum of a parameter's gradients, as whatever can add to it asks for it.

Whatever else makes a gradient lets the engine add it, which reads it again. What it adds to is zeros under
``jax.grad``, and the sum over the microbatches so far in a pipeline's step: ``split`` finds the mark. Megatron calls it
gradient accumulation fusion.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dualpipe_jax.varying import vary, varying_axes

GRADIENT_SUM = "dualpipe_gradient_sum"
"""The mark on zeros for which a sum may stand."""


def gradient_sum(shape: tuple[int, ...], beside: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Zeros to which a kernel, or ``at[...].add`` part by part, adds a parameter's gradient in place.

    The sum stands for them if it is of their dtype, and if nobody but the parameter reads what is made, as it is or
    cast to the parameter's dtype.

    Args:
      shape: the gradient's.
      beside: another argument of the kernel; in a shard_map, zeros vary over the axes that it varies over.
      dtype: what gradients are summed in.
    """
    return checkpoint_name(vary(jnp.zeros(shape, dtype), varying_axes(beside)), GRADIENT_SUM)
