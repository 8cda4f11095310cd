"""Two programs in one order, in which the communication of each lies under the work of the other."""

from dualpipe_jax.pair.interleave import Pool, interleave
from dualpipe_jax.pair.together import forward_backward, side_by_side

__all__ = ["Pool", "forward_backward", "interleave", "side_by_side"]
