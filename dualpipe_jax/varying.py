"""The mesh axes over which a value varies, as ``shard_map`` with ``check_vma`` types it."""

from collections.abc import Collection
from typing import Any, TypeAlias

import jax
from jax import lax

Tree: TypeAlias = Any


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which a value is typed as varying; empty outside shard_map or without check_vma."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def shape_like(x: Any, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The type of a kernel's output of this shape and dtype that varies over the same axes as x."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def vary(tree: Tree, axes: Collection[str]) -> Tree:
    """Cast each leaf to vary over these axes too; no axes, as without check_vma, leave the tree as it is."""
    if not axes:
        return tree

    def cast(leaf: Any) -> Any:
        missing = tuple(sorted(frozenset(axes) - varying_axes(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def vary_alike(tree: Tree) -> Tree:
    """Cast each leaf to vary over all axes that any leaf varies over.

    A ``custom_vjp`` needs it: its gradients must vary as its arguments do.
    """
    return vary(tree, frozenset[str]().union(*map(varying_axes, jax.tree.leaves(tree))))
