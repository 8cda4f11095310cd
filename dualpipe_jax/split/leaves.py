"""An argument of a plan as a list of leaves, and its gradients as a list over the leaves that have one."""

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
      name: the argument's name in error messages.
      tree: the tree structure of the argument.
      values: the leaves of the argument, in the order of the tree.
      wanted: for each leaf, whether its gradient was requested; only floating leaves can have one.
      has_gradient: for each leaf, whether the list of gradients has an entry for it: it is wanted, and its gradient is
        not zero for all arguments.
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
        """The length of a list of gradients."""
        return sum(self.has_gradient)

    def leaves(self, tree: Tree, ignored: Sequence[bool] | None = None) -> list[Any]:
        """Return the leaves of a tree like the traced one. Raises ValueError for a different tree.

        The leaves that ``ignored`` names are returned as None and may be anything; if it names all, so may the tree.
        """
        return leaves_like(self.name, tree, self.tree, self.types, ignored)

    def gradients(self, given: Iterable[Any]) -> Tree:
        """Return the tree of gradients from the list.

        A leaf without an entry in the list gets zeros if its gradient is wanted; None if it is not wanted; zeros of
        dtype float0 if the leaf is not floating.
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
    ignored: Sequence[bool] | None = None,
) -> list[Any]:
    """Return the leaves of a tree with the traced structure and types; None for ignored leaves, which may be anything.

    Raises ValueError if the structure, a shape or a dtype differs.
    """
    ignored = [False] * len(types) if ignored is None else ignored
    if all(ignored):
        return [None] * len(types)
    try:
        leaves = expected.flatten_up_to(tree)
    except ValueError:
        leaves = []
    if len(leaves) != len(types) or not all(
        ignore or jax.tree_util.all_leaves([leaf]) for leaf, ignore in zip(leaves, ignored, strict=True)
    ):
        found = jax.tree.structure(tree)
        raise ValueError(
            f"split: {name} is not the tree that was traced.\n  traced: {expected}\n  given:  {found}"
        )
    paths = [path for path, _ in jax.tree.leaves_with_path(expected.unflatten(types))]
    wrong = [
        f"  {name}{jax.tree_util.keystr(path)}: traced {kind.dtype}{list(kind.shape)}, given {jax.typeof(leaf)}"
        for path, leaf, kind, ignore in zip(paths, leaves, types, ignored, strict=True)
        if not ignore and (jax.typeof(leaf).shape, jax.typeof(leaf).dtype) != (kind.shape, kind.dtype)
    ]
    if wrong:
        raise ValueError("\n".join(["split: arguments differ from those traced.", *wrong]))
    return [None if ignore else leaf for leaf, ignore in zip(leaves, ignored, strict=True)]


def flags(name: str, prefix: Any, tree: Tree) -> list[bool]:
    """Return a bool for each leaf of a tree, from a tree of bools that is a prefix of it.

    Raises ValueError if it is not a prefix.
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
    """Return consecutive parts of the items, with these lengths."""
    parts, start = [], 0
    for count in counts:
        parts.append(list(items[start : start + count]))
        start += count
    return parts
