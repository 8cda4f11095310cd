"""Play a schedule against costs: who waits, for how long, and what is live meanwhile."""

import dataclasses
import math
from collections.abc import Iterable

from dualpipe_jax.schedule.dataflow import Orders, Value, execution_order, made_by, needed_by
from dualpipe_jax.schedule.ir import Op, Placement, Schedule, Slot


@dataclasses.dataclass(frozen=True)
class CostModel:
    """How long each kind of work takes on one stage, in any unit of time.

    Attributes:
      F: a forward.
      I: a backward for the input.
      W: a backward for the weights.
      FB: an overlapped pair of a forward and a full backward; F + I + W, no gain, unless given.
      send: a transfer to another rank, which delays only the receiver; a handover on the same rank is free.

    ``dataclasses.replace`` hands on the FB that was worked out; give it anew when F, I or W changes.

    Raises:
      ValueError: if a cost is negative or not finite.
    """

    F: float = 1.0
    I: float = 1.0
    W: float = 1.0
    FB: float = None  # type: ignore[assignment]  # a float once constructed
    send: float = 0.0

    def __post_init__(self):
        if self.FB is None:
            object.__setattr__(self, "FB", self.F + self.I + self.W)
        wrong = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if not (math.isfinite(getattr(self, field.name)) and getattr(self, field.name) >= 0)
        ]
        if wrong:
            raise ValueError(f"CostModel: costs must be finite and at least 0, got {', '.join(wrong)}")

    @property
    def B(self) -> float:
        """A full backward: I + W."""
        return self.I + self.W

    def of(self, slot: Slot) -> float:
        """Duration of a slot: FB for a pair, else that of its one action."""
        if len(slot) == 2:
            return self.FB
        op = slot[0].op
        return self.F if op is Op.F else self.I if op is Op.I else self.W if op is Op.W else self.I + self.W


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When everything happened in a simulated step. All tuples are indexed by rank.

    Attributes:
      schedule: what was played.
      costs: against what.
      starts: ``starts[rank][index]`` is when slot ``orders[rank][index]`` started; the step starts at 0.
      ends: likewise, when it ended.
      peak_activations: the most (stage, microbatch) pairs live at once on a rank, each from the start of
        its F to the end of its I or B.
      peak_weight_stashes: the most weight gradients owed at once, each from the end of an I to the end
        of its W. A full backward owes none.
      peak_inputs: the most (stage, microbatch) pairs whose inputs are kept, from the start of F to the end
        of B or W: what is live or owed together.
    """

    schedule: Schedule
    costs: CostModel
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    peak_activations: tuple[int, ...]
    peak_weight_stashes: tuple[int, ...]
    peak_inputs: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """When the last slot of all ended."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank worked."""
        return tuple(sum(map(self.costs.of, order)) for order in self.schedule.orders)

    @property
    def idle(self) -> tuple[float, ...]:
        """Time that each rank did not work: makespan - busy."""
        makespan = self.makespan
        return tuple(makespan - busy for busy in self.busy)


def simulate(schedule: Schedule, costs: CostModel | None = None) -> Timeline:
    """Run every slot as early as its rank's order and the data it needs allow.

    Sends are asynchronous: they cost the receiver ``costs.send`` after the end of the producing slot and
    the sender nothing. A pair starts when both of its actions can.

    >>> from dualpipe_jax.schedule import dualpipe
    >>> simulate(dualpipe(4, 8), CostModel(F=1, I=1, W=1)).idle
    (2.0, 2.0, 2.0, 2.0)

    Args:
      schedule: a valid schedule, see ``validate``.
      costs: durations; all 1, a pair 3, when left out.

    Raises:
      ValueError: if the schedule hangs; ``validate`` says where and why.
    """
    costs = CostModel() if costs is None else costs
    ran = execution_order(schedule.placement, schedule.orders)
    if len(ran) < sum(map(len, schedule.orders)):
        raise ValueError(f"simulate: {schedule.name} never ends; call validate(schedule) to see why")
    starts, ends = clock(schedule.placement, schedule.orders, ran, costs)
    peaks = zip(*map(_peaks, schedule.orders), strict=True)
    return Timeline(schedule, costs, tuple(map(tuple, starts)), tuple(map(tuple, ends)), *peaks)


def clock(
    placement: Placement,
    orders: Orders,
    ran: Iterable[tuple[int, int]],
    costs: CostModel,
    made: Iterable[Value] = (),
) -> tuple[list[list[float]], list[list[float]]]:
    """Start and end of the slots that ``execution_order`` found to run; what was ``made`` is there at 0."""
    starts: list[list[float]] = [[] for _ in orders]
    ends: list[list[float]] = [[] for _ in orders]
    made_at = dict.fromkeys(made, 0.0)
    for rank, index in ran:
        slot = orders[rank][index]
        start = ends[rank][-1] if index else 0.0
        for action in slot:
            for value in needed_by(placement, action):
                delay = costs.send if placement.rank_of[value[1]] != rank else 0.0
                start = max(start, made_at[value] + delay)
        end = start + costs.of(slot)
        for made_value in filter(None, map(made_by, slot)):
            made_at[made_value] = end
        starts[rank].append(start)
        ends[rank].append(end)
    return starts, ends


def _peaks(order: tuple[Slot, ...]) -> tuple[int, int, int]:
    """Most activations live, weight gradients owed, and both together. Needs no clock: a rank is serial."""
    live = owed = most_live = most_owed = most_both = 0
    for slot in order:
        ops = [action.op for action in slot]
        live += ops.count(Op.F)
        most_live, most_both = max(most_live, live), max(most_both, live + owed)
        live -= ops.count(Op.B) + ops.count(Op.I)
        owed += ops.count(Op.I) - ops.count(Op.W)
        most_owed = max(most_owed, owed)
    return most_live, most_owed, most_both
