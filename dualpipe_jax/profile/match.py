"""Match each execution of a unit in a trace with the actions of the schedule.

The program holds each unit once for each local stage, behind a guard. A unit's instructions run once each time that
the guard is taken, so the n-th event of each instruction belongs to the unit's n-th execution. A rank's executions in
order of time are, tick by tick, the units of its rows in the table. ``match`` checks that their kinds are the table's.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dualpipe_jax.inspect import Module
from dualpipe_jax.pods.units import units_in
from dualpipe_jax.profile.capture import Event
from dualpipe_jax.schedule import Action, Op, Schedule, TickTable


class ProfileError(ValueError):
    """The trace is not of this program; the message says where the two differ."""


class Unit(NamedTuple):
    """A unit in a row of the table: its op, a key of ``SCOPES``, and the actions that it does, wholly or partly."""

    kind: str
    actions: tuple[Action, ...]


class Execution(NamedTuple):
    """One execution of a unit; times are in milliseconds."""

    kind: str
    start: float
    end: float


def unit_guards(module: Module) -> dict[str, tuple[str, str]]:
    """The (kind, guard) of the unit of each instruction.

    Left out are instructions of inner loops, which run more often, and those that stand behind several guards.
    """
    found: dict[str, tuple[str, str]] = {}
    seen: Counter[str] = Counter()
    for key, where in units_in(module).items():
        for body in where:
            for name in {i.name for i in module.inside(body, enter_loops=False)}:
                seen[name] += 1
                found[name] = key.op, body
    return {name: unit for name, unit in found.items() if seen[name] == 1}


def executions(events: Iterable[Event], units: Mapping[str, tuple[str, str]]) -> list[Execution]:
    """The executions of units by one device in one run of the program, in order of time.

    A trace may lose events: an instruction with fewer events than others of its unit is ignored.
    """
    spans: dict[tuple[str, str], dict[str, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event.op in units:
            spans[units[event.op]][event.op].append(event)
    found = []
    for (kind, _), ops in spans.items():
        times = max(map(len, ops.values()))
        whole = [sorted(seen, key=lambda e: e.start) for seen in ops.values() if len(seen) == times]
        found += [
            Execution(kind, min(op[n].start for op in whole), max(op[n].end for op in whole))
            for n in range(times)
        ]
    return sorted(found, key=lambda execution: execution.start)


def expected_units(schedule: Schedule, table: TickTable, *, fused: bool) -> list[list[list[Unit]]]:
    """The units of each rank in each tick. ``fused``: whether a pair is one unit, or its forward and its backward."""
    return [
        [_row(schedule, table, tick, rank, fused) for tick in range(table.num_ticks)]
        for rank in range(schedule.num_ranks)
    ]


def _row(schedule: Schedule, table: TickTable, tick: int, rank: int, fused: bool) -> list[Unit]:
    row = dict(zip(table.columns, table.array[tick, rank].tolist(), strict=True))
    if row["unit"] < 0:
        return []
    op, ahead, back = table.units[row["unit"]]
    stages = schedule.placement.stages_on[rank]

    def action(local: int, op: Op, letter: str) -> Action:
        first = schedule.placement.pipe_of(stages[local]) * schedule.microbatches_per_pipe
        return Action(stages[local], op, row[f"{letter}_microbatch"] - first)

    forward = [action(ahead.local, Op.F, "F")] if ahead is not None else []
    backward = [action(back.local, Op.B if op == "FB" else Op(op), "G")] if back is not None else []
    actions = (*forward, *backward)
    return [Unit(op, actions)] if fused or len(actions) == 1 else [Unit(a.op.value, (a,)) for a in actions]


def match(
    found: Sequence[Execution], ticks: Sequence[Sequence[Unit]], where: str
) -> list[tuple[Unit, Execution]]:
    """Pair each unit of a rank's ticks with its execution; equal kinds within a tick are paired in order of time.

    Raises:
      ProfileError: the executions are not the same units in the same order.
    """
    expected = sum(map(len, ticks))
    if len(found) != expected:
        raise ProfileError(f"{where}: the trace has {len(found)} units of work, the schedule {expected}")
    matched, at = [], 0
    for tick, units in enumerate(ticks):
        here = list(found[at : at + len(units)])
        at += len(units)
        for unit in units:
            same = [execution for execution in here if execution.kind == unit.kind]
            if not same:
                saw = ", ".join(execution.kind for execution in found[at - len(units) : at])
                wanted = ", ".join(unit.kind for unit in units)
                raise ProfileError(f"{where}, tick {tick}: the trace has {saw}, the schedule {wanted}")
            here.remove(same[0])
            matched.append((unit, same[0]))
    return matched
