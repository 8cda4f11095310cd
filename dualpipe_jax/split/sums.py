"""Gradients of parameters that a kernel adds to their sum itself."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dualpipe_jax.gradient_sum import GRADIENT_SUM
from dualpipe_jax.split.graph import Atom, Equation, Node, Value, definitions, must_be_early, values
from dualpipe_jax.split.slices import prune


def accumulate_in_kernels(
    nodes: Sequence[Node], gradients: Sequence[Atom | None], dtypes: Sequence[Any], read: Iterable[Atom]
) -> tuple[tuple[Node, ...], tuple[Value | None, ...]]:
    """Return the nodes of a backward with kernels that add to sums where they can, and these sums.

    Arguments:
      nodes: the nodes of the backward, in order.
      gradients: the gradients of the parameters. If a sum is returned for one, the same atom is then the new sum
        instead of the gradient.
      dtypes: the dtype of each gradient's sum; None for a gradient without a sum.
      read: all other values that are wanted of the nodes. A kernel that these need keeps its zeros.

    Returns:
      The new nodes, and for each gradient the value of its sum so far, an input of the nodes; None for the others.
    """
    wanted = [*read, *(gradient for gradient in gradients if gradient is not None)]
    # After ``widen``, the cast that used to round a gradient still reads it: drop the cast before uses are counted.
    nodes, _ = prune(nodes, wanted)
    uses = Counter(values([*wanted, *(atom for node in nodes for atom in node.inputs)]))
    made_by = definitions(nodes)
    # Only the part for the weights gets the sums: not a kernel that makes dx too, nor one that communicates.
    early = set(prune(nodes, read, keep=must_be_early)[0])
    adding: dict[Node, Equation] = {}

    def find_addition(made: Atom) -> tuple[Equation, int] | None:
        """Return the kernel that adds to marked zeros and the number of that input, if the sum is only handed on."""
        kernel = made_by.get(made) if isinstance(made, Value) and uses[made] == 1 else None
        if not isinstance(kernel, Equation):
            return None
        places = [(kernel, k) for k, given in enumerate(kernel.inputs) if _is_marked(given, made_by)]
        if not places:
            found = map(find_addition, kernel.inputs[: _SUM_OPERANDS.get(kernel.name, 0)])
            places = [place for place in found if place is not None]
        return places[0] if len(places) == 1 else None

    def sum_of(gradient: Atom | None, dtype: Any) -> Value | None:
        if (
            not isinstance(gradient, Value)
            or gradient.dtype != dtype
            or (place := find_addition(gradient)) is None
        ):
            return None
        kernel, marked = place
        zeros = kernel.inputs[marked].kind
        if (
            kernel in adding
            or kernel in early
            or (zeros.shape, zeros.dtype) != (gradient.shape, gradient.dtype)
        ):
            return None
        total = gradient.like()
        inputs = [total if k == marked else given for k, given in enumerate(kernel.inputs)]
        adding[kernel] = replace(kernel, inputs=tuple(inputs))
        return total

    sums = tuple(map(sum_of, gradients, dtypes))
    return tuple(adding.get(node, node) for node in nodes), sums


_SUM_OPERANDS = {"add": 2, "add_any": 2, "scatter-add": 1, "reshape": 1}
"""Primitives that hand a sum on, by the number of leading inputs that may hold the sum."""


def _is_marked(atom: Atom, made_by: Mapping[Value, Node]) -> bool:
    maker = made_by.get(atom) if isinstance(atom, Value) else None
    if not isinstance(maker, Equation) or maker.name != "name":
        return False
    return bool(maker.params["name"] == GRADIENT_SUM)
