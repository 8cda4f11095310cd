"""ZB-V, V-Half, V-Min: two stages per rank on a V and split backwards; one mechanism for three sizes of memory.

A building block says in which tick a microbatch does its F and its I at each stage. A tick is long enough for
one F, I or W of a stage, and the next microbatch follows six ticks later: a rank owes each microbatch two of
each. The faster a microbatch walks there and back, the less is live meanwhile. A rank runs an F or I that is due as
soon as it can, a W when it would otherwise idle or has no place for an F, and an F or I that is due later
rather than nothing.

Sources: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241) for ZB-V; Qi et al., "Pipeline
Parallelism with Controllable Memory" (arXiv 2405.15362) for building blocks, V-Half and V-Min.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.schedule.costs import CostModel
from dualpipe_jax.schedule.ir import Action, Op, Placement, Schedule, Slot
from dualpipe_jax.schedule.recipes.classic import check_counts

_F, _I = Op.F, Op.I  # looked up once: attributes of an Enum are slow

_PERIOD = 6
"""Ticks from one microbatch to the next: F, I and W of a rank's two stages."""


@typechecked
def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: no rank idles between its first slot and its last when F = I = W, with the memory of 1F1B.

    That holds for num_microbatches >= 2 num_ranks - 1. At most 2 num_ranks stages' activations are live on a
    rank, num_ranks of its share of the model, and no more inputs are kept for W's. Takes any counts from 1.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241).

    >>> [str(slot[0]) for slot in zb_v(2, 2).orders[1]]
    ['1F0', '2F0', '1F1', '2F1', '2I0', '1I0', '2I1', '1I1', '2W0', '1W0', '2W1', '1W1']

    Raises:
      ValueError: if a count is below 1.
    """
    check_counts("zb_v", num_ranks, num_microbatches)
    return _repeat("zb_v", _walk(num_ranks, 3, 3), num_microbatches, num_ranks)


def zb_v_bubble(num_ranks: int, num_microbatches: int, costs: CostModel) -> float:
    """Bubble of ``zb_v`` in a step that ends for all at once, (num_ranks - 1) F for costs of a stage.

    The last rank waits that long for its first forward; the published bubble, 0, leaves that out. Exact for
    F = I = W and num_microbatches >= num_ranks; otherwise the idle may be above it, never below. For
    num_microbatches >= 2 num_ranks it is (num_ranks - 1) I where F <= I and I/2 <= W <= I.
    """
    del num_microbatches
    return (num_ranks - 1) * costs.F


@typechecked
def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Half: half of 1F1B's activations, (num_ranks + 2) // 2 of a rank's share, inputs kept for W's included.

    For F = I = W and num_microbatches >= num_ranks a rank idles 3 num_ranks - 7 of a stage's forwards if
    num_ranks is even, 3 num_ranks - 4 if it is odd, and at least num_ranks - 1. Takes any counts from 1.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362).

    >>> from dualpipe_jax.schedule import format_grid, v_half
    >>> print(format_grid(v_half(2, 4)))
    # v_half, ranks 2, microbatches 4, pipes (0 1 1 0)
    rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 3F2 0F3 0I1 3I2 0W1 3W2 3F3 3I3 0I2 3W3 0I3 0W2 0W3
    rank 1: 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2W1 1F3 1W1 2F3 2I2 1I2 2I3 1I3 2W2 1W2 2W3 1W3

    Raises:
      ValueError: if a count is below 1.
    """
    check_counts("v_half", num_ranks, num_microbatches)
    walk = _walk(num_ranks, 2, 1, end=0 if num_ranks % 2 else 3)
    return _repeat("v_half", walk, num_microbatches, (num_ranks + 2) // 2)


def v_half_bubble(num_ranks: int, num_microbatches: int, costs: CostModel) -> float:
    """Published bubble of ``v_half``, num_ranks (F + I + W) for costs of a stage: half of 1F1B's.

    An estimate for many ranks, not exact: for F = I = W and num_microbatches >= num_ranks > 2 the idle is 7
    forwards below it (4 on an odd number of ranks); with other costs it may be nearly twice as much.
    """
    del num_microbatches
    return num_ranks * (costs.F + costs.I + costs.W)


@typechecked
def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """V-Min: a third of 1F1B's activations, (num_ranks + 4) // 3 of a rank's share, inputs kept for W's included.

    For F = I = W and num_microbatches >= num_ranks a rank idles 4 num_ranks - (7, 5, 9)[num_ranks % 3] of a
    stage's forwards, and at least num_ranks - 1. Fragile: microbatches never pause on their way, so with
    other costs they hold each other up time and again. On 16 ranks with F : I : W = 1 : 1.64 : 0.97 and 64
    microbatches it idles more than twice as long as 1F1B. Takes any counts from 1.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362).

    >>> from dualpipe_jax.schedule import format_grid, v_min
    >>> print(format_grid(v_min(2, 4)))
    # v_min, ranks 2, microbatches 4, pipes (0 1 1 0)
    rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 0F3 3F2 0I1 3I2 0W1 3W2 3F3 0I2 3I3 0W2 3W3 0I3 0W3
    rank 1: 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 2I1 1W0 2F2 1I1 2W1 1F3 2I2 1W1 2F3 1I2 2W2 1W2 2I3 1I3 2W3 1W3

    Raises:
      ValueError: if a count is below 1.
    """
    check_counts("v_min", num_ranks, num_microbatches)
    # Of all pauses up to 3, those that idle least on 2 to 16 ranks, for F = I = W and then for 1 : 1.64 : 0.97.
    end, turn = ((1, 2), (1, 0), (3, 2))[num_ranks % 3]
    return _repeat("v_min", _walk(num_ranks, 1, 1, end, turn), num_microbatches, (num_ranks + 4) // 3)


def v_min_bubble(num_ranks: int, num_microbatches: int, costs: CostModel) -> float:
    """Published bubble of ``v_min``, 4/3 num_ranks (F + I + W) for costs of a stage: two thirds of 1F1B's.

    An estimate for many ranks, not exact: for F = I = W and num_microbatches >= num_ranks > 2 the idle is 5
    to 9 forwards below it; with other costs it grows with every microbatch and may be several times as much.
    """
    del num_microbatches
    return 4 / 3 * num_ranks * (costs.F + costs.I + costs.W)


def _walk(num_ranks: int, down: int, up: int, end: int = 0, turn: int = 0) -> tuple[int, ...]:
    """The building block: ticks of one microbatch's F at each stage, then of its I at each, last stage first.

    It takes ``down`` ticks from rank to rank away from rank 0, forward and backward, and ``up`` back towards
    it; one tick from stage to stage on the same rank, with pauses at the ``end`` of the forward and at the
    backward's ``turn``.
    """
    away, back = [down] * (num_ranks - 1), [up] * (num_ranks - 1)
    hops = [*away, 1, *back, 1 + end, *away, 1 + turn, *back]
    return tuple(itertools.accumulate(hops, initial=0))


def _repeat(name: str, walk: Sequence[int], num_microbatches: int, shares: int) -> Schedule:
    """Start one microbatch per period on the walk, with places for ``2 * shares`` stage inputs on each rank.

    All ranks choose by the actions of earlier ticks only, so this is a simulation with F = I = W.
    """
    num_ranks = len(walk) // 4
    # The number of F's and I's that each stage ran. The last entry has all microbatches: stage 0 reads it as [-1].
    forwards, backwards = ([0] * (2 * num_ranks) + [num_microbatches] for _ in range(2))
    ranks = [_action_chooser(rank, walk, forwards, backwards, 2 * shares) for rank in range(num_ranks)]
    orders: list[list[Slot]] = [[] for _ in ranks]
    left = 6 * num_ranks * num_microbatches
    while left:
        for order, action in zip(orders, [choose() for choose in ranks], strict=True):
            if action is None:
                continue
            stage, op, _ = action
            if op is _F:
                forwards[stage] += 1
            elif op is _I:
                backwards[stage] += 1
            order.append((action,))
            left -= 1
    return Schedule(name, Placement.v(num_ranks), num_microbatches, tuple(map(tuple, orders)))


def _action_chooser(
    rank: int, walk: Sequence[int], forwards: Sequence[int], backwards: Sequence[int], places: int
) -> Callable[[], Action | None]:
    """A function that returns a rank's next action: the F or I due first, else a W, else an F or I due later.

    Microbatches come in sequence, so counts tell which actions are ready. An F starts only if its stage leaves the
    rank's other stage the places that it needs in the block. The schedule never hangs: the oldest microbatch finds
    its stage empty and a place left for it, once W's have made room.
    """
    last, num_microbatches = len(forwards) - 2, forwards[-1]
    plan = []
    for stage, other in ((rank, last - rank), (last - rank, rank)):
        ticks_live = walk[2 * last + 1 - other] - walk[other] + 1
        most = max(1, places - math.ceil(ticks_live / _PERIOD))
        plan.append((stage, walk[stage], walk[2 * last + 1 - stage], most))
    owed: deque[Action] = deque()
    kept = 0  # inputs, from F to W

    def choose() -> Action | None:
        nonlocal kept
        earliest = first = math.inf
        action = None
        for stage, forward, backward, most in plan:
            f, i = forwards[stage], backwards[stage]
            if f < num_microbatches:
                due = forward + _PERIOD * f
                earliest = min(earliest, due)
                if due < first and f < forwards[stage - 1] and f - i < most and kept < places:
                    first, action = due, Action(stage, _F, f)
            if i < num_microbatches:
                due = backward + _PERIOD * i
                earliest = min(earliest, due)
                if due < first and i < f and i < backwards[stage + 1]:
                    first, action = due, Action(stage, _I, i)
        if owed and (action is None or first > earliest):
            kept -= 1
            return owed.popleft()
        if action and action.op is _I:
            owed.append(action._replace(op=Op.W))
        elif action:
            kept += 1
        return action

    return choose
