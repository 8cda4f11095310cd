"""Split any JAX function into a forward, a backward for the input and a backward for the weights.

This package knows jaxprs and nothing else of this project: no mesh, no schedule, no slot.
"""

from dualpipe_jax.split.backward import split_backward
from dualpipe_jax.split.declared import split_vjp, weight_part
from dualpipe_jax.split.hoist import hoist

__all__ = ["hoist", "split_backward", "split_vjp", "weight_part"]
