"""Parts of a list of equations: those that some values need, the values derived from others, and renamed copies."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dualpipe_jax.split.graph import (
    KEEPS_ZEROS,
    Atom,
    Binding,
    Cond,
    Constant,
    Equation,
    Node,
    Program,
    Scan,
    Value,
    has_effect,
    is_zero,
    values,
)


def prune(
    nodes: Sequence[Node], wanted: Iterable[Atom], keep: Callable[[Equation], bool] = has_effect
) -> tuple[tuple[Node, ...], set[Value]]:
    """Drop what ``wanted`` does not need, also inside scans and conds.

    Args:
      keep: whether to keep an equation that nothing reads; by default those with side effects.

    Returns:
      The kept nodes, and the values that these and ``wanted`` read but no kept node defines.
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
    """Return the node without the parts that ``live`` does not need; None if it needs nothing of it."""
    if isinstance(node, Scan):
        return trim_scan(node, live, keep)
    if isinstance(node, Cond):
        return trim_cond(node, live, keep)
    return node if keep(node) or any(output in live for output in node.outputs) else None


def trim_scan(
    scan: Scan, live: Collection[Value], keep: Callable[[Equation], bool] = has_effect
) -> Scan | None:
    """Return the scan without the carries, ys, consts and xs that ``live`` does not need; None if nothing is left."""
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


def trim_cond(
    cond: Cond, live: Collection[Value], keep: Callable[[Equation], bool] = has_effect
) -> Cond | None:
    """Return the cond without the outputs and operands that ``live`` does not need; None if nothing is left."""
    places = [place for place, output in enumerate(cond.outputs) if output in live]
    kept = cond.with_outputs(places)
    pruned = [prune(branch.equations, branch.outputs, keep) for branch in kept.branches]
    if not places and not any(equations for equations, _ in pruned):
        return None
    used = [
        place
        for place in range(len(cond.operands))
        if any(b.inputs[place] in needed for b, (_, needed) in zip(kept.branches, pruned, strict=True))
    ]
    branches = tuple(
        Program(tuple(branch.inputs[place] for place in used), equations, branch.outputs)
        for branch, (equations, _) in zip(kept.branches, pruned, strict=True)
    )
    return replace(kept, operands=tuple(cond.operands[place] for place in used), branches=branches)


@dataclass(frozen=True)
class _Rule:
    """How a property spreads from values to results: if all inputs of a node have it, its outputs have it too.

    Attributes:
      passes: whether a node passes the property on; scans and conds that do are searched inside.
      constant: whether a constant has the property.
      by_index: whether a cond's outputs can have the property only if its index has it.
    """

    passes: Callable[[Node], bool]
    constant: Callable[[Constant], bool]
    by_index: bool

    def has(self, atom: Atom, known: Collection[Value]) -> bool:
        return atom in known if isinstance(atom, Value) else self.constant(atom)


def derived(
    nodes: Sequence[Node], base: Iterable[Value], allowed: Callable[[Node], bool] = lambda _: True
) -> set[Value]:
    """Return ``base`` and every value computed from it and constants alone by ``allowed`` nodes."""
    return _spread(nodes, base, _Rule(allowed, lambda _: True, by_index=True))


def zero_values(nodes: Sequence[Node]) -> set[Value]:
    """Return the values that are zero for all arguments: computed from zeros alone by ``KEEPS_ZEROS`` primitives."""

    def keeps_zeros(node: Node) -> bool:
        return not isinstance(node, Equation) or node.name in KEEPS_ZEROS

    return _spread(nodes, (), _Rule(keeps_zeros, is_zero, by_index=False))


def _spread(nodes: Sequence[Node], base: Iterable[Value], rule: _Rule) -> set[Value]:
    known = set(base)
    for node in filter(rule.passes, nodes):
        if isinstance(node, Scan):
            known |= _through_scan(node, known, rule)
        elif isinstance(node, Cond):
            known |= _through_cond(node, known, rule)
        elif not node.effectful and all(rule.has(atom, known) for atom in node.inputs):
            known.update(node.outputs)
    return known


def _through_scan(scan: Scan, known: Collection[Value], rule: _Rule) -> set[Value]:
    base = {b.inner for b in (*scan.consts, *scan.xs) if rule.has(b.outer, known)}
    carry = [c for c in scan.carry if rule.has(c.start, known)]
    while True:
        inner = _spread(scan.equations, base | {c.inner for c in carry}, rule)
        still = [c for c in carry if rule.has(c.update, inner)]
        if len(still) == len(carry):
            return {c.end for c in carry} | {y.outer for y in scan.ys if rule.has(y.inner, inner)}
        carry = still


def _through_cond(cond: Cond, known: Collection[Value], rule: _Rule) -> set[Value]:
    if rule.by_index and not rule.has(cond.index, known):
        return set()
    result = set(cond.outputs)
    for branch in cond.branches:
        given = zip(branch.inputs, cond.operands, strict=True)
        inner = _spread(branch.equations, {mine for mine, outer in given if rule.has(outer, known)}, rule)
        result -= {o for o, a in zip(cond.outputs, branch.outputs, strict=True) if not rule.has(a, inner)}
    return result


def inner_known(bindings: Iterable[Binding], known: Collection[Value]) -> set[Value]:
    """Return the inner values of bindings with an outer value that is known or constant."""
    return {b.inner for b in bindings if isinstance(b.outer, Constant) or b.outer in known}


def branch_known(cond: Cond, branch: Program, known: Collection[Value]) -> set[Value]:
    """Return the inputs of a branch with an operand that is known or constant."""
    pairs = zip(branch.inputs, cond.operands, strict=True)
    return inner_known((Binding(inner, outer) for inner, outer in pairs), known)


def replace_atom(atom: Atom, mapping: Mapping[Value, Atom]) -> Atom:
    """Return the replacement of an atom, or the atom itself if it has none."""
    return mapping.get(atom, atom) if isinstance(atom, Value) else atom


def substitute(nodes: Iterable[Node], mapping: dict[Value, Atom]) -> tuple[Node, ...]:
    """Return the nodes with the values that they read replaced; bodies of scans and conds have values of their own."""
    result: list[Node] = []
    for node in nodes:
        if isinstance(node, Equation):
            result.append(replace(node, inputs=tuple(replace_atom(atom, mapping) for atom in node.inputs)))
        elif isinstance(node, Scan):
            consts = tuple(Binding(b.inner, replace_atom(b.outer, mapping)) for b in node.consts)
            xs = tuple(Binding(b.inner, replace_atom(b.outer, mapping)) for b in node.xs)
            carry = tuple(c._replace(start=replace_atom(c.start, mapping)) for c in node.carry)
            result.append(replace(node, consts=consts, xs=xs, carry=carry))
        else:
            operands = tuple(replace_atom(atom, mapping) for atom in node.operands)
            result.append(replace(node, index=replace_atom(node.index, mapping), operands=operands))
    return tuple(result)


def with_fresh_values(program: Program) -> Program:
    mapping: dict[Value, Atom] = {}

    def fresh(value: Value) -> Value:
        mapping[value] = new = value.like()
        return new

    inputs, nodes = tuple(map(fresh, program.inputs)), list[Node]()
    for node in program.equations:
        (node,) = substitute([node], mapping)
        if isinstance(node, Scan):
            carry = tuple(c._replace(end=fresh(c.end)) for c in node.carry)
            ys = tuple(y._replace(outer=fresh(y.outer)) for y in node.ys)
            nodes.append(replace(node, carry=carry, ys=ys))
        else:
            nodes.append(replace(node, outputs=tuple(map(fresh, node.outputs))))
    return Program(inputs, tuple(nodes), tuple(replace_atom(atom, mapping) for atom in program.outputs))
