"""GPipe and 1F1B: one pipe, one stage a rank, full backwards."""

from dualpipe_jax.schedule.ir import Action, Op, Placement, Schedule, Slot


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """GPipe: all forwards, then all backwards.

    Bubble (num_ranks - 1)(F + B); all microbatches' activations are live at the turn.

    Source: Huang et al., "GPipe" (arXiv 1811.06965).

    Raises:
      ValueError: if a count is below 1.
    """
    check_counts("gpipe", num_ranks, num_microbatches)
    orders = (
        tuple((Action(stage, op, m),) for op in (Op.F, Op.B) for m in range(num_microbatches))
        for stage in range(num_ranks)
    )
    return Schedule("gpipe", Placement.linear(num_ranks), num_microbatches, tuple(orders))


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

    def order(stage: int) -> tuple[Slot, ...]:
        ahead = min(num_ranks - stage, num_microbatches)
        actions = [Action(stage, Op.F, m) for m in range(ahead)]
        for m in range(num_microbatches):
            actions.append(Action(stage, Op.B, m))
            if ahead + m < num_microbatches:
                actions.append(Action(stage, Op.F, ahead + m))
        return tuple((action,) for action in actions)

    orders = tuple(order(stage) for stage in range(num_ranks))
    return Schedule("one_f_one_b", Placement.linear(num_ranks), num_microbatches, orders)


def check_counts(name: str, num_ranks: int, num_microbatches: int) -> None:
    """Raise ValueError unless there is at least one rank and one microbatch."""
    if num_ranks < 1 or num_microbatches < 1:
        raise ValueError(
            f"{name}: got {num_ranks} ranks and {num_microbatches} microbatches; it needs at least one of "
            f"each, try {max(num_ranks, 1)} ranks and {max(num_microbatches, 1)} microbatches"
        )
