"""DualPipe and DualPipeV: forwards and backwards of two streams of microbatches meet on every rank.

Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 3.2.1; the order is that of DeepSeek's
published code, action for action.
"""

from collections import Counter, deque
from collections.abc import Iterable

from dualpipe_jax.schedule.ir import Action, Op, Placement, Schedule, Slot

_Step = tuple[tuple[Op, int], ...]
"""A slot whose microbatches are not numbered yet: one (op, stage), or two for a pair."""


def dualpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipe: two pipes in opposite directions, so each rank holds two stages (2x parameters).

    With PP ranks, B = I + W and FB the cost of an overlapped pair, the bubble is (PP/2 - 1)(FB + B - 3W)
    when F = I >= W, and at most PP + 1 activations are live on any rank. The ranks must be even in number,
    the microbatches too, and at least 2 PP - 2 (the published code asks for 2 PP).

    >>> [str(slot[0]) for slot in dualpipe(2, 4).orders[0][-3:]]
    ['3B1', '0I1', '0W1']

    Args:
      num_ranks: pipeline ranks.
      num_microbatches: microbatches of the step, both pipes together; each pipe gets half.

    Raises:
      ValueError: for counts that the eight steps cannot serve; says which are the nearest they can.
    """
    _check_dualpipe(num_ranks, num_microbatches)
    depth = num_ranks // 2
    orders = []
    for rank in range(num_ranks):
        mirror = num_ranks - 1 - rank
        stages = rank, num_ranks + mirror  # in pipe 0, in pipe 1
        near, far = stages if rank < depth else stages[::-1]
        orders.append(_eight_steps(near, far, min(rank, mirror), depth, num_microbatches // 2))
    return Schedule("dualpipe", Placement.bidirectional(num_ranks), num_microbatches, tuple(orders))


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipeV: DualPipe cut in half and folded into one pipe, there and back over any number of ranks.

    A rank holds two stages of half the size, so parameters are 1x; the bubble is that of DualPipe with
    PP = 2 r stages on r ranks, in its own half-size units, and at most 2 r + 1 half-size activations are
    live on any rank. Needs at least 2 r - 1 microbatches (the published code asks for 2 r).

    Source: Sea AI Lab's "cut-in-half" note on DualPipe, and DeepSeek's published DualPipeV.

    Raises:
      ValueError: for counts that the eight steps cannot serve; says which are the nearest they can.
    """
    _check_dualpipe_v(num_ranks, num_microbatches)
    orders = (
        _eight_steps(rank, 2 * num_ranks - 1 - rank, rank, num_ranks, num_microbatches)
        for rank in range(num_ranks)
    )
    return Schedule("dualpipe_v", Placement.v(num_ranks), num_microbatches, tuple(orders))


def _eight_steps(near: int, far: int, hops: int, depth: int, microbatches: int) -> tuple[Slot, ...]:
    """The order of one rank, ``hops`` away from the end where microbatches enter its half of the pipe.

    They pass its stage ``near`` on the way in and others pass its stage ``far`` on their way out;
    ``depth`` ranks make the half. Each of the two stages sees ``microbatches`` of them.
    """
    left = depth - hops - 1
    f_near, f_far = (Op.F, near), (Op.F, far)
    b_near, b_far = (Op.B, near), (Op.B, far)
    i_near, i_far = (Op.I, near), (Op.I, far)
    w = (Op.W, near)  # whichever stage's turn it is

    main: list[_Step] = [(f_near, b_far), (f_far, b_near)] * (microbatches - 2 * depth + hops + 1)
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
    return tuple(_number(steps))


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


def _check_dualpipe(num_ranks: int, num_microbatches: int) -> None:
    given = f"dualpipe: got {num_ranks} ranks and {num_microbatches} microbatches"
    if num_ranks < 2 or num_ranks % 2:
        try_ranks = "2" if num_ranks < 2 else f"{num_ranks - 1} or {num_ranks + 1}"
        raise ValueError(
            f"{given}, but ranks work in mirrored pairs, so their number must be even and at least 2; "
            f"try {try_ranks} ranks, or dualpipe_v, which takes any number of ranks"
        )
    fewest = 2 * num_ranks - 2
    if num_microbatches < fewest:
        raise ValueError(
            f"{given}, but filling the pipes from both ends takes at least "
            f"2 * num_ranks - 2 = {fewest} microbatches (even, both pipes together); try {fewest}"
        )
    if num_microbatches % 2:
        raise ValueError(
            f"{given}, but its two pipes share the microbatches equally, so their number must be even; "
            f"try {num_microbatches - 1} or {num_microbatches + 1}"
        )


def _check_dualpipe_v(num_ranks: int, num_microbatches: int) -> None:
    given = f"dualpipe_v: got {num_ranks} ranks and {num_microbatches} microbatches"
    if num_ranks < 1:
        raise ValueError(f"{given}, but a pipe needs at least 1 rank; try 1")
    fewest = 2 * num_ranks - 1
    if num_microbatches < fewest:
        raise ValueError(
            f"{given}, but filling the pipe there and back takes at least "
            f"2 * num_ranks - 1 = {fewest} microbatches; try {fewest}"
        )
