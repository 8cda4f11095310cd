"""Reads jaxprs into programs, for jax 0.10 to 0.12. It and jaxprs_run are all that knows their inside.

``trace_backward`` traces a function together with its ``jax.vjp`` into one graph.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from dualpipe_jax.split.graph import (
    CHEAP,
    Atom,
    Binding,
    Carry,
    Cond,
    Constant,
    Equation,
    Node,
    Program,
    Scan,
    Stacked,
    Value,
)

WEIGHT_PART = "dualpipe_weight_part"
"""A jitted function of this name is a part of a weight gradient: the split never moves it into I."""

_SCALARS = (bool, int, float, complex, np.generic)
_REMAT = frozenset({"remat2", "checkpoint", "remat"})
_CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})
_INLINED = _REMAT | _CUSTOM | {"pjit", "jit", "closed_call", "core_call"}

# Stands between forward and backward in a joint trace: reads y, gives the cotangents.
_cotangents_p = jex.Primitive("dualpipe_cotangents")
_cotangents_p.multiple_results = True
_cotangents_p.def_abstract_eval(lambda *avals: avals)


@dataclass(frozen=True, eq=False)
class JointTrace:
    """A function and its backward as one graph, leaf by leaf; a gradient is None where its leaf has none."""

    params: tuple[Value, ...]
    x: tuple[Value, ...]
    forward: tuple[Node, ...]
    y: tuple[Atom, ...]
    aux: tuple[Atom, ...]
    dy: tuple[Value | None, ...]
    backward: tuple[Node, ...]
    dparams: tuple[Atom | None, ...]
    dx: tuple[Atom | None, ...]
    y_tree: Any
    aux_tree: Any
    holds_tracers: bool


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf of this dtype has a gradient."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def trace_backward(function: Callable[..., Any], params: Any, x: Any, has_aux: bool) -> JointTrace:
    """Traces ``function(params, x)`` and its ``jax.vjp``; nothing is computed."""
    box: dict[str, Any] = {}

    def joint(params: Any, x: Any) -> tuple[Any, ...]:
        y, pull, *aux = jax.vjp(function, params, x, has_aux=has_aux)  # type: ignore[call-overload]
        y_leaves, box["y_tree"] = jax.tree.flatten(y)
        aux_leaves, box["aux_tree"] = jax.tree.flatten(aux[0] if has_aux else None)
        y_leaves, aux_leaves = [jnp.asarray(v) for v in y_leaves], [jnp.asarray(v) for v in aux_leaves]
        box["floats"] = [is_inexact(leaf) for leaf in y_leaves]
        given = iter(_cotangents_p.bind(*[leaf for leaf in y_leaves if is_inexact(leaf)]))
        dy = [next(given) if is_inexact(v) else np.zeros(v.shape, jax.dtypes.float0) for v in y_leaves]
        dparams, dx = map(jax.tree.leaves, pull(jax.tree.unflatten(box["y_tree"], dy)))
        box["has_gradient"] = [g.dtype != jax.dtypes.float0 for g in (*dparams, *dx)]
        box["counts"] = len(y_leaves), len(aux_leaves), len(dparams)
        return y_leaves, aux_leaves, [g for g in (*dparams, *dx) if g.dtype != jax.dtypes.float0]

    closed = jax.make_jaxpr(joint)(params, x)
    reader = _Reader()
    inputs = tuple(_value(v.aval) for v in closed.jaxpr.invars)
    outputs = reader.read(closed.jaxpr, closed.consts, inputs)
    num_params = len(jax.tree.leaves(params))
    num_y, num_aux, num_dparams = box["counts"]
    given, gradients = iter(reader.cotangents), iter(outputs[num_y + num_aux :])
    every = [next(gradients) if has else None for has in box["has_gradient"]]
    return JointTrace(
        params=inputs[:num_params],
        x=inputs[num_params:],
        forward=tuple(reader.nodes[: reader.boundary]),
        y=tuple(outputs[:num_y]),
        aux=tuple(outputs[num_y : num_y + num_aux]),
        dy=tuple(next(given) if float_ else None for float_ in box["floats"]),
        backward=tuple(reader.nodes[reader.boundary :]),
        dparams=tuple(every[:num_dparams]),
        dx=tuple(every[num_dparams:]),
        y_tree=box["y_tree"],
        aux_tree=box["aux_tree"],
        holds_tracers=reader.holds_tracers,
    )


def trace_program(function: Callable[..., Any], *arguments: Any) -> tuple[Program, Any]:
    """A function of trees as a program from leaves to leaves, and the tree of its result; nothing is computed."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    reader = _Reader()
    inputs = tuple(_value(v.aval) for v in closed.jaxpr.invars)
    outputs = reader.read(closed.jaxpr, closed.consts, inputs)
    return Program(inputs, tuple(reader.nodes), tuple(outputs)), jax.tree.structure(shape)


class _Reader:
    """Reads jaxprs into nodes: calls inlined, repeated cheap equations read once."""

    def __init__(self, pinned: bool = False) -> None:
        self.nodes: list[Node] = []
        self.boundary = 0
        self.cotangents: tuple[Value, ...] = ()
        self.holds_tracers = False
        self._pinned = pinned
        self._seen: dict[Any, tuple[Value, ...]] = {}

    def read(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Atom], scope: str = "") -> list[Atom]:
        """Appends the jaxpr's equations; gives its outputs."""
        known: dict[Any, Atom] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            known[var] = Constant(const, _value(var.aval))
            self.holds_tracers |= isinstance(const, jax.core.Tracer)

        def look(atom: Any) -> Atom:
            return Constant(atom.val, _value(atom.aval)) if isinstance(atom, jex.Literal) else known[atom]

        for eqn in jaxpr.eqns:
            outputs = self._equation(eqn, [look(atom) for atom in eqn.invars], _join(scope, eqn))
            known.update(zip(eqn.outvars, outputs, strict=True))
        return [look(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, inputs: list[Atom], scope: str) -> Sequence[Atom]:
        name = eqn.primitive.name
        if eqn.primitive is _cotangents_p:
            self.boundary, self._seen = len(self.nodes), {}
            self.cotangents = tuple(_value(var.aval) for var in eqn.outvars)
            return self.cotangents
        if name in _INLINED:
            return self._inline(eqn, inputs, scope)
        if name == "scan":
            node: Node = self._scan(eqn, inputs, scope)
        elif name == "cond":
            node = self._cond(eqn, inputs, scope)
        else:
            return self._plain(eqn, inputs, scope)
        self.nodes.append(node)
        return node.outputs

    def _inline(self, eqn: Any, inputs: list[Atom], scope: str) -> list[Atom]:
        inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params)
        if eqn.primitive.name in _REMAT and eqn.params["differentiated"]:
            inputs = self._fence(eqn.params["prevent_cse"], inputs)
        was_pinned, self._pinned = self._pinned, self._pinned or eqn.params.get("name") == WEIGHT_PART
        outputs = self.read(*_open(inner), inputs, scope)
        self._pinned = was_pinned
        return outputs

    def _fence(self, prevent_cse: Any, inputs: list[Atom]) -> list[Atom]:
        """Barriers on what is recomputed from, or XLA would merge the recomputation with the forward."""
        fences = prevent_cse if isinstance(prevent_cse, tuple) else (prevent_cse,) * len(inputs)
        fenced: list[Atom] = []
        for fence, atom in zip(fences, inputs, strict=True):
            if fence and isinstance(atom, Value):
                barrier = Equation(_barrier_p(), (atom,), (atom.like(),), {}, pinned=self._pinned)
                self.nodes.append(barrier)
                atom = barrier.outputs[0]
            fenced.append(atom)
        return fenced

    def _plain(self, eqn: Any, inputs: list[Atom], scope: str) -> tuple[Value, ...]:
        key = _key(eqn, inputs, self._pinned)
        if key is not None and key in self._seen:
            return self._seen[key]
        counts: Counter[str] = Counter()
        flops = 0
        for inner in _walk(eqn):
            counts[inner.primitive.name] += 1
            flops += _flops(inner)
        outputs = tuple(_value(var.aval) for var in eqn.outvars)
        self.nodes.append(
            Equation(
                primitive=eqn.primitive,
                inputs=tuple(inputs),
                outputs=outputs,
                params=eqn.params,
                context=getattr(eqn, "ctx", None),
                scope=scope,
                communicates=any(_communicates(inner) for inner in _walk(eqn)),
                effectful=any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects),
                pinned=self._pinned,
                flops=flops,
                counts=counts,
            )
        )
        if key is not None:
            self._seen[key] = outputs
        return outputs

    def _scan(self, eqn: Any, inputs: list[Atom], scope: str) -> Scan:
        jaxpr, consts = _open(eqn.params["jaxpr"])
        num_consts, num_carry = _scan_arity(eqn.params)
        inner = [_value(var.aval) for var in jaxpr.invars]
        body = _Reader(self._pinned)
        updates = body.read(jaxpr, consts, inner)
        self.holds_tracers |= body.holds_tracers
        outputs = [_value(var.aval) for var in eqn.outvars]
        bindings = [Binding(i, o) for i, o in zip(inner, inputs, strict=True)]
        begun = bindings[num_consts : num_consts + num_carry]
        ended = zip(begun, updates[:num_carry], outputs[:num_carry], strict=True)
        stacked = zip(updates[num_carry:], outputs[num_carry:], strict=True)
        return Scan(
            consts=tuple(bindings[:num_consts]),
            carry=tuple(Carry(b.inner, b.outer, update, end) for b, update, end in ended),
            xs=tuple(bindings[num_consts + num_carry :]),
            ys=tuple(Stacked(i, o) for i, o in stacked),
            equations=tuple(body.nodes),
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params.get("unroll", 1),
            scope=scope,
        )

    def _cond(self, eqn: Any, inputs: list[Atom], scope: str) -> Cond:
        branches = []
        for branch in eqn.params["branches"]:
            jaxpr, consts = _open(branch)
            inner = tuple(_value(var.aval) for var in jaxpr.invars)
            body = _Reader(self._pinned)
            outputs = body.read(jaxpr, consts, inner)
            self.holds_tracers |= body.holds_tracers
            branches.append(Program(inner, tuple(body.nodes), tuple(outputs)))
        outer = tuple(_value(var.aval) for var in eqn.outvars)
        return Cond(inputs[0], tuple(inputs[1:]), tuple(branches), outer, scope)


def _varying(aval: Any) -> frozenset[str]:
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(manual.varying if manual is not None else getattr(aval, "vma", ()))


def _value(aval: Any) -> Value:
    return Value(getattr(aval, "shape", ()), getattr(aval, "dtype", None), _varying(aval))


def _open(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr and its consts; what a call holds is closed in jax 0.10 and plain in 0.12."""
    if hasattr(jaxpr, "eqns") and hasattr(jaxpr, "constvars"):
        return jaxpr, getattr(jaxpr, "consts", ())
    return jaxpr.jaxpr, jaxpr.consts


def _scan_arity(params: dict[str, Any]) -> tuple[int, int]:
    """How many consts and carries lead a scan's inputs: plain numbers in jax 0.10, a tree in 0.12."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def _barrier_p() -> Any:
    return jax.make_jaxpr(lax.optimization_barrier)(np.float32(0)).jaxpr.eqns[0].primitive


def _join(scope: str, eqn: Any) -> str:
    own = str(eqn.source_info.name_stack)
    return "/".join(part for part in (scope, own) if part)


def _key(eqn: Any, inputs: Sequence[Atom], pinned: bool) -> Any:
    """Equal for equations that compute the same; None where that is not known."""
    name = eqn.primitive.name
    if name not in CHEAP or name == "optimization_barrier":
        return None
    if not all(isinstance(a, Value) or isinstance(a.value, _SCALARS) for a in inputs):
        return None
    # By repr, for 0.0 equals -0.0; and only of scalars, for an array's is not exact.
    atoms = tuple(a if isinstance(a, Value) else (repr(a.value), a.kind.dtype) for a in inputs)
    key = name, atoms, tuple(sorted(eqn.params.items())), getattr(eqn, "ctx", None), pinned
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _walk(eqn: Any) -> Iterator[Any]:
    """The equation and all inside it."""
    yield eqn
    for param in eqn.params.values():
        for item in param if isinstance(param, tuple | list) else (param,):
            jaxpr = getattr(item, "jaxpr", item)
            for inner in getattr(jaxpr, "eqns", ()):
                yield from _walk(inner)


def _communicates(eqn: Any) -> bool:
    named = any(type(effect).__name__ == "NamedAxisEffect" for effect in eqn.effects)
    return named and eqn.primitive.name != "axis_index"


def _flops(eqn: Any) -> int:
    """Twice the multiplications of a matmul or convolution, what a Pallas kernel's author says, else 0."""
    name = eqn.primitive.name
    if name == "pallas_call":
        return int(getattr(eqn.params.get("cost_estimate"), "flops", 0))
    if name not in ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"):
        return 0
    lhs, rhs, out = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * math.prod(out) * math.prod(lhs[dim] for dim in contracted)
    if name == "conv_general_dilated":
        out_features = rhs[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(out) * math.prod(rhs) // max(out_features, 1)
    return _ragged_flops(eqn, lhs, out)


def _ragged_flops(eqn: Any, lhs: Sequence[int], out: Sequence[int]) -> int:
    """Each row of the ragged dim meets one group's weights, whichever dim is ragged."""
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    if numbers is None:
        return 2 * math.prod(lhs) * out[-1]
    (contracted, _), _ = numbers.dot_dimension_numbers
    ragged = numbers.lhs_ragged_dimensions[0]
    inner = math.prod(lhs[dim] for dim in contracted)
    if ragged in contracted:  # out has a leading dim of groups, each fed by a part of the ragged dim
        return 2 * math.prod(out[1:]) * inner
    return 2 * math.prod(out) * inner
