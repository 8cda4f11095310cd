"""Run a program: bind its equations again, under the caller's current trace."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dualpipe_jax.split.graph import Atom, Cond, Constant, Equation, Node, Program, Scan, Value
from dualpipe_jax.varying import vary, vary_alike, varying_axes


def evaluate(program: Program, arguments: Sequence[Any]) -> list[Any]:
    """Run a program on arrays or tracers; an argument that no equation reads may be None."""
    known = dict(zip(program.inputs, arguments, strict=True))
    run(program.equations, known)
    return values_of(known, program.outputs)


def zeros(kind: Value) -> Any:
    return _full(Constant(0, kind))


def values_of(known: dict[Value, Any], atoms: Sequence[Atom]) -> list[Any]:
    return [_array(known, atom) for atom in atoms]


def run(nodes: Sequence[Node], known: dict[Value, Any]) -> None:
    """Run the nodes in order; read their inputs from ``known`` and add their outputs to it."""
    for node in nodes:
        with jax.named_scope(node.scope) if node.scope else contextlib.nullcontext():
            if isinstance(node, Scan):
                outputs = _run_scan(node, known)
            elif isinstance(node, Cond):
                outputs = _run_cond(node, known)
            else:
                outputs = _bind(node, known)
        known.update(zip(node.outputs, outputs, strict=True))


def _bind(equation: Equation, known: dict[Value, Any]) -> Sequence[Any]:
    inputs = [known[a] if isinstance(a, Value) else _operand(a) for a in equation.inputs]
    if equation.name == "pvary":
        return [vary(array, value.varying) for array, value in zip(inputs, equation.outputs, strict=True)]
    if _extra_axes(equation.inputs, inputs) and len({atom.kind.varying for atom in equation.inputs}) == 1:
        inputs = vary_alike(inputs)
    bound = equation.primitive.get_bind_params(equation.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with equation.context.manager if equation.context is not None else contextlib.nullcontext():
        outputs = equation.primitive.bind(*functions, *inputs, **params)
    return outputs if equation.primitive.multiple_results else [outputs]


def _extra_axes(atoms: Sequence[Atom], arrays: Sequence[Any]) -> frozenset[str]:
    """Return the mesh axes that the arrays vary over now but did not when they were traced.

    An array that was stored in a slot, or passed a barrier with others, returns with a type that varies over more axes.
    The numbers are the same, so the results computed from it are typed likewise.
    """
    pairs = zip(atoms, arrays, strict=True)
    extra = (varying_axes(array) - atom.varying for atom, array in pairs if isinstance(atom, Value))
    return frozenset[str]().union(*extra)


def _run_scan(scan: Scan, known: dict[Value, Any]) -> Sequence[Any]:
    inputs = values_of(known, scan.inputs)
    extra = _extra_axes(scan.inputs, inputs)
    carried = [c.inner.varying | extra if extra else frozenset() for c in scan.carry]
    names = (*(b.inner for b in scan.consts), *(c.inner for c in scan.carry), *(b.inner for b in scan.xs))
    num_consts, num_carry = len(scan.consts), len(scan.carry)

    def typed(carry: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(map(vary, carry, carried))

    def body(carry: tuple[Any, ...], xs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        inner = dict(zip(names, (*consts, *carry, *xs), strict=True))
        run(scan.equations, inner)
        made = values_of(inner, scan.updates)
        return typed(made[:num_carry]), tuple(made[num_carry:])

    consts, start = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]
    xs = inputs[num_consts + num_carry :]
    carry, ys = lax.scan(
        body, typed(start), tuple(xs), length=scan.length, reverse=scan.reverse, unroll=scan.unroll
    )
    return (*carry, *ys)


def _run_cond(cond: Cond, known: dict[Value, Any]) -> Sequence[Any]:
    index, *operands = values_of(known, cond.inputs)
    extra = _extra_axes(cond.inputs, [index, *operands])

    def branch_function(branch: Program) -> Callable[..., list[Any]]:
        def run_branch(*operands: Any) -> list[Any]:
            outputs = evaluate(branch, operands)
            if not extra:
                return outputs
            return [vary(a, to.varying | extra) for a, to in zip(outputs, cond.outputs, strict=True)]

        return run_branch

    branches = [branch_function(branch) for branch in cond.branches]
    if cond.remat is not None:
        return jax.checkpoint(branches[0], **cond.remat)(*operands)
    if cond.platforms is None:
        return lax.switch(index, branches, *operands)
    by_platform = zip(cond.platforms, branches, strict=True)
    chosen = {name: branch for names, branch in by_platform for name in names or ("default",)}
    return lax.platform_dependent(*operands, **chosen)


def _operand(constant: Constant) -> Any:
    """Return a constant as an input of a primitive: a literal unchanged, a filled array made."""
    return _full(constant) if np.shape(constant.value) != constant.kind.shape else constant.value


def _array(known: dict[Value, Any], atom: Atom) -> Any:
    """Return the array of a value, or a constant as an array of its own dtype."""
    if isinstance(atom, Value):
        return known[atom]
    return atom.value if isinstance(atom.value, jax.Array) else _full(atom)


def _full(constant: Constant) -> Any:
    kind = constant.kind
    if np.ndim(constant.value):
        return jnp.asarray(constant.value, kind.dtype)
    filled = lax.full(kind.shape, constant.value, kind.dtype)
    if kind.memory is not None:
        filled = jax.device_put(filled, kind.memory)
    return vary(filled, kind.varying) if kind.varying else filled
