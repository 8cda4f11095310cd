"""What derives from parameters alone and costs matmuls, taken out of a function: it is made once a step.

``x @ (w + a @ b)`` does ``a @ b`` for every microbatch, and again in its backward, and so are the gradients of a and b
made of that of their product. All of them are the same, or linear, for all microbatches: the product can be made before
the first, and its gradient, summed, be led back after the last.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.split.crossing import stay
from dualpipe_jax.split.graph import (
    Atom,
    Binding,
    Cond,
    Node,
    Program,
    Scan,
    Stacked,
    Value,
    count_flops,
    is_view,
    values,
)
from dualpipe_jax.split.run import evaluate
from dualpipe_jax.split.slices import branch_known, derived, inner_known, prune, substitute, trim_scan
from dualpipe_jax.split.trace import trace_program

Tree: TypeAlias = Any
Arrays: TypeAlias = list[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Hoisted:
    """A function f in two: ``f(params, x) == function((params, prelude(params)), x)``.

    Attributes:
      function: of ``((params, values), x)``; gives what f does. Differentiable as f is, at the shapes traced.
      values: types of what the prelude gives; none where f has no matmul of parameters alone.
      sources: for each of them, for each leaf of params, whether it is made of that.
    """

    function: Callable[[Tree, Tree], Any]
    values: list[jax.ShapeDtypeStruct]
    sources: list[list[bool]]
    _prelude: Program

    def prelude(self, params: Tree) -> Arrays:
        """What derives from parameters alone, to be made once for all x."""
        return evaluate(self._prelude, jax.tree.leaves(params))

    def postlude(self, params: Tree, gradients: Sequence[Any]) -> Tree:
        """The gradients of params by way of the values, from those of the values, summed over all x.

        ``gradients`` has an entry for each value, None for one without. Gives what ``jax.vjp`` would: zeros for leaves
        that are in no value, of dtype float0 for integers. To be added to what the backward of ``function`` gives for
        params.
        """
        made, pull = jax.vjp(self.prelude, params)
        pairs = zip(made, gradients, strict=True)
        return pull([jnp.zeros_like(a) if g is None else g.astype(a.dtype) for a, g in pairs])[0]


@typechecked
def hoist(function: Callable[[Tree, Tree], Any], params: Tree, x: Tree) -> Hoisted:
    """Takes out of ``function(params, x)`` what derives from params alone and holds matmuls or convolutions.

    What ends it in casts and other views is left in the function, so that gradients are summed as precisely as those of
    params. Scans and what ``jax.checkpoint`` wraps are looked into; functions with derivatives of their own, while
    loops and choices are taken whole or not at all.

    Arguments:
      params, x: arrays, tracers or ShapeDtypeStructs.

    >>> import jax.numpy as jnp
    >>> p, x = {"w": jnp.ones((4, 4)), "a": jnp.ones((4, 1)), "b": jnp.ones((1, 4))}, jnp.ones((2, 4))
    >>> lora = hoist(lambda p, x: x @ (p["w"] + p["a"] @ p["b"]), p, x)
    >>> [value.shape for value in lora.values]
    [(4, 4)]
    >>> y = lora.function((p, lora.prelude(p)), x)
    """
    whole, tree = trace_program(function, params, x, differentiable=True)
    own = whole.inputs[: len(jax.tree.leaves(params))]
    early, late, crossing = _divide(whole.equations, whole.outputs, set(own))
    rest = Program((*own, *crossing, *whole.inputs[len(own) :]), late, whole.outputs)

    def remaining(prepared: tuple[Tree, Arrays], x: Tree) -> Any:
        if not crossing:
            return function(prepared[0], x)
        return tree.unflatten(evaluate(rest, jax.tree.leaves((*prepared, x))))

    reads = [prune(early, [value])[1] for value in crossing]
    return Hoisted(
        function=remaining,
        values=[jax.ShapeDtypeStruct(value.shape, value.dtype) for value in crossing],
        sources=[[leaf in read for leaf in own] for read in reads],
        _prelude=Program(own, early, tuple(crossing)),
    )


Divided: TypeAlias = tuple[tuple[Node, ...], tuple[Node, ...], list[Value]]


def _divide(nodes: Sequence[Node], wanted: Iterable[Atom], base: Collection[Value]) -> Divided:
    """What is taken out, what stays, and the values that pass from the one to the other."""
    known = derived(nodes, base)
    order: list[Node] = []
    costly: set[Node] = set()  # known, and a matmul or made of one
    made: set[Value] = set()
    for node in nodes:
        if node.outputs and known.issuperset(node.outputs):
            taken = [node] if count_flops([node]) or made.intersection(values(node.inputs)) else []
            order.append(node)
        else:
            taken, stays = _divide_inside(node, known)
            order.extend((*taken, stays))
        costly.update(taken)
        made.update(value for one in taken for value in one.outputs)
    out: set[Node] = set()
    read: set[Value] = set()
    for node in reversed(order):
        if node in costly and (not is_view(node) or read.intersection(node.outputs)):
            out.add(node)
            read.update(values(node.inputs))
    late, needed = prune([node for node in order if node not in out], wanted)
    crossing = [value for node in order if node in out for value in node.outputs if value in needed]
    return prune(order, crossing, keep=stay)[0], late, crossing


def _divide_inside(node: Node, known: Collection[Value]) -> tuple[list[Node], Node]:
    """What is taken out of a node's body, and the node that stays."""
    if isinstance(node, Scan):
        once, scan = _invariant(node, known)
        each, scan = _each_time(scan, derived(once, known))
        return [*once, *each], scan
    return _divide_call(node, known) if isinstance(node, Cond) and node.remat is not None else ([], node)


def _invariant(scan: Scan, known: Collection[Value]) -> tuple[list[Node], Scan]:
    """What is the same in every iteration is made once before the scan."""
    early, late, crossing = _divide(scan.equations, scan.updates, inner_known(scan.consts, known))
    if not crossing:
        return [], scan
    consts = (*scan.consts, *(Binding(value, value) for value in crossing))
    outer = {b.inner: b.outer for b in scan.consts}
    return list(substitute(early, outer)), dataclasses.replace(scan, consts=consts, equations=late)


def _each_time(scan: Scan, known: Collection[Value]) -> tuple[list[Node], Scan]:
    """What every iteration makes of its own slices is made for all of them by a scan before."""
    base = inner_known((*scan.consts, *scan.xs), known)
    early, late, crossing = _divide(scan.equations, scan.updates, base)
    if not crossing:
        return [], scan
    ys = tuple(Stacked(value, value.stacked(scan.length)) for value in crossing)
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
