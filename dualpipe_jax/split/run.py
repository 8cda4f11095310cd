"""Runs a program: binds its equations once more, under whatever trace the caller is in."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dualpipe_jax.split.graph import Atom, Cond, Constant, Equation, Node, Program, Scan, Value


def evaluate(program: Program, arguments: Sequence[Any]) -> list[Any]:
    """Runs a program on arrays or tracers; an argument nobody reads may be None."""
    known = dict(zip(program.inputs, arguments, strict=True))
    run(program.equations, known)
    return values_of(known, program.outputs)


def values_of(known: dict[Value, Any], atoms: Sequence[Atom]) -> list[Any]:
    """What the atoms stand for, as arrays."""
    return [_array(known, atom) for atom in atoms]


def run(nodes: Sequence[Node], known: dict[Value, Any]) -> None:
    """Runs nodes whose inputs are known, and adds their outputs."""
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
    bound = equation.primitive.get_bind_params(equation.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with equation.context.manager if equation.context is not None else contextlib.nullcontext():
        outputs = equation.primitive.bind(*functions, *inputs, **params)
    return outputs if equation.primitive.multiple_results else [outputs]


def _run_scan(scan: Scan, known: dict[Value, Any]) -> Sequence[Any]:
    consts = {b.inner: _array(known, b.outer) for b in scan.consts}

    def body(carry: tuple[Any, ...], xs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        inner = dict(consts)
        inner.update(zip((c.inner for c in scan.carry), carry, strict=True))
        inner.update(zip((b.inner for b in scan.xs), xs, strict=True))
        run(scan.equations, inner)
        updates = tuple(_array(inner, c.update) for c in scan.carry)
        return updates, tuple(_array(inner, y.inner) for y in scan.ys)

    start = tuple(_array(known, c.start) for c in scan.carry)
    xs = tuple(_array(known, b.outer) for b in scan.xs)
    carry, ys = lax.scan(body, start, xs, length=scan.length, reverse=scan.reverse, unroll=scan.unroll)
    return (*carry, *ys)


def _run_cond(cond: Cond, known: dict[Value, Any]) -> Sequence[Any]:
    def branch_function(branch: Program) -> Callable[..., list[Any]]:
        return lambda *operands: evaluate(branch, operands)

    operands = [_array(known, atom) for atom in cond.operands]
    return lax.switch(_array(known, cond.index), [branch_function(b) for b in cond.branches], *operands)


def _operand(constant: Constant) -> Any:
    """A constant as a primitive takes it: a literal as it stands in the jaxpr."""
    return _full(constant) if np.shape(constant.value) != constant.kind.shape else constant.value


def _array(known: dict[Value, Any], atom: Atom) -> Any:
    """A value, or a constant as an array of its own dtype."""
    if isinstance(atom, Value):
        return known[atom]
    return atom.value if isinstance(atom.value, jax.Array) else _full(atom)


def _full(constant: Constant) -> Any:
    kind = constant.kind
    if np.ndim(constant.value):
        return jnp.asarray(constant.value, kind.dtype)
    filled = lax.full(kind.shape, constant.value, kind.dtype)
    return lax.pcast(filled, tuple(sorted(kind.varying)), to="varying") if kind.varying else filled
