"""Zero-bubble schedules: the backward in two halves, the second of which fills the gaps."""

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.schedule.costs import CostModel
from dualpipe_jax.schedule.ir import Placement, Schedule
from dualpipe_jax.schedule.recipes.classic import check_counts, groups, one_for_one


@typechecked
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
    ahead, late = range(num_ranks, 0, -1), range(num_ranks)
    return one_for_one("zb_h1", Placement.linear(num_ranks), num_microbatches, ahead, late)


def zb_h1_bubble(num_ranks: int, num_microbatches: int, costs: CostModel) -> float:
    """Published bubble of ``zb_h1``, (num_ranks - 1)(F + B - 2W).

    Exact for num_microbatches >= num_ranks and W <= min(F, I). Otherwise the largest idle is above it, never
    below: W's that are longer than the gaps they fill, or too few to fill them, delay everyone.
    """
    del num_microbatches
    return (num_ranks - 1) * (costs.F + costs.B - 2 * costs.W)


@typechecked
def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H2 (ZB2P): ZB-H1 with twice the forwards ahead, so that no rank idles between first and last slot.

    That holds for F = I = W and num_microbatches >= 2 num_ranks - 1. Each rank starts and ends F later than
    the one before it, so a step that ends for all at once idles (num_ranks - 1) F all the same: the profit
    needs optimizer steps that start rank by rank. Rank r holds at most 2 (num_ranks - r) - 1 activations,
    and what W's read for up to 2 num_ranks - 1 microbatches.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241).

    >>> [str(slot[0]) for slot in zb_h2(2, 3).orders[0]]
    ['0F0', '0F1', '0F2', '0I0', '0W0', '0I1', '0W1', '0I2', '0W2']

    Raises:
      ValueError: if a count is below 1.
    """
    check_counts("zb_h2", num_ranks, num_microbatches)
    ahead, late = range(2 * num_ranks - 1, 0, -2), range(0, 2 * num_ranks, 2)
    return one_for_one("zb_h2", Placement.linear(num_ranks), num_microbatches, ahead, late)


def zb_h2_bubble(num_ranks: int, num_microbatches: int, costs: CostModel) -> float:
    """Published bubble of ``zb_h2``, (num_ranks - 1)(F + B - 3W): none for F = I = W.

    It counts the gaps between the first and the last slot of each rank: the idle time where the optimizer,
    too, starts rank by rank. A step that ends for all at once idles (num_ranks - 1) max(F, F + B - 3W), for
    num_microbatches >= 2 num_ranks - 1 and W <= min(F, I), and never less.
    """
    del num_microbatches
    return (num_ranks - 1) * (costs.F + costs.B - 3 * costs.W)


@typechecked
def interleaved_zero_bubble(num_ranks: int, num_microbatches: int, num_stages_per_rank: int = 2) -> Schedule:
    """Interleaved ZB-H1: interleaved 1F1B with each backward split, rank r doing its W's r backwards late.

    Bubble (num_ranks - 1)(F + B - 2W) of a stage, which is 1/v of a rank's share of the model for
    v = num_stages_per_rank. A backward for the input comes back sooner than a full one, so there are fewer
    forwards ahead than in interleaved 1F1B: rank 0 has v num_ranks activations of 1/v the size live, where
    num_ranks divides num_microbatches. Other numbers are divided into groups as in interleaved 1F1B.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), interleaved as PyTorch's
    ScheduleInterleavedZeroBubble does it.

    >>> [str(slot[0]) for slot in interleaved_zero_bubble(2, 2).orders[1]]
    ['1F0', '1F1', '3F0', '3I0', '3F1', '3I1', '3W0', '1I0', '3W1', '1I1', '1W0', '1W1']

    Raises:
      ValueError: if a count is below 1.
    """
    check_counts(
        "interleaved_zero_bubble", num_ranks, num_microbatches, num_stages_per_rank=num_stages_per_rank
    )
    most = (num_stages_per_rank - 1) * max(groups(num_ranks, num_microbatches)) + num_ranks
    ahead, late = range(most, most - num_ranks, -1), range(num_ranks)
    placement = Placement.interleaved(num_ranks, num_stages_per_rank)
    return one_for_one("interleaved_zero_bubble", placement, num_microbatches, ahead, late)


def interleaved_zero_bubble_bubble(num_ranks: int, num_microbatches: int, costs: CostModel) -> float:
    """Bubble of ``interleaved_zero_bubble``: ZB-H1's, (num_ranks - 1)(F + B - 2W), for costs of a stage.

    Exact for num_microbatches >= num_ranks and W <= min(F, I); otherwise the largest idle is above it.
    """
    return zb_h1_bubble(num_ranks, num_microbatches, costs)
