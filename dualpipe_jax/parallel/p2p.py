"""The exchange between neighbours: it sends what a stage hands to the next one."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from dualpipe_jax.parallel.mesh import PP

CONCURRENT_PERMUTE = {"_xla_gpu_collective_stream": "p2p", "_xla_stream_annotation": "1"}
"""Attributes by which XLA's GPU compiler lets a permute run at the same time as other collectives: its scheduler counts
the permute as a resource of its own, and the permute runs in a stream of its own. The compilers for TPU and CPU do not
read them."""


def send(tree: Any, pairs: Sequence[tuple[int, int]], *, concurrent: bool = False) -> Any:
    """Send every leaf along the (source rank, destination rank) pairs of the pp axis.

    Ranks that are nobody's destination receive zeros. All ranks must call it together, outside any branch:
    on CPU a permute meets all devices at once and hangs when one of them is elsewhere.

    Args:
      tree: arrays.
      pairs: (source rank, destination rank), at most one pair per source and per destination.
      concurrent: whether the permute may run at the same time as other collectives, which a GPU's compiler must be
        told. If False, a GPU runs one collective at a time, and a loop counts as every collective in it: no permute
        overlaps a guard (``engine.guard``) with an all-to-all in it.
    """
    with set_xla_metadata(**(CONCURRENT_PERMUTE if concurrent else {})):
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, PP, pairs), tree)
