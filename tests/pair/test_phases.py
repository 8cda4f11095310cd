"""Which work is done beside which collective: dependencies, deadlines, shares."""

import collections
import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from scipy.optimize import linprog

from dualpipe_jax.pair.phases import (
    ExtraWork,
    estimate,
    make_tasks,
    mix_evenly,
    order_collectives,
    plan,
    shortage,
    split_independent,
    turns,
)
from dualpipe_jax.split import split_backward
from dualpipe_jax.split.graph import Equation, Value
from dualpipe_jax.split.trace import trace_program

MIB = 1 << 20


def value():
    return Value((1,), jnp.dtype("int8"))


def exchange(*inputs):
    return Equation(
        types.SimpleNamespace(name="all_to_all"),
        inputs,
        (Value((MIB,), jnp.dtype("int8")),),
        {},
        collectives={"all_to_all": frozenset({"ep"})},
    )


def product(*inputs):
    return Equation(types.SimpleNamespace(name="dot_general"), inputs, (value(),), {}, flops=MIB)


def act(*inputs, cost=1.0, **options):
    return ExtraWork(tuple(inputs), (value(),), lambda *arrays: arrays, cost=cost, **options)


def planned(works, collectives):
    """Phases as lists of works: beside, and after."""
    tasks = make_tasks(works)
    of = {task.main: task for task in tasks}
    costs = {work: getattr(work, "cost", 0.0) for work in works}
    phases = plan(tasks, [of[c] for c in collectives], costs)
    assert [phase.collective and phase.collective.main for phase in phases] == [None, *collectives]
    return [([t.main for t in phase.overlapped], [t.main for t in phase.after]) for phase in phases]


@st.composite
def graphs(draw):
    """Two programs of works with collectives in each; lazy works; slots read by one and written by the other."""
    works, streams = [], ([], [])
    for stream in (0, 1):
        own = [act(cost=draw(st.floats(0, 4)))]
        for _ in range(draw(st.integers(2, 14))):
            inputs = [w.outputs[0] for w in draw(st.lists(st.sampled_from(own), max_size=3, unique_by=id))]
            kind = draw(st.sampled_from(["act", "act", "lazy", "exchange"]))
            if kind == "exchange":
                own.append(exchange(*inputs))
                streams[stream].append(own[-1])
            else:
                own.append(act(*inputs, cost=draw(st.floats(0, 4)), is_lazy=kind == "lazy"))
        works += own
    lazy = [w for w in works if isinstance(w, ExtraWork) and w.is_lazy and not w.inputs]
    works += [act(cost=1.0, after=(w,)) for w in lazy]
    return works, streams


@settings(max_examples=150)
@given(graphs())
def test_everything_is_done_after_what_it_needs_and_before_what_needs_it(graph):
    works, streams = graph
    tasks = make_tasks(works)
    of = {task.main: task for task in tasks}
    order = [t.main for t in mix_evenly(*([of[c] for c in stream] for stream in streams))]
    phases = planned(works, order)

    users = collections.defaultdict(set)
    for task in tasks:
        for work in task.nodes[:-1]:
            users[work].add(task.main)
    makers = {v: task.main for task in tasks for v in task.main.outputs}
    done, landed = set(), set()
    for (beside, after), collective in zip(phases, [None, *order], strict=True):
        if collective is not None:
            assert {makers[v] for v in of[collective].reads if v in makers} <= done | landed
        before = set(done)
        for group, there in ((beside, landed), (after, landed | {collective})):
            for work in group:
                needs = {makers[v] for v in of[work].reads if v in makers}
                assert needs <= done | there, "what it reads is made, and no collective in flight is read"
                assert work not in done, "once"
                waits = {user for read in getattr(work, "after", ()) for user in users[read]}
                assert waits <= before | landed, "a slot is written when the phase of its readers has ended"
                done.add(work)
        landed.add(collective)


def test_a_phase_takes_what_is_needed_soonest():
    """Of two works that are there in the first phase the one that the third collective sends comes first."""
    first, second = exchange(), exchange()
    soon, late = act(), act(cost=1.0)
    third = exchange(soon.outputs[0])
    phases = planned([late, soon, first, second, third], [first, second, third])
    assert phases == [([], []), ([soon], []), ([late], []), ([], [])]


def test_what_must_be_sent_next_is_done_whatever_it_costs():
    first = exchange()
    large = act(cost=1000.0)
    second = exchange(large.outputs[0])
    small = act(first.outputs[0])
    assert planned([large, first, small, second], [first, second])[1] == ([large], [])


def test_what_a_collective_brings_for_the_next_one_of_the_same_program_follows_it():
    first = exchange()
    between = act(first.outputs[0])
    second = exchange(between.outputs[0])
    assert planned([first, between, second], [first, second])[1] == ([], [between])


def test_work_that_nothing_waits_for_is_shared_out():
    for num_collectives, num_works in itertools.product((2, 3, 5), (0, 7, 40)):
        sent = [exchange() for _ in range(num_collectives)]
        works = [act() for _ in range(num_works)]
        beside = [len(group) for group, _ in planned([*works, *sent], sent)]
        assert beside[0] == 0, "before the first nothing is hidden"
        even = num_works / num_collectives  # the last phase's share is what is left
        assert max(beside[1:-1]) - min(beside[1:-1]) <= 1, (num_collectives, num_works)
        assert all(abs(count - even) <= 1 for count in beside[1:-1]), (num_collectives, num_works)


def test_work_of_the_last_phase_leaves_the_others_more():
    """Equal shares are of all work; but what only the last phase can do is not there for the others."""
    first, second, third = exchange(), exchange(), exchange()
    own = [act(second.outputs[0]) for _ in range(6)]
    free = [act() for _ in range(9)]
    beside = [len(group) for group, _ in planned([*free, first, second, third, *own], [first, second, third])]
    assert sorted(beside[1:3]) == [4, 5], (
        "an even share of all 15 would be 5, and leave 5 for the last one too"
    )


def test_lazy_work_that_several_need_is_paid_by_the_first():
    """Of 2 + 5 half is 3.5: the first of the five with the lazy one, and one that costs 1 alone."""
    first, second = exchange(), exchange()
    lazy = act(cost=2.0, is_lazy=True)
    users = [act(lazy.outputs[0]) for _ in range(5)]
    assert planned([lazy, *users, first, second], [first, second])[1] == (users[:2], [])


def test_a_slot_is_written_in_a_phase_after_its_reader():
    first, second = exchange(), exchange()
    read = act(cost=0.0, is_lazy=True)
    reader, writer = act(read.outputs[0]), act(cost=1.0, after=(read,))
    others = [act() for _ in range(3)]
    phases = planned([read, reader, writer, *others, first, second], [first, second])
    assert phases[1] == ([reader, *others[:2]], [])


def test_beside_a_slow_axis_lies_as_much_more_work():
    """Three exchanges of as many bytes, the second one's over links nine times as slow: 1, 9 and 1 parts of 11."""

    def beside(links):
        axes = ({"near"}, {"near", "far"}, {"near"})
        sent = [dataclasses.replace(exchange(), collectives={"all_to_all": frozenset(a)}) for a in axes]
        tasks = make_tasks([*(act() for _ in range(44)), *sent], links)
        of = {task.main: task for task in tasks}
        costs = {task.main: getattr(task.main, "cost", 0.0) for task in tasks}
        return [len(phase.overlapped) for phase in plan(tasks, [of[c] for c in sent], costs)][1:3]

    assert beside({"far": 9.0}) == [4, 36]
    assert beside({"other": 9.0}) == beside(None) == [15, 15]


@pytest.mark.parametrize(
    "exchanged", [lax.psum, lax.all_gather, lambda x, axis: lax.ppermute(x, axis, [(0, 1)])]
)
def test_a_collective_of_any_kind_is_as_slow_as_its_axis(exchanged):
    slowdowns = []

    def inside(x):
        program, _ = trace_program(lambda x: exchanged(x, "far"), x)
        slowdowns.extend(t.slowdown for t in make_tasks(program.equations, {"far": 9.0}) if t.communicates)
        return x

    jax.vmap(inside, axis_name="far")(jnp.ones((2, 3)))
    assert slowdowns == [9.0]


def test_a_collective_of_no_elements_needs_nothing_beside_it():
    empty = dataclasses.replace(exchange(), outputs=(Value((0, 4), jnp.dtype("int8")),))
    full, others = exchange(), [act() for _ in range(4)]
    for sent in ([empty, full], [full, empty]):
        beside = dict(zip(sent, planned([*sent, *others], sent)[1:], strict=True))
        assert beside[empty] == ([], [])


def test_hops_between_which_nothing_is_multiplied_are_one_turn():
    sizes, hop1 = exchange(), exchange()
    gathered = act(sizes.outputs[0], hop1.outputs[0])
    hop2 = exchange(gathered.outputs[0])
    experts = product(hop2.outputs[0])
    aside = product(hop1.outputs[0])  # nobody sends what it makes
    back2 = exchange(experts.outputs[0])
    back1 = exchange(back2.outputs[0])
    tasks = make_tasks([sizes, hop1, gathered, hop2, experts, aside, back2, back1])
    found = turns(tasks, [task for task in tasks if task.communicates])
    assert [[task.main for task in turn] for turn in found] == [[sizes, hop1, hop2], [back2, back1]]
    assert turns(tasks, []) == []


def test_collectives_that_stand_alone_are_told_from_those_that_wait_for_each_other():
    again = exchange()
    weights = act(again.outputs[0])  # nobody sends what it makes
    there = exchange()
    experts = product(there.outputs[0])
    back = exchange(experts.outputs[0])
    sizes = exchange()
    counted = exchange(sizes.outputs[0])
    tasks = make_tasks([again, weights, there, experts, back, sizes, counted])
    free, chained = split_independent(tasks, [task for task in tasks if task.communicates])
    assert [[task.main for task in turn] for turn in free] == [[again], [sizes, counted]]
    assert [task.main for task in chained] == [there, back]


def layer(costs):
    """A forward and a backward of a MoE layer, which sends again what its weights' gradient needs."""
    attention, backward, experts, back, weights = (costs[name] for name in ("F", "B", "experts", "back", "W"))
    before = act(cost=attention)
    there = exchange(before.outputs[0])
    forward = act(there.outputs[0], cost=experts)
    home = exchange(forward.outputs[0])
    again, grads = exchange(), exchange()
    product = act(again.outputs[0], grads.outputs[0], cost=weights)
    inside = act(grads.outputs[0], cost=back)
    out = exchange(inside.outputs[0])
    rest = act(out.outputs[0], cost=backward)
    names = dict(again=again, b1=grads, f1=there, b2=out, f2=home)
    tasks = make_tasks([before, there, forward, home, again, grads, product, inside, out, rest])
    of = {task.main: task for task in tasks}
    prices = {task.main: getattr(task.main, "cost", 0.0) for task in tasks}
    return tasks, {name: of[work] for name, work in names.items()}, prices


def missing(tasks, order, costs):
    """``shortage`` as a linear program: how much work can be put beside collectives, each with all work's share."""
    windows = {task: [0, len(order) + 1] for task in tasks}
    for task in tasks:
        if task in order:
            windows[task] = [order.index(task) + 1] * 2
    for task in tasks:
        for before in task.tasks:
            least = windows[before][0] + (before in order)
            if task not in order:
                windows[task][0] = max(windows[task][0], least)
    for task in reversed(tasks):
        for before in task.tasks - set(order):
            windows[before][1] = min(windows[before][1], windows[task][1] - (task in order))
    works = [task for task in tasks if task not in order and costs[task.main] > 0]
    share = sum(costs[task.main] for task in works) / len(order)  # all send as many bytes
    places = [
        (i, k)
        for i, t in enumerate(works)
        for k in range(len(order))
        if (k + 1) in range(windows[t][0], windows[t][1] + 1)
    ]
    if not places:
        return share * len(order)
    of_work = [[float(i == j) for i, _ in places] for j in range(len(works))]
    of_phase = [[float(k == j) for _, k in places] for j in range(len(order))]
    limits = [*(costs[task.main] for task in works), *[share] * len(order)]
    most = linprog([-1.0] * len(places), [*of_work, *of_phase], limits)
    return share * len(order) + most.fun


def test_a_dispatch_that_is_sent_again_lies_where_there_is_most_to_do():
    """Its weights' gradient is needed by nobody, and the forward's attention is too short for two of five."""
    tasks, named, costs = layer({"F": 9.0, "B": 15.0, "experts": 10.0, "back": 10.0, "W": 6.0})
    chained = [[named[name]] for name in ("b1", "f1", "b2", "f2")]
    found = order_collectives(tasks, chained, [[named["again"]]], costs)
    order = [next(name for name, task in named.items() if task is each) for each in found]
    assert order in (["b1", "f1", "b2", "again", "f2"], ["b1", "f1", "b2", "f2", "again"])


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries({name: st.integers(0, 20) for name in ("F", "B", "experts", "back", "W")}))
def test_no_place_leaves_more_work_beside_collectives(costs):
    tasks, named, costs = layer(costs)
    chained = [named[name] for name in ("b1", "f1", "b2", "f2")]
    orders = [[*chained[:k], named["again"], *chained[k:]] for k in range(5)]
    for order in orders:
        assert shortage(tasks, order, costs) == pytest.approx(missing(tasks, order, costs), abs=1e-6)
    found = order_collectives(tasks, [[task] for task in chained], [[named["again"]]], costs)
    least = min(missing(tasks, order, costs) for order in orders)
    assert missing(tasks, found, costs) == pytest.approx(least, abs=1e-6)


def test_turns_alternate_and_the_second_leads():
    def turns(num_first, num_second):
        tasks = [make_tasks([exchange() for _ in range(count)]) for count in (num_first, num_second)]
        return [0 if task in tasks[0] else 1 for task in mix_evenly(*tasks)]

    assert turns(2, 2) == [1, 0, 1, 0]
    assert turns(2, 4) == [1, 0, 1, 1, 0, 1]
    assert turns(3, 1) == [0, 1, 0, 0]
    assert turns(0, 2) == [1, 1]
    assert turns(0, 0) == []


def test_matmuls_cost_flops_and_what_elementwise_work_ends_in_costs_bytes():
    def layer(w, x):
        return jnp.tanh((x @ w) * 2 + 1)

    size = 256
    plan = split_backward(layer).trace(jnp.ones((size, size)), jnp.ones((size, size)))
    costs = estimate(plan.programs.forward)
    nbytes = size * size * 4
    by_name = {node.name: cost for node, cost in costs.items()}
    assert by_name["dot_general"] == pytest.approx(2 * size**3 / 450 + 1.5 * nbytes)
    assert by_name["tanh"] == 2 * nbytes, "it is an output"
    assert by_name["mul"] == by_name["add"] == 0, "they pass through no memory"


def test_what_picks_and_what_puts_together_costs_what_it_reads_and_writes():
    """Of four rows of 32 bytes 64 are picked by indices of 4 bytes, or two; halves are put together for a product."""

    def work(table, many, few, x, w):
        return table[many], table[few], jnp.concatenate([jnp.sin(x), x], axis=-1) @ w

    many, few = jnp.zeros((64, 1), int), jnp.zeros((2, 1), int)
    program, _ = trace_program(work, jnp.ones((4, 8)), many, few, jnp.ones((16, 4)), jnp.ones((8, 3)))
    costs = {
        node.outputs[0].shape: cost
        for node, cost in estimate(program).items()
        if node.name in ("gather", "concatenate")
    }
    assert costs == {(64, 1, 8): (64 + 4) * 32 + 64 * 4, (2, 1, 8): (2 + 2) * 32, (16, 8): 2 * 16 * 32}


def test_what_is_eager_follows_at_once():
    """A gradient is added to its sum where it is made, although the phase is full by then."""
    first, second = exchange(), exchange()
    gradient, other = act(cost=5.0), act(cost=4.0)
    added = act(gradient.outputs[0], cost=100.0, is_eager=True)
    phases = planned([gradient, added, other, first, second], [first, second])
    assert phases[1] == ([gradient, added], [])


@given(st.lists(st.integers(0, 12), min_size=2, max_size=6))
def test_no_phase_takes_what_a_later_one_will_lack(numbers):
    """``numbers[k]`` works are there from phase k + 1 on: j phases have at most what is there by the j-th, over j."""
    sent = [exchange() for _ in numbers]
    before = [(), *((collective.outputs[0],) for collective in sent[:-1])]
    works = [act(*inputs) for inputs, number in zip(before, numbers, strict=True) for _ in range(number)]
    beside = [len(group) for group, _ in planned([*sent, *works], sent)][1:-1]
    beside.append(sum(numbers) - sum(beside))  # what is left stands beside the last
    assert min(beside) > min(sum(numbers[:j]) / j for j in range(1, len(numbers) + 1)) - 1
