"""How a parameter is sharded between steps, and how within a step.

A stage function sees a leaf whole, or sharded over "ep" alone, as experts or a vocabulary may be. Between
steps a leaf may be stored sharded over further axes of the mesh: then it is gathered once a step, and its
gradient is reduce-scattered. With the optimizer's state sharded in the same way this is ZeRO's first stage,
and for leaves that are gathered its third (Rajbhandari et al., arXiv:1910.02054).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from dualpipe_jax.contract import Tree
from dualpipe_jax.parallel.mesh import DP

Axes = tuple[str, ...]


def axes_by_dim(spec: PartitionSpec, ndim: int) -> list[Axes]:
    """The mesh axes of each of ``ndim`` dims; an empty tuple for a dim that is not sharded."""
    given = [entry if isinstance(entry, tuple) else (entry,) if entry else () for entry in spec]
    return [*given, *[()] * (ndim - len(given))]


def axes_of(spec: PartitionSpec) -> set[str]:
    """All mesh axes that a spec names."""
    return {axis for axes in axes_by_dim(spec, len(spec)) for axis in axes}


@dataclasses.dataclass(frozen=True)
class LeafSharding:
    """How one leaf is used and stored. Its dims are counted without the stage dim.

    Attributes:
      used: PartitionSpec over "ep", as the stage function sees the leaf.
      stored: PartitionSpec over any axes; in each dim its axes begin with those of ``used``.
      dtype: the dtype in which the leaf is used; None: its own.
    """

    used: PartitionSpec
    stored: PartitionSpec
    dtype: Any = None

    @property
    def crosses_in_parts(self) -> bool:
        """Whether the leaf is sent from rank to rank as it is stored, and gathered after that.

        It is so if each of a rank's own devices stores a part: they gather it over the links between
        neighbours. A leaf that is sharded over replicas alone is gathered first and sent whole; else each
        copy would be gathered over the links between replicas, which are often the slowest.
        """
        return bool(axes_of(self.stored) - axes_of(self.used) - {DP})

    def gathered_dims(self, ndim: int) -> list[tuple[int, Axes]]:
        """The dims that are gathered, each with the axes over which it is gathered."""
        pairs = zip(axes_by_dim(self.used, ndim), axes_by_dim(self.stored, ndim), strict=True)
        return [
            (dim, stored[len(used) :]) for dim, (used, stored) in enumerate(pairs) if len(stored) > len(used)
        ]

    def cast(self, leaf: jax.Array) -> jax.Array:
        """The device's stored part in the dtype in which it is used."""
        floats = self.dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(self.dtype) if floats else leaf

    def gather(self, leaf: jax.Array) -> jax.Array:
        """The leaf as stage functions see it, cast and gathered from each device's stored part."""
        leaf = self.cast(leaf)
        for dim, axes in self.gathered_dims(leaf.ndim):
            leaf = lax.all_gather(leaf, axes, axis=dim, tiled=True)
        return leaf

    def reduce(self, gradient: jax.Array, over: Sequence[str]) -> jax.Array:
        """The device's stored part of the whole gradient, reduced from each device's own sum.

        ``over``: all axes over which the leaf is the same and the devices' contributions to its gradient differ.
        """
        owed = [axis for axis in over if axis not in axes_of(self.used)]
        for dim, axes in self.gathered_dims(gradient.ndim):
            gradient = lax.psum_scatter(gradient, axes, scatter_dimension=dim, tiled=True)
            owed = [axis for axis in owed if axis not in axes]
        return lax.psum(gradient, tuple(owed)) if owed else gradient


def _is_leaf(node: Any) -> bool:
    return isinstance(node, LeafSharding)


def leaf_shardings(shardings: Tree) -> list[LeafSharding]:
    """The shardings of all leaves, in the order of the tree that they describe."""
    return jax.tree.leaves(shardings, is_leaf=_is_leaf)


def map_shardings(function: Callable[..., Any], shardings: Tree, *trees: Tree) -> Tree:
    """A tree with ``function(leaf of shardings, leaf of each of trees)`` for each leaf."""
    return jax.tree.map(function, shardings, *trees, is_leaf=_is_leaf)
