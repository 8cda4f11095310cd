"""What a function makes of parameters alone, marked so that a pipeline's step makes it once, before its first tick.

It is held through the step, beside the parameters. Products of matrices need no mark: ``split.hoist`` takes them out in
any case.
"""

import jax
from jax.ad_checkpoint import checkpoint_name

MADE_ONCE = "dualpipe_made_once"
"""The mark."""


def made_once(array: jax.Array) -> jax.Array:
    """The array, marked; no gradient passes through it.

    For a copy of matrices in the order in which a kernel reads them, which each microbatch would make again. Without a
    pipeline the mark does nothing.

    Args:
      array: derived from parameters alone, or it is made where it stands.
    """
    return checkpoint_name(jax.lax.stop_gradient(array), MADE_ONCE)
