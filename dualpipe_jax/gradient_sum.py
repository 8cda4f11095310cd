"""Lets a kernel add a parameter's gradient to the sum of that parameter's gradients in place.

Other kernels write a gradient, and the engine reads it again to add it. A kernel that can add asks for
``gradient_sum``: zeros under ``jax.grad``, and the sum over the microbatches so far in a pipeline's step,
where ``split`` finds the mark and puts the sum in place of the zeros. Megatron calls it gradient accumulation
fusion.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dualpipe_jax.varying import vary, varying_axes

GRADIENT_SUM = "dualpipe_gradient_sum"
"""The ``checkpoint_name`` of zeros that ``split`` may replace by a sum."""


def gradient_sum(shape: tuple[int, ...], varying_like: jax.Array) -> jax.Array:
    """Zeros, float32, to which a kernel, or ``at[...].add`` part by part, adds a parameter's gradient in place.

    A pipeline's step puts the sum in their place if it has their dtype and if the kernel's result is used
    only as the parameter's gradient, as it is or cast to the parameter's dtype.

    Args:
      shape: the shape of the gradient.
      varying_like: another argument of the kernel; in a shard_map, zeros vary over the axes that it varies over.
    """
    return checkpoint_name(vary(jnp.zeros(shape, jnp.float32), varying_axes(varying_like)), GRADIENT_SUM)
