"""Two programs in one order, in which the communication of each is hidden behind the work of the other."""

from dualpipe_jax.pair.interleave import by_itself, interleave
from dualpipe_jax.pair.together import side_by_side

__all__ = ["by_itself", "interleave", "side_by_side"]
