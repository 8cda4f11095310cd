"""Which execution of which unit is which action of the schedule.

The program holds each unit once for each local stage, behind a guard, and a unit's instructions run once each time
that the guard lets them: so the n-th time of each is the n-th execution. A rank's executions in order of time are,
tick by tick, the units of its rows in the table. That they are of the kinds that the table says is checked.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dualpipe_jax.inspect import Module
from dualpipe_jax.pods.units import units_in
from dualpipe_jax.profile.capture import Event
from dualpipe_jax.schedule import Action, Op, Schedule, TickTable


class ProfileError(ValueError):
    """The trace is not one of this program; the message says where the two differ."""


class Unit(NamedTuple):
    """A unit in a row of the table: of an op of ``SCOPES``, and the actions that it does, or a part of."""

    kind: str
    actions: tuple[Action, ...]


class Execution(NamedTuple):
    """A unit, run once: milliseconds."""

    kind: str
    start: float
    end: float


def guards(module: Module) -> dict[str, tuple[str, str]]:
    """Instruction -> (kind, guard) of the unit that it stands in; not those of inner loops, which run more often."""
    found: dict[str, tuple[str, str]] = {}
    seen: Counter[str] = Counter()
    for key, where in units_in(module).items():
        for body in where:
            for name in {i.name for i in module.inside(body, enter_loops=False)}:
                seen[name] += 1
                found[name] = key.op, body
    return {name: unit for name, unit in found.items() if seen[name] == 1}


def executions(events: Iterable[Event], units: Mapping[str, tuple[str, str]]) -> list[Execution]:
    """What one device did in one run of the program, in order of time.

    An instruction that was not seen as often as others of its unit, for a trace may lose events, does not count.
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
    """Units by rank and tick. ``fused``: whether a pair is one unit, or its forward and its backward."""
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
    """Each unit of a rank's ticks, and its execution; among equal kinds in a tick in order of time.

    Raises:
      ProfileError: they are not the same units in the same order.
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
