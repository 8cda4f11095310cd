"""Arrays that are read only when they are needed, so that numbers on a disk go to their devices part by part."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from dualpipe_jax.functional import Tree


@dataclasses.dataclass(frozen=True, eq=False)
class Lazy:
    """An array that is read only by ``np.asarray``, each time anew; its parts are lazy, too.

    Attributes:
      shape: the shape of the array.
      dtype: the dtype of the array.
      read: ``read(index) -> np.ndarray``, the part at an index of the first dims, a tuple of ints; () for the whole.
      order: a number by which ``read_all`` sorts, so that arrays that lie together are read after each other.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[tuple[int, ...]], np.ndarray]
    order: int = 0

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator["Lazy"]:
        return (self[n] for n in range(len(self)))

    def __getitem__(self, n: int) -> "Lazy":
        """Return the part at one index of the first dim."""
        return dataclasses.replace(self, shape=self.shape[1:], read=lambda index: self.read((n, *index)))

    def expanded(self) -> "Lazy":
        """Return the array with an additional first dim of 1."""

        def read(index: tuple[int, ...]) -> np.ndarray:
            return self.read(index[1:]) if index else self.read(())[None]

        return dataclasses.replace(self, shape=(1, *self.shape), read=read)

    def take(self, rows: np.ndarray) -> "Lazy":
        """Return the parts at indices of the first dim, int [N], in any order; an index may occur more than once."""

        def read(index: tuple[int, ...]) -> np.ndarray:
            if index:
                return self.read((int(rows[index[0]]), *index[1:]))
            found = np.empty((len(rows), *self.shape[1:]), self.dtype)
            for place, n in enumerate(rows.tolist()):
                found[place] = self.read((n,))
            return found

        return dataclasses.replace(self, shape=(len(rows), *self.shape[1:]), read=read)

    def map(self, function: Callable[[Any], Any]) -> "Lazy":
        """Return a function's result for the array. To read any part of it, the whole array is read."""
        made = jax.eval_shape(function, jax.ShapeDtypeStruct(self.shape, self.dtype))
        return dataclasses.replace(
            self,
            shape=made.shape,
            dtype=np.dtype(made.dtype),
            read=lambda index: function(self.read(()))[index],
        )

    def astype(self, dtype: Any) -> "Lazy":
        """Return the same numbers in another dtype, rounded to nearest even."""
        own = np.dtype(dtype)
        return dataclasses.replace(
            self, dtype=own, read=lambda index: self.read(index).astype(own, copy=False)
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return self.read(()).astype(self.dtype if dtype is None else dtype, copy=False)


def lazily(tree: Tree) -> Tree:
    """Return a tree with its arrays made lazy; parts of an array are taken on the host."""

    def one(leaf: Any) -> Lazy:
        if isinstance(leaf, Lazy):
            return leaf
        return Lazy(leaf.shape, np.dtype(leaf.dtype), lambda index: np.asarray(leaf)[index])

    return jax.tree.map(one, tree)


def on_host(array: Any) -> np.ndarray:
    """Return a lazy array or JAX's as a NumPy array.

    JAX's is copied first: otherwise JAX would keep the NumPy array in memory as long as its own array lives.
    """
    return np.asarray(array.copy() if isinstance(array, jax.Array) else array)


def is_lazy(tree: Tree) -> bool:
    """Return whether any leaf is lazy."""
    return any(isinstance(leaf, Lazy) for leaf in jax.tree.leaves(tree))


def read_all(put: Callable[..., Any], tree: Tree, *more: Tree) -> Tree:
    """Return a tree with ``put(leaf, ...)`` for every lazy leaf, one after the other, by their ``order``.

    Args:
      put: a function of a leaf and of the leaves at its place in the further trees.
      tree: a tree with lazy leaves; other leaves are left as they are.
      more: the further trees, of the same form.
    """
    rows: list[tuple[Any, ...]] = []
    jax.tree.map(lambda *leaves: rows.append(leaves), tree, *more)
    found = [leaf for leaf, *_ in rows]
    lazy = [n for n, leaf in enumerate(found) if isinstance(leaf, Lazy)]
    for n in sorted(lazy, key=lambda n: found[n].order):
        found[n] = put(*rows[n])
    return jax.tree.unflatten(jax.tree.structure(tree), found)
