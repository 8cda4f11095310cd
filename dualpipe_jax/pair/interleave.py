"""Two programs in one order: the collectives of each are in flight during the work of the other.

This is DualPipe's pair. For one MoE layer, with b a backward's and f a forward's all-to-all:

  communication    b1: combine   f1: dispatch   b2: dispatch   f2: combine
  computation      F attention   B experts      F experts      B attention
                   '--- shared experts, weight gradients, slots: where there is room

The compiler's scheduler may find this order by itself, but often does not: it overestimates the time of some
work, so that a collective is in flight with too little work. So ``phases`` gives the order, and barriers keep
it.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jax import Array, lax

from dualpipe_jax.pair.phases import (
    ExtraWork,
    Phase,
    Work,
    estimate,
    is_lazy,
    lazy_before,
    make_tasks,
    mix_evenly,
    order_collectives,
    plan,
    split_independent,
    turns,
)
from dualpipe_jax.split.graph import Atom, Equation, Program, Value, values
from dualpipe_jax.split.run import evaluate, run, values_of
from dualpipe_jax.split.slices import replace_atom, substitute, with_fresh_values


def _identity(array: Array) -> Array:
    return array


@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
    """An array with slots in which values wait: the first program may write one slot, the second may read one.

    Attributes:
      array: [slots, ...], or any form that ``read`` and ``write`` understand.
      read: ``read(array) -> value``, the value in the slot; None if the second program reads nothing here.
      write: ``write(array, value) -> array``, the new pool; None if the first program writes nothing here.
      argument: the number of the second program's argument that is read from the slot.
      output: the number of the first program's output that is written to the slot.
      pin: a function that keeps a property of the pool, such as its layout, each time the pool is handed on.
    """

    array: Array
    read: Callable[[Array], Array] | None = None
    write: Callable[[Array, Array], Array] | None = None
    argument: int = -1
    output: int = -1
    pin: Callable[[Array], Array] = _identity


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

    Collectives alternate, beginning with ``second``'s, and are spread evenly where one program has more; the
    hops of one dispatch count as one (see ``phases.turns``). Collectives that do not depend on others, nor
    others on them, are put where all collectives then have most work to overlap with (see
    ``phases.split_independent`` and ``phases.order_collectives``). Collectives inside scans and conds are not
    seen: a scanned layer overlaps with nothing. ``side_by_side`` does the same for plain functions.

    >>> import jax.numpy as jnp
    >>> from dualpipe_jax.pair import interleave
    >>> from dualpipe_jax.split.trace import trace_program
    >>> first, _ = trace_program(lambda x: 2 * x, jnp.ones(2))
    >>> second, _ = trace_program(lambda x: 3 * x, jnp.ones(2))
    >>> [array.tolist() for (array,) in interleave(first, [jnp.ones(2)], second, [jnp.ones(2)])]
    [[2.0, 2.0], [3.0, 3.0]]

    Arguments:
      first, second: programs, with their arguments.
      pools: pools of slots into which ``first`` writes outputs and from which ``second`` reads inputs. The
        new pool is returned in place of an output that was written; the argument in whose place a slot is
        read is ignored. A slot is read before it is written.
      finish: by the number of an output of ``second``, a function to apply to it, such as one that adds a
        gradient to a sum.
      passed: by the number of an input of ``first``, the number of the output of ``second`` that it receives;
        the argument in its place is ignored. Except for these, neither program reads the other's values.
      fixed: for each program, the numbers of the arguments that exist long before the call, such as
        parameters: no barrier holds them.
      links: by mesh axis whose links are slower than others, the relative cost of a byte. A collective over
        such an axis gets more work to overlap with, in proportion.
    """
    # They may share values, as the backward recomputes some.
    first, second = with_fresh_values(first), with_fresh_values(second)
    if passed:
        first = _with_atoms(first, {first.inputs[i]: second.outputs[k] for i, k in passed.items()})
    pair = _Pair(first, first_arguments, second, second_arguments, pools, finish or {})
    tasks = make_tasks(pair.works, links)
    there = zip((first, second), fixed, strict=True)
    given = {program.inputs[number] for program, numbers in there for number in numbers}
    free, chained = split_independent(tasks, [task for task in tasks if task.communicates])
    ours = set(first.equations)
    of_first, of_second = (
        [task for task in chained if (task.main in ours) == mine] for mine in (True, False)
    )
    mixed = mix_evenly(turns(tasks, of_first), turns(tasks, of_second))
    phases = plan(tasks, order_collectives(tasks, mixed, free, pair.costs), pair.costs)
    for phase, following in zip(phases, [*phases[1:], None], strict=True):
        pair.do(phase.collective.nodes if phase.collective else ())
        for task in phase.overlapped:
            pair.do(task.nodes)
        if following is not None:
            pair.end_phase(phase, following, given)
        for task in phase.after:
            pair.do(task.nodes)
    return pair.finish()


def by_itself(
    program: Program,
    arguments: Sequence[Any],
    *,
    finish: Mapping[int, Callable[[Any], Any]] | None = None,
    fixed: Collection[int] = (),
    links: Mapping[str, float] | None = None,
) -> list[Any]:
    """Run one program on arrays or tracers so that its own work overlaps with its collectives.

    In a backward this work is gradients of weights, computed while gradients of inputs are in flight. The
    compiler's scheduler would compute nearly all of them after the last collective. A program without
    collectives is left to that scheduler. Arguments are those of ``interleave``.
    """
    if not any(isinstance(node, Equation) and node.communicates for node in program.equations):
        made = evaluate(program, arguments)
        return [(finish or {}).get(number, _identity)(array) for number, array in enumerate(made)]
    nothing = Program((), (), ())
    return interleave(nothing, [], program, arguments, finish=finish, fixed=((), fixed), links=links)[1]


class _Pair:
    """All work of both programs, in an order in which it could be done, and the values known so far."""

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
        self.fresh: dict[Value, None] = {}  # values made since the last phase ended
        reads, self.writes = list[ExtraWork](), list[ExtraWork]()
        read_in_place = _read_in_place(second)
        for pool in pools:
            self._add_pool(pool, first, second, read_in_place, reads)
        finishes = []
        for number, what in finish.items():
            output, done = second.outputs[number], Value((), None)
            # Eager, since the matmul before it can then add to the sum itself.
            added = ExtraWork((output,), (done,), _as_list(what), is_eager=True)
            finishes.append(added)
            self.outputs[1][number] = done
        self.works: list[Work] = [*reads, *second.equations, *first.equations, *finishes, *self.writes]
        self.costs |= {act: act.cost for act in (*reads, *finishes, *self.writes)}

    def _add_pool(
        self, pool: Pool, first: Program, second: Program, in_place: Collection[Value], reads: list[ExtraWork]
    ) -> None:
        """Add the acts that read a slot of a pool and that write one."""
        old, new = (Value(pool.array.shape, pool.array.dtype) for _ in range(2))
        before, after = old, list[ExtraWork]()  # the pool to write to, and the reads that must come first
        self.known[old] = pool.array
        if pool.read is not None:
            value = second.inputs[pool.argument]
            del self.known[value]
            if value in in_place:
                reads.append(ExtraWork((old,), (value,), _as_list(pool.read), is_lazy=True))
                after = reads[-1:]
            else:
                before = old.like()
                reads.append(ExtraWork((old,), (value, before), _copied_out(pool), cost=2.0 * value.nbytes))
        if pool.write is not None:
            output = first.outputs[pool.output]
            cost = 2.0 * output.kind.nbytes
            self.writes.append(
                ExtraWork((before, output), (new,), _as_list(pool.write), cost=cost, after=tuple(after))
            )
            self.outputs[0][pool.output] = new
        self.pins |= dict.fromkeys((old, before, new), pool.pin)

    def do(self, works: Iterable[Work]) -> None:
        """Do those of the works that have not been done yet."""
        for work in works:
            if work in self.ran:
                continue
            self.ran.add(work)
            if not is_lazy(work):
                self.fresh.update(dict.fromkeys(work.outputs))
            if isinstance(work, ExtraWork):
                arrays = work.run(*values_of(self.known, work.inputs))
                self.known.update(zip(work.outputs, arrays, strict=True))
            else:
                run([work], self.known)
                if isinstance(work, Equation) and work.name == "concatenate":
                    self._hold_shared(work)

    def _hold_shared(self, work: Equation) -> None:
        """Hold a concatenation that has several readers in a barrier.

        Otherwise XLA fuses it into the product of one reader, and computes it again for the others.
        """
        left = [values(other.inputs) for other in self.works if other not in self.ran]
        self._hold_in_barrier([made for made in work.outputs if sum(made in read for read in left) > 1])

    def end_phase(self, phase: Phase, following: Phase, fixed: Collection[Value]) -> None:
        """End a phase with a barrier over the values that it made and those that the next phase needs first.

        So the work of the next phase is held back too: it could start sooner, but would then run in a phase
        that has enough work already.
        """
        if following.collective is not None and not phase.after:
            self.do(following.collective.nodes[:-1])
        ready = self._ready_lazy_work()
        for value in list(self.fresh):
            if self._reduce_early(value, ready):
                ready = self._ready_lazy_work()
        tasks = [*filter(None, [following.collective]), *following.overlapped]
        needed = [v for task in tasks for v in (*values(task.main.inputs), *task.reads)]
        held, wanted = dict.fromkeys([*self.fresh, *needed]), self._values_wanted()
        self._hold_in_barrier([v for v in held if v in wanted and v in self.known and v not in fixed])
        self.fresh.clear()

    def _reduce_early(self, value: Value, ready: Sequence[Work]) -> bool:
        """Do the lazy work on a new value (reduce it, cast it, add it to its sum) if fewer bytes are then left to hold.

        Returns whether it was done.
        """
        chain = _dependents(value, ready)
        if not chain:
            return False
        makers = {v: work for work in ready for v in work.outputs}
        needed = {work for end in chain for work in (*lazy_before(end, makers), end)}
        wanted = self._values_wanted(but=needed)
        left = [v for v in (value, *(v for work in chain for v in work.outputs)) if v in wanted]
        read = dict.fromkeys(v for work in needed for v in values(work.inputs))
        before = [value, *(v for v in read if v in self.given and v not in wanted)]
        if value in left or sum(v.nbytes for v in left) >= sum(v.nbytes for v in before):
            return False
        self.do(work for work in ready if work in needed)
        self.fresh.update(dict.fromkeys(left))
        return True

    def _ready_lazy_work(self) -> list[Work]:
        """The lazy work that could be done now, in order."""
        there, ready = set(self.known), list[Work]()
        for work in self.works:
            if work not in self.ran and is_lazy(work) and there.issuperset(values(work.inputs)):
                ready.append(work)
                there.update(work.outputs)
        return ready

    def _hold_in_barrier(self, held: Sequence[Value]) -> None:
        arrays = lax.optimization_barrier([self.known[value] for value in held])
        for value, array in zip(held, arrays, strict=True):
            self.known[value] = self.pins.get(value, _identity)(array)

    def _values_wanted(self, but: Collection[Work] = ()) -> set[Value]:
        done = self.ran.union(but)
        wanted = {value for work in self.works if work not in done for value in values(work.inputs)}
        return wanted | {value for outputs in self.outputs for value in values(outputs)}

    def finish(self) -> tuple[list[Any], list[Any]]:
        """All outputs, after the work that is still to be done for them."""
        self.do(work for work in self.works if work not in self.writes)
        # The last writes wait for all reads of the same pools: else the pools are copied.
        pools = [write.inputs[0] for write in self.writes if write not in self.ran]
        seconds = [v for v in values(self.outputs[1]) if v in self.known]
        self._hold_in_barrier(values(dict.fromkeys([*seconds, *pools])))
        self.do(self.writes)
        return values_of(self.known, self.outputs[0]), values_of(self.known, self.outputs[1])


def _with_atoms(program: Program, atoms: Mapping[Value, Atom]) -> Program:
    """The program with another program's atoms in place of some of its inputs."""
    equations = substitute(program.equations, dict(atoms))
    outputs = tuple(replace_atom(atom, atoms) for atom in program.outputs)
    return dataclasses.replace(program, equations=equations, outputs=outputs)


def _dependents(value: Value, works: Iterable[Work]) -> list[Work]:
    """The works, in order, that depend on the value."""
    follows, found = {value}, list[Work]()
    for work in works:
        if follows.intersection(values(work.inputs)):
            found.append(work)
            follows.update(work.outputs)
    return found


def _as_list(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The function in the form of ``ExtraWork.run``: it returns a list of one array."""
    return lambda *arrays: [function(*arrays)]


def _copied_out(pool: Pool) -> Callable[[Array], list[Array]]:
    """A function that reads a slot, and returns its value and the pool, both from one barrier.

    The value is then copied out of the pool, and the slot may be written.
    """
    assert pool.read is not None
    read = pool.read

    def take_out(array: Array) -> list[Array]:
        value, array = lax.optimization_barrier((read(array), array))
        return [value, pool.pin(array)]

    return take_out


def _read_in_place(program: Program) -> set[Value]:
    """The inputs that only matmuls read: these read a value in its pool. Other readers have it copied out anyway."""
    users: dict[Value, list[Work]] = {value: [] for value in program.inputs}
    for task in make_tasks(program.equations):
        for value in users.keys() & set(task.reads):
            users[value].append(task.main)
    return {value for value, by in users.items() if {getattr(w, "name", "") for w in by} == {"dot_general"}}
