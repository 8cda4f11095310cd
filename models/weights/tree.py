"""Our parameters as a list of leaves, each with the published tensors that fill it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import SequenceKey

from dualpipe_jax.functional import Tree
from models.transformer import Model
from models.weights.names import Entry, Path, Rotary, entries

Part = tuple[tuple[int, int], ...]
"""A part of an array: for each dim its first index and the index past its last."""

Arrange = Callable[[Tree], Tree]
"""A function that puts the stages' leaves [P, ...] into another order or container, and does nothing else to them."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of the parameters.

    Attributes:
      shape: the shape of the whole leaf.
      dtype: float32, or int32 for the slots' rows.
      spec: the leaf's PartitionSpec on a mesh with axes "pp" and "ep".
      entries: for an index of the leaf's first dims, the tensor there, or several that lie next to each other in its
        last dim; empty slots and biases that a checkpoint does not have are zero.
      numbers: the contents of a leaf of int32; None for other leaves.
    """

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    entries: dict[tuple[int, ...], list[Entry]]
    numbers: np.ndarray | None = None

    @property
    def num_leading(self) -> int:
        """The number of dims of an index of ``entries``."""
        return len(next(iter(self.entries), ()))


def leaves_of(model: Model, arrange: Arrange | None) -> tuple[list[Leaf], Any]:
    """Return the leaves of ``model.init``'s params, with the stages arranged, and the structure of their tree."""
    filled: dict[Path, dict[tuple[int, ...], list[Entry]]] = {}
    for entry in entries(model.config, model.layout):
        filled.setdefault(entry.path, {}).setdefault(entry.at, []).append(entry)
    abstract = jax.eval_shape(model.init, jax.random.key(0))
    specs = jax.tree.leaves(model.param_specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    flat, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    leaves = []
    for (keys, leaf), spec in zip(flat, specs, strict=True):
        path = tuple(key.idx if isinstance(key, SequenceKey) else key.key for key in keys)
        numbers = model.layout.rows if jnp.issubdtype(leaf.dtype, jnp.integer) else None
        leaves.append(Leaf(leaf.shape, leaf.dtype, spec, filled.pop(path, {}), numbers))
    assert not filled, f"parameters that the model does not have: {sorted(filled)}"
    tree = jax.tree.unflatten(treedef, leaves)
    tree["stages"] = _arranged(tree["stages"], len(model.layout.plan), arrange)
    return jax.tree.flatten(tree)


def _arranged(stages: Tree, num_stages: int, arrange: Arrange | None) -> Tree:
    """Arrange leaves: arrange arrays of marks, one mark for each row of each leaf, and see where each mark has gone."""
    leaves, treedef = jax.tree.flatten(stages)
    marks = [np.arange(num_stages, dtype=np.int32) + num_stages * n for n in range(len(leaves))]
    moved = jax.tree.unflatten(treedef, marks)
    if arrange is not None:
        moved = arrange(moved)

    def moved_leaf(mark: Any) -> Leaf:
        mark = np.asarray(mark)
        source, rows = leaves[mark[0] // num_stages], mark % num_stages
        entries = {
            (row, *index[1:]): there
            for row, stage in enumerate(rows)
            for index, there in source.entries.items()
            if index[0] == stage
        }
        return dataclasses.replace(
            source,
            shape=(len(rows), *source.shape[1:]),
            spec=PartitionSpec("pp", *source.spec),
            entries=entries,
            numbers=None if source.numbers is None else source.numbers[rows],
        )

    return jax.tree.map(moved_leaf, moved)


def part_of(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Part:
    """Return the part that a sharding's index takes of an array of this shape."""
    slices = (slice(None),) * len(shape) if index is None else index
    return tuple(s.indices(size)[:2] for s, size in zip(slices, shape, strict=True))


def columns_of(entry: Entry, width: int) -> slice:
    """Return the columns that a tensor fills of its leaf, which has ``width`` columns."""
    which, parts = entry.columns
    return slice(which * width // parts, (which + 1) * width // parts)


def rotary_order(rotary: Rotary, num_rows: int) -> np.ndarray:
    """Return the order of rows in which rotated pairs are neighbours, for rows whose pairs lie half the part apart."""
    half = rotary.rotated // 2
    rotated = np.arange(rotary.rotated).reshape(2, half).T.reshape(-1)
    fixed = rotary.width - rotary.rotated
    one = np.concatenate([np.arange(fixed), fixed + rotated])
    return (np.arange(num_rows // rotary.width)[:, None] * rotary.width + one).reshape(-1)
