"""Chimera and Hanayo: full backwards, with microbatches of opposite directions that meet on every rank."""

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.schedule.costs import CostModel
from dualpipe_jax.schedule.ir import Action, Op, Placement, Schedule, Slot
from dualpipe_jax.schedule.recipes.classic import check_counts, check_two_pipes


@typechecked
def chimera(num_ranks: int, num_microbatches: int) -> Schedule:
    """Chimera: two pipes in opposite directions, so each rank holds two stages (2x parameters).

    A unit of PP = num_ranks microbatches, half from each end, fills the ranks; units follow each other
    directly. Bubble (PP - 2)/2 (F + B) where F = B and PP divides num_microbatches; with B > F a unit makes
    the next one wait, see ``chimera_bubble``. Between PP/2 + 1 (outer ranks) and PP (inner) activations are
    live. The ranks must be even in number, the microbatches too.

    Source: Li and Hoefler, "Chimera" (arXiv 2107.06925), direct concatenation.

    >>> [str(slot[0]) for slot in chimera(2, 2).orders[0]]
    ['0F0', '3F0', '3B0', '0B0']

    Args:
      num_ranks: pipeline ranks.
      num_microbatches: microbatches of the step, both pipes together; each pipe gets half.

    Raises:
      ValueError: if a count is odd or too small; the message names the nearest counts that are accepted.
    """
    check_two_pipes("chimera", num_ranks, num_microbatches, instead="hanayo")
    placement = Placement.bidirectional(num_ranks)
    orders = _on_beats(placement, num_microbatches // 2, num_ranks // 2)
    return Schedule("chimera", placement, num_microbatches, orders)


def chimera_bubble(num_ranks: int, num_microbatches: int, costs: CostModel) -> float:
    """Published bubble of ``chimera``, (num_ranks / 2 - 1)(F + B).

    Exact where F = B and num_ranks divides num_microbatches; otherwise the largest idle is above it. With n
    units of num_ranks microbatches it is (num_ranks - 2)(max(F, B) + (n - 1)|B - F|) for all costs: on 8
    ranks with B = 2F it passes that of 1F1B from the third unit on.
    """
    del num_microbatches
    return (num_ranks / 2 - 1) * (costs.F + costs.B)


@typechecked
def hanayo(num_ranks: int, num_microbatches: int, num_waves: int = 2) -> Schedule:
    """Hanayo: one pipe there and back over the ranks num_waves times, 2 num_waves stages a rank.

    It does what Chimera does with one copy of the parameters. A unit of num_ranks microbatches fills the
    ranks; units follow each other directly. Bubble (num_ranks - 1)(F + B) of a stage, which is
    1 / (2 num_waves) of a rank's share of the model, where F = B and num_ranks divides num_microbatches;
    with B > F a unit makes the next one wait, see ``hanayo_bubble``. A rank keeps at most num_ranks
    microbatches' activations of its share.

    Source: Liu et al., "Hanayo" (arXiv 2308.15762).

    >>> [str(slot[0]) for slot in hanayo(2, 2, num_waves=1).orders[1]]
    ['1F0', '2F0', '1F1', '2F1', '2B0', '1B0', '2B1', '1B1']

    Raises:
      ValueError: if a count is below 1.
    """
    check_counts("hanayo", num_ranks, num_microbatches, num_waves=num_waves)
    placement = Placement.wave(num_ranks, num_waves)
    return Schedule("hanayo", placement, num_microbatches, _on_beats(placement, num_microbatches, num_ranks))


def hanayo_bubble(num_ranks: int, num_microbatches: int, costs: CostModel) -> float:
    """Bubble of ``hanayo``, (num_ranks - 1)(F + B) for costs of a stage: the least on a wave placement.

    The last rank waits for num_ranks - 1 forwards at first, and for as many backwards at last. Exact where
    F = B and num_ranks divides num_microbatches; otherwise the largest idle is above it. With n units of
    num_ranks microbatches it is 2 (num_ranks - 1)(max(F, B) + (n - 1)|B - F|) for all costs.
    """
    del num_microbatches
    return (num_ranks - 1) * (costs.F + costs.B)


def _on_beats(placement: Placement, per_pipe: int, unit: int) -> tuple[tuple[Slot, ...], ...]:
    """The order of each rank if every action takes one beat; ``unit`` microbatches enter a pipe at a time.

    A microbatch enters every other beat and goes through its pipe and back without a pause. The beats between
    belong to the rank's actions of the other direction: no beat has two actions, and none is empty except at
    the ends.
    """
    turn = 2 * placement.num_model_stages - 1

    def beat(action: Action) -> int:
        stage, op, microbatch = action
        depth = placement.model_stage(stage)
        units, number = divmod(microbatch, unit)
        return units * (turn + 1) + 2 * number + (depth if op is Op.F else turn - depth)

    orders = (
        sorted((Action(s, op, m) for s in held for op in (Op.F, Op.B) for m in range(per_pipe)), key=beat)
        for held in placement.stages_on
    )
    return tuple(tuple((action,) for action in order) for order in orders)
