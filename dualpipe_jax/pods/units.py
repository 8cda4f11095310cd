"""The engine's units in a compiled program: their computations, their cycles, and the cycles outside them.

Cycles come from the compiler's model of the device, or from a roofline where it has none; nothing here was
measured.
"""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from dualpipe_jax.inspect import Module, products
from dualpipe_jax.inspect.report import OverlapReport
from dualpipe_jax.pods.results import Unit
from dualpipe_jax.schedule import Placement, Slot
from dualpipe_jax.schedule.lowering.unit_key import SCOPE, SCOPES, UnitKey

USUAL = "middle"
"""The name of the kind that most stages have."""


def bodies_of(module: Module, op: str) -> list[str]:
    """The computations that contain units of an op, each in its guard."""
    return [body for key, found in units_in(module).items() if key.op == op for body in found]


def units_in(module: Module) -> dict[UnitKey, list[str]]:
    """The computations that contain each unit: one for each local stage that runs it."""
    found: dict[UnitKey, list[str]] = {}
    for body, (_, scopes) in _guarded(module).items():
        if len(scopes) == 1:
            found.setdefault(UnitKey.of_scope(scopes[0]), []).append(body)
    return found


def scan_body(module: Module) -> str | None:
    """The body of the scan over ticks, which contains all guards; None where no loop contains guards."""
    # A user's own loop may have the name of a unit: one in the scopes "forward" and "layers".
    return next(
        (holder for holder, names in _guarded(module).values() if names and holder in module.loops), None
    )


def _guarded(module: Module) -> dict[str, tuple[str, list[str]]]:
    """The computations that guards may skip: a loop's body or one branch of a conditional.

    Each name is mapped to the name of the computation that contains the guard, and the scopes of the units in
    it.
    """
    loop, inside = re.compile(rf"/({SCOPE})/while$"), re.compile(rf"/branch_\d+_fun/({SCOPE})/")
    found = {
        body: (holder, [match[1]])
        for body, (holder, instruction) in module.loops.items()
        if (match := loop.search(instruction.op_name))
    }
    for body, (holder, _) in module.branches.items():
        # Where each unit of a tick is a branch, the conditional itself has no unit's name.
        matches = (inside.search(instruction.op_name) for instruction in module.computations[body])
        if names := sorted({match[1] for match in matches if match}):
            found[body] = holder, names
    return found


def units_of_program(
    report: OverlapReport,
    module: Module,
    kind_of: Sequence[str] = (),
    alike: Mapping[str, str] = MappingProxyType({}),
) -> dict[UnitKey, Unit]:
    """The units of a program; where several serve the same kinds of stages, the slowest of them.

    ``kind_of``: see ``with_usual``; ``alike``: see ``with_alike``.
    """
    units = {
        key: max((unit_of(report, module, body) for body in found), key=lambda u: u.cycles)
        for key, found in units_in(module).items()
    }
    return with_usual(with_alike(units, alike), kind_of)


def with_alike(found: Mapping[UnitKey, Unit], alike: Mapping[str, str]) -> dict[UnitKey, Unit]:
    """Units, and for kinds that are alike copies of the unit of the other kind; see ``StagedModel.alike``."""
    names: dict[str, set[str]] = {}
    for kind, other in alike.items():
        names.setdefault(other, {other}).add(kind)

    def of(kind: str) -> set[str]:
        return names.get(alike.get(kind, kind), {kind})

    others = {
        UnitKey(key.op, kinds): unit
        for key, unit in found.items()
        for kinds in itertools.product(*map(of, key.kinds))
    }
    return others | dict(found)


def with_usual(found: Mapping[UnitKey, Unit], kind_of: Sequence[str] = ()) -> dict[UnitKey, Unit]:
    """Units by the keys that ``costs`` looks up: those of most stages by op alone, the others by op and kinds.

    The kind of most stages is the most frequent between the ends, and is renamed to "middle". If no unit of
    that kind was found, the slowest one between the ends takes its place, or the slowest of all.

    Args:
      found: units by op and kinds.
      kind_of: the kind of each stage of the model; empty where it is not known: stages then go by their
        place.
    """
    between = Counter([USUAL] if USUAL in kind_of else kind_of[1:-1])
    usual = max(between, key=between.__getitem__, default=USUAL)
    units: dict[UnitKey, Unit] = {}
    for op in (op for op in SCOPES if any(key.op == op for key in found)):
        own = {
            tuple(USUAL if kind == usual else kind for kind in key.kinds): dataclasses.replace(
                unit, stages=tuple(stage for stage, its in enumerate(kind_of) if (its,) == key.kinds)
            )
            for key, unit in found.items()
            if key.op == op
        }
        most = [unit for kinds, unit in own.items() if set(kinds) == {USUAL}]
        others = [unit for kinds, unit in own.items() if not {"first", "last"} & set(kinds)] or own.values()
        slowest = max(others, key=lambda unit: unit.cycles)
        units[UnitKey(op)] = most[0] if most else dataclasses.replace(slowest, stages=())
        units |= {UnitKey(op, kinds): unit for kinds, unit in own.items() if set(kinds) != {USUAL}}
    return units


def kinds_of(units: Mapping[UnitKey, Unit]) -> dict[int, str]:
    """The kind of each stage that any of the units works on, by the names of ``with_usual``."""
    return {
        stage: key.kinds[0] if key.kinds else USUAL for key, unit in units.items() for stage in unit.stages
    }


def kind_at(stage: int, placement: Placement, kinds: Mapping[int, str]) -> str:
    """The kind of a stage of a pipe: its entry in ``kinds``, else by its place."""
    at, last = placement.model_stage(stage), placement.num_model_stages - 1
    return kinds.get(at) or {0: "first", last: "last"}.get(at, USUAL)


def key_of(slot: Slot, placement: Placement, kinds: Mapping[int, str]) -> UnitKey:
    of = tuple(kind_at(action.stage, placement, kinds) for action in slot)
    op = "FB" if len(slot) == 2 else slot[0].op.name
    return UnitKey(op) if set(of) == {USUAL} else UnitKey(op, of)


def unit_of(report: OverlapReport, module: Module, computation: str) -> Unit:
    time = report.computations[computation]
    durations = [c.duration for c in report.inside(computation)]
    total = None if None in durations else sum(d for d in durations if d is not None)
    made = products(report, module, computation)
    return Unit(time.cycles, time.work, total, time.waits, len(time.unpriced), *made)


def cycles_of(report: OverlapReport, module: Module, runs: Mapping[UnitKey, int], ticks: int) -> float:
    """Cycles of a whole program on one rank that runs ``runs`` units in ``ticks`` ticks, one after the other.

    The cycles outside units and ticks are included. A program without a scan over ticks counts as the report
    has it. Where several local stages have bodies for one unit, its runs are shared equally among them.

    Raises:
      ValueError: the program has other units.
    """
    found = units_in(module)
    if found.keys() != runs.keys():
        raise ValueError(
            f"cycles_of: the program has the units {sorted(map(str, found))}, and runs names {sorted(map(str, runs))}"
        )
    beside = overheads(report, module)
    if beside is None:
        return report.computations[module.entry].cycles
    cycles = {
        key: sum(report.computations[body].cycles for body in bodies) / len(bodies)
        for key, bodies in found.items()
    }
    return sum(runs[key] * cycles[key] for key in runs) + ticks * beside[0] + beside[1]


def overheads(report: OverlapReport, module: Module) -> tuple[float, float] | None:
    """Cycles of a tick outside its units, and of a step outside its ticks; None where there is no scan over ticks.

    The first are for writing arrivals to slots, clearing outputs, and guards, if one is taken. The second are
    for clearing pools and sums, borrowing copies of stages, and returning and reducing gradients.
    """
    tick = scan_body(module)
    if tick is None:
        return None
    cycles = {name: time.cycles for name, time in report.computations.items()}
    taken = {event.name: event.end - event.start for event in report.timelines[tick]}
    loops = [(body, loop) for body, (holder, loop) in module.loops.items() if holder == tick]
    guards = sum(cycles[body] for body, _ in loops)
    # A loop that is taken tests its condition twice, and the report counts all loops so. All but one test it once.
    asks = sorted(
        (taken.get(loop.name, 0.0) - cycles[body]) / 2 for body, loop in loops if loop.trips is None
    )
    guards += sum(asks[:-1])
    choices: dict[str, float] = {}
    for body, (holder, choice) in module.branches.items():
        if holder == tick:
            choices[choice.name] = max(choices.get(choice.name, 0.0), cycles[body])
    beside = cycles[tick] - guards - sum(choices.values())
    holder, scan = module.loops[tick]
    return max(0.0, beside), max(0.0, cycles[holder] - (scan.trips or 1) * cycles[tick])
