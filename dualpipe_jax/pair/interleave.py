"""Two programs in one order: the collectives of each lie under the work of the other.

This is DualPipe's pair. For one MoE layer, with b a backward's and f a forward's all-to-all:

  communication    b1: combine   f1: dispatch   b2: dispatch   f2: combine
  computation      F attention   B experts      F experts      B attention
                   '--- shared experts, weight gradients, slots: where there is room

Left to itself the compiler's scheduler may find this order, and often does not: it takes some work for longer
than it is, and lets a collective run out of it. So the order is given (``phases``), and barriers keep it.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jax import Array, lax

from dualpipe_jax.pair.phases import (
    Act,
    Phase,
    Work,
    apart,
    arranged,
    estimate,
    is_lazy,
    lazy_before,
    make_tasks,
    plan,
    take_turns,
    turns,
)
from dualpipe_jax.split.graph import Atom, Equation, Program, Value, values
from dualpipe_jax.split.run import evaluate, run, values_of
from dualpipe_jax.split.slices import renamed, substitute, swap


def _as_it_is(array: Array) -> Array:
    return array


@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
    """An array in whose slots values wait: the first program may write one of them, the second read one.

    Attributes:
      array: [slots, ...], or whatever ``read`` and ``write`` know.
      read: from the pool to the value that waits there; None if the second program reads nothing here.
      write: from the pool and a value to the new pool; None if the first program writes nothing here.
      used: which argument of the second program is read.
      made: which output of the first is written.
      pin: keeps the pool as its owner wants it (its layout, say) where it is handed on.
    """

    array: Array
    read: Callable[[Array], Array] | None = None
    write: Callable[[Array, Array], Array] | None = None
    used: int = -1
    made: int = -1
    pin: Callable[[Array], Array] = _as_it_is


def interleave(
    first: Program,
    first_arguments: Sequence[Any],
    second: Program,
    second_arguments: Sequence[Any],
    *,
    pools: Sequence[Pool] = (),
    finish: Mapping[int, Callable[[Any], Any]] | None = None,
    passed: Mapping[int, int] | None = None,
    fixed: tuple[Collection[int], Collection[int]] = ((), ()),
    links: Mapping[str, float] | None = None,
) -> tuple[list[Any], list[Any]]:
    """Run both programs on arrays or tracers, and return the outputs of each.

    Collectives alternate, ``second``'s leading, spread evenly where one program has more; the hops of one dispatch
    count as one (see ``phases.turns``). Those that wait for none and for which none waits lie where that leaves most
    work beside all (see ``phases.apart`` and ``phases.arranged``). Collectives inside scans and conds are out of reach:
    a scanned layer overlaps with nothing. ``side_by_side`` does the same for plain functions.

    >>> import jax.numpy as jnp
    >>> from dualpipe_jax.pair import interleave
    >>> from dualpipe_jax.split.trace import trace_program
    >>> first, _ = trace_program(lambda x: 2 * x, jnp.ones(2))
    >>> second, _ = trace_program(lambda x: 3 * x, jnp.ones(2))
    >>> [array.tolist() for (array,) in interleave(first, [jnp.ones(2)], second, [jnp.ones(2)])]
    [[2.0, 2.0], [3.0, 3.0]]

    Arguments:
      first, second: programs, with their arguments.
      pools: pools of slots into which ``first`` writes outputs and from which ``second`` reads inputs. Among the
        outputs, the new pool takes the place of what was written; the argument for what is read is ignored. A slot is
        read before it is written.
      finish: by the number of an output of ``second``, a function of it, such as one that adds a gradient to a sum.
      passed: the number of an input of ``first`` -> the number of the output of ``second`` that it is; the argument for
        it is ignored. Otherwise neither program reads the other's values.
      fixed: which arguments of each exist long before the call, such as parameters: no barrier holds them.
      links: relative cost of a byte on mesh axes whose links are slower than others; in proportion, more work is put
        next to a collective over such an axis.
    """
    first, second = renamed(first), renamed(second)  # they may share values: the backward computes some again
    if passed:
        first = _given(first, {first.inputs[i]: second.outputs[k] for i, k in passed.items()})
    pair = _Pair(first, first_arguments, second, second_arguments, pools, finish or {})
    tasks = make_tasks(pair.works, links)
    there = zip((first, second), fixed, strict=True)
    given = {program.inputs[number] for program, numbers in there for number in numbers}
    free, chained = apart(tasks, [task for task in tasks if task.communicates])
    ours = set(first.equations)
    of_first, of_second = ([task for task in chained if (task.own in ours) == mine] for mine in (True, False))
    mixed = take_turns(turns(tasks, of_first), turns(tasks, of_second))
    phases = plan(tasks, arranged(tasks, mixed, free, pair.costs), pair.costs)
    for phase, following in zip(phases, [*phases[1:], None], strict=True):
        pair.do(phase.collective.nodes if phase.collective else ())
        for task in phase.beside:
            pair.do(task.nodes)
        if following is not None:
            pair.tie(phase, following, given)
        for task in phase.after:
            pair.do(task.nodes)
    return pair.rest()


def by_itself(
    program: Program,
    arguments: Sequence[Any],
    *,
    finish: Mapping[int, Callable[[Any], Any]] | None = None,
    fixed: Collection[int] = (),
    links: Mapping[str, float] | None = None,
) -> list[Any]:
    """Run one program on arrays or tracers, with its own work beside its collectives; arguments as of ``interleave``.

    In a backward these are gradients of weights, made while gradients of inputs travel. The compiler's scheduler puts
    nearly all of them behind the last collective. A program without collectives is left to it whole.
    """
    if not any(isinstance(node, Equation) and node.communicates for node in program.equations):
        made = evaluate(program, arguments)
        return [(finish or {}).get(number, _as_it_is)(array) for number, array in enumerate(made)]
    nothing = Program((), (), ())
    return interleave(nothing, [], program, arguments, finish=finish, fixed=((), fixed), links=links)[1]


class _Pair:
    """All there is to do, in an order in which it could be done, and the values known so far."""

    def __init__(
        self,
        first: Program,
        first_arguments: Sequence[Any],
        second: Program,
        second_arguments: Sequence[Any],
        pools: Sequence[Pool],
        finish: Mapping[int, Callable[[Any], Any]],
    ):
        self.known: dict[Value, Any] = dict(zip(first.inputs, first_arguments, strict=True))
        self.known |= dict(zip(second.inputs, second_arguments, strict=True))
        self.given = frozenset(self.known)
        self.outputs: tuple[list[Atom], list[Atom]] = list(first.outputs), list(second.outputs)
        self.pins: dict[Value, Callable[[Array], Array]] = {}
        self.costs: dict[Work, float] = estimate(first) | estimate(second)
        self.ran: set[Work] = set()
        self.fresh: dict[Value, None] = {}  # made since the last tie
        reads, self.writes = list[Act](), list[Act]()
        read_in_place = _read_in_place(second)
        for pool in pools:
            self._add_pool(pool, first, second, read_in_place, reads)
        finishes = []
        for number, what in finish.items():
            output, done = second.outputs[number], Value((), None)
            added = Act((output,), (done,), _listed(what), is_eager=True)  # matmuls add what they make
            finishes.append(added)
            self.outputs[1][number] = done
        self.works: list[Work] = [*reads, *second.equations, *first.equations, *finishes, *self.writes]
        self.costs |= {act: act.cost for act in (*reads, *finishes, *self.writes)}

    def _add_pool(
        self, pool: Pool, first: Program, second: Program, in_place: Collection[Value], reads: list[Act]
    ) -> None:
        """How a slot is read and how one is written."""
        old, new = (Value(pool.array.shape, pool.array.dtype) for _ in range(2))
        before, after = old, list[Act]()  # what is written to, and which reads must be over
        self.known[old] = pool.array
        if pool.read is not None:
            value = second.inputs[pool.used]
            del self.known[value]
            if value in in_place:
                reads.append(Act((old,), (value,), _listed(pool.read), is_lazy=True))
                after = reads[-1:]
            else:
                before = old.like()
                reads.append(Act((old,), (value, before), _taken_out(pool), cost=2.0 * value.nbytes))
        if pool.write is not None:
            output = first.outputs[pool.made]
            cost = 2.0 * (output if isinstance(output, Value) else output.kind).nbytes
            self.writes.append(
                Act((before, output), (new,), _listed(pool.write), cost=cost, after=tuple(after))
            )
            self.outputs[0][pool.made] = new
        self.pins |= dict.fromkeys((old, before, new), pool.pin)

    def do(self, works: Iterable[Work]) -> None:
        """Do what has not been done yet."""
        for work in works:
            if work in self.ran:
                continue
            self.ran.add(work)
            if not is_lazy(work):
                self.fresh.update(dict.fromkeys(work.outputs))
            if isinstance(work, Act):
                arrays = work.run(*values_of(self.known, work.inputs))
                self.known.update(zip(work.outputs, arrays, strict=True))
            else:
                run([work], self.known)
                if isinstance(work, Equation) and work.name == "concatenate":
                    self._keep_for_all(work)

    def _keep_for_all(self, work: Equation) -> None:
        """Hold what is put together for several: XLA does it within one of their products, and once more for others."""
        left = [values(other.inputs) for other in self.works if other not in self.ran]
        self._hold([made for made in work.outputs if sum(made in read for read in left) > 1])

    def tie(self, phase: Phase, following: Phase, fixed: Collection[Value]) -> None:
        """End a phase: what it brought, and what the next one begins with, is there when all its work is done.

        The work of the next phase is held back too: ready sooner, it would run where there is enough to do.
        """
        if following.collective is not None and not phase.after:
            self.do(following.collective.nodes[:-1])
        reach = self._within_reach()
        for value in list(self.fresh):
            if self._condense(value, reach):
                reach = self._within_reach()
        tasks = [*filter(None, [following.collective]), *following.beside]
        needed = [v for task in tasks for v in (*values(task.own.inputs), *task.reads)]
        held, wanted = dict.fromkeys([*self.fresh, *needed]), self._wanted()
        self._hold([v for v in held if v in wanted and v in self.known and v not in fixed])
        self.fresh.clear()

    def _condense(self, value: Value, reach: Sequence[Work]) -> bool:
        """Reduce and cast what was made, and add it to its sum, as far as that takes less room; whether it was done."""
        chain = _following(value, reach)
        if not chain:
            return False
        makers = {v: work for work in reach for v in work.outputs}
        needed = {work for end in chain for work in (*lazy_before(end, makers), end)}
        wanted = self._wanted(but=needed)
        left = [v for v in (value, *(v for work in chain for v in work.outputs)) if v in wanted]
        read = dict.fromkeys(v for work in needed for v in values(work.inputs))
        before = [value, *(v for v in read if v in self.given and v not in wanted)]
        if value in left or sum(v.nbytes for v in left) >= sum(v.nbytes for v in before):
            return False
        self.do(work for work in reach if work in needed)
        self.fresh.update(dict.fromkeys(left))
        return True

    def _within_reach(self) -> list[Work]:
        """Lazy work that could be done now, in order."""
        there, reach = set(self.known), list[Work]()
        for work in self.works:
            if work not in self.ran and is_lazy(work) and there.issuperset(values(work.inputs)):
                reach.append(work)
                there.update(work.outputs)
        return reach

    def _hold(self, held: Sequence[Value]) -> None:
        arrays = lax.optimization_barrier([self.known[value] for value in held])
        for value, array in zip(held, arrays, strict=True):
            self.known[value] = self.pins.get(value, _as_it_is)(array)

    def _wanted(self, but: Collection[Work] = ()) -> set[Value]:
        done = self.ran.union(but)
        wanted = {value for work in self.works if work not in done for value in values(work.inputs)}
        return wanted | {value for outputs in self.outputs for value in values(outputs)}

    def rest(self) -> tuple[list[Any], list[Any]]:
        """All outputs, with what is still to be done for them."""
        self.do(work for work in self.works if work not in self.writes)
        # What is written last waits for all that reads the same pools: else they are copied.
        pools = [write.inputs[0] for write in self.writes if write not in self.ran]
        seconds = [v for v in values(self.outputs[1]) if v in self.known]
        self._hold(values(dict.fromkeys([*seconds, *pools])))
        self.do(self.writes)
        return values_of(self.known, self.outputs[0]), values_of(self.known, self.outputs[1])


def _given(program: Program, atoms: Mapping[Value, Atom]) -> Program:
    """The program with atoms of another one in place of some of its inputs."""
    equations = substitute(program.equations, dict(atoms))
    outputs = tuple(swap(atom, atoms) for atom in program.outputs)
    return dataclasses.replace(program, equations=equations, outputs=outputs)


def _following(value: Value, works: Iterable[Work]) -> list[Work]:
    """Those of the works, in order, that rest on the value."""
    follows, found = {value}, list[Work]()
    for work in works:
        if follows.intersection(values(work.inputs)):
            found.append(work)
            follows.update(work.outputs)
    return found


def _listed(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The function as an act's, which gives a list."""
    return lambda *arrays: [function(*arrays)]


def _taken_out(pool: Pool) -> Callable[[Array], list[Array]]:
    """Reads a slot, and gives the pool behind a barrier: then the value is out, and the slot may be written."""
    assert pool.read is not None
    read = pool.read

    def take_out(array: Array) -> list[Array]:
        value, array = lax.optimization_barrier((read(array), array))
        return [value, pool.pin(array)]

    return take_out


def _read_in_place(program: Program) -> set[Value]:
    """Inputs that only matmuls read, which take them from where they lie. For others a copy is made anyway."""
    users: dict[Value, list[Work]] = {value: [] for value in program.inputs}
    for task in make_tasks(program.equations):
        for value in users.keys() & set(task.reads):
            users[value].append(task.own)
    return {value for value, by in users.items() if {getattr(w, "name", "") for w in by} == {"dot_general"}}
