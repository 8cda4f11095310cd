"""An argument of a plan as a list of leaves, and gradients as lists over those that have one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

Tree: TypeAlias = Any


@dataclass(frozen=True, eq=False)
class Leaves:
    """The leaves of an argument, and which of them have a gradient."""

    name: str
    tree: Any
    types: list[jax.ShapeDtypeStruct]
    has_gradient: list[bool]

    @property
    def num_gradients(self) -> int:
        """How many leaves have one."""
        return sum(self.has_gradient)

    def leaves(self, tree: Tree) -> list[Any]:
        """The leaves of a tree like the one traced; raises ValueError for another."""
        return leaves_like(self.name, tree, self.tree, self.types)

    def gradients(self, given: Iterable[Any]) -> Tree:
        """The tree of gradients, float0 where a leaf has none."""
        given = iter(given)
        every = [
            next(given) if has else np.zeros(kind.shape, jax.dtypes.float0)
            for kind, has in zip(self.types, self.has_gradient, strict=True)
        ]
        return self.tree.unflatten(every)


def leaves_like(name: str, tree: Tree, expected: Any, types: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    """The leaves of a tree, which must be as it was when traced."""
    paths, found = jax.tree.flatten_with_path(tree)
    if found != expected:
        raise ValueError(
            f"split: {name} is not the tree that was traced.\n  traced: {expected}\n  given:  {found}"
        )
    wrong = [
        f"  {name}{jax.tree_util.keystr(path)}: traced {kind.dtype}{list(kind.shape)}, given {jax.typeof(leaf)}"
        for (path, leaf), kind in zip(paths, types, strict=True)
        if np.shape(leaf) != kind.shape or jax.typeof(leaf).dtype != kind.dtype
    ]
    if wrong:
        raise ValueError("\n".join(["split: arguments differ from those traced.", *wrong]))
    return [leaf for _, leaf in paths]


def cut(items: Sequence[Any], *counts: int) -> list[list[Any]]:
    """Consecutive parts of the items, of these lengths."""
    parts, start = [], 0
    for count in counts:
        parts.append(list(items[start : start + count]))
        start += count
    return parts
