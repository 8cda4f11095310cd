"""A function as the split sees it: values, equations, and the two nodes it looks into, scan and cond.

A jaxpr with its calls inlined. Every value is defined once; a value is compared by identity, and the same
value may be computed by two programs (that is what recomputing means here).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np


class Value:
    """What an equation reads or writes: an array's type.

    Attributes:
      varying: mesh axes it varies over.
      memory: the memory space it lies in where that is not the device's own; None as a rule.
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
        """The type of an atom: of a value itself."""
        return self

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * getattr(self.dtype, "itemsize", 1)

    @property
    def type(self) -> tuple[Any, ...]:
        """Shape, dtype, varying axes and memory: equal for values that may share a place."""
        return self.shape, self.dtype, self.varying, self.memory

    def like(self) -> "Value":
        return Value(*self.type)

    def stacked(self, length: int) -> "Value":
        """A new value that holds ``length`` of these along a leading dim."""
        return Value((length, *self.shape), self.dtype, self.varying, self.memory)


@dataclass(frozen=True, eq=False)
class Constant:
    """A literal or a captured array; a scalar ``value`` of a larger ``kind``: an array full of it."""

    value: Any
    kind: Value


Atom: TypeAlias = Value | Constant


@dataclass(frozen=True, eq=False)
class Equation:
    """One primitive applied.

    Attributes:
      scope: where in the user's code it stood, for profiles.
      collectives: the mesh axes of each collective primitive that it is, or holds.
      effectful: it does something besides its outputs (a debug print).
      pinned: the user marked it as part of a weight gradient (see declared.split_vjp).
      flops: what it spends in matmuls and convolutions.
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
        """Whether it is, or holds, a collective over a mesh axis."""
        return bool(self.collectives)

    @property
    def name(self) -> str:
        return self.primitive.name


class Binding(NamedTuple):
    """A scan's const or xs: ``inner`` in the body is ``outer``, whole or one slice of it."""

    inner: Value
    outer: Atom


class Carry(NamedTuple):
    """A scan's carry: ``inner`` begins as ``start``, becomes ``update`` each time, and leaves as ``end``."""

    inner: Value
    start: Atom
    update: Atom
    end: Value


class Stacked(NamedTuple):
    """A scan's ys: ``inner`` of every iteration, stacked in ``outer``."""

    inner: Atom
    outer: Value


@dataclass(frozen=True, eq=False)
class Scan:
    consts: tuple[Binding, ...]
    carry: tuple[Carry, ...]
    xs: tuple[Binding, ...]
    ys: tuple[Stacked, ...]
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
    """Equations in order, from inputs to outputs; also a branch of a cond."""

    inputs: tuple[Value, ...]
    equations: tuple["Node", ...]
    outputs: tuple[Atom, ...]


@dataclass(frozen=True, eq=False)
class Cond:
    """``branches[index](*operands)``.

    Attributes:
      platforms: of a choice by platform, those of each branch, None for the default's; the index is not read then.
      remat: with one branch, a call that is rematerialised, with these options of ``jax.checkpoint``.
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

    def giving(self, places: Sequence[int]) -> "Cond":
        """The same with only these outputs."""

        def chosen(outputs: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(outputs[place] for place in places)

        branches = tuple(replace(branch, outputs=chosen(branch.outputs)) for branch in self.branches)
        return replace(self, branches=branches, outputs=chosen(self.outputs))

    def running(self, equations: Iterable[tuple["Node", ...]]) -> "Cond":
        """The same with other equations in its branches."""
        pairs = zip(self.branches, equations, strict=True)
        return replace(self, branches=tuple(replace(branch, equations=own) for branch, own in pairs))


Node: TypeAlias = Equation | Scan | Cond


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEWS = _names(
    """
    bitcast_convert_type broadcast_in_dim concatenate convert_element_type copy copy_p device_put expand_dims
    optimization_barrier pcast pvary reduce_precision reshape rev slice squeeze stop_gradient transpose
    """
)
"""Only move or cast what is there already: recomputing them is free beside storing their result."""

ARITHMETIC = VIEWS | _names(
    """
    abs add add_any and clamp eq ge gt integer_pow le lt max min mul ne neg not one_minus_square or
    select_n sign square sub xor
    """
)
"""Elementwise, a few instructions each: recomputing them costs less than a trip to memory and back."""

CHEAP = ARITHMETIC | _names(
    """
    acos acosh argmax argmin asin asinh atan atan2 atanh axis_index cbrt ceil conj cos cosh cumsum
    digamma div empty empty2 erf erf_inv erfc exp exp2 expm1 floor full imag iota is_finite lgamma
    log log1p logistic nextafter pad population_count pow real reduce_and reduce_max reduce_min
    reduce_or reduce_prod reduce_sum rem round rsqrt shift_left shift_right_arithmetic
    shift_right_logical sin sinh sqrt tan tanh
    """
)
"""Elementwise and reductions. An unknown primitive is not cheap: that costs bytes, never correctness."""


KEEPS_ZEROS = VIEWS | _names(
    "add add_any all_gather all_to_all neg pad psum psum_invariant reduce_scatter reduce_sum sub"
)
"""Primitives that make zeros of zeros."""


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
    """Whether the node is elementwise or a reduction, or a loop or choice of such."""
    if isinstance(node, Equation):
        return node.name in CHEAP and not node.effectful and not node.pinned
    return all(is_cheap(inner) for body in bodies(node) for inner in body)


def is_tied(node: Equation) -> bool:
    """Whether the equation may not be left to the weight part."""
    return node.communicates or node.effectful


def bodies(node: Node) -> list[tuple[Node, ...]]:
    """The equations inside a node, one tuple per branch."""
    if isinstance(node, Scan):
        return [node.equations]
    return [branch.equations for branch in node.branches] if isinstance(node, Cond) else []


def definitions(nodes: Iterable[Node]) -> dict[Value, Node]:
    return {output: node for node in nodes for output in node.outputs}


def count_flops(nodes: Iterable[Node]) -> int:
    """FLOPs of matmuls and convolutions; every branch of a cond is counted."""
    total = 0
    for node in nodes:
        if isinstance(node, Equation):
            total += node.flops
        else:
            repeats = node.length if isinstance(node, Scan) else 1
            total += repeats * sum(count_flops(body) for body in bodies(node))
    return total


def find_collectives(nodes: Iterable[Node]) -> dict[str, frozenset[str]]:
    """The mesh axes of each collective primitive in the nodes and inside them."""
    found: dict[str, frozenset[str]] = {}
    for node in nodes:
        inner = [node.collectives] if isinstance(node, Equation) else map(find_collectives, bodies(node))
        for name, axes in (pair for each in inner for pair in each.items()):
            found[name] = found.get(name, frozenset()) | axes
    return found


def has_effect(node: Equation) -> bool:
    """Whether running the equation again, or not at all, would be seen outside."""
    return node.effectful
