"""Choose which work is done while which collective is in flight.

A *phase* is the time of one collective; phase 0 is the time before the first. Work that makes the input of a
collective must be done before its phase; work that needs a collective's result can be done only after its
phase. In between there is a choice: a phase takes, of the work that can be done, that which is needed
soonest, until it has its share. Work for which nothing waits, such as weight gradients, fills the phases that
have too little.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from dualpipe_jax.split.graph import (
    Atom,
    Equation,
    Node,
    Program,
    Value,
    count_flops,
    is_cheap,
    is_view,
    values,
)

FLOPS_A_BYTE = 450
"""The number of matmul FLOPs in the time of one byte from memory, by the TPU compiler's final figures: 395 to
460 on v5p, 440 to 560 on v5e (libtpu 0.0.42.1). Published figures are 166 for v5p, 240 for v5e and 295 for an
H100. Only the shares of work depend on it."""

_ALIASING = frozenset({"name", "split", "stack", "reshape", "squeeze", "stop_gradient", "pvary"})
"""Primitives whose output shares the memory of their input."""

_PARTIAL_READS = frozenset({"gather", "dynamic_slice"})
"""Primitives that read only a part of their input."""


@dataclasses.dataclass(frozen=True, eq=False)
class ExtraWork:
    """Work that is no equation of a program, such as writing a slot.

    Attributes:
      run: the function from the inputs' arrays to the outputs' arrays.
      is_lazy: whether it is done together with the work that uses its output, and costs nothing there.
      is_eager: whether it is done as soon as its inputs are there.
      cost: bytes to and from memory.
      after: lazy acts; this act must wait until the phases of all tasks that use them have ended.
    """

    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]
    run: Callable[..., Sequence[Any]]
    is_lazy: bool = False
    is_eager: bool = False
    cost: float = 0.0
    after: tuple["ExtraWork", ...] = ()


Work = Node | ExtraWork
Item = TypeVar("Item")


@dataclasses.dataclass(eq=False)
class Task:
    """Work that is done at one time: one node that is not lazy, and the lazy nodes that it needs.

    Attributes:
      nodes: the nodes in order, the one that is not lazy last. A lazy node that an earlier task has run is
        not run again.
      reads: the values that it reads from other tasks or from the program's inputs.
      tasks: the tasks that must be done before; for a collective among them, its phase must have ended.
      phases_before: the tasks whose phases must have ended.
      first, last: the first and the last phase in which it can be done; both a collective's own phase.
      slowdown: the time of a collective's bytes, in multiples of their time over the quickest links.
    """

    nodes: list[Work]
    reads: list[Value]
    tasks: set["Task"]
    phases_before: set["Task"]
    first: int = 0
    last: int = 0
    slowdown: float = 1.0

    @property
    def main(self) -> Work:
        return self.nodes[-1]

    @property
    def communicates(self) -> bool:
        return isinstance(self.main, Equation) and self.main.communicates

    @property
    def payload(self) -> float:
        """The bytes of its outputs, times ``slowdown``."""
        return self.slowdown * sum(value.nbytes for value in self.main.outputs)


@dataclasses.dataclass(frozen=True, eq=False)
class Phase:
    """The time of one collective.

    Attributes:
      collective: the collective in flight, None in phase 0.
      overlapped: the tasks done while it is in flight.
      after: the tasks done when it has arrived, before the next collective starts.
    """

    collective: Task | None
    overlapped: list[Task] = dataclasses.field(default_factory=list)
    after: list[Task] = dataclasses.field(default_factory=list)


def is_lazy(work: Work) -> bool:
    """Whether the work is done together with the work that needs its output."""
    return work.is_lazy if isinstance(work, ExtraWork) else is_cheap(work) or _name(work) in _ALIASING


def make_tasks(works: Sequence[Work], links: Mapping[str, float] | None = None) -> list[Task]:
    """A task for each node that is not lazy.

    Arguments:
      works: all work, in an order in which it can be done.
      links: by mesh axis whose links are slower than others, how many times as long a byte takes.
    """
    made_by = {value: work for work in works if is_lazy(work) for value in work.outputs}
    makers: dict[Value, Task] = {}
    users: dict[Work, set[Task]] = {}
    tasks = []
    for work in works:
        if not is_lazy(work):
            nodes = [*lazy_before(work, made_by), work]
            inputs = dict.fromkeys(value for node in nodes for value in values(node.inputs))
            reads = [value for value in inputs if value not in made_by]
            before = {makers[value] for value in reads if value in makers}
            after = work.after if isinstance(work, ExtraWork) else ()
            task = Task(nodes, reads, before, {user for act in after for user in users.get(act, ())})
            axes = frozenset[str]().union(*getattr(work, "collectives", {}).values())
            task.slowdown = max((times for axis, times in (links or {}).items() if axis in axes), default=1.0)
            makers |= dict.fromkeys(work.outputs, task)
            for node in nodes[:-1]:
                users.setdefault(node, set()).add(task)
            tasks.append(task)
    return tasks


def lazy_before(work: Work, made_by: Mapping[Value, Work]) -> list[Work]:
    """The works of ``made_by`` on which a work depends, in order."""
    needed: dict[Work, None] = {}

    def visit(work: Work) -> None:
        for value in values(work.inputs):
            if value in made_by and made_by[value] not in needed:
                visit(made_by[value])
                needed[made_by[value]] = None

    visit(work)
    return list(needed)


def plan(tasks: Sequence[Task], collectives: Sequence[Task], costs: Mapping[Work, float]) -> list[Phase]:
    """Spread tasks over the phases of the collectives; tasks in no phase are left to be done after the last.

    Arguments:
      tasks: all tasks, in an order in which they can be done.
      collectives: the tasks that communicate, in the order in which they are to be in flight.
      costs: the cost of each node, in bytes to and from memory.
    """
    number = {task: k for k, task in enumerate(collectives, 1)}
    _set_phase_range(tasks, number)
    planner = _Planner(number, costs, [task for task in tasks if task not in number])
    phases = []
    for k, collective in enumerate([None, *collectives]):
        phase = Phase(collective)
        # The next collective's task may have lazy work too, which makes what it sends.
        load = sum(map(planner.cost, collectives[k : k + 1]))
        load += sum(planner.place(task, phase.overlapped) for task in planner.due(k) if task.first <= k)
        room = planner.share(k, load, collectives) if 0 < k < len(collectives) else 0.0
        while found := [t for t in planner.ready(k, phase) if load + planner.cost(t) / 2 <= room]:
            costs_of = {task: planner.cost(task) for task in found}
            best = min(found, key=lambda t: (t.last, load + costs_of[t] > room, -costs_of[t]))
            load += planner.place(best, phase.overlapped)
        for task in planner.due(k):
            planner.place(task, phase.after)
        phases.append(phase)
    return phases


def order_collectives(
    tasks: Sequence[Task],
    chained: Sequence[Sequence[Task]],
    free: Sequence[Sequence[Task]],
    costs: Mapping[Work, float],
) -> list[Task]:
    """All collectives in one order, with each free turn in the place where the ``shortage`` is least.

    Arguments:
      tasks, costs: see ``plan``.
      chained: turns that depend on each other, in their order.
      free: turns that may have any place among the others; see ``split_independent``.
    """

    def in_order(turns: Sequence[Sequence[Task]]) -> list[Task]:
        return [task for turn in turns for task in turn]

    order = mix_evenly(free, chained)
    for turn in free:
        others = [other for other in order if other is not turn]
        places = [[*others[:k], turn, *others[k:]] for k in range(len(others) + 1)]
        order = min([order, *places], key=lambda order: shortage(tasks, in_order(order), costs))
    return in_order(order)


def shortage(tasks: Sequence[Task], collectives: Sequence[Task], costs: Mapping[Work, float]) -> float:
    """The cost of the work that collectives lack to overlap with, if work could be divided into any parts.

    Each collective is to have a share of all work in proportion to its payload. Of the work that can be done
    in its phase it gets the work that must be done by then, and of the rest the work that is needed soonest.
    """
    number = {task: k for k, task in enumerate(collectives, 1)}
    _set_phase_range(tasks, number)
    paid, arriving = set[Work](), dict[int, list[tuple[int, float]]]()
    for task in tasks:
        if task not in number:
            cost = sum(costs[node] for node in task.nodes if node not in paid)
            arriving.setdefault(task.first, []).append((task.last, cost))
            paid.update(task.nodes)
    total = sum(cost for there in arriving.values() for _, cost in there)
    share = total / max(sum(task.payload for task in collectives), 1.0)
    waiting, missing = list[tuple[int, float]](), 0.0
    for k, collective in enumerate([None, *collectives]):
        for work in arriving.get(k, ()):
            heapq.heappush(waiting, work)
        room = 0.0 if collective is None else share * collective.payload
        while waiting and (room > 0 or waiting[0][0] <= k):
            last, cost = heapq.heappop(waiting)
            if cost > room and last > k:
                heapq.heappush(waiting, (last, cost - room))
            room -= cost
        missing += max(0.0, room)
    return missing


@dataclasses.dataclass
class _Planner:
    """The tasks that are still to be placed in phases (``left``, in order), and what has been placed."""

    number: Mapping[Task, int]
    costs: Mapping[Work, float]
    left: list[Task]
    done: set[Task] = dataclasses.field(default_factory=set)
    paid: set[Work] = dataclasses.field(default_factory=set)

    def cost(self, task: Task) -> float:
        """The cost of a task's nodes, without lazy nodes that belong to an earlier task."""
        return sum(self.costs[node] for node in task.nodes if node not in self.paid)

    def place(self, task: Task, into: list[Task]) -> float:
        """Place a task, and the eager tasks that waited only for it; returns their cost."""
        cost = self.cost(task)
        self.paid.update(task.nodes)
        self.done.add(task)
        self.left.remove(task)
        into.append(task)
        eager = [
            t for t in self.left if isinstance(t.main, ExtraWork) and t.main.is_eager and task in t.tasks
        ]
        return cost + sum(self.place(t, into) for t in eager if t.tasks <= self.done)

    def due(self, k: int) -> list[Task]:
        """The tasks that must be done in phase k."""
        return [task for task in self.left if task.last == k]

    def share(self, k: int, load: float, collectives: Sequence[Task]) -> float:
        """The cost of the work that phase k is to have; ``load`` is the cost of the work that it has already.

        For each phase j from k on, the work that can be done by then has to suffice for the phases k to j.
        The phase j with the least such work for each byte in flight sets the work for each byte of phase k.
        """
        nodes, payload, least = set[Work](), 0.0, math.inf
        for j, collective in enumerate(collectives[k - 1 :], k):
            following = collectives[j : j + 1] if j > k else ()  # at j == k the load has it already
            there = (task for task in self.left if task.first <= j)
            nodes.update(node for task in (*there, *following) for node in task.nodes)
            payload += collective.payload
            work = load + sum(self.costs[node] for node in nodes - self.paid)
            least = min(least, work / max(payload, 1.0))  # an array without elements sends nothing
        return least * collectives[k - 1].payload

    def ready(self, k: int, phase: Phase) -> Iterator[Task]:
        """The tasks that can be done next in phase k, after those already in it."""
        for task in self.left:
            before = (self.number[t] < k if t in self.number else t in self.done for t in task.tasks)
            if (
                task.first <= k
                and all(before)
                and task.phases_before <= self.done.difference(phase.overlapped)
            ):
                yield task


def _set_phase_range(tasks: Sequence[Task], number: Mapping[Task, int]) -> None:
    """Set ``first`` and ``last`` of each task: the phases in which it can be done."""
    for task in tasks:
        task.last = number.get(task, len(number) + 1)
        over = [number[before] + 1 if before in number else before.first for before in task.tasks]
        over += [before.first + 1 for before in task.phases_before]
        task.first = number.get(task, max(over, default=0))
    for task in reversed(tasks):
        for before in task.tasks - number.keys():
            before.last = min(before.last, task.last - 1 if task in number else task.last)


def mix_evenly(first: Sequence[Item], second: Sequence[Item]) -> list[Item]:
    """The items of both sequences in one order, mixed as evenly as possible, beginning with ``second``'s."""
    moments = [((k + 0.5) / len(first), 1, item) for k, item in enumerate(first)]
    moments += [((k + 0.5) / len(second), 0, item) for k, item in enumerate(second)]
    return [item for *_, item in sorted(moments, key=lambda moment: moment[:2])]


def turns(tasks: Sequence[Task], collectives: Sequence[Task]) -> list[list[Task]]:
    """A program's collectives in turns.

    A collective joins the turn before it, unless it depends on a matrix product that depends on a collective
    of that turn. So the hops of one dispatch are one turn, and the other program's work overlaps with all of
    them. If the hops of two programs alternated one by one, the other program would have to be ready for its
    own first hop when this one's first hop ends, and both programs would then wait, with no work left.
    """
    found: list[list[Task]] = []
    for collective in collectives:
        if found and collective not in _beyond_products(tasks, found[-1]):
            found[-1].append(collective)
        else:
            found.append([collective])
    return found


def split_independent(
    tasks: Sequence[Task], collectives: Sequence[Task]
) -> tuple[list[list[Task]], list[Task]]:
    """A program's collectives in two parts: turns that depend on no other turn, nor any other on them, and the rest.

    An example of the first part is a dispatch, with all its hops, that a backward does again for gradients of
    weights. It can be in flight when the links would be idle otherwise: during work that needs the result of
    one collective and makes the input of the next.
    """
    collectives_before: dict[Task, set[Task]] = {}  # the collectives on which a task depends
    groups: list[list[Task]] = []  # collectives connected by dependencies
    for task in tasks:
        before = task.tasks | task.phases_before
        collectives_before[task] = set[Task]().union(
            *(collectives_before[b] for b in before), (b for b in before if b.communicates)
        )
        if task in collectives:
            joined = [group for group in groups if collectives_before[task].intersection(group)]
            groups = [group for group in groups if group not in joined]
            groups.append([*(c for group in joined for c in group), task])
    free = [group for group in groups if len(turns(tasks, group)) == 1]
    return free, [c for c in collectives if not any(c in group for group in free)]


def _beyond_products(tasks: Sequence[Task], start: Sequence[Task]) -> set[Task]:
    """The tasks that depend on a matrix product which depends on one of ``start``."""
    after, beyond = set(start), set[Task]()
    for task in tasks:
        if task.tasks & beyond:
            beyond.add(task)
        elif task.tasks & after:
            (beyond if _multiplies(task) else after).add(task)
    return beyond


def _multiplies(task: Task) -> bool:
    return any(count_flops([node]) > 0 for node in task.nodes if not isinstance(node, ExtraWork))


def estimate(program: Program) -> dict[Work, float]:
    """The cost of each node, in bytes to and from memory.

    In a chain of elementwise nodes only the last one counts, and nodes that merely move a matmul's inputs
    cost nothing. The other costs agree with the TPU compiler's final figures to about a fifth.
    """
    stored = set(values(program.outputs))
    in_memory_order = set[
        Value
    ]()  # values that others than matmuls read, in the order in which they lie in memory
    for node in program.equations:
        if not is_cheap(node) and _name(node) not in _ALIASING:
            (stored if _name(node) == "dot_general" else in_memory_order).update(values(node.inputs))
    for node in reversed(program.equations):
        if _name(node) in _ALIASING and in_memory_order.intersection(node.outputs):
            in_memory_order.update(values(node.inputs))
    read_from = _sources(program, stored | in_memory_order)
    return {
        node: _estimate(node, stored | in_memory_order, in_memory_order, read_from)
        for node in program.equations
    }


def _sources(program: Program, stored: Collection[Value]) -> dict[Value, frozenset[Value]]:
    """For each value that elementwise nodes make and nobody stores, the stored values from which it is made."""
    sources: dict[Value, frozenset[Value]] = {}
    for node in program.equations:
        if is_cheap(node):
            read = frozenset().union(*(sources.get(value, {value}) for value in values(node.inputs)))
            sources |= {value: read for value in node.outputs if value not in stored}
    return sources


def _estimate(
    node: Node,
    stored: Collection[Value],
    in_memory_order: Collection[Value],
    sources: Mapping[Value, Collection[Value]],
) -> float:
    written, name = float(sum(value.nbytes for value in node.outputs)), _name(node)
    read = float(sum(value.nbytes for value in values(node.inputs)))
    if name in _ALIASING or getattr(node, "communicates", False):
        return 0.0
    if name in ("slice", "concatenate"):  # irregular ones are copied, even for a matmul; all are priced so
        return 2 * written
    if name.startswith("reduce_"):
        read_from = {source for value in values(node.inputs) for source in sources.get(value, {value})}
        return min(read, float(sum(value.nbytes for value in read_from)))
    if is_view(node):
        return 2 * written if any(value in in_memory_order for value in node.outputs) else 0.0
    if is_cheap(node):
        return 2 * written if any(value in stored for value in node.outputs) else 0.0
    if name in _PARTIAL_READS:  # a part that is picked several times is read once
        return written + min(written, read)
    flops = count_flops([node]) / FLOPS_A_BYTE
    return flops + (read + written) / 2 if flops else read + written


def _name(node: Node) -> str:
    return node.name if isinstance(node, Equation) else ""
