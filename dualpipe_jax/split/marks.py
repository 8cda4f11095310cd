"""Return arrays that a function marks by name, at any depth inside it, as additional results."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.split.graph import Atom, Cond, Constant, Node, Program, Scan, ScanOutput, Value
from dualpipe_jax.split.jaxprs import names_in
from dualpipe_jax.split.run import evaluate
from dualpipe_jax.split.trace import trace_program


@typechecked
def capture_marked(function: Callable[..., Any], name: str, *arguments: Any) -> Callable[..., Any] | None:
    """Return a function with the result ``(function(*arguments), marked)``, or None if nothing is marked.

    ``marked`` is a list of all arrays that ``jax.ad_checkpoint.checkpoint_name(array, name)`` named. Those inside a
    scan are stacked along a new leading dim; those of a branch that is not taken are zeros. Arrays that are marked
    inside a while loop or a function with a derivative of its own are left out, with a warning.

    Arguments:
      function: a function of trees of arrays.
      name: the name of the mark.
      arguments: trees of arrays, tracers or ShapeDtypeStructs; the returned function accepts only these shapes.
    """
    program, tree = trace_program(function, *arguments, differentiable=True)
    nodes, marked = _lift_marked(program.equations, name)
    if not marked:
        return None
    whole = Program(program.inputs, nodes, (*program.outputs, *marked))

    def with_marked(*arguments: Any) -> tuple[Any, list[Any]]:
        results = evaluate(whole, jax.tree.leaves(arguments))
        return tree.unflatten(results[: tree.num_leaves]), results[tree.num_leaves :]

    return with_marked


def _lift_marked(nodes: Sequence[Node], name: str) -> tuple[tuple[Node, ...], list[Value]]:
    """Return the nodes with all marked values inside scans and conds as extra outputs, and the marked values."""
    found: list[Value] = []

    def visit(node: Node) -> Node:
        if isinstance(node, Scan):
            node, values = _lift_from_scan(node, name)
        elif isinstance(node, Cond):
            node, values = _lift_from_cond(node, name)
        else:
            values = []
            if node.name == "name" and node.params["name"] == name:
                values = list(node.outputs)
            elif name in names_in(node.params):
                warnings.warn(
                    f"what is marked {name!r} inside {node.name} is not seen from outside it, and not counted",
                    stacklevel=2,
                )
        found.extend(values)
        return node

    return tuple(map(visit, nodes)), found


def _lift_from_scan(scan: Scan, name: str) -> tuple[Scan, list[Value]]:
    inside, marked = _lift_marked(scan.equations, name)
    ys = [ScanOutput(value, value.stacked(scan.length)) for value in marked]
    return dataclasses.replace(scan, equations=inside, ys=(*scan.ys, *ys)), [y.outer for y in ys]


def _lift_from_cond(cond: Cond, name: str) -> tuple[Cond, list[Value]]:
    each = [_lift_marked(branch.equations, name) for branch in cond.branches]
    every = [(number, value) for number, (_, marked) in enumerate(each) for value in marked]
    branches = []
    for number, (branch, (inside, _)) in enumerate(zip(cond.branches, each, strict=True)):
        more: list[Atom] = [value if home == number else Constant(0, value.like()) for home, value in every]
        branches.append(Program(branch.inputs, inside, (*branch.outputs, *more)))
    outer = [value.like() for _, value in every]
    return dataclasses.replace(cond, branches=tuple(branches), outputs=(*cond.outputs, *outer)), outer
