"""The parts of a step's time: the program's operations at the peak, and all that the prediction takes beyond them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

from dualpipe_jax.inspect.target import Device
from dualpipe_jax.pods import predict
from dualpipe_jax.pods.costs import UnitCosts, find_unit, splits
from dualpipe_jax.pods.results import Compiled, Overheads, Part, Unit
from dualpipe_jax.pods.units import key_of, kind_at, kinds_of
from dualpipe_jax.schedule import Action, CostModel, Op, Schedule, Slot
from dualpipe_jax.schedule.lowering.unit_key import UnitKey

Field = Callable[[Unit], float]


@dataclasses.dataclass(frozen=True)
class UsefulSeconds:
    """Seconds that operations take at the peak of a device.

    Attributes:
      program: seconds of the operations that the program counts.
      unfilled: seconds of the further operations that experts do on room beyond an even load.
    """

    program: float
    unfilled: float = 0.0


def account_of(
    schedule: Schedule,
    costs: UnitCosts,
    compiled: Compiled,
    useful: UsefulSeconds,
    beside: Overheads,
    device: Device,
    placed: CostModel,
) -> tuple[Part, ...]:
    """Divide the seconds of a step into parts that add up to it, on average over ranks.

    Args:
      schedule: the schedule of the step.
      costs: the costs of its units in cycles; see ``unit_costs``.
      compiled: the compiled units.
      useful: the useful seconds of one device.
      beside: cycles of a tick outside its units, and of a step outside its ticks.
      device: the device with the peak and the clock by which cycles become seconds.
      placed: the costs by which actions are placed on ticks; see ``predict.step_cycles``.

    Parts, in this order:
      the program's operations at the peak; then the further operations of all matrix products at the peak, by
        purpose:
      recomputation: operations of backwards beyond twice the forward's.
      capacity not filled: operations on experts' room beyond an even load.
      operations that the program does not count: operations of forwards beyond the program's count, and twice as
        many for their backwards: on empty places, and attention over what a causal mask hides.
      matrix units not full: the time of instructions with matrix products, with all that the compiler has
        fused to them, beyond the time of their operations at the peak.
      no matrix product: all other work.
      waiting for collectives: the waits inside units, for the exchange of tokens between experts.
      idle: the bubble of equal stages; then what unequal stages add to it, or save.
      ticks beside their units: the time of ticks outside units; beside the ticks: pools cleared, gradients
        reduced; the optimizer's update.

    If the operations of any unit were not counted, the parts from "recomputation" to "no matrix product" are
    one.
    """
    usual = {key: cycles for key, cycles in costs.cycles.items() if not key.kinds}
    equal = dataclasses.replace(costs, extra={}, FB=costs.FB, cycles=usual)
    slots = [slot for order in schedule.orders for slot in order]
    ranks = schedule.num_ranks if compiled.at_once is None else min(schedule.num_ranks, compiled.at_once)

    table = predict.table_of(schedule, placed)

    def spans(costs: CostModel) -> tuple[float, float]:
        """Cycles of all ticks of a step, and cycles of its work, summed over slots and divided by ``ranks``."""
        busy = sum(costs.of(slot, schedule.placement) for slot in slots) / ranks
        return predict.span(table, costs, compiled.at_once), busy

    whole, busy = spans(costs)
    even, busy_even = spans(equal)
    sums = _SlotSums(schedule, compiled.units, splits(schedule))
    waits = sum(sums.of(slot, lambda unit: unit.exposed) for slot in slots) / ranks
    work = busy - waits - useful.program * device.clock
    cycles = _work_parts(sums, slots, ranks, useful, device, work) | {
        "waiting for collectives": waits,
        "idle: bubble of equal stages": even - busy_even,
        "idle: stages that are not equal": (whole - busy) - (even - busy_even),
        "ticks beside their units": table.num_ticks * beside.tick,
        "beside the ticks": beside.step,
        "the optimizer's update": compiled.update_cycles,
    }
    parts = (Part(name, value / device.clock) for name, value in cycles.items())
    return Part("the program's operations at the peak", useful.program), *parts


def _work_parts(
    sums: "_SlotSums", slots: list[Slot], ranks: float, useful: UsefulSeconds, device: Device, work: float
) -> dict[str, float]:
    """Cycles of a rank's work beyond the program's operations at the peak, by the names of ``account_of``'s parts."""
    if any(unit.flops is None for unit in sums.units.values()):
        return {"work beyond the peak": work}
    a_cycle = device.flops / device.clock * ranks

    def of_all(field: Field) -> float:
        return sum(sums.of(slot, field) for slot in slots)

    done = of_all(lambda unit: unit.flops or 0.0) / a_cycle
    forwards = [action for slot in slots for action in slot if action.op is Op.F]
    thrice = 3 * sum(sums.action(action, lambda unit: unit.flops or 0.0) for action in forwards) / a_cycle
    inside = of_all(lambda unit: unit.matmuls) / ranks
    program, unfilled = useful.program * device.clock, useful.unfilled * device.clock
    return {
        "recomputation": done - thrice,
        "capacity not filled": unfilled,
        "operations that the program does not count": thrice - program - unfilled,
        "matrix units not full": inside - done,
        "no matrix product": work + program - inside,
    }


@dataclasses.dataclass(frozen=True)
class _SlotSums:
    """Sums of a field of units for the slots of a schedule, by the rules by which ``unit_costs`` sums their cycles."""

    schedule: Schedule
    units: Mapping[UnitKey, Unit]
    halves: bool

    @functools.cached_property
    def kinds(self) -> Mapping[int, str]:
        return kinds_of(self.units)

    def of(self, slot: Slot, field: Field) -> float:
        """The value of ``field`` for a slot: that of its unit, or else the sum over its actions, as in ``stage_costs``.

        Where the usual pair was measured, a pair without a unit of its own counts as that pair, plus what
        each action takes beyond a usual stage's; an action alone then counts for no less than a usual
        stage's.
        """
        own = find_unit(self.units, key_of(slot, self.schedule.placement, self.kinds))
        if own is not None:
            return field(own)
        each = [(self.action(action, field), self._of(action.op, field)) for action in slot]
        pair = self.units.get(UnitKey("FB"))
        if pair is None:
            return sum(of_kind for of_kind, _ in each)
        usual = field(pair) if len(slot) == 2 else each[0][1]
        return usual + sum(max(0.0, of_kind - usual) for of_kind, usual in each)

    def action(self, action: Action, field: Field) -> float:
        """The value of ``field`` for an action alone, by the kind of its stage where that is known."""
        kind = kind_at(action.stage, self.schedule.placement, self.kinds)
        return self._of(action.op, field, kind)

    def _of(self, op: Op, field: Field, kind: str | None = None) -> float:
        def one(name: str) -> float | None:
            usual = self.units.get(UnitKey(name))
            unit = usual if kind is None else self.units.get(UnitKey(name, (kind,)), usual)
            return None if unit is None else field(unit)

        names = ("I", "W") if op is Op.B and self.halves else (op.name,)
        found = [one(name) for name in names]
        if None not in found:
            return sum(value for value in found if value is not None)
        part = {Op.I: 2 / 3, Op.W: 1 / 3}.get(op, 1.0)
        return part * (one("B") or 0.0)
