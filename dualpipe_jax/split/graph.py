"""The intermediate representation of the split: values, equations, and the two nodes with bodies, scan and cond.

A program is a jaxpr with its calls inlined. Each program defines a value once. Values are compared by identity, and
two programs may compute the same value (this is how recomputation is represented).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np


class Value:
    """A variable that equations read or write, with the type of its array.

    Attributes:
      varying: the mesh axes over which the array varies.
      memory: the array's memory space if it is not the device's own; otherwise None.
    """

    __slots__ = ("dtype", "memory", "shape", "varying")

    def __init__(
        self, shape: Sequence[int], dtype: Any, varying: frozenset[str] = frozenset(), memory: Any = None
    ):
        self.shape = tuple(shape)
        self.dtype = dtype
        self.varying = varying
        self.memory = memory

    @property
    def kind(self) -> "Value":
        """The type of an atom; a value is its own type."""
        return self

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * getattr(self.dtype, "itemsize", 1)

    @property
    def type(self) -> tuple[Any, ...]:
        """Shape, dtype, varying axes and memory: equal for values that may share one output of a cond."""
        return self.shape, self.dtype, self.varying, self.memory

    def like(self) -> "Value":
        return Value(*self.type)

    def stacked(self, length: int) -> "Value":
        """Return a new value that holds ``length`` arrays of this type along a leading dim."""
        return Value((length, *self.shape), self.dtype, self.varying, self.memory)


@dataclass(frozen=True, eq=False)
class Constant:
    """A literal or a captured array; a scalar ``value`` with a larger ``kind`` is an array filled with it."""

    value: Any
    kind: Value


Atom: TypeAlias = Value | Constant


@dataclass(frozen=True, eq=False)
class Equation:
    """One application of a primitive.

    Attributes:
      scope: the JAX name stack of the user's code that made it, for profiles.
      collectives: the mesh axes of each collective primitive that the equation is or holds.
      effectful: whether it has a side effect, such as a debug print.
      pinned: whether the user marked it as part of a weight gradient (see declared.split_vjp).
      flops: FLOPs of its matmuls and convolutions.
    """

    primitive: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]
    params: dict[str, Any]
    context: Any = None
    scope: str = ""
    collectives: Mapping[str, frozenset[str]] = field(default_factory=dict)
    effectful: bool = False
    pinned: bool = False
    flops: int = 0

    @property
    def communicates(self) -> bool:
        """Whether the equation is, or holds, a collective over a mesh axis."""
        return bool(self.collectives)

    @property
    def name(self) -> str:
        return self.primitive.name


class Binding(NamedTuple):
    """A const or xs of a scan: ``inner`` in the body is the whole of ``outer`` (const) or one slice of it (xs)."""

    inner: Value
    outer: Atom


class ScanCarry(NamedTuple):
    """A carry of a scan: ``inner`` is ``start`` at first and ``update`` after each iteration; the result is ``end``."""

    inner: Value
    start: Atom
    update: Atom
    end: Value


class ScanOutput(NamedTuple):
    """One of the ys of a scan: the ``inner`` of every iteration, stacked in ``outer``."""

    inner: Atom
    outer: Value


@dataclass(frozen=True, eq=False)
class Scan:
    consts: tuple[Binding, ...]
    carry: tuple[ScanCarry, ...]
    xs: tuple[Binding, ...]
    ys: tuple[ScanOutput, ...]
    equations: tuple["Node", ...]
    length: int
    reverse: bool
    unroll: int
    scope: str = ""

    @property
    def inputs(self) -> tuple[Atom, ...]:
        return (*(b.outer for b in self.consts), *(c.start for c in self.carry), *(b.outer for b in self.xs))

    @property
    def outputs(self) -> tuple[Value, ...]:
        return (*(c.end for c in self.carry), *(y.outer for y in self.ys))

    @property
    def updates(self) -> tuple[Atom, ...]:
        return (*(c.update for c in self.carry), *(y.inner for y in self.ys))


@dataclass(frozen=True, eq=False)
class Program:
    """Equations in order, from inputs to outputs; a branch of a cond is one too."""

    inputs: tuple[Value, ...]
    equations: tuple["Node", ...]
    outputs: tuple[Atom, ...]


@dataclass(frozen=True, eq=False)
class Cond:
    """``branches[index](*operands)``.

    Attributes:
      platforms: for a choice by platform, the platforms of each branch, None for the default branch; the index is then
        not read. None for an ordinary cond.
      remat: the options of ``jax.checkpoint`` if the node is a rematerialised call, which has one branch; else None.
    """

    index: Atom
    operands: tuple[Atom, ...]
    branches: tuple[Program, ...]
    outputs: tuple[Value, ...]
    scope: str = ""
    platforms: tuple[tuple[str, ...] | None, ...] | None = None
    remat: dict[str, Any] | None = None

    @property
    def inputs(self) -> tuple[Atom, ...]:
        return (self.index, *self.operands)

    def with_outputs(self, places: Sequence[int]) -> "Cond":
        """Return the same cond with only the outputs at these places."""

        def chosen(outputs: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(outputs[place] for place in places)

        branches = tuple(replace(branch, outputs=chosen(branch.outputs)) for branch in self.branches)
        return replace(self, branches=branches, outputs=chosen(self.outputs))

    def with_equations(self, equations: Iterable[tuple["Node", ...]]) -> "Cond":
        """Return the same cond with these equations in its branches."""
        pairs = zip(self.branches, equations, strict=True)
        return replace(self, branches=tuple(replace(branch, equations=own) for branch, own in pairs))


Node: TypeAlias = Equation | Scan | Cond


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEWS = _names(
    """
    bitcast_convert_type broadcast_in_dim concatenate convert_element_type copy device_put
    optimization_barrier pvary reduce_precision reshape rev slice squeeze stop_gradient transpose
    """
)
"""Primitives that only move or cast their inputs: to recompute them costs nothing compared with storing the result."""

ARITHMETIC = VIEWS | _names(
    """
    abs add add_any and clamp eq ge gt integer_pow le lt max min mul ne neg not one_minus_square or
    select_n sign square sub xor
    """
)
"""Views, and elementwise primitives of a few instructions: recomputing them costs less than a memory round trip."""

CHEAP = ARITHMETIC | _names(
    """
    acos acosh argmax argmin asin asinh atan atan2 atanh axis_index cbrt ceil conj cos cosh cumsum
    digamma div empty empty2 erf erf_inv erfc exp exp2 expm1 floor imag iota is_finite lgamma
    log log1p logistic nextafter pad population_count pow real reduce_and reduce_max reduce_min
    reduce_or reduce_prod reduce_sum rem round rsqrt shift_left shift_right_arithmetic
    shift_right_logical sin sinh sqrt tan tanh
    """
)
"""``ARITHMETIC``, other elementwise primitives and reductions. An unknown primitive counts as not cheap: that costs
bytes, never correctness."""


KEEPS_ZEROS = VIEWS | _names(
    "add add_any all_gather all_to_all neg pad psum psum_invariant reduce_scatter reduce_sum sub"
)
"""Primitives that return zeros if all their inputs are zeros."""


def values(atoms: Iterable[Atom]) -> list[Value]:
    return [atom for atom in atoms if isinstance(atom, Value)]


def is_zero(constant: Constant) -> bool:
    value = constant.value
    return isinstance(value, bool | int | float | complex | np.generic | np.ndarray) and not np.any(value)


def is_view(node: Node) -> bool:
    """Whether the node only moves or casts its inputs."""
    return isinstance(node, Equation) and node.name in VIEWS and not node.pinned


def is_arithmetic(node: Node) -> bool:
    """Whether the node is so cheap that the backward may run it again, rather than keep its result."""
    return isinstance(node, Equation) and node.name in ARITHMETIC and not node.pinned


def is_cheap(node: Node) -> bool:
    """Whether the node is elementwise or a reduction, or a scan or cond of such nodes."""
    if isinstance(node, Equation):
        return node.name in CHEAP and not node.effectful and not node.pinned
    return all(is_cheap(inner) for body in bodies(node) for inner in body)


def must_be_early(node: Equation) -> bool:
    """Whether the equation must run in the input part: it communicates or has a side effect."""
    return node.communicates or node.effectful


def bodies(node: Node) -> list[tuple[Node, ...]]:
    """Return the equations inside a node, one tuple per body or branch; none for an equation."""
    if isinstance(node, Scan):
        return [node.equations]
    return [branch.equations for branch in node.branches] if isinstance(node, Cond) else []


def definitions(nodes: Iterable[Node]) -> dict[Value, Node]:
    return {output: node for node in nodes for output in node.outputs}


def count_flops(nodes: Iterable[Node]) -> int:
    """Count the FLOPs of matmuls and convolutions; every branch of a cond is counted."""
    total = 0
    for node in nodes:
        if isinstance(node, Equation):
            total += node.flops
        else:
            repeats = node.length if isinstance(node, Scan) else 1
            total += repeats * sum(count_flops(body) for body in bodies(node))
    return total


def find_collectives(nodes: Iterable[Node]) -> dict[str, frozenset[str]]:
    """Return the mesh axes of each collective primitive in the nodes and inside them."""
    found: dict[str, frozenset[str]] = {}
    for node in nodes:
        inner = [node.collectives] if isinstance(node, Equation) else map(find_collectives, bodies(node))
        for name, axes in (pair for each in inner for pair in each.items()):
            found[name] = found.get(name, frozenset()) | axes
    return found


def has_effect(node: Equation) -> bool:
    """Whether the equation has a side effect, so that running it twice or never would be visible outside."""
    return node.effectful
