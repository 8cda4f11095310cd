"""The parts of a step's time: the program's operations at the peak, and all that the prediction takes beyond them."""

import dataclasses
from collections.abc import Callable, Iterable

from dualpipe_jax.inspect.target import Device
from dualpipe_jax.pods import predict
from dualpipe_jax.pods.costs import UnitCosts, splits, unit_costs
from dualpipe_jax.pods.results import Compiled, Overheads, Part, Unit
from dualpipe_jax.schedule import CostModel, Op, Schedule, Slot


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

    def total(slots: Iterable[Slot], field: Callable[[Unit], float]) -> float:
        """The sum of a field of units over slots, by the rules by which ``unit_costs`` sums their cycles."""
        units = {key: dataclasses.replace(unit, cycles=field(unit)) for key, unit in compiled.units.items()}
        of_field = unit_costs(units, 0.0, split=splits(schedule))
        return sum(of_field.of(slot, schedule.placement) for slot in slots)

    waits = total(slots, lambda unit: unit.exposed) / ranks
    work = busy - waits - useful.program * device.clock
    if any(unit.flops is None for unit in compiled.units.values()):
        parts_of_work = {"work beyond the peak": work}
    else:
        a_cycle = device.flops / device.clock * ranks
        forwards = [(action,) for slot in slots for action in slot if action.op is Op.F]
        done, forward = (total(some, lambda unit: unit.flops or 0.0) / a_cycle for some in (slots, forwards))
        inside = total(slots, lambda unit: unit.matmuls) / ranks
        program, unfilled = useful.program * device.clock, useful.unfilled * device.clock
        parts_of_work = {
            "recomputation": done - 3 * forward,
            "capacity not filled": unfilled,
            "operations that the program does not count": 3 * forward - program - unfilled,
            "matrix units not full": inside - done,
            "no matrix product": work + program - inside,
        }
    cycles = parts_of_work | {
        "waiting for collectives": waits,
        "idle: bubble of equal stages": even - busy_even,
        "idle: stages that are not equal": (whole - busy) - (even - busy_even),
        "ticks beside their units": table.num_ticks * beside.tick,
        "beside the ticks": beside.step,
        "the optimizer's update": compiled.update_cycles,
    }
    parts = (Part(name, value / device.clock) for name, value in cycles.items())
    return Part("the program's operations at the peak", useful.program), *parts
