"""Any JAX function as a forward, a backward for the input and a backward for the weights.

Knows jaxprs and nothing of this project: no mesh, no schedule, no slot.
"""

from dualpipe_jax.split.backward import SplitFunction, split_backward
from dualpipe_jax.split.declared import split_vjp, weight_part
from dualpipe_jax.split.hoist import Hoisted, hoist
from dualpipe_jax.split.marks import reveal
from dualpipe_jax.split.plan import Flops, Programs, SplitPlan, total_bytes

__all__ = [
    "Flops",
    "Hoisted",
    "Programs",
    "SplitFunction",
    "SplitPlan",
    "hoist",
    "reveal",
    "split_backward",
    "split_vjp",
    "total_bytes",
    "weight_part",
]
