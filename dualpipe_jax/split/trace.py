"""Trace functions into programs: a function with its backward as one graph, or a function alone."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dualpipe_jax.split.graph import Atom, Node, Program, Value, is_zero
from dualpipe_jax.split.jaxprs import Reader, cotangents_p, value_of
from dualpipe_jax.split.leaves import cut, is_floating
from dualpipe_jax.split.slices import zero_values
from dualpipe_jax.split.sums import accumulate_in_kernels
from dualpipe_jax.split.widen import widen


@dataclass(frozen=True, eq=False)
class JointTrace:
    """A function and its backward as one graph, leaf by leaf; the gradient of a leaf without one is None.

    ``sums`` are the sums to which the backward itself adds gradients of params; like dy, they are inputs of it.
    """

    params: tuple[Value, ...]
    x: tuple[Value, ...]
    forward: tuple[Node, ...]
    y: tuple[Atom, ...]
    aux: tuple[Atom, ...]
    dy: tuple[Value | None, ...]
    backward: tuple[Node, ...]
    dparams: tuple[Atom | None, ...]
    sums: tuple[Value | None, ...]
    dx: tuple[Atom | None, ...]
    y_tree: Any
    aux_tree: Any
    holds_tracers: bool


def trace_backward(
    function: Callable[..., Any],
    params: Any,
    x: Any,
    has_aux: bool,
    wanted: Sequence[bool],
    sums: Sequence[Any] | None = None,
) -> JointTrace:
    """Trace ``function(params, x)`` and its ``jax.vjp``; nothing is computed.

    ``wanted`` says for each leaf of params and of x whether its gradient is wanted. A gradient that is zero for all
    arguments counts as none. ``sums``: see ``split_backward``.
    """
    box: dict[str, Any] = {}

    def joint(params: Any, x: Any) -> tuple[Any, ...]:
        leaves = jax.tree.leaves((params, x))

        def of_wanted(chosen: list[Any]) -> Any:
            given = iter(chosen)
            every = [next(given) if want else leaf for leaf, want in zip(leaves, wanted, strict=True)]
            return function(*jax.tree.unflatten(jax.tree.structure((params, x)), every))

        chosen = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
        y, pull, *aux = jax.vjp(of_wanted, chosen, has_aux=has_aux)  # type: ignore[call-overload]
        y_leaves, box["y_tree"] = jax.tree.flatten(y)
        aux_leaves, box["aux_tree"] = jax.tree.flatten(aux[0] if has_aux else None)
        y_leaves, aux_leaves = [jnp.asarray(v) for v in y_leaves], [jnp.asarray(v) for v in aux_leaves]
        box["floats"] = [is_floating(leaf) for leaf in y_leaves]
        given = iter(cotangents_p.bind(*[leaf for leaf in y_leaves if is_floating(leaf)]))
        dy = [next(given) if is_floating(v) else np.zeros(v.shape, jax.dtypes.float0) for v in y_leaves]
        (gradients,) = pull(jax.tree.unflatten(box["y_tree"], dy))
        box["counts"] = len(y_leaves), len(aux_leaves)
        return y_leaves, aux_leaves, gradients

    closed = jax.make_jaxpr(joint)(params, x)
    reader = Reader()
    inputs = tuple(value_of(v.aval) for v in closed.jaxpr.invars)
    outputs = reader.read(closed.jaxpr, closed.consts, inputs)
    num_params = len(jax.tree.leaves(params))
    y, aux, of_wanted = cut(outputs, *box["counts"], sum(wanted))
    given, gradients = iter(reader.cotangents), iter(of_wanted)
    zeros = zero_values(reader.nodes)
    every = [_unless_zero(next(gradients), zeros) if want else None for want in wanted]
    backward, dparams = tuple(reader.nodes[reader.boundary :]), tuple(every[:num_params])
    added: tuple[Value | None, ...] = (None,) * num_params
    if sums is not None:
        others = [*y, *aux, *(dx for dx in every[num_params:] if dx is not None)]
        backward, dparams = widen(backward, dparams, sums, others)
        backward, added = accumulate_in_kernels(backward, dparams, sums, others)
    return JointTrace(
        params=inputs[:num_params],
        x=inputs[num_params:],
        forward=tuple(reader.nodes[: reader.boundary]),
        y=tuple(y),
        aux=tuple(aux),
        dy=tuple(next(given) if float_ else None for float_ in box["floats"]),
        backward=backward,
        dparams=dparams,
        sums=added,
        dx=tuple(every[num_params:]),
        y_tree=box["y_tree"],
        aux_tree=box["aux_tree"],
        holds_tracers=reader.holds_tracers,
    )


def _unless_zero(gradient: Atom, zeros: Collection[Value]) -> Atom | None:
    zero = gradient in zeros if isinstance(gradient, Value) else is_zero(gradient)
    return None if zero else gradient


def trace_program(
    function: Callable[..., Any], *arguments: Any, differentiable: bool = False
) -> tuple[Program, Any]:
    """Trace a function of trees into a program from leaves to leaves; return it and the tree of its result.

    Nothing is computed. With ``differentiable``, the function's custom derivatives and ``jax.checkpoint`` calls are
    kept; the split then cannot see inside the former.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    reader = Reader(differentiable=differentiable)
    inputs = tuple(value_of(v.aval) for v in closed.jaxpr.invars)
    outputs = reader.read(closed.jaxpr, closed.consts, inputs)
    return Program(inputs, tuple(reader.nodes), tuple(outputs)), jax.tree.structure(shape)
