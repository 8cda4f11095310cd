"""Gradients of parameters that the kernel which makes them adds to their sum."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dualpipe_jax.gradient_sum import GRADIENT_SUM
from dualpipe_jax.split.graph import Atom, Equation, Node, Value, definitions, values
from dualpipe_jax.split.slices import prune


def hand_in_sums(
    nodes: Sequence[Node], gradients: Sequence[Atom | None], dtypes: Sequence[Any], read: Iterable[Atom]
) -> tuple[tuple[Node, ...], tuple[Value | None, ...]]:
    """The nodes of a backward, whose kernels add to sums where they can, and these sums.

    Arguments:
      gradients: of parameters. One whose sum is handed in is the new sum, and no gradient any more.
      dtypes: of each gradient's sum; None: it has none.
      read: all else that is wanted of the nodes.
    """
    wanted = [*read, *(gradient for gradient in gradients if gradient is not None)]
    # What rounded a gradient that is wide now still reads it.
    nodes, _ = prune(nodes, wanted)
    uses = Counter(values([*wanted, *(atom for node in nodes for atom in node.inputs)]))
    made_by = definitions(nodes)
    adding: dict[Node, Equation] = {}

    def sum_of(gradient: Atom | None, dtype: Any) -> Value | None:
        if not isinstance(gradient, Value) or uses[gradient] > 1 or gradient.dtype != dtype:
            return None
        kernel, total = made_by.get(gradient), gradient.like()
        while isinstance(kernel, Equation):
            marked = [k for k, given in enumerate(kernel.inputs) if _is_marked(given, made_by)]
            if marked:
                break
            before = _added_to(kernel)
            if before is None or uses[before] > 1:
                return None
            kernel = made_by.get(before)
        else:
            return None
        if len(marked) > 1 or _kind(kernel.inputs[marked[0]]) != _kind(gradient):
            return None
        inputs = [total if k in marked else given for k, given in enumerate(kernel.inputs)]
        adding[kernel] = replace(kernel, inputs=tuple(inputs))
        return total

    sums = tuple(map(sum_of, gradients, dtypes))
    return tuple(adding.get(node, node) for node in nodes), sums


def _added_to(kernel: Equation) -> Value | None:
    """That to which an addition to a part of an array adds."""
    total = kernel.inputs[0] if kernel.name == "scatter-add" else None
    return total if isinstance(total, Value) else None


def _is_marked(atom: Atom, made_by: Mapping[Value, Node]) -> bool:
    maker = made_by.get(atom) if isinstance(atom, Value) else None
    if not isinstance(maker, Equation) or maker.name != "name":
        return False
    return bool(maker.params["name"] == GRADIENT_SUM)


def _kind(atom: Atom) -> tuple[Any, ...]:
    kind = atom if isinstance(atom, Value) else atom.kind
    return kind.shape, kind.dtype
