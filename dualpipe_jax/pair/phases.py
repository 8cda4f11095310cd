"""Which work is done while which collective is in flight.

A *phase* is the time of one collective; phase 0 is before the first. What the next collective sends must be
computed in a phase at the latest; what needs a collective's result can be when its phase has ended. Between the
two there is a choice: of the work that is there a phase takes what is needed soonest, until it has its share.
What nothing waits for, such as weight gradients, goes where there is room.
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
"""Matmul FLOPs in the time of a byte from memory, by the TPU compiler's final figures: 395 to 460 on v5p, 440 to 560
on v5e (libtpu 0.0.42.1). Published ones are 166 and 240, 295 of an H100. Only shares of work depend on it."""

_PASSED_ON = frozenset(
    {"name", "split", "stack", "reshape", "squeeze", "expand_dims", "stop_gradient", "pvary", "pcast"}
)
"""Primitives whose output lies where their input does."""

_PICKING = frozenset({"gather", "dynamic_slice"})
"""Primitives that read a part."""


@dataclasses.dataclass(frozen=True, eq=False)
class Act:
    """Something done besides a program's equations, such as to write a slot.

    Attributes:
      run: from the inputs' arrays to the outputs'.
      is_lazy: whether it is done where its output is used, and costs nothing there.
      is_eager: whether it is done as soon as what it reads is there.
      cost: bytes to and from memory.
      after: lazy ones whose users' phases must have ended.
    """

    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]
    run: Callable[..., Sequence[Any]]
    is_lazy: bool = False
    is_eager: bool = False
    cost: float = 0.0
    after: tuple["Act", ...] = ()


Work = Node | Act
Item = TypeVar("Item")


@dataclasses.dataclass(eq=False)
class Task:
    """Work that is done at one time: one node that is not lazy, and the lazy ones that it needs.

    Attributes:
      nodes: in order, its own last; one that an earlier task has run is not run again.
      reads: values that other tasks make or that were given.
      tasks: those to be done before; for a collective among them, its phase must have ended.
      earlier: those whose phases must have ended.
      first, last: the phases in which it can be done; a collective's own phase.
      slow: how many times as long as over the quickest links a collective's bytes take.
    """

    nodes: list[Work]
    reads: list[Value]
    tasks: set["Task"]
    earlier: set["Task"]
    first: int = 0
    last: int = 0
    slow: float = 1.0

    @property
    def own(self) -> Work:
        return self.nodes[-1]

    @property
    def communicates(self) -> bool:
        return isinstance(self.own, Equation) and self.own.communicates

    @property
    def payload(self) -> float:
        """Bytes of what it makes, each as often as it takes longer than one over the quickest links."""
        return self.slow * sum(value.nbytes for value in self.own.outputs)


@dataclasses.dataclass(frozen=True, eq=False)
class Phase:
    """One collective in flight, none in phase 0; what is done beside it; what must follow before the next."""

    collective: Task | None
    beside: list[Task] = dataclasses.field(default_factory=list)
    after: list[Task] = dataclasses.field(default_factory=list)


def is_lazy(work: Work) -> bool:
    """Whether it is done along with what needs it."""
    return work.is_lazy if isinstance(work, Act) else is_cheap(work) or _name(work) in _PASSED_ON


def make_tasks(works: Sequence[Work], links: Mapping[str, float] | None = None) -> list[Task]:
    """A task for each node that is not lazy; ``works`` in an order in which they can be done.

    ``links``: of mesh axes whose links are slower than others, how many times.
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
            after = work.after if isinstance(work, Act) else ()
            task = Task(nodes, reads, before, {user for act in after for user in users.get(act, ())})
            task.slow = max(
                (times for axis, times in (links or {}).items() if axis in _axes(work)), default=1.0
            )
            makers |= dict.fromkeys(work.outputs, task)
            for node in nodes[:-1]:
                users.setdefault(node, set()).add(task)
            tasks.append(task)
    return tasks


def _axes(work: Work) -> tuple[str, ...]:
    params = work.params if isinstance(work, Equation) and work.communicates else {}
    axes = params.get("axis_name", ())
    return (axes,) if isinstance(axes, str) else tuple(axes)


def lazy_before(work: Work, made_by: Mapping[Value, Work]) -> list[Work]:
    """The works that one rests on, as far as there are any in ``made_by``, in order."""
    needed: dict[Work, None] = {}

    def visit(work: Work) -> None:
        for value in values(work.inputs):
            if value in made_by and made_by[value] not in needed:
                visit(made_by[value])
                needed[made_by[value]] = None

    visit(work)
    return list(needed)


def plan(tasks: Sequence[Task], collectives: Sequence[Task], costs: Mapping[Work, float]) -> list[Phase]:
    """Spread tasks over the phases of the collectives; what is in none is left for after the last.

    Arguments:
      tasks: in an order in which they can be done.
      collectives: those of the tasks that communicate, in the order in which they shall be in flight.
      costs: of all nodes, in bytes to and from memory.
    """
    number = {task: k for k, task in enumerate(collectives, 1)}
    _bound(tasks, number)
    planner = _Planner(number, costs, [task for task in tasks if task not in number])
    phases = []
    for k, collective in enumerate([None, *collectives]):
        phase = Phase(collective)
        # To what is sent next there may be something to do as well.
        load = sum(map(planner.cost, collectives[k : k + 1]))
        load += sum(planner.take(task, phase.beside) for task in planner.due(k) if task.first <= k)
        room = planner.share(k, load, collectives) if 0 < k < len(collectives) else 0.0
        while found := [t for t in planner.there(k, phase) if load + planner.cost(t) / 2 <= room]:
            costs_of = {task: planner.cost(task) for task in found}
            best = min(found, key=lambda t: (t.last, load + costs_of[t] > room, -costs_of[t]))
            load += planner.take(best, phase.beside)
        for task in planner.due(k):
            planner.take(task, phase.after)
        phases.append(phase)
    return phases


def arranged(
    tasks: Sequence[Task],
    chained: Sequence[Sequence[Task]],
    free: Sequence[Sequence[Task]],
    costs: Mapping[Work, float],
) -> list[Task]:
    """All collectives in one order: each free turn in the place that leaves most work beside all of them.

    Arguments:
      tasks, costs: see ``plan``.
      chained: turns that wait for each other, in their order.
      free: turns for which any place between others will do; see ``apart``.
    """

    def in_order(turns: Sequence[Sequence[Task]]) -> list[Task]:
        return [task for turn in turns for task in turn]

    order = take_turns(free, chained)
    for turn in free:
        others = [other for other in order if other is not turn]
        places = [[*others[:k], turn, *others[k:]] for k in range(len(others) + 1)]
        order = min([order, *places], key=lambda order: shortage(tasks, in_order(order), costs))
    return in_order(order)


def shortage(tasks: Sequence[Task], collectives: Sequence[Task], costs: Mapping[Work, float]) -> float:
    """The cost of the work that is missing beside collectives, as if work could be divided at will.

    Each collective wants all work's share by its bytes. Of the work that can be done by then it has what must be done,
    and of the rest what is needed soonest.
    """
    number = {task: k for k, task in enumerate(collectives, 1)}
    _bound(tasks, number)
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
    """What is still to be placed, in order."""

    number: Mapping[Task, int]
    costs: Mapping[Work, float]
    left: list[Task]
    done: set[Task] = dataclasses.field(default_factory=set)
    paid: set[Work] = dataclasses.field(default_factory=set)

    def cost(self, task: Task) -> float:
        """The cost of its nodes, without lazy ones that belong to an earlier task."""
        return sum(self.costs[node] for node in task.nodes if node not in self.paid)

    def take(self, task: Task, into: list[Task]) -> float:
        """Place a task, and the eager ones that only waited for it; their cost."""
        cost = self.cost(task)
        self.paid.update(task.nodes)
        self.done.add(task)
        self.left.remove(task)
        into.append(task)
        eager = [t for t in self.left if isinstance(t.own, Act) and t.own.is_eager and task in t.tasks]
        return cost + sum(self.take(t, into) for t in eager if t.tasks <= self.done)

    def due(self, k: int) -> list[Task]:
        """Tasks that must be done in phase k."""
        return [task for task in self.left if task.last == k]

    def share(self, k: int, load: float, collectives: Sequence[Task]) -> float:
        """How much work is phase k's, of which ``load`` is in it.

        As much for each byte in flight as there can be from here to whichever phase has least: what is there by then
        must do for all phases up to it.
        """
        nodes, payload, least = set[Work](), 0.0, math.inf
        for j, collective in enumerate(collectives[k - 1 :], k):
            following = collectives[j : j + 1] if j > k else ()  # what the next one needs is in the load
            there = (task for task in self.left if task.first <= j)
            nodes.update(node for task in (*there, *following) for node in task.nodes)
            payload += collective.payload
            least = min(least, (load + sum(self.costs[node] for node in nodes - self.paid)) / payload)
        return least * collectives[k - 1].payload

    def there(self, k: int, phase: Phase) -> Iterator[Task]:
        """Tasks that can be done next in phase k, so far as filled."""
        for task in self.left:
            before = (self.number[t] < k if t in self.number else t in self.done for t in task.tasks)
            if task.first <= k and all(before) and task.earlier <= self.done.difference(phase.beside):
                yield task


def _bound(tasks: Sequence[Task], number: Mapping[Task, int]) -> None:
    """Set in which phases tasks can be done."""
    for task in tasks:
        task.last = number.get(task, len(number) + 1)
        over = [number[before] + 1 if before in number else before.first for before in task.tasks]
        over += [before.first + 1 for before in task.earlier]
        task.first = number.get(task, max(over, default=0))
    for task in reversed(tasks):
        for before in task.tasks - number.keys():
            before.last = min(before.last, task.last - 1 if task in number else task.last)


def take_turns(first: Sequence[Item], second: Sequence[Item]) -> list[Item]:
    """Both in one order, as evenly mixed as can be, ``second`` leading."""
    moments = [((k + 0.5) / len(first), 1, item) for k, item in enumerate(first)]
    moments += [((k + 0.5) / len(second), 0, item) for k, item in enumerate(second)]
    return [item for *_, item in sorted(moments, key=lambda moment: moment[:2])]


def turns(tasks: Sequence[Task], collectives: Sequence[Task]) -> list[list[Task]]:
    """A program's collectives, those together between which no matrix product waits for one and is waited for.

    The hops of one dispatch are a turn: what the other program does lies beside all of them. Mixed one by one, it would
    have to be ready for its own first hop when this one's has ended, and both would then wait, with no work left.
    """
    found: list[list[Task]] = []
    for collective in collectives:
        if found and collective not in _beyond_products(tasks, found[-1]):
            found[-1].append(collective)
        else:
            found.append([collective])
    return found


def apart(tasks: Sequence[Task], collectives: Sequence[Task]) -> tuple[list[list[Task]], list[Task]]:
    """A program's collectives in two: turns that wait for no other and that no other waits for, and the rest.

    A dispatch that a backward makes again for gradients of weights, with all its hops, is one of the first. It can be
    in flight while the link would be idle: beside work that another collective has brought and the next one needs.
    """
    behind: dict[Task, set[Task]] = {}  # the collectives that a task rests on
    groups: list[list[Task]] = []  # those of which one rests on another
    for task in tasks:
        before = task.tasks | task.earlier
        behind[task] = set[Task]().union(*(behind[b] for b in before), (b for b in before if b.communicates))
        if task in collectives:
            joined = [group for group in groups if behind[task].intersection(group)]
            groups = [group for group in groups if group not in joined]
            groups.append([*(c for group in joined for c in group), task])
    free = [group for group in groups if len(turns(tasks, group)) == 1]
    return free, [c for c in collectives if not any(c in group for group in free)]


def _beyond_products(tasks: Sequence[Task], start: Sequence[Task]) -> set[Task]:
    """What rests on matrix products that rest on one of ``start``."""
    after, beyond = set(start), set[Task]()
    for task in tasks:
        if task.tasks & beyond:
            beyond.add(task)
        elif task.tasks & after:
            (beyond if _multiplies(task) else after).add(task)
    return beyond


def _multiplies(task: Task) -> bool:
    return any(count_flops([node]) > 0 for node in task.nodes if not isinstance(node, Act))


def estimate(program: Program) -> dict[Work, float]:
    """Each node's work as bytes to and from memory.

    Of a chain of elementwise work only the end counts, and matmuls read through what merely moves their inputs.
    The rest follows the TPU compiler's final figures, to about a fifth.
    """
    stored = set(values(program.outputs))
    laid = set[Value]()  # read in the order in which they lie
    for node in program.equations:
        if not is_cheap(node) and _name(node) not in _PASSED_ON:
            (stored if _name(node) == "dot_general" else laid).update(values(node.inputs))
    for node in reversed(program.equations):
        if _name(node) in _PASSED_ON and laid.intersection(node.outputs):
            laid.update(values(node.inputs))
    read_from = _sources(program, stored | laid)
    return {node: _estimate(node, stored | laid, laid, read_from) for node in program.equations}


def _sources(program: Program, stored: Collection[Value]) -> dict[Value, frozenset[Value]]:
    """What is read from memory to make each value that elementwise work makes and nobody stores."""
    sources: dict[Value, frozenset[Value]] = {}
    for node in program.equations:
        if is_cheap(node):
            read = frozenset().union(*(sources.get(value, {value}) for value in values(node.inputs)))
            sources |= {value: read for value in node.outputs if value not in stored}
    return sources


def _estimate(
    node: Node, stored: Collection[Value], laid: Collection[Value], sources: Mapping[Value, Collection[Value]]
) -> float:
    written, name = float(sum(value.nbytes for value in node.outputs)), _name(node)
    read = float(sum(value.nbytes for value in values(node.inputs)))
    if name in _PASSED_ON or getattr(node, "communicates", False):
        return 0.0
    if name in ("slice", "concatenate"):  # odd ones are copied, even for a matmul
        return 2 * written
    if name.startswith("reduce_"):
        read_from = {source for value in values(node.inputs) for source in sources.get(value, {value})}
        return min(read, float(sum(value.nbytes for value in read_from)))
    if is_view(node):
        return 2 * written if any(value in laid for value in node.outputs) else 0.0
    if is_cheap(node):
        return 2 * written if any(value in stored for value in node.outputs) else 0.0
    if name in _PICKING:  # what is picked several times is read once
        return written + min(written, read)
    flops = count_flops([node]) / FLOPS_A_BYTE
    return flops + (read + written) / 2 if flops else read + written


def _name(node: Node) -> str:
    return node.name if isinstance(node, Equation) else ""
