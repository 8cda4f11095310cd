"""Simulate a schedule with given costs: which ranks wait, for how long, and what is live meanwhile."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.schedule.costs import CostModel, MemoryModel
from dualpipe_jax.schedule.dataflow import Orders, Value, complete_execution_order, made_by, needed_by
from dualpipe_jax.schedule.ir import Action, Op, Placement, Schedule, Slot

if TYPE_CHECKING:
    import numpy as np


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The start and end of every slot of a simulated step. All tuples are indexed by rank.

    >>> from dualpipe_jax.schedule import one_f_one_b, simulate
    >>> timeline = simulate(one_f_one_b(2, 3))
    >>> timeline.makespan, timeline.busy, timeline.bubble
    (12.0, (9.0, 9.0), 0.25)
    >>> timeline.starts[0]
    (0.0, 1.0, 4.0, 6.0, 7.0, 10.0)

    Attributes:
      schedule: the schedule that was simulated.
      costs: the durations of its actions; times are in their unit.
      starts: ``starts[rank][index]`` is when slot ``orders[rank][index]`` started; the step starts at 0.
      ends: likewise, when it ended.
    """

    schedule: Schedule
    costs: CostModel
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @functools.cached_property
    def makespan(self) -> float:
        """The end of the last slot of all ranks."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @functools.cached_property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank worked."""
        placement = self.schedule.placement
        return tuple(sum(self.costs.of(slot, placement) for slot in order) for order in self.schedule.orders)

    @functools.cached_property
    def idle(self) -> tuple[float, ...]:
        """Time that each rank did not work: makespan - busy."""
        makespan = self.makespan
        return tuple(makespan - busy for busy in self.busy)

    @functools.cached_property
    def bubble(self) -> float:
        """The share of all ranks' time in which they idle."""
        makespan = self.makespan
        return sum(self.idle) / (self.schedule.num_ranks * makespan) if makespan else 0.0

    @functools.cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """The most (stage, microbatch) pairs live at once on each rank, from the start of F to the end of I or B."""
        return self._peak_counts(MemoryModel(residual_i=1))

    @functools.cached_property
    def peak_weight_stashes(self) -> tuple[int, ...]:
        """The most weight gradients owed at once on each rank, each from an I to the end of its W.

        A full backward owes none.
        """
        return self._peak_counts(MemoryModel(residual_i=0, stash=1))

    @functools.cached_property
    def peak_inputs(self) -> tuple[int, ...]:
        """The most stage inputs kept at once on each rank, each from the start of F to the end of B or W."""
        return self._peak_counts(MemoryModel(residual_i=0, boundary=1))

    def _peak_counts(self, counted: MemoryModel) -> tuple[int, ...]:
        return tuple(map(int, self.memory(counted)))

    def memory(self, sizes: MemoryModel | None = None) -> tuple[float, ...]:
        """The most memory that each rank keeps at once, in the unit of ``sizes``; by default, its live activations."""
        sizes = MemoryModel() if sizes is None else sizes
        # Durations do not matter: a rank runs its slots one after the other.
        return tuple(
            _peak(sizes.at_rest(self.schedule.placement, rank), order, sizes)
            for rank, order in enumerate(self.schedule.orders)
        )

    def memory_over_time(
        self, rank: int, sizes: MemoryModel | None = None
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The times at which a rank's memory changes, and its size from each of them on.

        Returns (times, kept), of the same length: times ascend from 0, where the step starts with the
        memory of ``MemoryModel.at_rest`` alone.
        """
        sizes = MemoryModel() if sizes is None else sizes
        kept = sizes.at_rest(self.schedule.placement, rank)
        times, amounts = [0.0], [kept]
        changes = _memory_changes(self.schedule.orders[rank], sizes)
        for (taken, freed), start, end in zip(changes, self.starts[rank], self.ends[rank], strict=True):
            for time, change in ((start, taken), (end, -freed)):
                if change:
                    kept += change
                    times.append(time)
                    amounts.append(kept)
        return tuple(times), tuple(amounts)


def _peak(kept: float, order: Sequence[Slot], sizes: MemoryModel) -> float:
    most = kept
    for taken, freed in _memory_changes(order, sizes):
        kept += taken
        most = max(most, kept)
        kept -= freed
    return most


def _memory_changes(order: Sequence[Slot], sizes: MemoryModel) -> Iterator[tuple[float, float]]:
    """For each slot, the memory that it takes when it starts, and the memory that it frees when it ends."""
    by_op = sizes.before_and_after
    for slot in order:
        taken, freed = by_op[slot[0].op]
        for action in slot[1:]:
            more, less = by_op[action.op]
            taken, freed = taken + more, freed + less
        yield taken, freed


@typechecked
def simulate(schedule: Schedule, costs: CostModel | None = None) -> Timeline:
    """Run every slot as early as its rank's order and the data it needs allow.

    Sends cost the receiver ``costs.send`` after the end of the producing slot, and the sender nothing
    unless ``costs.blocking``. A pair starts when both of its actions can.

    >>> from dualpipe_jax.schedule import dualpipe
    >>> simulate(dualpipe(4, 8), CostModel(F=1, I=1, W=1)).idle
    (2.0, 2.0, 2.0, 2.0)

    Args:
      schedule: a valid schedule, see ``validate``.
      costs: durations; all 1, a pair 3, when left out.

    Raises:
      ValueError: if the schedule hangs (``validate`` says where and why), or if its makespan is not finite.
    """
    costs = CostModel() if costs is None else costs
    ran = complete_execution_order(schedule, "simulate")
    starts, ends = clock(schedule.placement, schedule.orders, ran, costs)
    if not all(math.isfinite(end[-1]) for end in ends if end):
        raise ValueError(
            f"simulate: {schedule.name} takes longer than a number can say under {costs}; "
            "give costs in a larger unit of time"
        )
    return Timeline(schedule, costs, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def jittered(
    schedule: Schedule, costs: CostModel | None = None, jitter: float = 0.1, runs: int = 200, seed: int = 0
) -> "np.ndarray":
    """Makespans, float64 [runs], ascending, where the time of each slot varies and the orders stay as they are.

    The duration of every slot in every run has a random factor of its own, log-normal with mean 1 and standard
    deviation ``jitter``. Transfer times do not vary. Schedules of the same shape with the same seed get the
    same factors.

    >>> from dualpipe_jax.schedule import gpipe
    >>> spread = jittered(gpipe(4, 8), jitter=0.1)
    >>> bool(simulate(gpipe(4, 8)).makespan < spread[100] < spread[190])
    True

    Raises:
      ValueError: if ``jitter`` is negative or not finite, ``runs`` is below 1, or the schedule hangs.
    """
    if not (math.isfinite(jitter) and jitter >= 0) or runs < 1:
        raise ValueError(
            f"jittered: got jitter={jitter}, runs={runs}; jitter is a share of a slot's time, at least 0 and "
            "finite, such as 0.1, and there must be a run"
        )
    import numpy as np

    # The square of a large jitter overflows; of a small one, the logarithm of 1 plus it is 0.
    spread = math.sqrt(math.log1p(jitter**2) if jitter < 1 else 2 * math.log(math.hypot(1, jitter)))
    rng = np.random.default_rng(seed)

    def vary(cost: float) -> np.ndarray:
        return cost * np.exp(spread * rng.standard_normal(runs) - spread**2 / 2)

    ran, costs = complete_execution_order(schedule, "simulate"), CostModel() if costs is None else costs
    _, ends = clock(schedule.placement, schedule.orders, ran, costs, vary=vary, latest=np.maximum)
    return np.sort(np.max([end[-1] for end in ends if len(end)], axis=0))


def clock(
    placement: Placement,
    orders: Orders,
    ran: Iterable[tuple[int, int]],
    costs: CostModel,
    made: Iterable[Value] = (),
    *,
    vary: Callable[[float], Any] = float,
    latest: Callable[[Any, Any], Any] = max,
) -> tuple[list[list[Any]], list[list[Any]]]:
    """Start and end of the slots ``ran``, as ``execution_order`` returns them; the values ``made`` exist at time 0.

    ``vary`` turns a slot's cost into its duration, and ``latest`` returns the later of two times. Times may be
    numbers, or arrays with one entry for each of many runs.
    """
    starts: list[list[Any]] = [[] for _ in orders]
    ends: list[list[Any]] = [[] for _ in orders]
    made_at: dict[Value, Any] = dict.fromkeys(made, 0.0)
    free_at: list[Any] = [0.0] * len(orders)
    for rank, index in ran:
        slot = orders[rank][index]
        start = free_at[rank]
        for action in slot:
            for value in needed_by(placement, action):
                start = latest(start, made_at[value] + costs.transfer(placement.rank_of[value[1]], rank))
        end = free_at[rank] = start + vary(costs.of(slot, placement))
        for action in slot:
            for value in made_by(action):
                made_at[value] = end
        if costs.blocking:
            # Not in place: ``end`` may be the same array.
            free_at[rank] = end + blocking_send_time(placement, slot, costs)
        starts[rank].append(start)
        ends[rank].append(end)
    return starts, ends


def blocking_send_time(placement: Placement, slot: Slot, costs: CostModel) -> float:
    """How long a slot's blocking sends keep its rank from the next slot: as long as the longest of them."""
    if not costs.blocking:
        return 0.0
    return max(
        costs.transfer(placement.rank_of[action.stage], reading_rank(placement, action)) for action in slot
    )


def reading_rank(placement: Placement, action: Action) -> int:
    """The rank that reads the output of an action: its own rank if no other stage reads it."""
    stage, op, _ = action
    if op is Op.W or (placement.is_last(stage) if op is Op.F else placement.is_first(stage)):
        return placement.rank_of[stage]
    return placement.rank_of[stage + 1 if op is Op.F else stage - 1]
