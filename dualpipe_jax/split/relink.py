"""Minimise the values that a forward's scans and conds hand to those of its backward."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from dualpipe_jax.split.crossing import partition_by_min_cut
from dualpipe_jax.split.graph import Cond, Equation, Node, Program, Scan, Value, is_arithmetic, values
from dualpipe_jax.split.recursion import connect_conds, connect_scans, scan_weight
from dualpipe_jax.split.slices import branch_known, derived, inner_known, replace_atom, substitute


def relink(
    early: Sequence[Node], late: Sequence[Node], given: Collection[Value]
) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """Let late scans and conds compute values for themselves that early ones need not hand over.

    A forward scan stacks the values that its backward reads. Only inside the bodies can one see that some of these are
    a parameter, or a cast of one, or a view of another stacked value.

    Args:
      early, late: the nodes of the forward and of the backward, in order.
      given: values that both parts have.

    Returns:
      The new early and late nodes.
    """
    first, second = list(early), list(late)
    for place, node in enumerate(second):
        if isinstance(node, Equation):
            continue
        reads = set(values(node.inputs))
        for source, maker in enumerate(first):
            if isinstance(maker, Equation) or reads.isdisjoint(maker.outputs):
                continue
            free = derived(first, given)
            current = second[place]
            if isinstance(maker, Scan) and isinstance(current, Scan) and maker.length == current.length:
                first[source], second[place] = _relink_scan(maker, current, free)
            elif isinstance(maker, Cond) and isinstance(current, Cond) and maker.index is current.index:
                first[source], second[place] = _relink_cond(maker, current, free)
    return tuple(first), tuple(second)


def _relink_scan(early: Scan, late: Scan, free: Collection[Value]) -> tuple[Scan, Scan]:
    stacked = {y.outer: y.inner for y in early.ys}
    mapping = {
        b.inner: stacked[b.outer] for b in late.xs if isinstance(b.outer, Value) and b.outer in stacked
    }
    if not mapping:
        return early, late
    late = replace(
        late,
        xs=tuple(b for b in late.xs if b.inner not in mapping),
        carry=tuple(c._replace(update=replace_atom(c.update, mapping)) for c in late.carry),
        ys=tuple(y._replace(inner=replace_atom(y.inner, mapping)) for y in late.ys),
        equations=substitute(late.equations, mapping),
    )
    own = (*late.consts, *late.xs)
    known = inner_known((*early.consts, *early.xs, *own), free)
    first, second = relink(early.equations, late.equations, known)
    parts = partition_by_min_cut(
        first,
        second,
        late.updates,
        free=derived(first, known),
        late_inputs={b.inner for b in own} | {c.inner for c in late.carry},
        weight=scan_weight(early),
        repeatable=is_arithmetic,
    )
    new_early, new_late = connect_scans(
        replace(early, equations=parts.early), replace(late, equations=parts.late), parts.crossing
    )
    assert new_late is not None
    return new_early, new_late


def _relink_cond(early: Cond, late: Cond, free: Collection[Value]) -> tuple[Cond, Cond]:
    outputs = {output: place for place, output in enumerate(early.outputs)}
    linked = {
        place: outputs[operand]
        for place, operand in enumerate(late.operands)
        if isinstance(operand, Value) and operand in outputs
    }
    own = [place for place in range(len(late.operands)) if place not in linked]
    early_equations, late_branches, crossings = [], [], []
    for mine, theirs in zip(early.branches, late.branches, strict=True):
        mapping = {theirs.inputs[place]: mine.outputs[source] for place, source in linked.items()}
        wanted = tuple(replace_atom(atom, mapping) for atom in theirs.outputs)
        inputs = tuple(theirs.inputs[place] for place in own)
        known = branch_known(early, mine, free) | branch_known(late, theirs, free)
        first, second = relink(mine.equations, substitute(theirs.equations, mapping), known)
        parts = partition_by_min_cut(
            first,
            second,
            wanted,
            free=derived(first, known),
            late_inputs=set(inputs),
            repeatable=is_arithmetic,
        )
        early_equations.append(parts.early)
        late_branches.append(Program((*inputs, *mine.inputs), parts.late, wanted))
        crossings.append(parts.crossing)
    operands = (*(late.operands[place] for place in own), *early.operands)
    new_early, new_late = connect_conds(
        early.with_equations(early_equations),
        replace(late, branches=tuple(late_branches), operands=operands),
        crossings,
    )
    assert new_late is not None
    return new_early, new_late
