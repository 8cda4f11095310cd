"""The neighbour exchange: what a stage hands to the next one."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from dualpipe_jax.parallel.mesh import PP


def send(tree: Any, pairs: Sequence[tuple[int, int]]) -> Any:
    """Send every leaf along the (source rank, destination rank) pairs of the pp axis.

    Ranks that are nobody's destination receive zeros. All ranks must call it together, outside any branch:
    on CPU a permute meets all devices at once and hangs when one of them is elsewhere.
    """
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, PP, pairs), tree)
