"""Check that a schedule computes all gradients and does not hang."""

import collections
import itertools
from collections.abc import Iterable
from typing import NoReturn

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.schedule.costs import CostModel
from dualpipe_jax.schedule.dataflow import Value, execution_order, makers, needed_by
from dualpipe_jax.schedule.formats.text import excerpt
from dualpipe_jax.schedule.ir import Action, Op, Schedule, Slot, spelt
from dualpipe_jax.schedule.simulate import clock

_ORDER_RULE = "A stage runs F, then B (or I, later W), and hands over in pipe order."

_ONCE_RULE = "Each stage runs each microbatch of its pipe once: F, and B or both I and W."

_SlotOf = dict[Action, int]
"""The slot of each action on one rank."""

_Cycle = dict[int, tuple[int, int]]
"""Ranks that wait for each other in a ring: for each, the rank and the index of the slot that it waits for."""


class ScheduleError(ValueError):
    """A schedule that cannot be run; the message shows the fault in the grid and names the rule.

    >>> from dualpipe_jax.schedule import Placement, ScheduleError, parse_grid, validate
    >>> try:
    ...     validate(parse_grid("0B0 0F0", Placement.linear(1)))
    ... except ScheduleError as error:
    ...     print(str(error).splitlines()[0])
    parsed: rank 0, slot 0 runs 0B0 before 0F0.
    """


@typechecked
def validate(schedule: Schedule) -> Schedule:
    """Check that a schedule is complete, in order and free of deadlock; return it.

    Every stage runs every microbatch of its pipe once (F, and B or both I and W) on the rank that holds
    it, after what it needs; a pair is an F and a B of independent microbatches; and the ranks, each
    working through its order, all reach their ends.

    >>> from dualpipe_jax.schedule import dualpipe
    >>> validate(dualpipe(4, 8)).name
    'dualpipe'

    Raises:
      ScheduleError: at the first fault. It points at the slot at fault rather than at those that wait for
        it. In a deadlock the orders of several ranks contradict each other; then it points at the one
        whose correction gives the shortest step.
    """
    _check_counts(schedule)
    places = [_check_slots(schedule, rank) for rank in range(schedule.num_ranks)]
    for rank, where in enumerate(places):
        _check_complete(schedule, rank, where)
        _check_rank_order(schedule, rank, where)
    _check_ends(schedule)
    return schedule


def _check_counts(schedule: Schedule) -> None:
    pipes, microbatches = schedule.placement.num_pipes, schedule.num_microbatches
    if len(schedule.orders) != schedule.num_ranks:
        raise ScheduleError(
            f"{schedule.name}: has orders for {len(schedule.orders)} ranks, but its placement "
            f"{schedule.placement.pipes} has {schedule.num_ranks}; give one order for each rank"
        )
    if microbatches < 1 or microbatches % pipes:
        raise ScheduleError(
            f"{schedule.name}: {microbatches} microbatches cannot be shared by {pipes} pipe(s); "
            f"num_microbatches counts those of all pipes and must be a positive multiple of {pipes}"
        )


def _check_slots(schedule: Schedule, rank: int) -> _SlotOf:
    """Check each slot of a rank by itself, then against earlier slots; return the slot index of each action."""
    placement = schedule.placement
    here, known = set(placement.stages_on[rank]), range(schedule.microbatches_per_pipe)
    where: _SlotOf = {}
    for index, slot in enumerate(schedule.orders[rank]):
        _check_shape(schedule, rank, index, slot)
        for action in slot:
            if action.stage not in here or action.microbatch not in known:
                _refuse_place(schedule, rank, index, action)
            if action in where:
                fault = f"runs {action} again; slot {where[action]} ran it already"
                _refuse(schedule, rank, index, fault, f"{_ONCE_RULE} Drop one of the two.")
            rivals = () if action.op is Op.F else (Op.I, Op.W) if action.op is Op.B else (Op.B,)
            for rival in (Action(action.stage, op, action.microbatch) for op in rivals):
                if rival in where:
                    fault = f"runs {action}, though slot {where[rival]} runs {rival}"
                    _refuse(schedule, rank, index, fault, f"{_ONCE_RULE} B is I and W in one.")
            where[action] = index
    return where


def _check_shape(schedule: Schedule, rank: int, index: int, slot: Slot) -> None:
    actions = type(slot) is tuple and slot and all(type(a) is Action and type(a.op) is Op for a in slot)
    if not actions:
        fault = f"is {slot!r}, not a tuple of actions"
        _refuse(schedule, rank, index, fault, "A slot is (action,) or (forward, backward), of Action and Op.")
    if len(slot) == 1:
        return
    pipes = {schedule.placement.pipe_of(action.stage) for action in slot}
    advice = "A pair is one F, then one B, of two microbatches that do not wait for each other."
    if [action.op for action in slot] != [Op.F, Op.B]:
        _refuse(
            schedule, rank, index, "pairs what cannot be paired", f"{advice} Give each a slot of its own."
        )
    if len(pipes) == 1 and slot[0].microbatch == slot[1].microbatch:
        fault = f"pairs {slot[0]} with {slot[1]}, one microbatch with itself"
        _refuse(
            schedule, rank, index, fault, f"{advice} Pair it with another, or run them one after the other."
        )


def _refuse_place(schedule: Schedule, rank: int, index: int, action: Action) -> NoReturn:
    placement = schedule.placement
    if not 0 <= action.stage < placement.num_stages:
        fault = f"runs {action}, but there is no stage {action.stage}"
        advice = f"Stages are 0 to {placement.num_stages - 1}."
    elif placement.rank_of[action.stage] != rank:
        owner = placement.rank_of[action.stage]
        fault = f"runs {action}, but stage {action.stage} lives on rank {owner}"
        advice = f"Rank {rank} holds {_stages(schedule, rank)}. Move {action} to the order of rank {owner}."
    else:
        fault = f"runs {action}, but there is no microbatch {action.microbatch}"
        advice = (
            f"Microbatches count from 0 within each pipe, to {schedule.microbatches_per_pipe - 1} here: "
            f"{schedule.num_microbatches} over {placement.num_pipes} pipe(s)."
        )
    _refuse(schedule, rank, index, fault, advice)


def _check_complete(schedule: Schedule, rank: int, where: _SlotOf) -> None:
    ops = collections.Counter(action.op for action in where)
    due = len(schedule.placement.stages_on[rank]) * schedule.microbatches_per_pipe
    if ops[Op.F] == ops[Op.B] + ops[Op.I] == due and ops[Op.I] == ops[Op.W]:
        return  # B rules out I and W, and no action occurs twice: so nothing is missing
    for stage in schedule.placement.stages_on[rank]:
        for microbatch in range(schedule.microbatches_per_pipe):
            f, b, i, w = (Action(stage, op, microbatch) for op in (Op.F, Op.B, Op.I, Op.W))
            if f in where and (b in where or (i in where and w in where)):
                continue
            missing = f if f not in where else i if w in where else w if i in where else b
            near = next((where[action] for action in (i, w, b, f) if action in where), None)
            though = "" if near is None else f", though slot {near} runs {spelt(schedule.orders[rank][near])}"
            either = f" (nor {i} and {w})" if missing is b else ""
            fault = f"never runs {missing}{either}{though}"
            _refuse(schedule, rank, near, fault, f"{_ONCE_RULE} Add {missing}.", place=f"rank {rank}")


def _check_rank_order(schedule: Schedule, rank: int, where: _SlotOf) -> None:
    """Check that each rank runs the actions of a microbatch forward through its pipe, then back."""
    placement = schedule.placement
    turn = 2 * placement.num_model_stages - 1
    pipe_and_depth = {s: (placement.pipe_of(s), placement.model_stage(s)) for s in placement.stages_on[rank]}
    last: dict[tuple[int, int], tuple[int, Action]] = {}
    for action in where:
        stage, op, microbatch = action
        if op is Op.W:
            early, late = action, Action(stage, Op.I, microbatch)
            wrong = where[early] < where[late]
        else:
            pipe, depth = pipe_and_depth[stage]
            step = depth if op is Op.F else turn - depth
            before, early = last.get((pipe, microbatch), (-1, action))
            late, wrong = action, step < before
            last[pipe, microbatch] = step, action
        if wrong:
            advice = f"{_ORDER_RULE} Check the order given to rank {rank}."
            _refuse(schedule, rank, where[early], f"runs {early} before {late}", advice)


def _check_ends(schedule: Schedule) -> None:
    """Refuse a deadlock: a cycle of ranks, each of which waits for a later slot of the next."""
    placement, orders = schedule.placement, schedule.orders
    ran = execution_order(placement, orders)
    if len(ran) == sum(map(len, orders)):
        return

    ran_on = collections.Counter(rank for rank, _ in ran)
    at = [ran_on[rank] for rank in range(len(orders))]
    made_at = makers(orders)
    made = {value for value, (rank, index) in made_at.items() if index < at[rank]}
    cycle: _Cycle = {}
    rank = next(rank for rank, order in enumerate(orders) if at[rank] < len(order))
    while rank not in cycle:
        slot = orders[rank][at[rank]]
        value = next(v for action in slot for v in needed_by(placement, action) if v not in made)
        cycle[rank] = made_at[value]
        rank = cycle[rank][0]
    while next(iter(cycle)) != rank:  # ranks that only lead into the cycle are not part of it
        del cycle[next(iter(cycle))]
    late = dict(cycle.values())
    faulty_rank = min(cycle, key=lambda rank: _fault_key(schedule, at, made, rank, late[rank]))
    _refuse_deadlock(schedule, at, cycle, faulty_rank)


def _fault_key(
    schedule: Schedule, at: list[int], made: set[Value], rank: int, late: int
) -> tuple[bool, int, float]:
    """A sort key for the ranks of a deadlock: the rank with the least key is reported as the one at fault.

    The key is (whether the rank keeps the microbatches of each stage in sequence, slots that still hang if this
    rank alone is corrected, makespan of the slots that then run). Corrections are tried on a window of slots that
    begins where all ranks are stuck: the slot at which the rank is stuck and the slot for which the others wait
    change places, or one of the two moves past the other.
    """
    length, late = 4 * len(at) + late - at[rank], late - at[rank]
    window = [list(order[i : i + length]) for order, i in zip(schedule.orders, at, strict=True)]
    stuck, wanted = window[rank][0], window[rank][late]
    between, rest = window[rank][1:late], window[rank][late + 1 :]
    in_sequence = _in_sequence(schedule.orders[rank][: at[rank] + length])
    outcomes = []
    for piece in ([wanted, *between, stuck], [wanted, stuck, *between], [*between, wanted, stuck]):
        window[rank] = piece + rest
        ran = execution_order(schedule.placement, window, made)
        _, ends = clock(schedule.placement, window, ran, CostModel(), made)
        hanging = sum(map(len, window)) - len(ran)
        outcomes.append((hanging, max((end[-1] for end in ends if end), default=0.0)))
    return in_sequence, *min(outcomes)


def _in_sequence(order: Iterable[Slot]) -> bool:
    latest: dict[tuple[int, bool], int] = {}
    for stage, op, microbatch in itertools.chain.from_iterable(order):
        if op is Op.W:
            continue
        key = stage, op is Op.F
        if latest.setdefault(key, microbatch) > microbatch:
            return False
        latest[key] = microbatch
    return True


def _refuse_deadlock(schedule: Schedule, at: list[int], cycle: _Cycle, faulty_rank: int) -> NoReturn:
    chain: list[str] = []
    rank = faulty_rank
    while not chain or rank != faulty_rank:
        waited, index = cycle[rank]
        stuck, wanted = schedule.orders[rank][at[rank]], schedule.orders[waited][index]
        chain.append(
            f"Rank {rank}, slot {at[rank]} ({spelt(stuck)}) waits for "
            f"rank {waited}, slot {index} ({spelt(wanted)})."
        )
        rank = waited
    early, late = (
        schedule.orders[faulty_rank][i] for i in (at[faulty_rank], dict(cycle.values())[faulty_rank])
    )
    shown = chain if len(chain) <= 6 else [*chain[:3], f"... {len(chain) - 5} more ...", *chain[-2:]]
    _refuse(
        schedule,
        faulty_rank,
        at[faulty_rank],
        f"runs {spelt(early)} before {spelt(late)}, and so waits for itself",
        "\n".join(
            [
                *shown,
                f"{_ORDER_RULE} Check the order given to rank {faulty_rank}: {spelt(late)} must come first.",
            ]
        ),
        ((rank, at[rank]) for rank in cycle),
    )


def _refuse(
    schedule: Schedule,
    rank: int,
    index: int | None,
    fault: str,
    advice: str,
    involved: Iterable[tuple[int, int]] = (),
    place: str = "",
) -> NoReturn:
    """Raise the error that points at one slot of one rank, or at the rank where a slot is missing."""
    centre = len(schedule.orders[rank]) if index is None else index
    around = {r: centre for r in range(max(0, rank - 2), min(schedule.num_ranks, rank + 3))}
    around |= dict(itertools.islice(involved, 6))
    grid = excerpt(schedule, around | {rank: centre}, rank, index)
    raise ScheduleError(
        f"{schedule.name}: {place or f'rank {rank}, slot {index}'} {fault}.\n\n{grid}\n\n{advice}"
    )


def _stages(schedule: Schedule, rank: int) -> str:
    held = schedule.placement.stages_on[rank]
    return f"stage {held[0]}" if len(held) == 1 else f"stages {', '.join(map(str, held))}"
