"""What is shared out over devices that would each hold the same: the optimizer's state, or parameters with it.

ZeRO (Rajbhandari et al., arXiv:1910.02054): with the optimizer's state alone a device updates its part of a parameter
and gathers the rest; parameters that are stored alike are gathered once a step, in the dtype that they are used in, and
their gradients come back reduce-scattered, so that the update asks nobody but for the gradient's norm.
"""

import itertools
import math
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding, PartitionSpec

from dualpipe_jax.engine import PlacedStages
from dualpipe_jax.engine.storage import axes_of, entries
from dualpipe_jax.parallel import PP

Tree = Any
Shard = Literal["nothing", "optimizer", "parameters"]
"""What is shared out; each is on top of the one before."""

_ROWS, _LANES = 16, 128
"""Of a TPU's tile of bfloat16, in which arrays lie."""


def share_out(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """An array, cut further over all mesh axes over which it is replicated.

    Along a dim that they divide together, for one collective gathers it then; else along one that those that share a
    batch divide, or each does. Of several such dims along the longest. Parts that are whole tiles come before all that:
    of others the TPU compiler makes all-reduces of zeros, twice as dear as a gather. Vectors stay whole, for what they
    take is not worth collectives of their own; so does what has no such dim. Takes and gives types with shardings.
    """
    mesh, spec = leaf.sharding.mesh, entries(leaf.sharding.spec, leaf.ndim)
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
    """``Pipeline.storage_specs`` with which every leaf is stored as ``share_out`` says.

    Args:
      params: as the engine places them, types with shardings, as they are used; None for what stays as it is.
    """
    placed: PlacedStages = params["stages"]

    def of_stage(leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        return PartitionSpec(*share_out(leaf).sharding.spec[1:])  # placed leaves are [ranks, ...]

    shared = jax.tree.map(lambda leaf: share_out(leaf).sharding.spec, params["shared"])
    return {"stages": jax.tree.map(of_stage, placed.local[0]), "shared": shared}
