"""The sum of a parameter's gradients, as a kernel that can add to it asks for it.

Whatever else makes a gradient lets the engine add it, which reads it again. What a kernel adds to is zeros under
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
    """Zeros to which a kernel adds a parameter's gradient, as its last step and in their place.

    The sum stands for them if it is of their dtype, and if nobody but the parameter reads what the kernel makes, as it
    is or cast to the parameter's dtype.

    Args:
      shape: the gradient's.
      beside: another argument of the kernel; in a shard_map, zeros vary over the axes that it varies over.
      dtype: what gradients are summed in.
    """
    return checkpoint_name(vary(jnp.zeros(shape, dtype), varying_axes(beside)), GRADIENT_SUM)
