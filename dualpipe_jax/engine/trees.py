"""Leaves of trees: typed keys as plain integers, dtypes of sums, and gradients of leaves that have none."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dualpipe_jax.contract import Tree

Vary = Callable[[Tree], Tree]
"""A function that casts leaves to vary over all axes of the mesh, as a rank's own values do; for ``check_vma`` alone.

Parameters must be cast before the stage sees them: else the vjp of a parameter that does not vary over pp
contains a psum over pp, inside a branch that other ranks do not take.
"""


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def raw(tree: Tree) -> Tree:
    """The tree with typed keys as plain uint32 arrays, since permutes, slots and layouts cannot hold typed keys."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, tree)


def typed(tree: Tree, like: Tree) -> Tree:
    """The inverse of ``raw``: leaves become typed keys where ``like`` has typed keys."""

    def wrap(leaf: Any, kind: Any) -> Any:
        return jax.random.wrap_key_data(leaf, impl=_impl(kind)) if is_key(kind) else leaf

    return jax.tree.map(wrap, tree, like)


def _impl(kind: Any) -> Any:
    """The algorithm of typed keys, from an array of keys or from its type alone."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), kind)
    return found[0]


def types_of(tree: Tree) -> tuple[Any, list[tuple[tuple[int, ...], Any]]]:
    """The tree's structure, and the shape and dtype of each leaf, to be compared with those of another tree.

    A tree of types cannot be compared itself: two objects of a class that defines no equality are never equal.
    """
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def types_in_words(tree: Tree) -> str:
    """Shapes and dtypes as text; a bare array without its tree."""
    return str(jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)).replace("'", "")


def zeros(tree: Tree) -> Tree:
    """Zeros of the shapes and dtypes of a tree of arrays or of their types."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def raw_zeros(tree: Tree) -> Tree:
    """Zeros of the types that ``raw`` gives the tree, weak where these are."""

    def zero(leaf: Any) -> jax.Array:
        # Of a Python number JAX makes a weak array, which takes the dtype of what it meets.
        strong = jnp.zeros(leaf.shape, leaf.dtype)
        weak = jnp.full(leaf.shape, leaf.dtype.type(0).item()) if leaf.weak_type else strong
        return weak if weak.dtype == leaf.dtype else strong

    return jax.tree.map(zero, jax.eval_shape(raw, tree))


def sum_dtype(dtype: Any, wanted: Any) -> Any:
    """The dtype of a gradient's sum: the wanted dtype, made complex if the gradient is complex.

    If None is wanted, it is the gradient's own dtype, but at least float32: if 1,024 equal gradients are
    added one by one in bfloat16, the sum reaches only a quarter of the true value.
    """
    if wanted is None:
        narrow = jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits < 32
        return jnp.dtype(jnp.float32) if narrow else dtype
    if jnp.issubdtype(dtype, jnp.complexfloating) and not jnp.issubdtype(wanted, jnp.complexfloating):
        return np.result_type(np.dtype(wanted), np.complex64)
    return wanted


def metric_dtype(dtype: Any) -> Any:
    """The dtype of a metric's sum: float32 for narrower floats, int32 for narrower integers, its own for others."""
    narrow = jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 32
    return jnp.dtype(jnp.int32) if narrow else sum_dtype(dtype, None)


def as_metric(value: Any) -> jax.Array:
    """A stage's metric in the dtype of its sum."""
    value = jnp.asarray(value)
    return value.astype(metric_dtype(value.dtype))


def add_to(total: jax.Array, gradient: jax.Array) -> jax.Array:
    """The new sum, in the sum's dtype."""
    return total + gradient.astype(total.dtype)


def float0_like(leaf: Any) -> np.ndarray:
    """The gradient of a leaf that cannot have one: zeros of dtype float0, as from ``jax.grad(allow_int=True)``."""
    return np.zeros(leaf.shape, jax.dtypes.float0)
