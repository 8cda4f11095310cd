"""A function as the split sees it: values, equations, and the two nodes it looks into, scan and cond.

A jaxpr with its calls inlined. Every value is defined once; a value is compared by identity, and the same
value may be computed by two programs (that is what recomputing means here).
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias


class Value:
    """What an equation reads or writes: an array's type. ``varying``: mesh axes it varies over."""

    __slots__ = ("dtype", "shape", "varying")

    def __init__(self, shape: Sequence[int], dtype: Any, varying: frozenset[str] = frozenset()):
        self.shape = tuple(shape)
        self.dtype = dtype
        self.varying = varying

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * getattr(self.dtype, "itemsize", 1)

    @property
    def type(self) -> tuple[Any, ...]:
        """Shape, dtype and varying axes: equal for values that may share a place."""
        return self.shape, self.dtype, self.varying

    def like(self) -> "Value":
        """A new value of this type."""
        return Value(self.shape, self.dtype, self.varying)

    def stacked(self, length: int) -> "Value":
        """A new value that holds ``length`` of these along a leading dim."""
        return Value((length, *self.shape), self.dtype, self.varying)


@dataclass(frozen=True, eq=False)
class Constant:
    """A literal or a captured array; a scalar ``value`` of a larger ``kind`` stands for an array full of it."""

    value: Any
    kind: Value


Atom: TypeAlias = Value | Constant


@dataclass(frozen=True, eq=False)
class Equation:
    """One primitive applied.

    Attributes:
      scope: where in the user's code it stood, for profiles.
      communicates: it is, or holds, a collective over a mesh axis.
      effectful: it does something besides its outputs (a debug print).
      pinned: the user marked it as part of a weight gradient (see linear.split_vjp).
      flops: what it spends in matmuls and convolutions.
      counts: names of the primitives in it, itself included.
    """

    primitive: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]
    params: dict[str, Any]
    context: Any = None
    scope: str = ""
    communicates: bool = False
    effectful: bool = False
    pinned: bool = False
    flops: int = 0
    counts: Counter[str] | None = None

    @property
    def name(self) -> str:
        """The primitive's name."""
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
    """A loop of known length."""

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
        """What it reads."""
        return (*(b.outer for b in self.consts), *(c.start for c in self.carry), *(b.outer for b in self.xs))

    @property
    def outputs(self) -> tuple[Value, ...]:
        """What it defines."""
        return (*(c.end for c in self.carry), *(y.outer for y in self.ys))

    @property
    def updates(self) -> tuple[Atom, ...]:
        """What the body must compute."""
        return (*(c.update for c in self.carry), *(y.inner for y in self.ys))


@dataclass(frozen=True, eq=False)
class Program:
    """Equations in order, from inputs to outputs; also a branch of a cond."""

    inputs: tuple[Value, ...]
    equations: tuple["Node", ...]
    outputs: tuple[Atom, ...]


@dataclass(frozen=True, eq=False)
class Cond:
    """``branches[index](*operands)``."""

    index: Atom
    operands: tuple[Atom, ...]
    branches: tuple[Program, ...]
    outputs: tuple[Value, ...]
    scope: str = ""

    @property
    def inputs(self) -> tuple[Atom, ...]:
        """What it reads."""
        return (self.index, *self.operands)


Node: TypeAlias = Equation | Scan | Cond

VIEWS = frozenset(
    "reshape transpose squeeze expand_dims broadcast_in_dim convert_element_type bitcast_convert_type copy copy_p "
    "rev slice concatenate pvary pcast reduce_precision stop_gradient optimization_barrier".split()
)
"""Only move or cast what is there already: recomputing them is free beside storing their result."""

CHEAP = VIEWS | frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp conj cos cosh digamma div empty empty2 "
    "eq erf erf_inv erfc exp exp2 expm1 floor full ge gt imag integer_pow iota is_finite le lgamma log log1p logistic "
    "lt max min mul ne neg nextafter not one_minus_square or pad pow real reduce_and reduce_max reduce_min reduce_or "
    "reduce_prod reduce_sum rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin "
    "sinh sqrt square sub tan tanh xor axis_index argmax argmin cumsum population_count zeros_like".split()
)
"""Elementwise and reductions. An unknown primitive is not cheap: that costs bytes at most, never correctness."""


def values(atoms: Iterable[Atom]) -> list[Value]:
    """The atoms that are not constants."""
    return [atom for atom in atoms if isinstance(atom, Value)]


def is_view(node: Node) -> bool:
    """Whether the node only moves or casts its inputs."""
    return isinstance(node, Equation) and node.name in VIEWS and not node.pinned


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
    """The node that defines each value."""
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


def count_primitives(nodes: Iterable[Node]) -> Counter[str]:
    """How often each primitive is applied; every branch of a cond is counted."""
    total: Counter[str] = Counter()
    for node in nodes:
        if isinstance(node, Equation):
            total.update(node.counts or {node.name: 1})
            continue
        for name, count in (pair for body in bodies(node) for pair in count_primitives(body).items()):
            total[name] += count * (node.length if isinstance(node, Scan) else 1)
    return total


def never(node: Equation) -> bool:
    """Keep no equation for its own sake."""
    del node
    return False


def prune(
    nodes: Sequence[Node], wanted: Iterable[Atom], keep: Callable[[Equation], bool] = never
) -> tuple[tuple[Node, ...], set[Value]]:
    """Drops what ``wanted`` does not need, inside scans and conds too.

    Args:
      keep: equations to keep although nothing reads them.

    Returns:
      The nodes kept, and the values they and ``wanted`` read that no kept node defines.
    """
    live = set(values(wanted))
    kept: list[Node] = []
    for node in reversed(nodes):
        trimmed = _trim(node, live, keep)
        if trimmed is None:
            continue
        kept.append(trimmed)
        live.difference_update(trimmed.outputs)
        live.update(values(trimmed.inputs))
    return tuple(reversed(kept)), live


def _trim(node: Node, live: Collection[Value], keep: Callable[[Equation], bool]) -> Node | None:
    """The node with what ``live`` needs of it, or None."""
    if isinstance(node, Scan):
        return trim_scan(node, live, keep)
    if isinstance(node, Cond):
        return trim_cond(node, live, keep)
    return node if keep(node) or any(output in live for output in node.outputs) else None


def trim_scan(scan: Scan, live: Collection[Value], keep: Callable[[Equation], bool] = never) -> Scan | None:
    """The scan without the carries, ys, consts and xs that ``live`` does not need."""
    ys = tuple(y for y in scan.ys if y.outer in live)
    carry = tuple(c for c in scan.carry if c.end in live)
    while True:
        wanted = [*(c.update for c in carry), *(y.inner for y in ys)]
        equations, needed = prune(scan.equations, wanted, keep)
        grown = tuple(c for c in scan.carry if c in carry or c.inner in needed)
        if len(grown) == len(carry):
            break
        carry = grown
    if not (carry or ys or equations):
        return None
    consts = tuple(b for b in scan.consts if b.inner in needed)
    xs = tuple(b for b in scan.xs if b.inner in needed)
    return replace(scan, consts=consts, carry=carry, xs=xs, ys=ys, equations=equations)


def trim_cond(cond: Cond, live: Collection[Value], keep: Callable[[Equation], bool] = never) -> Cond | None:
    """The cond without the outputs and operands that ``live`` does not need."""
    places = [place for place, output in enumerate(cond.outputs) if output in live]
    outputs = [[branch.outputs[place] for place in places] for branch in cond.branches]
    pruned = [prune(b.equations, o, keep) for b, o in zip(cond.branches, outputs, strict=True)]
    if not places and not any(equations for equations, _ in pruned):
        return None
    used = [
        place
        for place in range(len(cond.operands))
        if any(b.inputs[place] in needed for b, (_, needed) in zip(cond.branches, pruned, strict=True))
    ]
    branches = tuple(
        Program(tuple(branch.inputs[place] for place in used), equations, tuple(wanted))
        for branch, wanted, (equations, _) in zip(cond.branches, outputs, pruned, strict=True)
    )
    operands = tuple(cond.operands[place] for place in used)
    return replace(
        cond, operands=operands, branches=branches, outputs=tuple(cond.outputs[place] for place in places)
    )


def derived(
    nodes: Sequence[Node], base: Iterable[Value], allowed: Callable[[Node], bool] = lambda _: True
) -> set[Value]:
    """``base``, and every value computed from it and constants alone by ``allowed`` nodes."""
    known = set(base)
    for node in nodes:
        if isinstance(node, Equation):
            if allowed(node) and not is_tied_to_others(node) and all(v in known for v in values(node.inputs)):
                known.update(node.outputs)
        elif allowed(node):
            known.update(_derived_scan(node, known) if isinstance(node, Scan) else _derived_cond(node, known))
    return known


def is_tied_to_others(node: Equation) -> bool:
    """Whether running the equation again would be seen outside (a debug print)."""
    return node.effectful


def inner_known(bindings: Iterable[Binding], known: Collection[Value]) -> set[Value]:
    """The inner values whose outer ones are known or constant."""
    return {b.inner for b in bindings if isinstance(b.outer, Constant) or b.outer in known}


def branch_known(cond: Cond, branch: Program, known: Collection[Value]) -> set[Value]:
    """The branch's inputs whose operands are known or constant."""
    pairs = zip(branch.inputs, cond.operands, strict=True)
    return inner_known((Binding(inner, outer) for inner, outer in pairs), known)


def _derived_scan(scan: Scan, known: Collection[Value]) -> set[Value]:
    base = inner_known((*scan.consts, *scan.xs), known)
    carry = [c for c in scan.carry if isinstance(c.start, Constant) or c.start in known]
    while True:
        inner = derived(scan.equations, base | {c.inner for c in carry})
        still = [c for c in carry if isinstance(c.update, Constant) or c.update in inner]
        if len(still) == len(carry):
            break
        carry = still
    ys = {y.outer for y in scan.ys if isinstance(y.inner, Constant) or y.inner in inner}
    return ys | {c.end for c in carry}


def _derived_cond(cond: Cond, known: Collection[Value]) -> set[Value]:
    if isinstance(cond.index, Value) and cond.index not in known:
        return set()
    result = set(cond.outputs)
    for branch in cond.branches:
        inner = derived(branch.equations, branch_known(cond, branch, known))
        pairs = zip(branch.outputs, cond.outputs, strict=True)
        result -= {outer for atom, outer in pairs if isinstance(atom, Value) and atom not in inner}
    return result


def substitute(nodes: Iterable[Node], mapping: dict[Value, Atom]) -> tuple[Node, ...]:
    """The nodes with the values they read replaced; what is inside scans and conds has names of its own."""

    def swap(atom: Atom) -> Atom:
        return mapping.get(atom, atom) if isinstance(atom, Value) else atom

    result: list[Node] = []
    for node in nodes:
        if isinstance(node, Equation):
            result.append(replace(node, inputs=tuple(map(swap, node.inputs))))
        elif isinstance(node, Scan):
            consts = tuple(Binding(b.inner, swap(b.outer)) for b in node.consts)
            xs = tuple(Binding(b.inner, swap(b.outer)) for b in node.xs)
            carry = tuple(c._replace(start=swap(c.start)) for c in node.carry)
            result.append(replace(node, consts=consts, xs=xs, carry=carry))
        else:
            result.append(replace(node, index=swap(node.index), operands=tuple(map(swap, node.operands))))
    return tuple(result)
