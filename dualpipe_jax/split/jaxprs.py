"""Read jaxprs into programs, for jax 0.10 to 0.12. Only this module and ``run`` depend on the internals of jaxprs."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from dualpipe_jax.convolution import num_window_hits
from dualpipe_jax.split.graph import (
    CHEAP,
    Atom,
    Binding,
    Cond,
    Constant,
    Equation,
    Node,
    Program,
    Scan,
    ScanCarry,
    ScanOutput,
    Value,
)

WEIGHT_PART = "dualpipe_weight_part"
"""A jitted function of this name is a part of a weight gradient: the split never moves it into I."""

_SCALARS = (bool, int, float, complex, np.generic)
_REMAT = "remat2"
_CALLS = frozenset({"jit", "closed_call"})
_INLINED = _CALLS | {_REMAT, "custom_jvp_call", "custom_vjp_call"}
_KERNELS = frozenset({"pallas_call", "mpmd_map", "core_map"})
"""Primitives of Pallas kernels: of ``pl.pallas_call``, ``plgpu.kernel`` and ``pl.kernel``, and ``pl.core_map``."""

# Separates the forward from the backward in a joint trace: it reads y and returns the cotangents.
cotangents_p = jex.Primitive("dualpipe_cotangents")
cotangents_p.multiple_results = True
cotangents_p.def_abstract_eval(lambda *avals: avals)


class Reader:
    """Reads jaxprs into nodes; calls are inlined, and a repeated cheap equation becomes one node.

    Args:
      pinned: whether the equations are part of a weight gradient (``weight_part``).
      differentiable: keep the calls of custom derivatives and of ``jax.checkpoint`` instead of inlining them.
    """

    def __init__(self, pinned: bool = False, differentiable: bool = False) -> None:
        self.nodes: list[Node] = []
        self.boundary = 0
        self.cotangents: tuple[Value, ...] = ()
        self.holds_tracers = False
        self._pinned = pinned
        self._differentiable = differentiable
        self._seen: dict[Any, tuple[Value, ...]] = {}

    def read(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Atom], scope: str = "") -> list[Atom]:
        """Append the jaxpr's equations to the nodes; return its outputs."""
        known: dict[Any, Atom] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            known[var] = Constant(const, value_of(var.aval))
            self.holds_tracers |= isinstance(const, jax.core.Tracer)

        def read_atom(atom: Any) -> Atom:
            return Constant(atom.val, value_of(atom.aval)) if isinstance(atom, jex.Literal) else known[atom]

        for eqn in jaxpr.eqns:
            outputs = self._equation(eqn, [read_atom(atom) for atom in eqn.invars], _join_scopes(scope, eqn))
            known.update(zip(eqn.outvars, outputs, strict=True))
        return [read_atom(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, inputs: list[Atom], scope: str) -> Sequence[Atom]:
        name = eqn.primitive.name
        if eqn.primitive is cotangents_p:
            self.boundary, self._seen = len(self.nodes), {}
            self.cotangents = tuple(value_of(var.aval) for var in eqn.outvars)
            return self.cotangents
        if name in (_CALLS if self._differentiable else _INLINED):
            return self._inline(eqn, inputs, scope)
        if name == "reduce_precision" and _keeps_every_bit(eqn):
            return inputs
        if name == "scan":
            node: Node = self._scan(eqn, inputs, scope)
        elif name == _REMAT:
            node = self._remat(eqn, inputs, scope)
        elif name == "cond":
            node = self._cond(eqn, inputs, scope)
        else:
            return self._plain(eqn, inputs, scope)
        self.nodes.append(node)
        return node.outputs

    def _inline(self, eqn: Any, inputs: list[Atom], scope: str) -> list[Atom]:
        inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr") if key in eqn.params)
        if eqn.primitive.name == _REMAT and eqn.params["differentiated"]:
            inputs = self._add_barriers(eqn.params["prevent_cse"], inputs)
        was_pinned, self._pinned = self._pinned, self._pinned or eqn.params.get("name") == WEIGHT_PART
        outputs = self.read(*_open_jaxpr(inner), inputs, scope)
        self._pinned = was_pinned
        return outputs

    def _add_barriers(self, prevent_cse: Any, inputs: list[Atom]) -> list[Atom]:
        """Add barriers to the inputs of a recomputation; without them XLA would merge it with the forward."""
        per_input = prevent_cse if isinstance(prevent_cse, tuple) else (prevent_cse,) * len(inputs)
        results: list[Atom] = []
        for prevent, atom in zip(per_input, inputs, strict=True):
            if prevent and isinstance(atom, Value):
                barrier = Equation(_barrier_p(), (atom,), (atom.like(),), {}, pinned=self._pinned)
                self.nodes.append(barrier)
                atom = barrier.outputs[0]
            results.append(atom)
        return results

    def _plain(self, eqn: Any, inputs: list[Atom], scope: str) -> tuple[Value, ...]:
        key = _equation_key(eqn, inputs, self._pinned)
        if key is not None and key in self._seen:
            return self._seen[key]
        outputs = tuple(value_of(var.aval) for var in eqn.outvars)
        self.nodes.append(
            Equation(
                primitive=eqn.primitive,
                inputs=tuple(inputs),
                outputs=outputs,
                params=eqn.params,
                context=getattr(eqn, "ctx", None),
                scope=scope,
                collectives=collectives([eqn]),
                effectful=any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects),
                pinned=self._pinned,
                flops=equation_flops(eqn),
            )
        )
        if key is not None:
            self._seen[key] = outputs
        return outputs

    def _scan(self, eqn: Any, inputs: list[Atom], scope: str) -> Scan:
        body = self._program(eqn.params["jaxpr"])
        num_consts, num_carry = scan_arity(eqn.params)
        outputs = [value_of(var.aval) for var in eqn.outvars]
        bindings = [Binding(i, o) for i, o in zip(body.inputs, inputs, strict=True)]
        begun = bindings[num_consts : num_consts + num_carry]
        ended = zip(begun, body.outputs[:num_carry], outputs[:num_carry], strict=True)
        stacked = zip(body.outputs[num_carry:], outputs[num_carry:], strict=True)
        return Scan(
            consts=tuple(bindings[:num_consts]),
            carry=tuple(ScanCarry(b.inner, b.outer, update, end) for b, update, end in ended),
            xs=tuple(bindings[num_consts + num_carry :]),
            ys=tuple(ScanOutput(i, o) for i, o in stacked),
            equations=body.equations,
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params.get("unroll", 1),
            scope=scope,
        )

    def _cond(self, eqn: Any, inputs: list[Atom], scope: str) -> Cond:
        branches = tuple(map(self._program, eqn.params["branches"]))
        outputs = tuple(value_of(var.aval) for var in eqn.outvars)
        platforms = eqn.params.get("branches_platforms")
        return Cond(inputs[0], tuple(inputs[1:]), branches, outputs, scope, platforms)

    def _remat(self, eqn: Any, inputs: list[Atom], scope: str) -> Cond:
        prevent_cse = eqn.params["prevent_cse"]
        options = {
            "policy": eqn.params["policy"],
            "prevent_cse": any(prevent_cse) if isinstance(prevent_cse, tuple) else prevent_cse,
        }
        outputs = tuple(value_of(var.aval) for var in eqn.outvars)
        index = Constant(np.int32(0), Value((), np.dtype(np.int32)))
        program = self._program(eqn.params["jaxpr"])
        return Cond(index, tuple(inputs), (program,), outputs, scope, remat=options)

    def _program(self, inside: Any) -> Program:
        """Read a branch or body into a program of its own."""
        jaxpr, consts = _open_jaxpr(inside)
        inner = tuple(value_of(var.aval) for var in jaxpr.invars)
        body = Reader(self._pinned, self._differentiable)
        outputs = body.read(jaxpr, consts, inner)
        self.holds_tracers |= body.holds_tracers
        return Program(inner, tuple(body.nodes), tuple(outputs))


def _varying(aval: Any) -> frozenset[str]:
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(manual.varying if manual is not None else getattr(aval, "vma", ()))


def _memory(aval: Any) -> Any:
    space = getattr(aval, "memory_space", None)
    return space if space is jax.memory.Space.Host else None


def value_of(aval: Any) -> Value:
    """Return a new value with the type of a JAX abstract value."""
    return Value(getattr(aval, "shape", ()), getattr(aval, "dtype", None), _varying(aval), _memory(aval))


def _open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Return a jaxpr and its consts; calls hold closed jaxprs in jax 0.10 and plain ones in 0.12."""
    if hasattr(jaxpr, "eqns") and hasattr(jaxpr, "constvars"):
        return jaxpr, getattr(jaxpr, "consts", ())
    return jaxpr.jaxpr, jaxpr.consts


def scan_arity(params: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of consts and of carries of a scan; its params hold two ints in jax 0.10, a tree in 0.12."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def _barrier_p() -> Any:
    return jax.make_jaxpr(lax.optimization_barrier)(np.float32(0)).jaxpr.eqns[0].primitive


def _join_scopes(scope: str, eqn: Any) -> str:
    own = str(eqn.source_info.name_stack)
    return "/".join(part for part in (scope, own) if part)


def _equation_key(eqn: Any, inputs: Sequence[Atom], pinned: bool) -> Any:
    """Return a key that is equal for equations that compute the same; None if that is not known."""
    name = eqn.primitive.name
    if name not in CHEAP or name == "optimization_barrier":
        return None
    if not all(isinstance(a, Value) or _is_scalar(a.value) for a in inputs):
        return None
    # Compared by repr because 0.0 == -0.0; only scalars, because the repr of an array is not exact.
    atoms = tuple(
        a if isinstance(a, Value) else (repr(np.asarray(a.value).item()), a.kind.dtype) for a in inputs
    )
    key = name, atoms, tuple(sorted(eqn.params.items())), getattr(eqn, "ctx", None), pinned
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _keeps_every_bit(eqn: Any) -> bool:
    """Whether a ``reduce_precision`` keeps all bits of its dtype; ``jax.checkpoint`` adds one to each saved value."""
    kind = jnp.finfo(eqn.outvars[0].aval.dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (kind.nexp, kind.nmant)


def _is_scalar(value: Any) -> bool:
    """Whether a value is a scalar; jax 0.10 holds literals as NumPy arrays of no dims."""
    return isinstance(value, _SCALARS) or (isinstance(value, np.ndarray) and value.ndim == 0)


def _walk(eqn: Any) -> Iterator[Any]:
    """Yield the equation and all inside it, but not inside kernels: axes and effects there belong to their own grid."""
    yield eqn
    if eqn.primitive.name not in _KERNELS:
        for inner in _inner_equations(eqn.params):
            yield from _walk(inner)


def _inner_equations(params: dict[str, Any]) -> Iterator[Any]:
    for param in params.values():
        for item in param if isinstance(param, tuple | list) else (param,):
            yield from getattr(getattr(item, "jaxpr", item), "eqns", ())


def names_in(params: dict[str, Any]) -> set[str]:
    """Return the names of ``jax.ad_checkpoint.checkpoint_name`` inside an equation with these params, at any depth."""
    inside = itertools.chain.from_iterable(map(_walk, _inner_equations(params)))
    return {eqn.params["name"] for eqn in inside if eqn.primitive.name == "name"}


def collectives(eqns: Iterable[Any]) -> dict[str, frozenset[str]]:
    """Return the mesh axes of each collective primitive among the equations and inside them, at any depth."""
    found: dict[str, frozenset[str]] = {}
    for eqn in itertools.chain.from_iterable(map(_walk, eqns)):
        axes = {effect.name for effect in eqn.effects if type(effect).__name__ == "NamedAxisEffect"}
        # These collectives have no NamedAxisEffect.
        if eqn.primitive.name in ("ppermute", "pbroadcast", "pbroadcast_dynamic"):
            axes = set(eqn.params["axis_name"])
        # A loop has the effects of all equations in it, also of an axis_index, which exchanges nothing.
        if (
            axes
            and not any(True for _ in _inner_equations(eqn.params))
            and eqn.primitive.name != "axis_index"
        ):
            found[eqn.primitive.name] = found.get(eqn.primitive.name, frozenset()) | axes
    return found


def equation_flops(eqn: Any) -> int:
    """Return the FLOPs of an equation and all inside it: a scan's body as often as it runs, a while loop's once."""
    if eqn.primitive.name in _KERNELS:
        return _own_flops(eqn)
    inside = sum(map(equation_flops, _inner_equations(eqn.params)))
    return _own_flops(eqn) + inside * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)


def _own_flops(eqn: Any) -> int:
    """Return the FLOPs of a matmul or convolution (two per multiplication) or a Pallas kernel's estimate, else 0."""
    name = eqn.primitive.name
    if name in _KERNELS:
        return int(getattr(eqn.params.get("cost_estimate"), "flops", 0))
    if name not in ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"):
        return 0
    lhs, rhs, out = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * math.prod(out) * math.prod(lhs[dim] for dim in contracted)
    if name == "conv_general_dilated":
        return _convolution_flops(eqn, lhs, rhs, out)
    return _ragged_flops(eqn, lhs, out)


def _convolution_flops(eqn: Any, lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int]) -> int:
    """Return the FLOPs of a convolution, without those that padding or dilation multiply by zero, as XLA does."""
    params = eqn.params
    of_left, of_kernel, made = params["dimension_numbers"]
    sizes = (
        [shape[dim] for dim in dims[2:]] for shape, dims in ((lhs, of_left), (rhs, of_kernel), (out, made))
    )
    before = [low for low, _ in params["padding"]]
    windows = zip(
        *sizes, params["window_strides"], before, params["lhs_dilation"], params["rhs_dilation"], strict=True
    )
    return (
        2
        * out[made[0]]
        * out[made[1]]
        * rhs[of_kernel[1]]
        * math.prod(itertools.starmap(num_window_hits, windows))
    )


def _ragged_flops(eqn: Any, lhs: Sequence[int], out: Sequence[int]) -> int:
    """Return the FLOPs of a ragged dot: each row of the ragged dim is multiplied by the weights of one group."""
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    if numbers is None:
        return 2 * math.prod(lhs) * out[-1]
    (contracted, _), _ = numbers.dot_dimension_numbers
    ragged = numbers.lhs_ragged_dimensions[0]
    inner = math.prod(lhs[dim] for dim in contracted)
    # The output then has a leading dim of groups; each group contracts only its part of the ragged dim.
    if ragged in contracted:
        return 2 * math.prod(out[1:]) * inner
    return 2 * math.prod(out) * inner
