"""Choose the values that pass from an early part to a late part: the fewest bytes, by a minimum cut.

Cheap late equations may run early instead (a [D]-sized sum crosses in place of its larger operands), and
early equations that cost almost nothing may run again in the late part (their input crosses, not their result).
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from dualpipe_jax.split.graph import Atom, Node, Value, definitions, is_view, values
from dualpipe_jax.split.mincut import FlowGraph
from dualpipe_jax.split.slices import prune

_EARLY, _LATE = "early", "late"


@dataclass(frozen=True, eq=False)
class Partition:
    """Two parts of a list of equations, and the values that cross between them.

    Attributes:
      crossing: the values that the early part computes (or is given) and the late part reads.
      early, late: the equations of each part.
    """

    crossing: tuple[Value, ...]
    early: tuple[Node, ...]
    late: tuple[Node, ...]


def nbytes(value: Value) -> int:
    """The weight of a value that is stored once: its bytes in device memory, 0 for a value in another memory."""
    return 0 if value.memory is not None else value.nbytes


def never(node: Node) -> bool:
    """A predicate that is always False: no equation may move."""
    del node
    return False


def partition_by_min_cut(
    early: Sequence[Node],
    late: Sequence[Node],
    wanted: Iterable[Atom],
    *,
    free: Collection[Value],
    late_inputs: Collection[Value] = (),
    weight: Callable[[Value], int] = nbytes,
    movable: Callable[[Node], bool] = never,
    repeatable: Callable[[Node], bool] = is_view,
) -> Partition:
    """Choose the values that cross from ``early`` to ``late`` at the least total weight.

    Args:
      early, late: the equations of the two parts, each in order.
      wanted: the values that ``late`` must compute.
      free: values that both parts have or may compute for themselves: they never cross.
      late_inputs: values that only ``late`` has.
      weight: the cost of a value that crosses.
      movable: which late nodes may run early.
      repeatable: which early nodes may run again in the late part.
    """
    wanted = values(wanted)
    graph = _graph(early, late, wanted, free, late_inputs, weight, movable, repeatable)
    side = graph.source_side(_EARLY, _LATE)
    moved = {node for node in late if node in side}
    kept = [node for node in late if node not in moved]
    crossing = [v for v in _in_order(early, late, wanted) if (v, "made") in side and (v, "read") not in side]
    moved |= _makers(late, values(v for node in moved for v in node.inputs), have=())
    early = (*early, *(node for node in late if node in moved))
    repeated, _ = prune(_repeat(early, kept, wanted, crossing), prune(kept, wanted)[1], keep=never)
    return Partition(tuple(crossing), early, (*repeated, *kept))


def _in_order(early: Sequence[Node], late: Sequence[Node], wanted: Iterable[Value]) -> list[Value]:
    """Return all values in order of first use; the order of a set would differ from process to process."""
    order: dict[Value, None] = {}
    for node in (*early, *late):
        order.update(dict.fromkeys((*values(node.inputs), *node.outputs)))
    order.update(dict.fromkeys(wanted))
    return list(order)


def _graph(
    early: Sequence[Node],
    late: Sequence[Node],
    wanted: Sequence[Value],
    free: Collection[Value],
    late_inputs: Collection[Value],
    weight: Callable[[Value], int],
    movable: Callable[[Node], bool],
    repeatable: Callable[[Node], bool],
) -> FlowGraph:
    """Build the flow graph: each value is an edge from (value, "made") to (value, "read"), cut if the value crosses.

    A node or value on the source's side is early. "made" is early if the value is computed early and not
    again in the late part; "read" is early if no late node reads the value.
    """
    graph = FlowGraph()
    made_early, made_late = definitions(early), definitions(late)
    asked: set[Value] = set()

    def ask(value: Value) -> None:
        """Add a value that some late node reads and no late node makes."""
        if value in asked:
            return
        asked.add(value)
        graph.connect((value, "made"), (value, "read"), weight(value) + 1)
        maker = made_early.get(value)
        if maker is None or not repeatable(maker):
            graph.connect(_EARLY, (value, "made"))
            return
        for root in values(maker.inputs):
            if root not in free:
                graph.connect((root, "read"), (value, "made"))
                ask(root)

    for node in late:
        read = [v for v in values(node.inputs) if v not in free]
        if not movable(node) or any(v in late_inputs for v in read):
            graph.connect(node, _LATE)
        for value in dict.fromkeys(v for v in read if v not in late_inputs):
            graph.connect((value, "read"), node)
            if value in made_late:
                graph.connect(node, made_late[value])
            else:
                ask(value)
        for value in node.outputs:
            if value not in free:
                graph.connect(node, (value, "made"))
                graph.connect((value, "made"), (value, "read"), weight(value) + 1)
    for value in wanted:
        if value not in free and value not in late_inputs:
            graph.connect((value, "read"), _LATE)
            if value not in made_late:
                ask(value)
    return graph


def _repeat(
    early: Sequence[Node], late: Sequence[Node], wanted: Iterable[Value], crossing: Collection[Value]
) -> list[Node]:
    """Return the early nodes that the late part runs again, in order."""
    have = {*crossing, *(output for node in late for output in node.outputs)}
    needed = _makers(early, [*wanted, *(v for node in late for v in values(node.inputs))], have)
    return [node for node in early if node in needed]


def _makers(nodes: Sequence[Node], wanted: Iterable[Value], have: Collection[Value]) -> set[Node]:
    """Return those of ``nodes`` that compute ``wanted`` from the values in ``have``."""
    made = definitions(nodes)
    needed: set[Node] = set()
    todo = list(wanted)
    while todo:
        value = todo.pop()
        maker = made.get(value)
        if value not in have and maker is not None and maker not in needed:
            needed.add(maker)
            todo.extend(values(maker.inputs))
    return needed
