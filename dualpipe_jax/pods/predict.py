"""What a compiled program's cycles say of a step: costs of its units, its time, its share of the peak.

All of this is the compiler's model of the device, or a roofline where it has none; nothing here was measured.
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dualpipe_jax.inspect import Module, products
from dualpipe_jax.inspect.report import OverlapReport
from dualpipe_jax.pods.results import Unit
from dualpipe_jax.schedule import CostModel, MemoryModel, Op, Placement, Schedule, Slot, lower, simulate
from dualpipe_jax.schedule.costs import stages_a_share
from dualpipe_jax.schedule.lowering.table import TickTable
from dualpipe_jax.schedule.lowering.unit_key import SCOPE, SCOPES, UnitKey
from dualpipe_jax.schedule.optimize.choose import Candidate, choose

T = TypeVar("T")

USUAL = "middle"
"""What most stages' kind is called."""


def bodies(module: Module, op: str) -> list[str]:
    """Computations in which units of an op stand, each behind its guard."""
    return [body for key, found in units_in(module).items() if key.op == op for body in found]


def units_in(module: Module) -> dict[UnitKey, list[str]]:
    """The computations in which each unit stands: one for each local stage that runs it."""
    found: dict[UnitKey, list[str]] = {}
    for body, (_, scopes) in _guarded(module).items():
        if len(scopes) == 1:
            found.setdefault(UnitKey.of_scope(scopes[0]), []).append(body)
    return found


def walk(module: Module) -> str | None:
    """The body of the scan over ticks, which holds all guards; None where there are none."""
    return next((holder for holder, names in _guarded(module).values() if names), None)


def _guarded(module: Module) -> dict[str, tuple[str, list[str]]]:
    """What a guard skips, a loop's body or one branch of a conditional: -> (its holder, the scopes of units in it)."""
    loop, inside = re.compile(rf"/({SCOPE})/while$"), re.compile(rf"/branch_\d+_fun/({SCOPE})/")
    found = {
        body: (holder, [match[1]])
        for body, (holder, instruction) in module.loops.items()
        if (match := loop.search(instruction.op_name))
    }
    for body, (holder, _) in module.branches.items():
        # Where a tick's unit is a branch, the conditional itself has no unit's name.
        matches = (inside.search(instruction.op_name) for instruction in module.computations[body])
        if names := sorted({match[1] for match in matches if match}):
            found[body] = holder, names
    return found


def measure(report: OverlapReport, module: Module, kind_of: Sequence[str] = ()) -> dict[UnitKey, Unit]:
    """The units of a program; of several for the same kinds of stages the slowest. ``kind_of``: see ``with_usual``."""
    units = {
        key: max((unit_of(report, module, body) for body in found), key=lambda u: u.cycles)
        for key, found in units_in(module).items()
    }
    return with_usual(units, kind_of)


def with_usual(found: Mapping[UnitKey, Unit], kind_of: Sequence[str] = ()) -> dict[UnitKey, Unit]:
    """Units as ``costs`` asks for them: of most stages by op alone, of others with their kinds.

    Most stages are of the kind that most between the ends are of, and are called "middle"; if none was found of that,
    the slowest between the ends stands for them, or the slowest of all.

    Args:
      found: by op and kinds.
      kind_of: the kind of each stage of the model; where nobody knows, stages go by their place.
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
    """The kind of each stage that units say they work on, as ``with_usual`` calls it."""
    return {
        stage: key.kinds[0] if key.kinds else USUAL for key, unit in units.items() for stage in unit.stages
    }


def kind_at(stage: int, placement: Placement, kinds: Mapping[int, str]) -> str:
    """The kind of a stage of a pipe: as ``kinds`` has it, else by its place."""
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


def overheads(report: OverlapReport, module: Module) -> tuple[float, float] | None:
    """Cycles of a tick beside its units, and of a step beside its ticks; None where there is no scan over ticks.

    The first is arrivals written to slots and outputs cleared; the second pools and sums cleared, copies of stages
    borrowed, gradients given back and reduced.
    """
    tick = walk(module)
    if tick is None:
        return None
    cycles = {name: time.cycles for name, time in report.computations.items()}
    guards = sum(cycles[body] for body, (holder, _) in module.loops.items() if holder == tick)
    choices: dict[str, float] = {}
    for body, (holder, choice) in module.branches.items():
        if holder == tick:
            choices[choice.name] = max(choices.get(choice.name, 0.0), cycles[body])
    beside = cycles[tick] - guards - sum(choices.values())
    holder, scan = module.loops[tick]
    return max(0.0, beside), max(0.0, cycles[holder] - (scan.trips or 1) * cycles[tick])


def costs(units: Mapping[UnitKey, Unit], send: float, *, split: bool = True) -> CostModel:
    """Costs of one stage in cycles, from units measured.

    A full backward takes less than its two halves, which pass a stash between them, and a cost model has no place
    for both. So schedules that never split get costs of their own.

    Arguments:
      units: F and either B or I and W, of most stages at least.
      send: cycles of a transfer.
      split: take I and W for the backward if they were measured; else B, two thirds of it for the input, which
        schedules that never split do not mind.

    Raises:
      ValueError: one of those is missing.
    """
    cycles = {key: unit.cycles for key, unit in units.items()}
    usual = {key.op: each for key, each in cycles.items() if not key.kinds}
    halves = {"I", "W"} <= usual.keys()
    if "F" not in usual or not (halves or "B" in usual):
        raise ValueError(
            f"costs: needs F and either B or I and W; measured were {', '.join(map(str, cycles)) or 'none'}"
        )
    whole = "B" in usual and not (split and halves)
    backward = (usual["B"] * 2 / 3, usual["B"] / 3) if whole else (usual["I"], usual["W"])
    extra = {}
    between = {stage: kind for stage, kind in kinds_of(units).items() if kind not in ("first", "last")}
    for stage, kind in ({0: "first", -1: "last"} | between).items():
        if UnitKey("F", (kind,)) in cycles:
            more = _more(cycles, kind, whole, backward)
            # In a pair differences do not add up: alone, much of F and B is an exchange that the pair hides. So where
            # there are pairs a stage that takes less counts as a usual one, which is an upper bound.
            extra[stage] = tuple(max(0.0, cost) for cost in more) if "FB" in usual else more
    return CostModel(usual["F"], *backward, FB=usual.get("FB"), send=send, extra=extra)  # type: ignore[arg-type]


def found(units: Mapping[UnitKey, T], key: UnitKey) -> T | None:
    """What there is of a unit; what is of all stages where none has one of its own."""
    alike = not any(other.op == key.op and other.kinds for other in units)
    return units.get(UnitKey(key.op) if alike else key)


@dataclasses.dataclass(frozen=True)
class Measured(CostModel):
    """Costs of one stage of which whole units were measured, each for the stages that it works on.

    What was measured costs that: a pair of the first stage's forward and the last one's backward, a full backward
    beside I and W. All else, such as a pair of kinds that never met, is as in a ``CostModel``.

    Attributes:
      cycles: of each unit.
      kinds: of stages, see ``kinds_of``.
    """

    cycles: Mapping[UnitKey, float] = dataclasses.field(default_factory=dict, hash=False)
    kinds: Mapping[int, str] = dataclasses.field(default_factory=dict, hash=False)

    def of(self, slot: Slot, placement: Placement) -> float:
        own = found(self.cycles, key_of(slot, placement, self.kinds))
        return super().of(slot, placement) if own is None else own


def measured(units: Mapping[UnitKey, Unit], send: float, *, split: bool = True) -> Measured:
    """``costs`` of the same, and what they have no place for."""
    usual = _fields(costs(units, send, split=split))
    cycles = {key: unit.cycles for key, unit in units.items()}
    return Measured(**usual, cycles=cycles, kinds=kinds_of(units))


@dataclasses.dataclass(frozen=True)
class _Share(CostModel):
    """Costs of a whole rank's share, made of those of a ``stage``: one of ``parts``."""

    stage: CostModel = CostModel()  # noqa: RUF009  # frozen
    parts: float = 1.0

    def for_schedule(self, schedule: Schedule) -> CostModel:  # type: ignore[override]  # not of its own type
        """Costs of the schedule's stages: what was measured, where they are as deep as those that were."""
        return (
            self.stage if stages_a_share(schedule.placement) == self.parts else super().for_schedule(schedule)
        )


def _fields(costs: CostModel) -> dict[str, Any]:
    return {field.name: getattr(costs, field.name) for field in dataclasses.fields(CostModel)}


def _more(
    cycles: Mapping[UnitKey, float], kind: str, whole: bool, usual: tuple[float, float]
) -> tuple[float, float, float]:
    """What F, I and W of a kind take beyond the usual stage's; an unmeasured backward is twice the forward."""
    own = {key.op: each for key, each in cycles.items() if key.kinds == (kind,)}
    ahead = own["F"] - cycles[UnitKey("F")]
    if "B" in own and (whole or "I" not in own):
        more = own["B"] - sum(usual)
        return ahead, more * 2 / 3, more / 3
    if {"I", "W"} <= own.keys():
        return ahead, own["I"] - usual[0], own["W"] - usual[1]
    return ahead, ahead, ahead


def splits(schedule: Schedule) -> bool:
    """Whether any of its backwards comes in two halves."""
    return any(action.op is Op.I for order in schedule.orders for slot in order for action in slot)


def units_of(schedule: Schedule) -> tuple[str, ...]:
    """The ops of units that it runs."""
    slots = [slot for order in schedule.orders for slot in order]
    there = {action.op.name for slot in slots if len(slot) == 1 for action in slot}
    there |= {"FB"} if any(len(slot) > 1 for slot in slots) else set()
    return tuple(op for op in SCOPES if op in there)


def step_cycles(
    schedule: Schedule,
    costs: CostModel,
    tick: float = 0.0,
    at_once: float | None = None,
    placed: CostModel | None = None,
) -> tuple[float, float]:
    """Cycles from the first forward to the last backward: in the engine's ticks, and in the ideal order.

    The optimizer and the reduction of gradients come on top. ``tick`` is what each tick takes beside its units, which
    the ideal order, of no ticks, leaves out. ``at_once`` is of how many ranks the processors can do the work at a
    time, where they share them; None: all. ``placed`` are the costs by which the engine places actions on ticks, see
    ``Pipeline.costs``; None: those given.
    """
    table, ideal = lower(schedule, placed or costs), simulate(schedule, costs).makespan
    if at_once is not None:
        ideal = max(ideal, float(table.work(costs).sum()) / at_once)
    return span(table, costs, at_once) + table.num_ticks * tick, ideal


def span(table: TickTable, costs: CostModel, at_once: float | None) -> float:
    return table.makespan(costs) if at_once is None else table.shared_makespan(costs, at_once)


def rank_costs(costs: CostModel, schedule: Schedule) -> CostModel:
    """Costs of a whole rank's share of the model, which ``choose`` wants, from those of a schedule's stage."""
    parts = stages_a_share(schedule.placement)
    more = {name: parts * getattr(costs, name) for name in ("F", "I", "W", "FB")}
    ends = {stage: extra for stage, extra in costs.extra.items() if stage in (0, -1)}  # as deep as any are
    return _Share(**(_fields(costs) | more | {"extra": ends}), stage=costs, parts=parts)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A schedule for given costs.

    Attributes:
      name: its recipe's.
      cycles: of a step in the engine's ticks; infinite where the recipe does not serve the counts.
      ideal_cycles: in the ideal order.
      memory: bytes of the fullest device.
      refused: why it cannot be had; empty if it can.
    """

    name: str
    cycles: float
    ideal_cycles: float
    memory: float
    refused: str


def rank_schedules(
    num_ranks: int,
    num_microbatches: int,
    costs: CostModel,
    costs_unsplit: CostModel,
    memory: MemoryModel,
    limit: float,
    fixed: float = 0.0,
    tick: float = 0.0,
    at_once: float | None = None,
    placed: CostModel | None = None,
) -> tuple[Prediction, ...]:
    """All schedules for given costs and sizes of a rank's share: the shortest step that fits first.

    Arguments:
      costs: of a whole rank's share, for schedules that split backwards.
      costs_unsplit: for those that do not.
      memory: sizes of a whole rank's share.
      limit: bytes of a device.
      fixed: bytes that every schedule needs.
      tick: cycles of each tick beside its units; as many on a V, whose stages are half as deep and ticks twice as many.
      at_once, placed: see ``step_cycles``.
    """
    price = functools.partial(step_cycles, tick=tick, at_once=at_once, placed=placed)
    found = []
    for own, wanted in ((costs, True), (costs_unsplit, False)):
        for candidate in choose(num_ranks, num_microbatches, own, limit - fixed, memory=memory):
            if candidate.schedule is None:
                if wanted:
                    refused = candidate.refused.removeprefix(f"{candidate.name}: ")
                    found.append(Prediction(candidate.name, math.inf, math.inf, 0.0, refused))
            elif splits(candidate.schedule) == wanted:
                found.append(_predicted(candidate, own, limit, fixed, price))
    return tuple(sorted(found, key=lambda p: (bool(p.refused), p.cycles)))


def _predicted(
    candidate: Candidate,
    costs: CostModel,
    limit: float,
    fixed: float,
    price: Callable[[Schedule, CostModel], tuple[float, float]],
) -> Prediction:
    assert candidate.schedule is not None
    own, needed = costs.for_schedule(candidate.schedule), candidate.peak + fixed
    refused = f"needs {needed / 2**30:.1f} GiB of {limit / 2**30:.1f}" if candidate.refused else ""
    cycles, ideal = price(candidate.schedule, own)
    return Prediction(candidate.name, cycles, ideal, needed, refused)
