"""An argument of a plan as a list of leaves, and gradients as lists over those that have one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dualpipe_jax.split.graph import Value
from dualpipe_jax.split.run import zeros

Tree: TypeAlias = Any


@dataclass(frozen=True, eq=False)
class Leaves:
    """The leaves of an argument, and which of them have a gradient.

    Attributes:
      tree: what they are the leaves of.
      wanted: those whose gradient was asked for; only floating ones can be.
      has_gradient: those of them that the function uses. The gradients of the others that are wanted are zero
        whatever is computed, and lists have no entry for them.
    """

    name: str
    tree: Any
    values: Sequence[Value]
    wanted: list[bool]
    has_gradient: list[bool]

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in self.values]

    @property
    def num_gradients(self) -> int:
        """Entries of a list of gradients."""
        return sum(self.has_gradient)

    def leaves(self, tree: Tree, spared: Sequence[bool] | None = None) -> list[Any]:
        """The leaves of a tree like the one traced; raises ValueError for another.

        Whatever stands for the ``spared`` ones is not looked at; if all are, nor is the tree.
        """
        return leaves_like(self.name, tree, self.tree, self.types, spared)

    def gradients(self, given: Iterable[Any]) -> Tree:
        """The tree of gradients from the list.

        Where the list has none: zeros if one is wanted, which the function does not use; None if none is wanted; and
        zeros of dtype float0 for leaves that can have none.
        """
        left = iter(given)

        def gradient(value: Value, wanted: bool, has: bool) -> Any:
            if has:
                return next(left)
            if wanted:
                return zeros(value)
            return None if is_floating(value) else np.zeros(value.shape, jax.dtypes.float0)

        return self.tree.unflatten(map(gradient, self.values, self.wanted, self.has_gradient))


def is_floating(leaf: Any) -> bool:
    """Whether a leaf of this dtype can have a gradient; integers, bools and keys have none."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def leaves_like(
    name: str,
    tree: Tree,
    expected: Any,
    types: Sequence[jax.ShapeDtypeStruct],
    spared: Sequence[bool] | None = None,
) -> list[Any]:
    """The leaves of a tree, which must be as it was when traced; None for those that are spared, whatever is there."""
    spared = [False] * len(types) if spared is None else spared
    if all(spared):
        return [None] * len(types)
    try:
        leaves = expected.flatten_up_to(tree)
    except ValueError:
        leaves = []
    if len(leaves) != len(types) or not all(
        spare or jax.tree_util.all_leaves([leaf]) for leaf, spare in zip(leaves, spared, strict=True)
    ):
        found = jax.tree.structure(tree)
        raise ValueError(
            f"split: {name} is not the tree that was traced.\n  traced: {expected}\n  given:  {found}"
        )
    paths = [path for path, _ in jax.tree.leaves_with_path(expected.unflatten(types))]
    wrong = [
        f"  {name}{jax.tree_util.keystr(path)}: traced {kind.dtype}{list(kind.shape)}, given {jax.typeof(leaf)}"
        for path, leaf, kind, spare in zip(paths, leaves, types, spared, strict=True)
        if not spare and (jax.typeof(leaf).shape, jax.typeof(leaf).dtype) != (kind.shape, kind.dtype)
    ]
    if wrong:
        raise ValueError("\n".join(["split: arguments differ from those traced.", *wrong]))
    return [None if spare else leaf for leaf, spare in zip(leaves, spared, strict=True)]


def flags(name: str, prefix: Any, tree: Tree) -> list[bool]:
    """A bool for each leaf of a tree, from a tree of bools that is a prefix of it.

    Raises ValueError where it is none.
    """
    try:
        full = jax.tree.broadcast(prefix, tree)
    except ValueError as error:
        raise ValueError(
            f"split: {name} must have bools in place of leaves or of whole branches, a prefix of the tree; it is no "
            f"prefix: {error}"
        ) from error
    return [bool(flag) for flag in jax.tree.leaves(full)]


def cut(items: Sequence[Any], *counts: int) -> list[list[Any]]:
    """Consecutive parts of the items, of these lengths."""
    parts, start = [], 0
    for count in counts:
        parts.append(list(items[start : start + count]))
        start += count
    return parts
