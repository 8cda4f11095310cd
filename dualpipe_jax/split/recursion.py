"""Split a list of equations in two, also inside scans and conds.

``split_equations`` cuts a backward into the part that dx needs and the rest. At each level, outside and
in the bodies of scans and conds, ``partition_by_min_cut`` decides which values cross.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from dualpipe_jax.split.crossing import Partition, nbytes, partition_by_min_cut
from dualpipe_jax.split.graph import (
    Atom,
    Binding,
    Cond,
    Constant,
    Node,
    Scan,
    ScanOutput,
    Value,
    definitions,
    is_cheap,
    must_be_early,
    values,
)
from dualpipe_jax.split.slices import branch_known, derived, inner_known, prune, trim_cond, trim_scan

Movable = Callable[[Node], bool]


def split_equations(
    nodes: Sequence[Node],
    early_wanted: Iterable[Atom],
    late_wanted: Iterable[Atom],
    given: Collection[Value],
    *,
    late_inputs: Collection[Value] = (),
    weight: Callable[[Value], int] = nbytes,
    movable: Movable,
) -> Partition:
    """Split ``nodes`` into those that ``early_wanted`` needs and those that only ``late_wanted`` needs.

    Collectives and equations with side effects are early, with all they need.

    Args:
      given: values that both parts have, such as parameters. Values that derive cheaply from these are
        computed in each part that needs them.
      late_inputs: values that only the late part has.
      weight: the cost of a value that crosses.
      movable: which equations that only the late part needs may move to the early one.
    """
    free = derived(nodes, given, is_cheap)
    live = set(values(early_wanted))
    late_only = _late_only(nodes, live, free, late_inputs, movable)
    early: list[Node] = []
    late: list[Node] = []
    for node in reversed(nodes):
        first, second = _split_node(node, live, free, late_only, movable)
        if first is not None:
            early.append(first)
            live.update(values(first.inputs))
        if second is not None:
            late.append(second)
    late_wanted = list(late_wanted)
    kept, _ = prune(late[::-1], late_wanted)
    return partition_by_min_cut(
        early[::-1], kept, late_wanted, free=free, late_inputs=late_inputs, weight=weight, movable=movable
    )


def _late_only(
    nodes: Sequence[Node],
    early_wanted: Iterable[Value],
    free: Collection[Value],
    late_inputs: Collection[Value],
    movable: Movable,
) -> set[Value]:
    """Return the values that the early part cannot have, whatever moves there: no body may read them early."""
    made_early = definitions(prune(nodes, early_wanted, must_be_early)[0])
    found = set(late_inputs)
    for node in nodes:
        if not movable(node) or found.intersection(values(node.inputs)):
            found.update(v for v in node.outputs if v not in made_early and v not in free)
    return found


def _split_node(
    node: Node,
    live: Collection[Value],
    free: Collection[Value],
    late_only: Collection[Value],
    movable: Movable,
) -> tuple[Node | None, Node | None]:
    if isinstance(node, Scan):
        first = trim_scan(node, live, must_be_early)
        return (None, node) if first is None else _split_scan(node, first, free, late_only, movable)
    if isinstance(node, Cond):
        choice = trim_cond(node, live, must_be_early)
        return (None, node) if choice is None else _split_cond(node, choice, free, late_only, movable)
    is_early = must_be_early(node) or any(output in live for output in node.outputs)
    return (node, None) if is_early else (None, node)


def _split_scan(
    scan: Scan, trimmed: Scan, free: Collection[Value], late_only: Collection[Value], movable: Movable
) -> tuple[Scan, Scan | None]:
    """Split a scan: the carries and ys of ``trimmed`` are computed early, and the others late."""
    ends, ys = {c.end for c in trimmed.carry}, {y.outer for y in trimmed.ys}
    late_carry = tuple(c for c in scan.carry if c.end not in ends)
    late_ys = tuple(y for y in scan.ys if y.outer not in ys)
    parts = split_equations(
        scan.equations,
        trimmed.updates,
        [*(c.update for c in late_carry), *(y.inner for y in late_ys)],
        inner_known((*scan.consts, *scan.xs), free),
        late_inputs={c.inner for c in late_carry}
        | {b.inner for b in (*scan.consts, *scan.xs) if b.outer in late_only},
        weight=scan_weight(scan),
        movable=movable,
    )
    early = replace(scan, carry=trimmed.carry, ys=trimmed.ys, equations=parts.early)
    late = replace(scan, carry=late_carry, ys=late_ys, equations=parts.late)
    return connect_scans(early, late, parts.crossing)


def scan_weight(scan: Scan) -> Callable[[Value], int]:
    """Return the weight of the values inside a scan: a const crosses once, any other value once per iteration."""
    consts = {b.inner for b in scan.consts}
    return lambda value: nbytes(value) * (1 if value in consts else scan.length)


def connect_scans(early: Scan, late: Scan, crossing: Iterable[Value]) -> tuple[Scan, Scan | None]:
    """Stack the crossing values as ys of ``early`` and read them as xs of ``late``; late reads consts and xs itself."""
    consts, xs = _by_inner((*early.consts, *late.consts)), _by_inner((*early.xs, *late.xs))
    have = {y.inner: y for y in early.ys}
    inner = [value for value in crossing if value not in consts and value not in xs]
    stacked = [have.get(value, ScanOutput(value, value.stacked(early.length))) for value in inner]
    extra = tuple(Binding(value, y.outer) for value, y in zip(inner, stacked, strict=True))
    early = replace(early, ys=(*early.ys, *(y for y in stacked if y.inner not in have)))
    late = replace(late, consts=tuple(consts.values()), xs=(*xs.values(), *extra))
    first = trim_scan(early, early.outputs, must_be_early)
    assert first is not None
    return first, trim_scan(late, late.outputs)


def _by_inner(bindings: Iterable[Binding]) -> dict[Value, Binding]:
    return {b.inner: b for b in bindings}


def _split_cond(
    cond: Cond, trimmed: Cond, free: Collection[Value], late_only: Collection[Value], movable: Movable
) -> tuple[Cond, Cond | None]:
    early_places = [place for place, output in enumerate(cond.outputs) if output in trimmed.outputs]
    late_places = [place for place in range(len(cond.outputs)) if place not in early_places]
    first, second = cond.with_outputs(early_places), cond.with_outputs(late_places)
    parts = [
        split_equations(
            branch.equations,
            own.outputs,
            rest.outputs,
            branch_known(cond, branch, free),
            late_inputs={v for v, o in zip(branch.inputs, cond.operands, strict=True) if o in late_only},
            movable=movable,
        )
        for branch, own, rest in zip(cond.branches, first.branches, second.branches, strict=True)
    ]
    first, second = first.with_equations(p.early for p in parts), second.with_equations(p.late for p in parts)
    return connect_conds(first, second, [p.crossing for p in parts])


def connect_conds(
    early: Cond, late: Cond, crossings: Sequence[Collection[Value]]
) -> tuple[Cond, Cond | None]:
    """Pass the crossing values from ``early`` to ``late`` in extra outputs that all branches share.

    A branch returns zeros for the extra outputs that it does not need. ``late`` must have the operands of ``early``
    among its own.
    """
    inner = [
        [value for value in crossing if value not in branch.inputs]
        for crossing, branch in zip(crossings, late.branches, strict=True)
    ]
    places = _share_places(inner)
    filled = [_fill(places, mine) for mine in inner]
    early = replace(
        early,
        outputs=(*early.outputs, *places),
        branches=tuple(
            replace(
                branch,
                outputs=(*branch.outputs, *(v or Constant(0, p) for v, p in zip(row, places, strict=True))),
            )
            for branch, row in zip(early.branches, filled, strict=True)
        ),
    )
    late = replace(
        late,
        operands=(*late.operands, *places),
        branches=tuple(
            replace(
                branch, inputs=(*branch.inputs, *(v or p.like() for v, p in zip(row, places, strict=True)))
            )
            for branch, row in zip(late.branches, filled, strict=True)
        ),
    )
    first = trim_cond(early, early.outputs, must_be_early)
    assert first is not None
    return first, trim_cond(late, late.outputs)


def _share_places(crossings: Iterable[Iterable[Value]]) -> list[Value]:
    """Return shared outputs: of each type as many as the branch needs that has most crossing values of this type."""
    most: dict[tuple[object, ...], list[Value]] = {}
    for crossing in crossings:
        types = Counter(v.type for v in crossing)
        examples = {v.type: v for v in crossing}
        for type_, count in types.items():
            row = most.setdefault(type_, [])
            row.extend(examples[type_].like() for _ in range(count - len(row)))
    return [place for row in most.values() for place in row]


def _fill(places: Sequence[Value], crossing: Iterable[Value]) -> list[Value | None]:
    """Assign one branch's crossing values to the shared outputs; None for an output that the branch does not use."""
    left = list(crossing)
    row: list[Value | None] = []
    for place in places:
        row.append(next((v for v in left if v.type == place.type), None))
        left = [v for v in left if v is not row[-1]]
    assert not left
    return row
