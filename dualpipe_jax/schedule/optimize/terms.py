"""What work costs at each stage and what room each rank has, as plain numbers for the schedulers' loops."""

import dataclasses

from dualpipe_jax.schedule.costs import HAIR, CostModel, MemoryModel
from dualpipe_jax.schedule.ir import Action, Op, Placement
from dualpipe_jax.schedule.optimize.problem import Problem
from dualpipe_jax.schedule.simulate import send_hold


@dataclasses.dataclass(frozen=True)
class Terms:
    """A scheduling problem: what runs where, how long it takes, what it keeps.

    Attributes:
      placement: where stages live.
      count: microbatches of each pipe.
      f, i, w: cost of each stage's F, I, W.
      gain: what a pair saves over its F and B one after the other.
      y_delay, dx_delay: how long the output of each stage's forward, or backward, is on its way to its
        reader; None where nobody else reads it.
      y_held, dx_held: how long sending these keeps the stage's rank from its next work.
      unit: what a microbatch at a stage keeps from F to B.
      kept: what of that remains after I; with the stash on top it is what an owed W keeps.
      stash: what I hands to W.
      room: what each rank may keep besides parameters.
      eps: times closer than this are the same.
    """

    placement: Placement
    count: int
    f: tuple[float, ...]
    i: tuple[float, ...]
    w: tuple[float, ...]
    gain: float
    y_delay: tuple[float | None, ...]
    dx_delay: tuple[float | None, ...]
    y_held: tuple[float, ...]
    dx_held: tuple[float, ...]
    unit: float
    kept: float
    stash: float
    room: tuple[float, ...]
    eps: float


def make_terms(placement: Placement, problem: Problem) -> Terms:
    """A problem, its costs and sizes those of one stage, on a placement.

    The pipes share the microbatches evenly, and the limit is ``least_memory`` at least.
    """
    costs, memory = problem.costs, problem.memory
    stages = range(placement.num_stages)
    more = [costs.more(placement, stage) for stage in stages]
    return Terms(
        placement=placement,
        count=problem.num_microbatches // placement.num_pipes,
        f=tuple(costs.F + f for f, _, _ in more),
        i=tuple(costs.I + i for _, i, _ in more),
        w=tuple(costs.W + w for _, _, w in more),
        gain=costs.F + costs.B - costs.FB,
        y_delay=tuple(_delay(placement, costs, stage, 1) for stage in stages),
        dx_delay=tuple(_delay(placement, costs, stage, -1) for stage in stages),
        y_held=tuple(send_hold(placement, (Action(stage, Op.F, 0),), costs) for stage in stages),
        dx_held=tuple(send_hold(placement, (Action(stage, Op.I, 0),), costs) for stage in stages),
        unit=memory.live,
        kept=memory.owed,
        stash=memory.stash,
        room=tuple(
            problem.limit * (1 + HAIR) - memory.at_rest(placement, rank)
            for rank in range(placement.num_ranks)
        ),
        eps=HAIR * (costs.F + costs.B + costs.FB + costs.dearest_send),
    )


def least_memory(placement: Placement, memory: MemoryModel) -> float:
    """The least memory with which any schedule of the placement runs.

    A microbatch passes all of a rank's stages of its pipe before the first of them is done with it; all
    microbatches may pass one by one, by full backwards.
    """
    return max(
        memory.at_rest(placement, rank) + memory.live * max(pipe.count(rank) for pipe in placement.pipes)
        for rank in range(placement.num_ranks)
    )


def _delay(placement: Placement, costs: CostModel, stage: int, step: int) -> float | None:
    """How long an output is on its way to the stage ``step`` further; None past the ends of the pipe."""
    if placement.is_last(stage) if step > 0 else placement.is_first(stage):
        return None
    return costs.transfer(placement.rank_of[stage], placement.rank_of[stage + step])
