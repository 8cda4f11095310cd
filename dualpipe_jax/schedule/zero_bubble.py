"""Zero-bubble schedules: the backward in two halves, the second of which fills the gaps."""

from dualpipe_jax.schedule.classic import check_counts
from dualpipe_jax.schedule.ir import Action, Op, Placement, Schedule, Slot


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1: 1F1B with each backward split, rank r doing its W's r microbatches late.

    The later a rank is in the pipe the less it idles while filling, and the more W's it keeps for the drain.
    Bubble (num_ranks - 1)(F + B - 2W) for num_microbatches >= num_ranks and W <= min(F, I); activations
    as in 1F1B. With fewer microbatches than ranks it works too, with a larger bubble.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241).

    >>> [str(slot[0]) for slot in zb_h1(2, 2).orders[1]]
    ['1F0', '1I0', '1F1', '1I1', '1W0', '1W1']

    Raises:
      ValueError: if a count is below 1.
    """
    check_counts("zb_h1", num_ranks, num_microbatches)

    def order(stage: int) -> tuple[Slot, ...]:
        ahead, late = min(num_ranks - stage, num_microbatches), min(stage, num_microbatches)
        actions = [Action(stage, Op.F, m) for m in range(ahead)]
        for m in range(num_microbatches):
            actions.append(Action(stage, Op.I, m))
            if m >= late:
                actions.append(Action(stage, Op.W, m - late))
            if ahead + m < num_microbatches:
                actions.append(Action(stage, Op.F, ahead + m))
        actions += [Action(stage, Op.W, m) for m in range(num_microbatches - late, num_microbatches)]
        return tuple((action,) for action in actions)

    orders = tuple(order(stage) for stage in range(num_ranks))
    return Schedule("zb_h1", Placement.linear(num_ranks), num_microbatches, orders)
