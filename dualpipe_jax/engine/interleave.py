"""Two independent programs in one order: the collectives of each lie under the work of the other.

This is DualPipe's pair. For one MoE layer, with b a backward's and f a forward's all-to-all:

  communication    b1: combine   f1: dispatch   b2: dispatch   f2: combine
  computation      F attention   B experts      F experts      B attention, weight gradients

The compiler's scheduler may find this order by itself, and often does not. So it is given: a collective's
result is not used before the next collective, of the other direction, has all that it sends.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jax import lax

from dualpipe_jax.engine.jaxprs_run import run, values_of
from dualpipe_jax.engine.split_graph import Equation, Node, Program, Value, definitions, values

Known = dict[Value, Any]


def interleave(
    first: Program, first_arguments: Sequence[Any], second: Program, second_arguments: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Run both programs on arrays or tracers; their outputs.

    Collectives alternate, ``second``'s leading, spread evenly where one program has more. Everything that a
    collective does not wait for is left to the compiler: weight gradients fill what gaps there are.
    Collectives inside scans and conds are out of reach: a scanned layer overlaps with nothing.
    """
    known = [
        dict(zip(program.inputs, arguments, strict=True))
        for program, arguments in ((first, first_arguments), (second, second_arguments))
    ]
    streams = [_pieces(first), _pieces(second)]
    flying: tuple[Known, Sequence[Value]] | None = None
    for turn in _turns(*(sum(map(_communicates, program.equations)) for program in (first, second))):
        *before, collective = next(streams[turn])
        run(before, known[turn])
        sends = values(collective.inputs)
        if flying is not None:
            _tie(*flying, known[turn], sends)
        run([collective], known[turn])
        flying = known[turn], collective.outputs
    for stream, here in zip(streams, known, strict=True):
        run(next(stream), here)
    return values_of(known[0], first.outputs), values_of(known[1], second.outputs)


def _tie(there: Known, received: Sequence[Value], here: Known, sends: Sequence[Value]) -> None:
    """Let nobody use what was ``received`` before what is to be sent next is there."""
    pair = [there[v] for v in received], [here[v] for v in sends]
    arrived, ready = lax.optimization_barrier(pair)
    there.update(zip(received, arrived, strict=True))
    here.update(zip(sends, ready, strict=True))


def _pieces(program: Program) -> Iterator[list[Node]]:
    """For each collective what it waits for and it; then all that is left. Each in the program's order."""
    made_by, left = definitions(program.equations), dict.fromkeys(program.equations)
    for collective in filter(_communicates, program.equations):
        needed: set[Node] = set()
        todo: list[Node] = [collective]
        while todo:
            node = todo.pop()
            if node in left and node not in needed:
                needed.add(node)
                todo += [made_by[value] for value in values(node.inputs) if value in made_by]
        yield [node for node in left if node in needed]
        for node in needed:
            del left[node]
    yield list(left)


def _turns(num_first: int, num_second: int) -> list[int]:
    """Whose collective comes next: 0 or 1, as evenly mixed as can be, 1 leading."""
    moments = [((k + 0.5) / num_first, 1, 0) for k in range(num_first)]
    moments += [((k + 0.5) / num_second, 0, 1) for k in range(num_second)]
    return [turn for *_, turn in sorted(moments)]


def _communicates(node: Node) -> bool:
    return isinstance(node, Equation) and node.communicates
