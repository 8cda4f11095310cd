"""Parts of a list of equations: what some values need, what is known from others, and the same renamed."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

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
    """Drops what ``wanted`` does not need, inside scans and conds too.

    Args:
      keep: equations to keep although nothing reads them; by default those with side effects.

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


def trim_scan(
    scan: Scan, live: Collection[Value], keep: Callable[[Equation], bool] = has_effect
) -> Scan | None:
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


def trim_cond(
    cond: Cond, live: Collection[Value], keep: Callable[[Equation], bool] = has_effect
) -> Cond | None:
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
            if allowed(node) and not node.effectful and all(v in known for v in values(node.inputs)):
                known.update(node.outputs)
        elif allowed(node):
            known.update(_derived_scan(node, known) if isinstance(node, Scan) else _derived_cond(node, known))
    return known


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


def zero_values(nodes: Sequence[Node], base: Iterable[Value] = ()) -> set[Value]:
    """Values that are zero whatever the rest is: ``base``, and what is summed and moved from zeros alone."""
    known = set(base)

    def zero(atom: Atom) -> bool:
        return atom in known if isinstance(atom, Value) else is_zero(atom)

    for node in nodes:
        if isinstance(node, Scan):
            known.update(_zero_scan(node, zero))
        elif isinstance(node, Cond):
            known.update(_zero_cond(node, zero))
        elif node.name in KEEPS_ZEROS and not node.effectful and all(map(zero, node.inputs)):
            known.update(node.outputs)
    return known


def _zero_scan(scan: Scan, zero: Callable[[Atom], bool]) -> set[Value]:
    base = {b.inner for b in (*scan.consts, *scan.xs) if zero(b.outer)}
    carry = [c for c in scan.carry if zero(c.start)]
    while True:
        inner = zero_values(scan.equations, base | {c.inner for c in carry})
        still = [c for c in carry if _is_in(c.update, inner)]
        if len(still) == len(carry):
            return {c.end for c in carry} | {y.outer for y in scan.ys if _is_in(y.inner, inner)}
        carry = still


def _zero_cond(cond: Cond, zero: Callable[[Atom], bool]) -> set[Value]:
    result = set(cond.outputs)
    for branch in cond.branches:
        given = zip(branch.inputs, cond.operands, strict=True)
        inner = zero_values(branch.equations, {mine for mine, outer in given if zero(outer)})
        result -= {o for o, a in zip(cond.outputs, branch.outputs, strict=True) if not _is_in(a, inner)}
    return result


def _is_in(atom: Atom, zeros: Collection[Value]) -> bool:
    return atom in zeros if isinstance(atom, Value) else is_zero(atom)


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


def renamed(program: Program) -> Program:
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
    outputs = (mapping.get(atom, atom) if isinstance(atom, Value) else atom for atom in program.outputs)
    return Program(inputs, tuple(nodes), tuple(outputs))
