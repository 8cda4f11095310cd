"""What a step's time goes to: from the program's operations at the peak to the step as it is predicted."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

from dualpipe_jax.inspect.target import Device
from dualpipe_jax.pods import predict
from dualpipe_jax.pods.costs import UnitCosts, of_unit, splits
from dualpipe_jax.pods.results import Compiled, Overheads, Part, Unit
from dualpipe_jax.pods.units import key_of, kind_at, kinds_of
from dualpipe_jax.schedule import Action, CostModel, Op, Schedule, Slot, lower
from dualpipe_jax.schedule.lowering.unit_key import UnitKey

Field = Callable[[Unit], float]


@dataclasses.dataclass(frozen=True)
class Useful:
    """Seconds at the peak of a device.

    Attributes:
      program: of the operations that the program counts.
      unfilled: of those that experts' room beyond an even load takes besides.
    """

    program: float
    unfilled: float = 0.0


def account_of(
    schedule: Schedule,
    costs: UnitCosts,
    compiled: Compiled,
    useful: Useful,
    beside: Overheads,
    device: Device,
    placed: CostModel | None = None,
) -> tuple[Part, ...]:
    """What a step's seconds go to, on average over ranks; the parts add up to the step.

    Args:
      schedule, costs: in cycles, see ``unit_costs``.
      compiled: its units.
      useful: of one device.
      beside: cycles of a tick beside its units, and of a step beside its ticks.
      device: whose peak and clock are meant.
      placed: see ``predict.step_cycles``.

    Parts, in this order:
      the program's operations at the peak; then what all matrix products do at the peak besides, by what they are for:
      recomputation: operations of backwards beyond twice the forward's.
      capacity not filled: of experts' room beyond an even load.
      operations that the program does not count: what forwards do beyond it, and as much twice in backwards; empty
        places, and attention over what a causal mask hides.
      matrix units not full: instructions with matrix products beyond these operations' time at the peak, with all that
        the compiler has fused to them.
      no matrix product: all other work.
      waiting for collectives: of units, the exchange of tokens between experts.
      idle: bubble of equal stages; stages that are not equal: what these add, or save.
      ticks beside their units; beside the ticks: pools cleared, gradients reduced; the optimizer's update.

    Where nobody counted the units' operations, those from recomputation to no matrix product are one part.
    """
    usual = {key: cycles for key, cycles in costs.cycles.items() if not key.kinds}
    equal = dataclasses.replace(costs, extra={}, FB=costs.FB, cycles=usual)
    slots = [slot for order in schedule.orders for slot in order]
    ranks = schedule.num_ranks if compiled.at_once is None else min(schedule.num_ranks, compiled.at_once)

    def spans(costs: CostModel) -> tuple[float, float]:
        """Cycles of a step in ticks, and of them those in which a rank, or what ranks share, works."""
        busy = sum(costs.of(slot, schedule.placement) for slot in slots) / ranks
        return predict.span(lower(schedule, placed or costs), costs, compiled.at_once), busy

    whole, busy = spans(costs)
    even, busy_even = spans(equal)
    sums = _Sums(schedule, compiled.units, splits(schedule))
    waits = sum(sums.of(slot, lambda unit: unit.exposed) for slot in slots) / ranks
    work = busy - waits - useful.program * device.clock
    cycles = _work(sums, slots, ranks, useful, device, work) | {
        "waiting for collectives": waits,
        "idle: bubble of equal stages": even - busy_even,
        "idle: stages that are not equal": (whole - busy) - (even - busy_even),
        "ticks beside their units": lower(schedule, placed or costs).num_ticks * beside.tick,
        "beside the ticks": beside.step,
        "the optimizer's update": compiled.update_cycles,
    }
    parts = (Part(name, value / device.clock) for name, value in cycles.items())
    return Part("the program's operations at the peak", useful.program), *parts


def _work(
    sums: "_Sums", slots: list[Slot], ranks: float, useful: Useful, device: Device, work: float
) -> dict[str, float]:
    """Cycles of a rank's work beyond the program's operations at the peak, by what it is."""
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
class _Sums:
    """Figures of slots, as ``unit_costs`` makes their cycles of units."""

    schedule: Schedule
    units: Mapping[UnitKey, Unit]
    halves: bool

    @functools.cached_property
    def kinds(self) -> Mapping[int, str]:
        return kinds_of(self.units)

    def of(self, slot: Slot, field: Field) -> float:
        """The value of ``field`` for a slot: that of its unit, or else the sum of its parts, as in ``stage_costs``.

        Next to a measured pair, a part counts for no less than that of a usual stage.
        """
        own = of_unit(self.units, key_of(slot, self.schedule.placement, self.kinds))
        if own is not None:
            return field(own)
        each = [(self.action(action, field), self._of(action.op, field)) for action in slot]
        pair = self.units.get(UnitKey("FB"))
        if pair is None:
            return sum(of_kind for of_kind, _ in each)
        usual = field(pair) if len(slot) == 2 else each[0][1]
        return usual + sum(max(0.0, of_kind - usual) for of_kind, usual in each)

    def action(self, action: Action, field: Field) -> float:
        """A figure of an action alone, by the kind of its stage where that is known."""
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
