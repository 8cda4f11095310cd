"""Marks a value that is computed from parameters alone, so that a pipeline's step computes it once, before its ticks.

The value takes memory through the whole step, as the parameters do. Matrix products of parameters need no mark:
``split.hoist`` takes them out in any case.
"""

import jax
from jax.ad_checkpoint import checkpoint_name

MADE_ONCE = "dualpipe_made_once"
"""The ``checkpoint_name`` that marks such a value."""


def made_once(array: jax.Array) -> jax.Array:
    """The array, marked; no gradient passes through it.

    Use it for example on a copy of matrices in the order in which a kernel reads them: unmarked, each
    microbatch would make that copy again. Outside a pipeline the mark does nothing.

    Args:
      array: an array that depends on parameters alone; any other array is computed in each microbatch, as
        unmarked.
    """
    return checkpoint_name(jax.lax.stop_gradient(array), MADE_ONCE)
