"""DualPipe and DualPipeV: forwards and backwards of two streams of microbatches meet on every rank.

Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 3.2.1; the order is that of DeepSeek's
published code, action for action.
"""

from collections import Counter, deque
from collections.abc import Iterable

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.schedule.costs import CostModel
from dualpipe_jax.schedule.ir import Action, Op, Placement, Schedule, Slot
from dualpipe_jax.schedule.recipes.classic import check_counts, check_two_pipes

_Step = tuple[tuple[Op, int], ...]
"""A slot whose microbatches are not numbered yet: one (op, stage), or two for a pair."""


@typechecked
def dualpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipe: two pipes in opposite directions, so each rank holds two stages (2x parameters).

    With PP ranks, B = I + W and FB the cost of an overlapped pair, the bubble is (PP/2 - 1)(FB + B - 3W)
    when F = I >= W and there are at least 2 PP - 2 microbatches (the published code asks for 2 PP); at most
    PP + 1 activations are live on any rank. With fewer microbatches each rank keeps to the order for
    2 PP - 2 and leaves out the microbatches that do not exist, which idles more. The ranks must be even in number,
    the microbatches too.

    >>> [str(slot[0]) for slot in dualpipe(2, 4).orders[0][-3:]]
    ['3B1', '0I1', '0W1']

    Args:
      num_ranks: pipeline ranks.
      num_microbatches: microbatches of the step, both pipes together; each pipe gets half.

    Raises:
      ValueError: if a count is odd or too small; the message names the nearest counts that are accepted.
    """
    check_two_pipes("dualpipe", num_ranks, num_microbatches, instead="dualpipe_v")
    depth = num_ranks // 2
    orders = []
    for rank in range(num_ranks):
        mirror = num_ranks - 1 - rank
        stages = rank, num_ranks + mirror  # in pipe 0, in pipe 1
        near, far = stages if rank < depth else stages[::-1]
        orders.append(_eight_steps(near, far, min(rank, mirror), depth, num_microbatches // 2))
    return Schedule("dualpipe", Placement.bidirectional(num_ranks), num_microbatches, tuple(orders))


def dualpipe_bubble(num_ranks: int, num_microbatches: int, costs: CostModel) -> float:
    """Published bubble of ``dualpipe``, (num_ranks / 2 - 1)(FB + B - 3W).

    Exact for F = I >= W, max(F, B) <= FB <= F + B and num_microbatches >= 2 num_ranks - 2. With W > I it is
    far too low, even below zero; with I different from F the largest idle may be on either side of it.
    With h = num_ranks / 2, whatever F, I and W are, the largest idle is
    (h - 1)(FB + max(0, W - I) - 2W + max(F, I)) - min(F, (h - 1) max(0, I - F)).
    """
    del num_microbatches
    return (num_ranks / 2 - 1) * (costs.FB + costs.B - 3 * costs.W)


@typechecked
def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipeV: DualPipe cut in half and folded into one pipe, there and back over any number of ranks.

    A rank holds two stages of half the size, so parameters are 1x; the bubble is that of DualPipe with
    PP = 2 r stages on r ranks, in its own half-size units, and at most 2 r + 1 half-size activations are
    live on any rank. That holds from 2 r - 1 microbatches on (the published code asks for 2 r); fewer are
    served as by DualPipe.

    Source: Sea AI Lab's "cut-in-half" note on DualPipe, and DeepSeek's published DualPipeV.

    >>> from dualpipe_jax.schedule import format_grid, dualpipe_v
    >>> print(format_grid(dualpipe_v(2, 4)))
    # dualpipe_v, ranks 2, microbatches 4, pipes (0 1 1 0)
    rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1     0F3+3B1 3F2+0B0 3B2 3F3+0B1 3B3 0I2 0W2 0I3 0W3
    rank 1: 1F0 2F0 1F1 2F1 1F2 2B0 2F2+1B0 1F3+2B1 2F3+1B1 2B2 1B2     2I3 1I3 2W3 1W3

    Raises:
      ValueError: if a count is below 1.
    """
    check_counts("dualpipe_v", num_ranks, num_microbatches)
    orders = (
        _eight_steps(rank, 2 * num_ranks - 1 - rank, rank, num_ranks, num_microbatches)
        for rank in range(num_ranks)
    )
    return Schedule("dualpipe_v", Placement.v(num_ranks), num_microbatches, tuple(orders))


def dualpipe_v_bubble(num_ranks: int, num_microbatches: int, costs: CostModel) -> float:
    """Published bubble of ``dualpipe_v``, (num_ranks - 1)(FB + B - 3W) for costs of a stage, half a rank's.

    It is that of ``dualpipe`` on twice the ranks, exact under the same conditions, here for
    num_microbatches >= 2 num_ranks - 1.
    """
    return dualpipe_bubble(2 * num_ranks, num_microbatches, costs)


def _eight_steps(near: int, far: int, hops: int, depth: int, microbatches: int) -> tuple[Slot, ...]:
    """The order of one rank, ``hops`` away from the end where microbatches enter its half of the pipe.

    They pass its stage ``near`` on the way in, and others pass its stage ``far`` on their way out; the half
    has ``depth`` ranks. ``microbatches`` pass each of the two stages. The steps are made for at least
    2 depth - 1 microbatches, and actions of microbatches that do not exist are left out.
    """
    enough = max(microbatches, 2 * depth - 1)
    left = depth - hops - 1
    f_near, f_far = (Op.F, near), (Op.F, far)
    b_near, b_far = (Op.B, near), (Op.B, far)
    i_near, i_far = (Op.I, near), (Op.I, far)
    w = (Op.W, near)  # whichever stage's turn it is

    main: list[_Step] = [(f_near, b_far), (f_far, b_near)] * (enough - 2 * depth + hops + 1)
    if left == 0 and main:
        main[:1] = [(f_near,), (b_far,)]  # in series: everyone else waits for what they hand over
    drain: list[_Step] = [(b_far,), (b_near,)] * (hops + 1)
    owing: list[_Step] = [(i_far,), (i_near,)] * (hops + 1)
    steps: list[_Step] = [
        *[(f_near,)] * (2 * left),
        *[(f_near,), (f_far,)] * (hops + 1),
        *[(i_far,), (w,), (f_far,)] * left,
        *main,
        *[(b_far,), (f_far, b_near)] * left,
        *drain[: hops + 1],
        *owing[hops + 1 :],
        *[(w,), (i_near,)] * left,
        *[(w,)] * (hops + 1),
    ]
    slots = (tuple(a for a in slot if a.microbatch < microbatches) for slot in _number(steps))
    return tuple(filter(None, slots))


def _number(steps: Iterable[_Step]) -> Iterable[Slot]:
    """Give every action its microbatch: ascending for each stage, W's in the order in which they fell due."""
    forwards: Counter[int] = Counter()
    backwards: Counter[int] = Counter()
    owed: deque[Action] = deque()

    def number(op: Op, stage: int) -> Action:
        if op is Op.W:
            return owed.popleft()
        seen = forwards if op is Op.F else backwards
        microbatch = seen[stage]
        seen[stage] += 1
        if op is Op.I:
            owed.append(Action(stage, Op.W, microbatch))
        return Action(stage, op, microbatch)

    for step in steps:
        yield tuple(number(op, stage) for op, stage in step)
