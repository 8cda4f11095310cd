"""Sharding over devices that would each hold the same: of the optimizer's state, or of parameters too.

This is ZeRO (Rajbhandari et al., arXiv:1910.02054). If only the optimizer's state is sharded, a device updates its part
of a parameter and gathers the rest. Parameters that are sharded too are gathered once a step, in the dtype in which
they are used, and their gradients are reduce-scattered, so that the update needs no communication except for the
gradient's norm.
"""

import itertools
import math
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding, PartitionSpec

from dualpipe_jax.engine import PlacedStages
from dualpipe_jax.engine.storage import axes_by_dim, axes_of
from dualpipe_jax.parallel import PP

Tree = Any
Shard = Literal["nothing", "optimizer", "parameters"]
"""What is sharded; each value includes those before it."""

_ROWS, _LANES = 16, 128
"""The shape of the tiles in which a TPU stores bfloat16 arrays."""


def shard_further(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The type of an array, sharded further over all mesh axes over which it is replicated, as a type with sharding.

    If possible, a dim is cut by all these axes together, because one collective then gathers it; else by all of them
    except pp, which share a batch; else by single axes. Of several dims that can be cut, the longest is. Cuts into
    whole tiles are tried before all others: of other parts the TPU compiler makes all-reduces of zeros, twice as
    expensive as a gather. Vectors stay whole, because their memory is not worth collectives of their own; so do arrays
    without such a dim.
    """
    mesh, spec = leaf.sharding.mesh, axes_by_dim(leaf.sharding.spec, leaf.ndim)
    here = list(leaf.sharding.shard_shape(leaf.shape))
    if sum(length > 1 for length in here) < 2:
        return leaf
    taken = axes_of(leaf.sharding.spec)
    free = tuple(axis for axis, size in mesh.shape.items() if size > 1 and axis not in taken)
    groups = free, tuple(axis for axis in free if axis != PP), *((axis,) for axis in free)
    for tiled, axes in itertools.product((True, False), groups):
        size = math.prod(mesh.shape[axis] for axis in axes)
        fitting = [dim for dim, length in enumerate(here) if length > 1 and length % size == 0]
        if tiled:
            tiles = [_LANES if dim == leaf.ndim - 1 else _ROWS for dim in range(leaf.ndim)]
            fitting = [dim for dim in fitting if here[dim] // size % tiles[dim] == 0]
        if fitting and not taken.intersection(axes):
            dim = max(fitting, key=lambda dim: here[dim])
            spec[dim], here[dim] = (*spec[dim], *axes), here[dim] // size
            taken.update(axes)
    lies = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lies)


def storage_specs(params: Tree) -> Tree:
    """The ``Pipeline.storage_specs`` with which every leaf is stored as ``shard_further`` shards it.

    Args:
      params: the parameters as the engine places and uses them, as types with shardings; None for leaves that are not
        sharded further.
    """
    placed: PlacedStages = params["stages"]

    def of_stage(leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        return PartitionSpec(*shard_further(leaf).sharding.spec[1:])  # placed leaves are [ranks, ...]

    shared = jax.tree.map(lambda leaf: shard_further(leaf).sharding.spec, params["shared"])
    return {"stages": jax.tree.map(of_stage, placed.local[0]), "shared": shared}
