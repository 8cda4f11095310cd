"""Hoist values that derive from parameters alone and cost matmuls or copies out of a function: once per step.

``x @ (w + a @ b)`` computes ``a @ b`` for every microbatch, and again in its backward, which also computes the
gradients of a and b from the gradient of the product. The product is the same for all microbatches, and its gradient
enters linearly: so the product can be computed before the first microbatch, and the gradients of a and b after the
last one, from the summed gradient of the product.

The same holds for a leaf that stacks the matrices of several layers and is read only layer by layer. A slice of it is a
copy in every microbatch, and no product can add its gradient to a part of the leaf's sum.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.made_once import MADE_ONCE
from dualpipe_jax.split.crossing import never
from dualpipe_jax.split.graph import (
    Atom,
    Binding,
    Cond,
    Equation,
    Node,
    Program,
    Scan,
    ScanOutput,
    Value,
    count_flops,
    is_view,
    values,
)
from dualpipe_jax.split.leaves import is_floating
from dualpipe_jax.split.run import evaluate
from dualpipe_jax.split.slices import branch_known, derived, inner_known, prune, substitute, trim_scan
from dualpipe_jax.split.trace import trace_program

Tree: TypeAlias = Any
Arrays: TypeAlias = list[Any]


class Layer(NamedTuple):
    """``leaf[at]``, reshaped to ``shape``; ``leaf`` is the leaf's number among the leaves of params."""

    leaf: int
    at: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Hoisted:
    """A function f in two parts: ``f(params, x) == function((params, prelude(params)), x)``.

    Attributes:
      function: a function of ``((params, values), x)`` with the results of f. It can be differentiated like f, at the
        traced shapes.
      layers: the layers of leaves among ``values``. These come first, in this order.
      values: types of the results of the prelude; empty if f has no matmul of parameters alone and reads no layers.
      sources: for each value, for each leaf of params, whether the value is computed from the leaf and its gradient
        flows back to it.
    """

    function: Callable[[Tree, Tree], Any]
    layers: list[Layer]
    values: list[jax.ShapeDtypeStruct]
    sources: list[list[bool]]
    _prelude: Program

    def prelude(self, params: Tree) -> Arrays:
        """Compute the values that derive from parameters alone, once for all x."""
        return evaluate(self._prelude, jax.tree.leaves(params))

    def postlude(self, params: Tree, gradients: Sequence[Any]) -> Tree:
        """Return the gradients of params through the values, from the gradients of the values, summed over all x.

        ``gradients`` has an entry for each value, None for a value without gradient. The result is that of ``jax.vjp``:
        zeros for leaves that no value uses, of dtype float0 for integers. Add it to the gradients of params from the
        backward of ``function``.
        """
        made, pull = jax.vjp(self.prelude, params)
        pairs = zip(made, gradients, strict=True)
        return pull([jnp.zeros_like(a) if g is None else g.astype(a.dtype) for a, g in pairs])[0]


@typechecked
def hoist(function: Callable[[Tree, Tree], Any], params: Tree, x: Tree) -> Hoisted:
    """Take out of ``function(params, x)`` the values that derive from params alone by matmuls or convolutions.

    Values that ``made_once`` marks are taken out too, whatever computes them.
    Casts and other views at the end of such a computation stay in the function, so that gradients are summed as
    precisely as those of params. The layers of a leaf are taken out too, if the leaf is read as ``leaf[0]``,
    ``leaf[1]``, ..., and in no other way. The bodies of scans and of ``jax.checkpoint`` are searched; functions with
    derivatives of their own, while loops and conds are taken out whole or not at all.

    Arguments:
      params, x: trees of arrays, tracers or ShapeDtypeStructs.

    >>> import jax.numpy as jnp
    >>> p, x = {"w": jnp.ones((4, 4)), "a": jnp.ones((4, 1)), "b": jnp.ones((1, 4))}, jnp.ones((2, 4))
    >>> lora = hoist(lambda p, x: x @ (p["w"] + p["a"] @ p["b"]), p, x)
    >>> [value.shape for value in lora.values]
    [(4, 4)]
    >>> y = lora.function((p, lora.prelude(p)), x)
    """
    whole, tree = trace_program(function, params, x, differentiable=True)
    own = whole.inputs[: len(jax.tree.leaves(params))]
    layers = _layers(whole, own)
    early, late, crossing = _divide(whole.equations, whole.outputs, set(own), layers)
    part_of = {node.outputs[0]: layer for node, layer in layers.items()}
    crossing.sort(key=lambda value: value not in part_of)
    rest = Program((*own, *crossing, *whole.inputs[len(own) :]), late, whole.outputs)

    def remaining(prepared: tuple[Tree, Arrays], x: Tree) -> Any:
        if not crossing:
            return function(prepared[0], x)
        return tree.unflatten(evaluate(rest, jax.tree.leaves((*prepared, x))))

    marked = _marked_in(early)
    reads = [set[Value]() if value in marked else prune(early, [value])[1] for value in crossing]
    return Hoisted(
        function=remaining,
        layers=[part_of[value] for value in crossing if value in part_of],
        values=[jax.ShapeDtypeStruct(value.shape, value.dtype) for value in crossing],
        sources=[[leaf in read for leaf in own] for read in reads],
        _prelude=Program(own, early, tuple(crossing)),
    )


Divided: TypeAlias = tuple[tuple[Node, ...], tuple[Node, ...], list[Value]]


def _layers(whole: Program, params: Sequence[Value]) -> dict[Node, Layer]:
    """Find the nodes that read ``leaf[index]``, for leaves that are read only by their leading index."""
    readers: dict[Value, list[Node]] = {
        leaf: [] for leaf in params if leaf.shape and leaf.shape[0] > 1 and is_floating(leaf)
    }
    for node in whole.equations:
        for value in {*values(node.inputs)} & readers.keys():
            readers[value].append(node)
    found: dict[Node, Layer] = {}
    for number, leaf in enumerate(params):
        nodes = readers.get(leaf, [])
        indices = [_index(node, leaf) for node in nodes]
        if None not in indices and leaf not in whole.outputs:
            for node, index in zip(nodes, indices, strict=True):
                found[node] = Layer(number, index or 0, node.outputs[0].shape)
    # The layer is taken after the squeeze of its leading dim: a product adds only to a sum of its own shape.
    sliced = {node.outputs[0]: layer for node, layer in found.items()}
    for node in whole.equations:
        if isinstance(node, Equation) and node.name == "squeeze" and node.inputs[0] in sliced:
            found[node] = sliced[node.inputs[0]]._replace(shape=node.outputs[0].shape)
    return found


def _index(node: Node, leaf: Value) -> int | None:
    """Return the index of a leaf's leading dim that a node slices out; None if the node does anything else."""
    if not isinstance(node, Equation) or node.name != "slice" or node.params["strides"] is not None:
        return None
    (start, *rest), shape = node.params["start_indices"], node.outputs[0].shape
    return start if shape == (1, *leaf.shape[1:]) and not any(rest) else None


def _divide(
    nodes: Sequence[Node], wanted: Iterable[Atom], base: Collection[Value], layers: Collection[Node] = ()
) -> Divided:
    """Return the nodes taken out (with ``layers``), the nodes that stay, and the values passed between the two."""
    known = derived(nodes, base)
    order: list[Node] = []
    # Nodes that derive from ``base`` and are a matmul, a layer or marked, or read the result of one.
    costly: set[Node] = set()
    made: set[Value] = set()
    for node in nodes:
        if node.outputs and known.issuperset(node.outputs):
            costs = count_flops([node]) or made.intersection(values(node.inputs))
            taken = [node] if costs or node in layers or _is_marked(node) else []
            order.append(node)
        else:
            taken, stays = _divide_inside(node, known)
            order.extend((*taken, stays))
        costly.update(taken)
        made.update(value for one in taken for value in one.outputs)
    out: set[Node] = set()
    read: set[Value] = set()
    for node in reversed(order):
        ends = not is_view(node) or node in layers or _is_marked(node)
        if node in costly and (ends or read.intersection(node.outputs)):
            out.add(node)
            read.update(values(node.inputs))
    late, needed = prune([node for node in order if node not in out], wanted)
    crossing = [value for node in order if node in out for value in node.outputs if value in needed]
    return prune(order, crossing, keep=never)[0], late, crossing


def _is_marked(node: Node) -> bool:
    return isinstance(node, Equation) and node.name == "name" and node.params["name"] == MADE_ONCE


def _marked_in(nodes: Iterable[Node]) -> set[Value]:
    """Return the outputs of marked nodes; for those in the bodies of scans, the stacked outputs of all iterations."""
    found = set[Value]()
    for node in nodes:
        if isinstance(node, Scan):
            inside = _marked_in(node.equations)
            found.update(y.outer for y in node.ys if y.inner in inside)
        elif _is_marked(node):
            found.update(node.outputs)
    return found


def _divide_inside(node: Node, known: Collection[Value]) -> tuple[list[Node], Node]:
    """Return the nodes taken out of a node's body, and the node that stays."""
    if isinstance(node, Scan):
        once, scan = _hoist_invariant(node, known)
        each, scan = _hoist_per_iteration(scan, derived(once, known))
        return [*once, *each], scan
    return _divide_call(node, known) if isinstance(node, Cond) and node.remat is not None else ([], node)


def _hoist_invariant(scan: Scan, known: Collection[Value]) -> tuple[list[Node], Scan]:
    """Compute what is the same in every iteration once before the scan."""
    early, late, crossing = _divide(scan.equations, scan.updates, inner_known(scan.consts, known))
    if not crossing:
        return [], scan
    consts = (*scan.consts, *(Binding(value, value) for value in crossing))
    outer = {b.inner: b.outer for b in scan.consts}
    return list(substitute(early, outer)), dataclasses.replace(scan, consts=consts, equations=late)


def _hoist_per_iteration(scan: Scan, known: Collection[Value]) -> tuple[list[Node], Scan]:
    """Compute what each iteration derives from its own slices in a separate scan before, for all iterations."""
    base = inner_known((*scan.consts, *scan.xs), known)
    early, late, crossing = _divide(scan.equations, scan.updates, base)
    if not crossing:
        return [], scan
    ys = tuple(ScanOutput(value, value.stacked(scan.length)) for value in crossing)
    whole = dataclasses.replace(scan, carry=(), ys=ys, equations=early)
    first = trim_scan(whole, whole.outputs)
    assert first is not None
    xs = (*scan.xs, *(Binding(y.inner, y.outer) for y in ys if isinstance(y.inner, Value)))
    return [first], dataclasses.replace(scan, xs=xs, equations=late)


def _divide_call(call: Cond, known: Collection[Value]) -> tuple[list[Node], Cond]:
    (body,) = call.branches
    early, late, crossing = _divide(body.equations, body.outputs, branch_known(call, body, known))
    if not crossing:
        return [], call
    outer = dict(zip(body.inputs, call.operands, strict=True))
    stays = Program((*body.inputs, *crossing), late, body.outputs)
    operands = (*call.operands, *crossing)
    return list(substitute(early, outer)), dataclasses.replace(call, operands=operands, branches=(stays,))
