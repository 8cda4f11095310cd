"""Gradients of parameters in the dtype in which they are summed, directly from the products that make them.

``jax.vjp`` rounds a gradient to its parameter's dtype. If many gradients are summed in float32, this loses bits, and on
GPU also time: a product can add to the sum in its last step only if it makes the dtype of the sum.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from dualpipe_jax.split.graph import Atom, Equation, Node, Value, definitions, values

_DTYPE_PRESERVING = frozenset({"add_any", "concatenate", "reshape", "split", "transpose"})
"""Primitives that a gradient may pass after its product: their results have the dtype of their inputs."""

_Replacements = dict[Node, Equation]


def widen(
    nodes: Sequence[Node], gradients: Sequence[Atom | None], dtypes: Sequence[Any], read: Iterable[Atom]
) -> tuple[tuple[Node, ...], tuple[Atom | None, ...]]:
    """Return the nodes of a backward and the gradients of parameters, in wider dtypes if their products can make these.

    A gradient that anything else reads, or that is neither a matrix product nor rounded from the wider dtype, is
    unchanged.

    Arguments:
      dtypes: the dtype of each gradient's sum; None to leave the gradient unchanged.
      read: all other values that are wanted of the nodes.
    """
    uses = Counter(values(atom for node in nodes for atom in node.inputs))
    uses.update(values([*read, *(gradient for gradient in gradients if gradient is not None)]))
    graph = _Graph(definitions(nodes), uses)
    changed: _Replacements = {}
    found: list[Atom | None] = []
    for gradient, dtype in zip(gradients, dtypes, strict=True):
        wide = None if gradient is None or dtype is None else graph.wide(gradient, jnp.dtype(dtype))
        found.append(gradient if wide is None else wide[0])
        changed |= {} if wide is None else wide[1]
    return tuple(changed.get(node, node) for node in nodes), tuple(found)


@dataclass(frozen=True)
class _Graph:
    made_by: dict[Value, Node]
    uses: Counter[Value]

    def wide(self, atom: Atom, dtype: Any) -> tuple[Value, _Replacements] | None:
        """Return the value in a wider dtype and the nodes that change for it; None if that is impossible."""
        node = self.made_by.get(atom) if isinstance(atom, Value) else None
        if not isinstance(node, Equation) or not isinstance(atom, Value) or self.uses[atom] > 1:
            return None
        if not (jnp.issubdtype(atom.dtype, jnp.floating) and atom.dtype.itemsize < dtype.itemsize):
            return None
        made = Value(atom.shape, dtype, atom.varying, atom.memory)
        # A kernel that sums in the wider dtype and rounds at the end: take the result before it is rounded.
        if node.name == "convert_element_type":
            exact = node.inputs[0]
            return (exact, {}) if isinstance(exact, Value) and exact.dtype == dtype else None
        if node.name == "dot_general" and _is_plain(node.params["precision"]):
            params = node.params | {"preferred_element_type": dtype}
            return made, {node: replace(node, params=params, outputs=(made,))}
        if node.name not in _DTYPE_PRESERVING or any(
            self.uses[out] for out in node.outputs if out is not atom
        ):
            return None
        inputs = [self.wide(given, dtype) for given in node.inputs]
        changed: _Replacements = {}
        for given in inputs:
            if given is None:
                return None
            changed |= given[1]
        moved = tuple(given[0] for given in inputs if given is not None)
        outputs = tuple(
            made if out is atom else Value(out.shape, dtype, out.varying, out.memory) for out in node.outputs
        )
        return made, changed | {node: replace(node, inputs=moved, outputs=outputs)}


def _is_plain(precision: Any) -> bool:
    """Whether the precision leaves the dtype of the result open; a named algorithm fixes it."""
    each = precision if isinstance(precision, tuple) else (precision,)
    return all(one is None or isinstance(one, lax.Precision) for one in each)
