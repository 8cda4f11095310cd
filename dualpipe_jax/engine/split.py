"""Forward, backward for the input, and backward for the weights, of any function, from its jaxpr.

``jax.vjp`` of a stage gives dx and dparams at once. A pipeline schedule wants dx first: the neighbour waits
for it, while the weight gradient may fill an idle tick later. Both come out of one graph, so the split is a
cut of that graph: what dx needs is ``backward_input`` (I), what is left is ``backward_weight`` (W), and the
values that pass from I to W are the stash.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np

from dualpipe_jax.engine.interleave import Kept, interleave
from dualpipe_jax.engine.jaxprs import JointTrace, trace_backward
from dualpipe_jax.engine.jaxprs_run import evaluate
from dualpipe_jax.engine.split_crossing import choose_crossing, stay
from dualpipe_jax.engine.split_graph import (
    Atom,
    Node,
    Program,
    Value,
    count_flops,
    count_primitives,
    is_arithmetic,
    is_cheap,
    values,
)
from dualpipe_jax.engine.split_recursion import relink, split_equations
from dualpipe_jax.engine.split_slices import derived, prune
from dualpipe_jax.engine.trees import add_to

Tree: TypeAlias = Any
Arrays: TypeAlias = list[Any]


class PairSlots(NamedTuple):
    """Where what a pair's forward keeps goes, and where its backward finds its own.

    Attributes:
      residuals_i, residuals_w: pools, [slots, ...] for each of the plan's.
      read_i, read_w: int32 scalars, the slots that the backward reads.
      written_i, written_w: int32 scalars, the slots that the forward writes.
    """

    residuals_i: Arrays
    residuals_w: Arrays
    read_i: jax.Array
    read_w: jax.Array
    written_i: jax.Array
    written_w: jax.Array


class Flops(NamedTuple):
    """FLOPs of matmuls and convolutions in each part; ``input + weight == backward``."""

    forward: int
    backward: int
    input: int
    weight: int


@dataclass(frozen=True, eq=False)
class SplitPlan:
    """The parts of one function at one set of shapes. Its methods may be called under any trace.

    Attributes:
      residuals_i: types of what the forward keeps for I alone.
      residuals_w: types of what the forward keeps for W (and perhaps for I).
      stash: types of what I hands to W.
      y: tree of the output's types.
      aux: tree of the auxiliary output's types; None without one.
      keep_input: how long x itself is read: "F" (by the forward only), "I" or "W".
      flops: FLOPs of each part.
    """

    residuals_i: list[jax.ShapeDtypeStruct]
    residuals_w: list[jax.ShapeDtypeStruct]
    stash: list[jax.ShapeDtypeStruct]
    y: Tree
    aux: Tree
    keep_input: Literal["F", "I", "W"]
    flops: Flops
    _programs: "_Programs"
    _params: "_Leaves"
    _x: "_Leaves"
    _floats: tuple[bool, ...]

    def forward(self, params: Tree, x: Tree) -> tuple[Tree, Tree, Arrays, Arrays]:
        """Gives ``(y, aux, residuals_i, residuals_w)``."""
        arguments = [*self._params.leaves(params), *self._x.leaves(x)]
        return self._forward_parts(evaluate(self._programs.forward, arguments))

    def _forward_parts(self, outputs: Arrays) -> tuple[Tree, Tree, Arrays, Arrays]:
        y: Any = jax.tree.structure(self.y)
        aux: Any = jax.tree.structure(self.aux)
        kept_i, kept_w = len(self.residuals_i), len(self.residuals_w)
        parts = _cut(outputs, y.num_leaves, aux.num_leaves, kept_i, kept_w)
        return y.unflatten(parts[0]), aux.unflatten(parts[1]), parts[2], parts[3]

    def backward_input(
        self, params: Tree, x: Tree, residuals_i: Arrays, residuals_w: Arrays, dy: Tree
    ) -> tuple[Tree, Arrays]:
        """Gives ``(dx, stash)``; x may be None if ``keep_input`` is "F"."""
        arguments = [*self._given(params, x, "I"), *residuals_i, *residuals_w, *self._cotangents(dy)]
        dx, stash = _cut(evaluate(self._programs.input, arguments), self._x.num_gradients, len(self.stash))
        return self._x.gradients(dx), stash

    def backward_weight(self, params: Tree, x: Tree, residuals_w: Arrays, stash: Arrays) -> Tree:
        """Gives dparams; x may be None unless ``keep_input`` is "W"."""
        arguments = [*self._given(params, x, "W"), *residuals_w, *stash]
        return self._params.gradients(evaluate(self._programs.weight, arguments))

    def backward(
        self, params: Tree, x: Tree, residuals_i: Arrays, residuals_w: Arrays, dy: Tree
    ) -> tuple[Tree, Tree]:
        """Gives ``(dparams, dx)``, as ``jax.vjp`` orders them."""
        arguments = [*self._given(params, x, "I"), *residuals_i, *residuals_w, *self._cotangents(dy)]
        return self._backward_parts(evaluate(self._programs.backward, arguments))

    def pair(
        self, forward: tuple[Tree, Tree], backward: tuple[Tree, Tree, Tree], slots: "PairSlots", sums: Arrays
    ) -> tuple[tuple[Tree, Tree, Arrays, Arrays], Arrays, Tree]:
        """A forward and a full backward of different microbatches, each hiding the other's communication.

        See ``interleave``. ``forward`` is (params, x), ``backward`` (params, x, dy). The gradients of params are
        added to ``sums``, one for each floating leaf. Gives (y, aux and the pools of residuals_i and
        residuals_w, with the forward's written and the backward's read), the new sums, and dx.
        """
        (forward_params, forward_x), (params, x, dy) = forward, backward
        ahead = len(jax.tree.leaves((self.y, self.aux)))
        given = self._given(params, x, "I")
        pools = [*slots.residuals_i, *slots.residuals_w]
        at = [(slots.read_i, slots.written_i)] * len(slots.residuals_i)
        at += [(slots.read_w, slots.written_w)] * len(slots.residuals_w)
        kept = [
            Kept(pool, *where, made=ahead + k, used=len(given) + k)
            for k, (pool, where) in enumerate(zip(pools, at, strict=True))
        ]
        outputs, gradients = interleave(
            self._programs.forward,
            [*self._params.leaves(forward_params), *self._x.leaves(forward_x)],
            self._programs.backward,
            [*given, *pools, *self._cotangents(dy)],
            kept=kept,
            finish={k: functools.partial(add_to, total) for k, total in enumerate(sums)},
            num_fixed=len(self._params.types),
        )
        sums, dx = _cut(gradients, len(sums), self._x.num_gradients)
        return self._forward_parts(outputs), sums, self._x.gradients(dx)

    def _backward_parts(self, outputs: Arrays) -> tuple[Tree, Tree]:
        dparams, dx = _cut(outputs, self._params.num_gradients, self._x.num_gradients)
        return self._params.gradients(dparams), self._x.gradients(dx)

    def counts(self, part: Literal["forward", "backward", "input", "weight"]) -> Counter[str]:
        """How often each primitive is applied in a part."""
        return count_primitives(getattr(self._programs, part).equations)

    def _given(self, params: Tree, x: Tree, reader: str) -> list[Any]:
        spared = x is None and "FIW".index(self.keep_input) < "FIW".index(reader)
        leaves = [None] * len(self._x.types) if spared else self._x.leaves(x)
        return [*self._params.leaves(params), *leaves]

    def _cotangents(self, dy: Tree) -> list[Any]:
        types, tree = jax.tree.flatten(self.y)
        leaves = _leaves_like("dy", dy, tree, types)
        return [leaf for leaf, inexact in zip(leaves, self._floats, strict=True) if inexact]


class _Programs(NamedTuple):
    forward: Program
    backward: Program
    input: Program
    weight: Program


@dataclass(frozen=True, eq=False)
class _Leaves:
    """The leaves of an argument, and which of them have a gradient."""

    name: str
    tree: Any
    types: list[jax.ShapeDtypeStruct]
    has_gradient: list[bool]

    @property
    def num_gradients(self) -> int:
        return sum(self.has_gradient)

    def leaves(self, tree: Tree) -> list[Any]:
        return _leaves_like(self.name, tree, self.tree, self.types)

    def gradients(self, given: Iterable[Any]) -> Tree:
        given = iter(given)
        every = [
            next(given) if has else np.zeros(kind.shape, jax.dtypes.float0)
            for kind, has in zip(self.types, self.has_gradient, strict=True)
        ]
        return self.tree.unflatten(every)


def _leaves_like(name: str, tree: Tree, expected: Any, types: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    """The leaves of a tree, which must be as it was when traced."""
    paths, found = jax.tree.flatten_with_path(tree)
    if found != expected:
        raise ValueError(
            f"split: {name} is not the tree that was traced.\n  traced: {expected}\n  given:  {found}"
        )
    wrong = [
        f"  {name}{jax.tree_util.keystr(path)}: traced {kind.dtype}{list(kind.shape)}, given {jax.typeof(leaf)}"
        for (path, leaf), kind in zip(paths, types, strict=True)
        if np.shape(leaf) != kind.shape or jax.typeof(leaf).dtype != kind.dtype
    ]
    if wrong:
        raise ValueError("\n".join(["split: arguments differ from those traced.", *wrong]))
    return [leaf for _, leaf in paths]


def _cut(items: Sequence[Any], *counts: int) -> list[list[Any]]:
    """Consecutive parts of the items, of these lengths."""
    parts, start = [], 0
    for count in counts:
        parts.append(list(items[start : start + count]))
        start += count
    return parts


class SplitFunction:
    """What ``split_backward`` gives; see there."""

    def __init__(self, function: Callable[[Tree, Tree], Any], has_aux: bool):
        self._function = function
        self._has_aux = has_aux
        self._plans: dict[Any, SplitPlan] = {}

    def trace(self, params: Tree, x: Tree) -> SplitPlan:
        """The plan for these shapes; arrays, tracers or ShapeDtypeStructs. Kept for the next call."""
        leaves, tree = jax.tree.flatten((params, x))
        key = tree, tuple(map(_type_key, leaves)), jax.sharding.get_abstract_mesh(), _settings()
        if key not in self._plans:
            joint = trace_backward(self._function, params, x, self._has_aux)
            plan = _plan(joint, params, x)
            if joint.holds_tracers:  # captured from the caller's trace: no use to anyone else
                return plan
            self._plans[key] = plan
        return self._plans[key]

    def forward(self, params: Tree, x: Tree) -> tuple[Any, Any]:
        """Gives ``(y, residuals)``, or ``((y, aux), residuals)`` with has_aux."""
        y, aux, residuals_i, residuals_w = self.trace(params, x).forward(params, x)
        return ((y, aux) if self._has_aux else y), (residuals_i, residuals_w)

    def backward_input(self, params: Tree, x: Tree, residuals: Any, dy: Tree) -> tuple[Tree, Arrays]:
        """Gives ``(dx, stash)``."""
        residuals_i, residuals_w = residuals
        return self.trace(params, x).backward_input(params, x, residuals_i, residuals_w, dy)

    def backward_weight(self, params: Tree, x: Tree, residuals: Any, stash: Arrays) -> Tree:
        """Gives dparams."""
        return self.trace(params, x).backward_weight(params, x, residuals[1], stash)

    def backward(self, params: Tree, x: Tree, residuals: Any, dy: Tree) -> tuple[Tree, Tree]:
        """Gives ``(dparams, dx)``: I and W at once."""
        residuals_i, residuals_w = residuals
        return self.trace(params, x).backward(params, x, residuals_i, residuals_w, dy)


def split_backward(function: Callable[[Tree, Tree], Any], has_aux: bool = False) -> SplitFunction:
    """Splits the backward of ``function(params, x) -> y`` in two, with no change to the function.

    ``dx`` comes from ``backward_input`` alone. ``backward_weight`` holds no collective and recomputes nothing
    of the dx chain; together they spend the matmul FLOPs of the fused backward. A weight gradient that needs
    a collective (of an all-gathered or replicated parameter) is computed in ``backward_input`` as far as the
    collective. What ``jax.checkpoint`` recomputes for dx is stashed where the weights need it too.

    The forward never keeps parameters, what derives from parameters alone, constants, or x a second time.

    Scans and conds are split inside. While loops, Pallas kernels and shard_maps are atomic: one that gives dx
    and dparams together belongs to ``backward_input``. See ``linear.split_vjp`` to give the two apart.

    Args:
      function: pure; ``params`` and ``x`` are pytrees. Integer leaves have gradients of dtype float0, as with
        ``jax.vjp``.
      has_aux: whether the function gives ``(y, aux)``; aux has no cotangent.

    >>> import jax, jax.numpy as jnp
    >>> split = split_backward(lambda w, x: jnp.tanh(x @ w))
    >>> w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    >>> y, residuals = split.forward(w, x)
    >>> dx, stash = split.backward_input(w, x, residuals, jnp.ones_like(y))
    >>> dw = split.backward_weight(w, x, residuals, stash)
    """
    return SplitFunction(function, has_aux)


def _type_key(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, leaf.weak_type
    return jax.typeof(leaf)


def _settings() -> tuple[Any, ...]:
    """What changes a trace besides its arguments."""
    names = "jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion"
    return tuple(getattr(jax.config, name) for name in names)


def _plan(joint: JointTrace, params: Tree, x: Tree) -> SplitPlan:
    """From the joint graph: what the forward keeps, then what I hands to W."""
    dparams = [g for g in joint.dparams if g is not None]
    dx = [g for g in joint.dx if g is not None]
    dy = [v for v in joint.dy if v is not None]
    wanted = [*dparams, *dx]
    forward, backward = relink(joint.forward, prune(joint.backward, wanted)[0], set(joint.params))
    kept = choose_crossing(
        forward,
        backward,
        wanted,
        free=derived(forward, joint.params),
        late_inputs=set(dy),
        repeatable=is_arithmetic,
    )
    backward = kept.late
    parts = split_equations(backward, dx, dparams, set(joint.params), movable=is_cheap if dx else stay)
    for_weight = set(parts.values)
    stored = [v for v in kept.values if v not in joint.x]
    residuals_w = [v for v in stored if v in for_weight]
    residuals_i = [v for v in stored if v not in for_weight]
    stash = [v for v in parts.values if v not in stored and v not in joint.x]
    given = (*joint.params, *joint.x)
    whole = (*given, *residuals_i, *residuals_w, *dy)
    programs = _Programs(
        forward=_program(given, forward, [*joint.y, *joint.aux, *residuals_i, *residuals_w]),
        backward=_program(whole, backward, wanted),
        input=_program(whole, parts.early, [*dx, *stash]),
        weight=_program((*given, *residuals_w, *stash), parts.late, dparams),
    )
    return SplitPlan(
        residuals_i=list(map(_struct, residuals_i)),
        residuals_w=list(map(_struct, residuals_w)),
        stash=list(map(_struct, stash)),
        y=joint.y_tree.unflatten(map(_struct, joint.y)),
        aux=joint.aux_tree.unflatten(map(_struct, joint.aux)),
        keep_input=_keep_input(joint.x, programs),
        flops=Flops(*(count_flops(program.equations) for program in programs)),
        _programs=programs,
        _params=_Leaves(
            "params", jax.tree.structure(params), list(map(_struct, joint.params)), _has(joint.dparams)
        ),
        _x=_Leaves("x", jax.tree.structure(x), list(map(_struct, joint.x)), _has(joint.dx)),
        _floats=tuple(v is not None for v in joint.dy),
    )


def _program(inputs: Sequence[Value], nodes: Sequence[Node], outputs: Sequence[Atom]) -> Program:
    equations, needed = prune(nodes, outputs)
    missing = needed.difference(inputs)
    assert not missing, f"split: {len(missing)} values are read but never made"
    return Program(tuple(inputs), equations, tuple(outputs))


def _has(gradients: Iterable[Atom | None]) -> list[bool]:
    return [g is not None for g in gradients]


def _struct(atom: Atom) -> jax.ShapeDtypeStruct:
    kind = atom if isinstance(atom, Value) else atom.kind
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype)


def _keep_input(x: Collection[Value], programs: _Programs) -> Literal["F", "I", "W"]:
    if _reads(programs.weight).intersection(x):
        return "W"
    return "I" if _reads(programs.input).intersection(x) else "F"


def _reads(program: Program) -> set[Value]:
    return prune(program.equations, program.outputs)[1] | set(values(program.outputs)).intersection(
        program.inputs
    )


def total_bytes(types: Iterable[jax.ShapeDtypeStruct]) -> int:
    """Bytes of a list of arrays, such as ``plan.stash``."""
    return sum(math.prod(kind.shape) * kind.dtype.itemsize for kind in types)
