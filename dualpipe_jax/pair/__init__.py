"""Two programs in one order, in which the communication of each lies under the work of the other."""

from dualpipe_jax.pair.interleave import interleave
from dualpipe_jax.pair.together import side_by_side

__all__ = ["interleave", "side_by_side"]
