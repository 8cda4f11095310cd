"""Two independent programs in one order: the collectives of each lie under the work of the other.

This is DualPipe's pair. For one MoE layer, with b a backward's and f a forward's all-to-all:

  communication    b1: combine   f1: dispatch   b2: dispatch   f2: combine
  computation      F attention   B experts      F experts      B attention
                                 '--- weight gradients, where there is room

Left to itself the compiler's scheduler may find this order, and often does not: it takes some work for longer
than it is, and lets a collective run out of it. So the order is given. While a collective is in flight, all
that the next one sends is computed, and a fair share of what no collective waits for; before that is done
nobody gets its result.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax import lax

from dualpipe_jax.engine.jaxprs_run import run, values_of
from dualpipe_jax.engine.split_graph import (
    Equation,
    Node,
    Program,
    Value,
    count_flops,
    definitions,
    is_cheap,
    is_view,
    values,
)

FLOPS_A_BYTE = 240
"""Matmul FLOPs in the time of a byte from memory: 166 on TPU v5p, 240 on v5e, 295 on an H100. Only shares of
work depend on it."""

_FUSED = frozenset({"name", "split", "stack"})
"""Primitives that cost nothing beside what reads and writes their values, and are not in ``is_cheap``."""

_PICKING = frozenset({"gather", "dynamic_slice"})
"""Primitives that read as much as they write, however large what they pick from."""


def interleave(
    first: Program,
    first_arguments: Sequence[Any],
    second: Program,
    second_arguments: Sequence[Any],
    finish: Callable[[int, Any], Any] = lambda number, output: output,
) -> tuple[list[Any], list[Any]]:
    """Run both programs on arrays or tracers; their outputs.

    Collectives alternate, ``second``'s leading, spread evenly where one program has more. Collectives inside
    scans and conds are out of reach: a scanned layer overlaps with nothing.

    Arguments:
      first, second: programs that do not read each other's values, with their arguments.
      finish: ``finish(number, output)`` is what becomes of an output of ``second``, such as a sum that a
        gradient is added to: part of the work that may hide a collective.
    """
    streams = [_Stream(first, first_arguments), _Stream(second, second_arguments, finish)]
    phases = _plan(streams)
    if phases:
        phases[0].stream.run(phases[0].before)
    for phase, following in itertools.zip_longest(phases, phases[1:]):
        phase.stream.run([phase.collective])
        if following is not None:
            following.stream.run(following.before)
        for item in phase.share:
            item.stream.run(item.nodes)
            item.stream.put(item.number)
        _tie(phase, following)
    return streams[0].rest(), streams[1].rest()


@dataclasses.dataclass(eq=False)
class _Stream:
    """One program on its way: the values known so far, and the outputs that are done."""

    program: Program
    arguments: dataclasses.InitVar[Sequence[Any]]
    finish: Callable[[int, Any], Any] = lambda number, output: output

    def __post_init__(self, arguments: Sequence[Any]):
        self.known: dict[Value, Any] = dict(zip(self.program.inputs, arguments, strict=True))
        self.outputs: dict[int, Any] = {}
        self.costs = _costs(self.program)

    def run(self, nodes: Iterable[Node]) -> None:
        """Compute what the nodes define and nobody has yet."""
        run([node for node in nodes if not self.known.keys() >= set(node.outputs)], self.known)

    def put(self, number: int) -> None:
        """Finish an output whose value is known."""
        (value,) = values_of(self.known, [self.program.outputs[number]])
        self.outputs[number] = self.finish(number, value)

    def rest(self) -> list[Any]:
        """All outputs, those not done yet too."""
        self.run(self.program.equations)
        for number in range(len(self.program.outputs)):
            if number not in self.outputs:
                self.put(number)
        return [self.outputs[number] for number in range(len(self.program.outputs))]


@dataclasses.dataclass(frozen=True, eq=False)
class _Item:
    """An output that no collective waits for: what is left to compute for it, and from which phase on it can be."""

    stream: _Stream
    number: int
    nodes: list[Node]
    ready: int

    def computed(self) -> list[Value]:
        """What it reads that is computed already, arguments aside."""
        known, given = self.stream.known, set(self.stream.program.inputs)
        inputs = dict.fromkeys(value for node in self.nodes for value in values(node.inputs))
        return [value for value in inputs if value in known and value not in given]


@dataclasses.dataclass(frozen=True, eq=False)
class _Phase:
    """A collective in flight: what it waited for, and the outputs that are made meanwhile."""

    stream: _Stream
    collective: Equation
    before: list[Node]
    share: list[_Item] = dataclasses.field(default_factory=list)


def _tie(phase: _Phase, following: _Phase | None) -> None:
    """End a phase: what it brought, and what the next one begins with, is there when all its work is done.

    The share of the next phase is held back too: ready sooner, it would run where there is enough to do.
    """
    held = [(phase.stream, value) for value in phase.collective.outputs]
    if following is not None:
        held += [(following.stream, value) for value in values(following.collective.inputs)]
        held += [(item.stream, value) for item in following.share for value in item.computed()]
    held = list(dict.fromkeys(held))
    made = [item.stream.outputs[item.number] for item in phase.share]
    if len(held) == len(phase.collective.outputs) and not made:
        return
    now, done = lax.optimization_barrier(([stream.known[value] for stream, value in held], made))
    for (stream, value), array in zip(held, now, strict=True):
        stream.known[value] = array
    for item, output in zip(phase.share, done, strict=True):
        item.stream.outputs[item.number] = output


def _plan(streams: Sequence[_Stream]) -> list[_Phase]:
    """The collectives in turn, each with what is computed for it and beside it."""
    pieces = [_pieces(stream.program) for stream in streams]
    phases = [_Phase(streams[turn], *pieces[turn].pop(0)) for turn in _turns(*map(len, pieces))]
    items = [item for stream in streams for item in _items(stream, phases) if item.ready < len(phases)]
    planned: set[tuple[_Stream, Node]] = set()  # programs may share nodes: the backward computes some again
    work = [sum(map(phase.stream.costs.__getitem__, phase.before)) for phase in phases[1:]] + [0.0]
    payload = [sum(value.nbytes for value in phase.collective.outputs) for phase in phases]

    def cost(item: _Item) -> float:
        """Of what it still needs."""
        return sum(item.stream.costs[node] for node in item.nodes if (item.stream, node) not in planned)

    while items:  # those with the least choice first, then the largest
        item = max(items, key=lambda item: (item.ready, cost(item)))
        number = min(range(item.ready, len(phases)), key=lambda number: work[number] / payload[number])
        work[number] += cost(item)
        planned.update((item.stream, node) for node in item.nodes)
        phases[number].share.append(item)
        items.remove(item)
    return phases


def _pieces(program: Program) -> list[tuple[Equation, list[Node]]]:
    """Each collective, and what must be computed for it and for none before it, in the program's order."""
    made_by, left, pieces = definitions(program.equations), dict.fromkeys(program.equations), []
    for node in program.equations:
        if isinstance(node, Equation) and node.communicates:
            needed = _needed([node], made_by, left)
            pieces.append(
                (node, [other for other in program.equations if other in needed and other is not node])
            )
            for other in needed:
                del left[other]
    return pieces


def _items(stream: _Stream, phases: Sequence[_Phase]) -> list[_Item]:
    """The outputs for which something is left to compute beside the collectives."""
    program, made_by = stream.program, definitions(stream.program.equations)
    known_in: dict[Node, int] = {}
    for number, phase in enumerate(phases):
        if phase.stream is stream:
            known_in |= dict.fromkeys(phase.before, number - 1) | {phase.collective: number + 1}
    left = dict.fromkeys(node for node in program.equations if node not in known_in)
    ready: dict[Value, int] = {}
    for node in program.equations:
        since = max((ready.get(value, 0) for value in values(node.inputs)), default=0)
        ready.update(dict.fromkeys(node.outputs, max(since, known_in.get(node, 0))))
    items = []
    for number, output in enumerate(program.outputs):
        maker = made_by.get(output) if isinstance(output, Value) else None
        if maker in left:
            needed = _needed([maker], made_by, left)
            nodes = [node for node in program.equations if node in needed]
            since = max(ready[value] for node in nodes for value in node.outputs)
            items.append(_Item(stream, number, nodes, since))
    return items


def _needed(wanted: list[Node], made_by: dict[Value, Node], among: dict[Node, None]) -> set[Node]:
    """The nodes ``among`` those given that the wanted ones rest on, themselves included."""
    needed: set[Node] = set()
    while wanted:
        node = wanted.pop()
        if node in among and node not in needed:
            needed.add(node)
            wanted += [made_by[value] for value in values(node.inputs) if value in made_by]
    return needed


def _costs(program: Program) -> dict[Node, float]:
    """Each node's work as bytes to and from memory. Within a chain of elementwise work only the end counts."""
    stored = set(values(program.outputs))
    for node in program.equations:
        stored.update(() if is_cheap(node) else values(node.inputs))
    costs = {}
    for node in program.equations:
        written = sum(value.nbytes for value in node.outputs)
        name = getattr(node, "name", "")
        if is_view(node) or name in _FUSED:
            costs[node] = 0.0
        elif is_cheap(node):
            costs[node] = 2.0 * written if stored.intersection(node.outputs) else 0.0
        elif name in _PICKING:
            costs[node] = 2.0 * written
        else:
            traffic = written + sum(value.nbytes for value in values(node.inputs))
            costs[node] = max(float(traffic), (count_flops([node]) + _told_flops(node)) / FLOPS_A_BYTE)
    return costs


def _told_flops(node: Node) -> float:
    """FLOPs that a Pallas kernel's author tells the compiler."""
    told = node.params.get("cost_estimate") if isinstance(node, Equation) else None
    return getattr(told, "flops", 0)


def _turns(num_first: int, num_second: int) -> list[int]:
    """Whose collective comes next: 0 or 1, as evenly mixed as can be, 1 leading."""
    moments = [((k + 0.5) / num_first, 1, 0) for k in range(num_first)]
    moments += [((k + 0.5) / num_second, 0, 1) for k in range(num_second)]
    return [turn for *_, turn in sorted(moments)]
