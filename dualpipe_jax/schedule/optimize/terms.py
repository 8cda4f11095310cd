"""The costs of each stage and the memory of each rank, as plain numbers for the schedulers' loops."""

import dataclasses

from dualpipe_jax.schedule.costs import REL_TOLERANCE, CostModel, MemoryModel
from dualpipe_jax.schedule.ir import Action, Op, Placement
from dualpipe_jax.schedule.optimize.problem import Problem
from dualpipe_jax.schedule.simulate import blocking_send_time


@dataclasses.dataclass(frozen=True)
class Terms:
    """A scheduling problem on a placement: times and memory of the work at each stage.

    Attributes:
      placement: where stages live.
      count: the number of microbatches of each pipe.
      f, i, w: the cost of each stage's F, I, W.
      gain: the time that a pair saves over its F and B one after the other.
      y_delay, dx_delay: the transfer time of the output of each stage's forward, or backward, to the stage that
        reads it; None where no other stage reads it.
      y_held, dx_held: how long sending these outputs keeps the stage's rank from its next work.
      unit: the memory that a microbatch keeps at a stage from F to B.
      kept: the part of ``unit`` that remains after I; an owed W keeps this and the stash.
      stash: the memory of the values that I passes to W.
      room: the memory that each rank may use in addition to ``MemoryModel.at_rest``.
      eps: times whose difference is below this count as equal.
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
    """The terms of a problem on a placement; the problem's costs and sizes are those of one stage.

    The pipes must share the microbatches evenly, and the limit must be at least ``least_memory``.
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
        y_held=tuple(blocking_send_time(placement, (Action(stage, Op.F, 0),), costs) for stage in stages),
        dx_held=tuple(blocking_send_time(placement, (Action(stage, Op.I, 0),), costs) for stage in stages),
        unit=memory.live,
        kept=memory.owed,
        stash=memory.stash,
        room=tuple(
            problem.limit * (1 + REL_TOLERANCE) - memory.at_rest(placement, rank)
            for rank in range(placement.num_ranks)
        ),
        eps=REL_TOLERANCE * (costs.F + costs.B + costs.FB + costs.dearest_send),
    )


def least_memory(placement: Placement, memory: MemoryModel) -> float:
    """The least memory with which any schedule of the placement runs.

    It suffices for one microbatch at a time, with full backwards: a microbatch keeps its activations at all stages
    of its pipe on a rank before the first of them runs its backward.
    """
    return max(
        memory.at_rest(placement, rank) + memory.live * max(pipe.count(rank) for pipe in placement.pipes)
        for rank in range(placement.num_ranks)
    )


def _delay(placement: Placement, costs: CostModel, stage: int, step: int) -> float | None:
    """The transfer time of an output to stage ``stage + step``; None past the ends of the pipe."""
    if placement.is_last(stage) if step > 0 else placement.is_first(stage):
        return None
    return costs.transfer(placement.rank_of[stage], placement.rank_of[stage + step])
