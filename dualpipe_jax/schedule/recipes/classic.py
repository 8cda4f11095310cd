"""GPipe and 1F1B, on a line, interleaved, and interleaved in overlapped pairs: one pipe, full backwards."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.schedule.costs import CostModel
from dualpipe_jax.schedule.ir import Action, Op, Placement, Schedule, Slot


@typechecked
def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """GPipe: all forwards, then all backwards.

    Bubble (num_ranks - 1)(F + B); all microbatches' activations are live at the turn.

    Source: Huang et al., "GPipe" (arXiv 1811.06965).

    >>> from dualpipe_jax.schedule import format_grid, gpipe
    >>> print(format_grid(gpipe(2, 4)))
    # gpipe, ranks 2, microbatches 4, pipes (0 1)
    rank 0: 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
    rank 1: 1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3

    Raises:
      ValueError: if a count is below 1.
    """
    check_counts("gpipe", num_ranks, num_microbatches)
    return _breadth_first("gpipe", Placement.linear(num_ranks), num_microbatches)


def gpipe_bubble(num_ranks: int, num_microbatches: int, costs: CostModel) -> float:
    """Published bubble of ``gpipe``, (num_ranks - 1)(F + B): exact for all counts and costs."""
    del num_microbatches
    return (num_ranks - 1) * (costs.F + costs.B)


@typechecked
def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B (PipeDream-flush): fill the pipe, then one backward for each forward, then drain.

    Bubble (num_ranks - 1)(F + B) like GPipe's, but rank r holds at most num_ranks - r activations,
    so at most min(num_microbatches, num_ranks) are live on any rank.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv 2006.09503).

    >>> [str(slot[0]) for slot in one_f_one_b(2, 3).orders[0]]
    ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']

    Raises:
      ValueError: if a count is below 1.
    """
    check_counts("one_f_one_b", num_ranks, num_microbatches)
    ahead = range(num_ranks, 0, -1)
    return one_for_one("one_f_one_b", Placement.linear(num_ranks), num_microbatches, ahead)


def one_f_one_b_bubble(num_ranks: int, num_microbatches: int, costs: CostModel) -> float:
    """Published bubble of ``one_f_one_b``, (num_ranks - 1)(F + B): exact for all counts and costs."""
    return gpipe_bubble(num_ranks, num_microbatches, costs)


@typechecked
def interleaved_1f1b(num_ranks: int, num_microbatches: int, num_stages_per_rank: int = 2) -> Schedule:
    """Interleaved 1F1B: 1F1B over a pipe that walks the ranks v = num_stages_per_rank times.

    Bubble (num_ranks - 1)(F + B) of a stage, which is 1/v of a rank's share of the model, for
    num_microbatches >= num_ranks; v times the traffic. A rank takes its stages in turn, a group of
    microbatches through each. Rank 0 has the most activations live, (v + 1) num_ranks - 1 of 1/v the size
    where num_ranks divides num_microbatches.

    Published code wants groups of num_ranks, or equal ones. Here any number of microbatches is divided into
    groups of at least num_ranks that are as equal as can be, which keeps the bubble and costs up to
    (v - 1)(size of a group - num_ranks) more activations.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM" (arXiv 2104.04473).

    >>> [str(slot[0]) for slot in interleaved_1f1b(2, 2).orders[1]]
    ['1F0', '1F1', '3F0', '3B0', '3F1', '3B1', '1B0', '1B1']

    Raises:
      ValueError: if a count is below 1.
    """
    check_counts("interleaved_1f1b", num_ranks, num_microbatches, num_stages_per_rank=num_stages_per_rank)
    most = (num_stages_per_rank - 1) * max(groups(num_ranks, num_microbatches)) + 2 * num_ranks - 1
    ahead = range(most, most - 2 * num_ranks, -2)
    placement = Placement.interleaved(num_ranks, num_stages_per_rank)
    return one_for_one("interleaved_1f1b", placement, num_microbatches, ahead)


def interleaved_1f1b_bubble(
    num_ranks: int, num_microbatches: int, costs: CostModel, num_stages_per_rank: int = 2
) -> float:
    """Published bubble of ``interleaved_1f1b``, (num_ranks - 1)(F + B) for costs of a stage.

    Exact for all counts and costs, with a term that the paper leaves out: where there are fewer microbatches
    than ranks, each round after the first idles F + B for each missing microbatch.
    """
    missing = (num_stages_per_rank - 1) * max(0, num_ranks - num_microbatches)
    return (num_ranks - 1 + missing) * (costs.F + costs.B)


@typechecked
def interleaved_1f1b_overlap(num_ranks: int, num_microbatches: int, num_stages_per_rank: int = 2) -> Schedule:
    """Interleaved 1F1B with a steady state of overlapped pairs, where each hides the other's communication.

    The order is that of ``interleaved_1f1b`` with each backward and the forward that follows it in one slot.
    For a pair of max(F, B) <= FB <= F + B and num_microbatches >= num_ranks the rank that idles most idles
    (num_ranks - 1)(F + B) of a stage, 1/v of a rank's share of the model for v = num_stages_per_rank; v times
    the traffic. Rank 0 has the most activations live, (v + 1) num_ranks of 1/v the size where num_ranks divides
    num_microbatches and is not all of them.

    Source: Megatron-LM's interleaved 1F1B (arXiv 2104.04473) with expert communication overlapped, its
    ``overlap_moe_expert_parallel_comm``.

    >>> ["+".join(map(str, slot)) for slot in interleaved_1f1b_overlap(2, 2).orders[1]]
    ['1F0', '1F1', '3F0', '3F1+3B0', '3B1', '1B0', '1B1']

    Raises:
      ValueError: if a count is below 1.
    """
    plain = interleaved_1f1b(num_ranks, num_microbatches, num_stages_per_rank)
    orders = tuple(map(_overlapped, plain.orders))
    return dataclasses.replace(plain, name="interleaved_1f1b_overlap", orders=orders)


def interleaved_1f1b_overlap_bubble(
    num_ranks: int, num_microbatches: int, costs: CostModel, num_stages_per_rank: int = 2
) -> float:
    """Bubble of ``interleaved_1f1b_overlap``: that of ``interleaved_1f1b``, on the rank that idles most.

    Exact for max(F, B) <= FB <= F + B.
    """
    return interleaved_1f1b_bubble(num_ranks, num_microbatches, costs, num_stages_per_rank)


def _overlapped(order: tuple[Slot, ...]) -> tuple[Slot, ...]:
    """The order with each backward and the forward right after it joined into a pair."""
    slots: list[Slot] = []
    for slot in order:
        if slots and slot[0].op is Op.F and slots[-1][0].op is Op.B:
            slot += slots.pop()
        slots.append(slot)
    return tuple(slots)


@typechecked
def looped_bfs(num_ranks: int, num_microbatches: int, num_stages_per_rank: int = 2) -> Schedule:
    """Breadth-first pipeline: GPipe over a pipe that walks the ranks v = num_stages_per_rank times.

    All microbatches go through a rank's first stage, then through its next; then all come back. Bubble
    (num_ranks - 1)(F + B) of a stage, which is 1/v of a rank's share of the model, for
    num_microbatches >= num_ranks; all activations are live at the turn. Its purpose: a rank works on
    one stage at a time, so with sharded parameters each is gathered once per pass.

    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism" (arXiv 2211.05953).

    >>> [str(slot[0]) for slot in looped_bfs(2, 2).orders[0]]
    ['0F0', '0F1', '2F0', '2F1', '2B0', '2B1', '0B0', '0B1']

    Raises:
      ValueError: if a count is below 1.
    """
    check_counts("looped_bfs", num_ranks, num_microbatches, num_stages_per_rank=num_stages_per_rank)
    placement = Placement.interleaved(num_ranks, num_stages_per_rank)
    return _breadth_first("looped_bfs", placement, num_microbatches)


def looped_bfs_bubble(
    num_ranks: int, num_microbatches: int, costs: CostModel, num_stages_per_rank: int = 2
) -> float:
    """Published bubble of ``looped_bfs``, (num_ranks - 1)(F + B) for costs of a stage.

    Exact for all counts and costs; fewer microbatches than ranks count as in interleaved 1F1B.
    """
    return interleaved_1f1b_bubble(num_ranks, num_microbatches, costs, num_stages_per_rank)


def _breadth_first(name: str, placement: Placement, num_microbatches: int) -> Schedule:
    """All microbatches through a rank's stages, one stage after the other, and back."""
    orders = (
        tuple(
            (Action(stage, op, m),)
            for op, stages in ((Op.F, held), (Op.B, held[::-1]))
            for stage in stages
            for m in range(num_microbatches)
        )
        for held in placement.stages_on
    )
    return Schedule(name, placement, num_microbatches, tuple(orders))


def one_for_one(
    name: str,
    placement: Placement,
    num_microbatches: int,
    ahead: Sequence[int],
    late: Sequence[int] | None = None,
) -> Schedule:
    """Each rank runs ``ahead[rank]`` forwards, then one backward for each forward, then the remaining backwards.

    A group of microbatches passes all stages of a rank before the next group does: forwards in ascending order of the
    stages, backwards in descending. Where ``late`` is given, backwards are split, and each W comes right after
    the I that is ``late[rank]`` backwards after its own I.
    """
    sizes = groups(placement.num_ranks, num_microbatches)
    rounds = [range(end - size, end) for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
    op, behind = (Op.B, [0] * len(ahead)) if late is None else (Op.I, late)
    orders = []
    for held, first, owed in zip(placement.stages_on, ahead, behind, strict=True):
        forwards = [Action(stage, Op.F, m) for group in rounds for stage in held for m in group]
        backwards = [Action(stage, op, m) for group in rounds for stage in held[::-1] for m in group]
        weights = [] if late is None else [action._replace(op=Op.W) for action in backwards]
        actions = forwards[:first]
        for done, action in enumerate(backwards):
            actions += [action, *weights[max(0, done - owed) : max(0, done - owed + 1)]]
            actions += forwards[first + done : first + done + 1]
        actions += weights[max(0, len(backwards) - owed) :]
        orders.append(tuple((action,) for action in actions))
    return Schedule(name, placement, num_microbatches, tuple(orders))


def groups(num_ranks: int, num_microbatches: int) -> list[int]:
    """Sizes of the groups of microbatches, the larger first.

    There are as many groups of at least ``num_ranks`` as possible, of nearly equal sizes; fewer microbatches than
    ranks make one group.
    """
    num_groups = max(1, num_microbatches // num_ranks)
    size, more = divmod(num_microbatches, num_groups)
    return [size + 1] * more + [size] * (num_groups - more)


MOST_ACTIONS = 10_000_000
"""The most forwards and backwards of a schedule that can be made; making it takes some minutes and gigabytes."""


def check_counts(name: str, num_ranks: int, num_microbatches: int, **others: int) -> None:
    """Raise ValueError unless there is at least one rank, one microbatch and one of each of the others.

    Raise it, too, where their product makes more than MOST_ACTIONS forwards and backwards.
    """
    if min(num_ranks, num_microbatches, *others.values()) < 1:
        more = "".join(f", {key}={count}" for key, count in others.items() if count < 1)
        try_more = "".join(f", {key}=1" for key, count in others.items() if count < 1)
        raise ValueError(
            f"{name}: got {num_ranks} ranks and {num_microbatches} microbatches{more}; it needs at least one "
            f"of each, try {max(num_ranks, 1)} ranks and {max(num_microbatches, 1)} microbatches{try_more}"
        )
    if (actions := 2 * math.prod(map(int, (num_ranks, num_microbatches, *others.values())))) > MOST_ACTIONS:
        more = "".join(f" x {key}={count:,}" for key, count in others.items())
        raise ValueError(
            f"{name}: {num_ranks:,} ranks x {num_microbatches:,} microbatches{more} are {actions:,} forwards and "
            f"backwards; at most {MOST_ACTIONS:,} can be handled. The order of a long step repeats: look at fewer "
            "microbatches"
        )


def check_two_pipes(name: str, num_ranks: int, num_microbatches: int, instead: str) -> None:
    """Raise ValueError unless two pipes in opposite directions can share ranks and microbatches equally."""
    given = f"{name}: got {num_ranks} ranks and {num_microbatches} microbatches"
    if num_ranks < 2 or num_ranks % 2:
        try_ranks = "2" if num_ranks < 2 else f"{num_ranks - 1} or {num_ranks + 1}"
        raise ValueError(
            f"{given}, but ranks work in mirrored pairs, so their number must be even and at least 2; "
            f"try {try_ranks} ranks, or {instead}, which takes any number of ranks"
        )
    if num_microbatches < 2 or num_microbatches % 2:
        try_counts = "2" if num_microbatches < 2 else f"{num_microbatches - 1} or {num_microbatches + 1}"
        raise ValueError(
            f"{given}, but its two pipes share the microbatches equally, so their number must be even and "
            f"at least 2; try {try_counts}"
        )
    check_counts(name, num_ranks, num_microbatches)
