"""Gradients as lists: one entry for each floating leaf of a parameter tree, in flattening order.

Integer leaves (a stage's own number, say) may stand among the parameters; they have no entry, and get a
float0 gradient at the very end, as ``jax.grad(allow_int=True)`` gives.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dualpipe_jax.engine.model import Tree


def is_floating(leaf: Any) -> bool:
    """Whether a leaf can have a gradient."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def floating(tree: Tree) -> list[Any]:
    """The leaves that can have gradients."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_floating(leaf)]


def zeros_like_floating(tree: Tree, dtype: Any = None) -> list[jax.Array]:
    """A zero sum for each floating leaf, in ``dtype`` or in the leaf's own."""
    return [jnp.zeros(leaf.shape, dtype or leaf.dtype) for leaf in floating(tree)]


def accumulate(sums: list[jax.Array], gradients: Tree) -> list[jax.Array]:
    """Add one microbatch's gradients to the sums, in the sums' dtype."""
    return [add_to(total, g) for total, g in zip(sums, floating(gradients), strict=True)]


def add_to(total: jax.Array, gradient: jax.Array) -> jax.Array:
    """The new sum, in the sum's dtype."""
    return total + gradient.astype(total.dtype)


def with_float0(tree: Tree, gradients: list[Any]) -> Tree:
    """The gradient tree of ``tree``: the list's entries, and float0 zeros for integer leaves."""
    left = iter(gradients)

    def gradient(leaf):
        return next(left) if is_floating(leaf) else np.zeros(leaf.shape, jax.dtypes.float0)

    return jax.tree.map(gradient, tree)
