"""Lower bounds on the time of a step that hold for every schedule; docs/bounds.md has the proofs."""

import dataclasses
import itertools
import math

import numpy as np

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.schedule.costs import REL_TOLERANCE, CostModel, MemoryModel
from dualpipe_jax.schedule.ir import Placement
from dualpipe_jax.schedule.optimize.problem import Problem
from dualpipe_jax.schedule.recipes.classic import check_counts


@dataclasses.dataclass(frozen=True)
class Reach:
    """The times that one microbatch alone takes before, at and after one stage, in the unit of the costs.

    Attributes:
      head: the least time from the start of the step to the first start of an F here.
      turn: the least time from the start of an F here to the end of its I: on to the last stage and back.
      tail: the least time from the end of an I or B here to the end of the step.
    """

    head: float
    turn: float
    tail: float
    f: float
    """The duration of the shortest slot that can hold an F."""
    i: float
    """The duration of the shortest slot that can hold an I."""
    b: float
    """The least time that I and W can take together."""

    @property
    def early(self) -> float:
        """The earliest start of an I or B here."""
        return self.head + self.turn - self.i

    @property
    def rest(self) -> float:
        """The least time from the end of an F here to the end of the step."""
        return self.turn - self.f - self.i + max(self.b, self.i + self.tail)


def reaches(placement: Placement, costs: CostModel) -> tuple[Reach, ...]:
    """The reach of each stage; ``costs`` are those of one stage."""
    return tuple(
        reach for pipe in range(placement.num_pipes) for reach in _reaches_of_pipe(placement, costs, pipe)
    )


def _reaches_of_pipe(placement: Placement, costs: CostModel, pipe: int) -> list[Reach]:
    ranks, depth = placement.pipes[pipe], placement.num_model_stages
    more = [costs.more(placement, d) for d in range(depth)]
    # A partner whose stage costs less than usual shortens a pair.
    partners = [[costs.more(placement, stage) for stage in placement.stages_on[rank]] for rank in ranks]
    by_f = [costs.FB + min(0.0, *(m[0] for m in of)) for of in partners]
    by_b = [costs.FB + min(0.0, *(m[1] + m[2] for m in of)) for of in partners]
    f = [min(costs.F, pair) + m[0] for pair, m in zip(by_b, more, strict=True)]
    i = [min(costs.I, pair + min(0.0, m[2])) + m[1] for pair, m in zip(by_f, more, strict=True)]
    b = [min(costs.B, pair) + m[1] + m[2] for pair, m in zip(by_f, more, strict=True)]
    hop = [costs.transfer(here, there) for here, there in itertools.pairwise(ranks)]
    there, back = np.cumsum([0, *f[:-1]]) + np.cumsum([0, *hop]), np.cumsum([0, *hop])
    back = back + np.cumsum([0, b[0], *i[1:-1]][:depth])  # the first stage owes its W too
    turn = np.cumsum([f[d] + i[d] + (2 * hop[d] if d + 1 < depth else 0) for d in range(depth)][::-1])[::-1]
    return [Reach(*map(float, (there[d], turn[d], back[d], f[d], i[d], b[d]))) for d in range(depth)]


@typechecked
def lower_bound(
    num_ranks: int,
    num_microbatches: int,
    costs: CostModel | None = None,
    memory_limit: float = math.inf,
    *,
    placement: Placement | None = None,
    memory: MemoryModel | None = None,
) -> float:
    """A time below which no valid schedule ends, whatever its order, its pairs and its split of B.

    The bound is the largest of: the time of one microbatch through its pipe and back; for each rank, its work with
    the number of pairs that gives the least time, plus its idle time before the first backward can reach it and
    after its last forward and its last backward; and, under a memory limit, the total time for which activations
    must live, divided by the number that fit. docs/bounds.md proves each.

    >>> from dualpipe_jax.schedule import zb_h1, simulate
    >>> simulate(zb_h1(4, 8)).makespan, lower_bound(4, 8, placement=Placement.linear(4))
    (27.0, 27.0)

    Args:
      num_ranks: pipeline ranks.
      num_microbatches: microbatches of the step, all pipes together.
      costs: costs of a rank's equal share of the model; a stage that is half a share takes half. All 1, a pair 3,
        when left out. Where transfers are ``blocking`` the bound holds, but counts only their delay.
      memory_limit: the most memory that a rank may keep, in the unit of ``memory``.
      placement: which rank holds which stage. If left out, the bound holds for every placement, with any number
        of pipes and of stages per rank, and is lower.
      memory: sizes of a rank's share; live activations when left out.

    Returns:
      The bound, in the unit of the costs; infinite if not even one microbatch fits the memory.

    Raises:
      ValueError: if a count is below 1, the placement has another number of ranks, or its pipes cannot share the
        microbatches evenly.
    """
    if num_ranks < 1 or num_microbatches < 1:
        raise ValueError(
            f"lower_bound: got {num_ranks} ranks and {num_microbatches} microbatches; it needs at least one of each, "
            f"try {max(num_ranks, 1)} ranks and {max(num_microbatches, 1)} microbatches"
        )
    problem = Problem(num_microbatches, costs or CostModel(), memory or MemoryModel(), memory_limit)
    if placement is None:
        return _bound_of_any_placement(num_ranks, problem)
    check_placement("lower_bound", placement, num_ranks, num_microbatches)
    return bound_of_stages(placement, problem.of_stages(placement))


def bound_of_stages(placement: Placement, problem: Problem) -> float:
    """``lower_bound`` on a placement, with costs and sizes of one stage."""
    around = reaches(placement, problem.costs)
    bound = max(reach.f + reach.rest for reach in around if not reach.head)
    for number, stages in enumerate(placement.stages_on):
        rank = _Rank(placement, stages, problem, around)
        fit = _num_fitting(problem.limit - problem.memory.at_rest(placement, number), problem.memory)
        if fit < max(rank.stages_of_pipes):
            return math.inf
        bound = max(bound, rank.serial_bound(fit), rank.memory_bound(fit))
    return bound


def _num_fitting(room: float, memory: MemoryModel) -> float:
    """The number of live activations that fit; rounding errors of the division never make it too small."""
    if room < 0:
        return -1
    fit = (room / memory.live if memory.live else math.inf) * (1 + REL_TOLERANCE) + REL_TOLERANCE
    return math.floor(fit) if math.isfinite(fit) else math.inf


class _Rank:
    def __init__(
        self, placement: Placement, stages: tuple[int, ...], problem: Problem, around: tuple[Reach, ...]
    ):
        costs, microbatches = problem.costs, problem.num_microbatches // placement.num_pipes
        more = [costs.more(placement, stage) for stage in stages]
        self.around = [around[stage] for stage in stages]
        self.microbatches = microbatches
        self.most_f = _largest([costs.F + f for f, _, _ in more], microbatches)
        self.most_b = _largest([costs.B + i + w for _, i, w in more], microbatches)
        self.most_w = _largest([costs.W + w for _, _, w in more], microbatches)
        self.gain = max(0.0, costs.F + costs.B - costs.FB)
        pipes = [placement.pipe_of(stage) for stage in stages]
        self.stages_of_pipes = [pipes.count(pipe) for pipe in sorted(set(pipes))]

    def least(self, name: str) -> float:
        return min(getattr(reach, name) for reach in self.around)

    def serial_bound(self, fit: float) -> float:
        """Work and idle time of the rank, minimised over the number of pairs."""
        count = len(self.most_f) - 1
        pairs = np.arange(count + 1 - min(self.stages_of_pipes))
        work = self.most_f[-1] + self.most_b[-1] - pairs * self.gain
        alone = count - pairs
        # Forwards before the first backward; a whole number that fits may be too long for NumPy.
        early = np.minimum(alone, min(fit, count))
        before = np.maximum(self.least("head"), self.least("early") - self.most_f[early])
        tail = self.least("tail") - self.most_w[alone]
        after = np.maximum(0, np.maximum(self.least("rest") - self.most_b[alone], tail))
        meeting = float(np.min(work + before + after))
        if count > fit:
            return meeting
        drained = work[0] + before[0] + max(0.0, tail[0])  # every F before every backward
        return min(meeting, max(drained, self.least("head") + self.most_f[-1] + self.least("rest")))

    def memory_bound(self, fit: float) -> float:
        """The bound from the time for which the rank's activations live, when only ``fit`` of them fit at once."""
        if fit == math.inf:
            return 0.0
        count = self.microbatches * len(self.around)
        rounds, over = divmod(count - 1, int(fit))
        last = min(reach.f + reach.rest for reach in self.around)
        in_rounds = rounds * self.least("turn") + over * self.least("f") + last
        lived = self.microbatches * sum(reach.turn for reach in self.around)
        return self.least("head") + max(in_rounds, lived / fit + self.least("tail"))


def _largest(of_stages: list[float], microbatches: int) -> np.ndarray:
    """Entry n is the time of the n costliest actions, with ``microbatches`` actions at each stage."""
    every = np.sort(np.repeat(np.array(of_stages, float), microbatches))[::-1]
    return np.concatenate([[0.0], np.cumsum(every)])


def _bound_of_any_placement(num_ranks: int, problem: Problem) -> float:
    """The bound for every placement that shares the model equally over the ranks."""
    num_microbatches, costs, memory = problem.num_microbatches, problem.costs, problem.memory
    # Every cut has both ends; other stages may be missing, so only their negative extras count.
    least = [
        more if stage in (0, -1) else tuple(min(0.0, cost) for cost in more)
        for stage, more in costs.extra.items()
    ]
    extra_f, extra_i, extra_w = map(sum, zip((0.0, 0.0, 0.0), *least, strict=True))
    turn = min(costs.F, costs.FB) + min(costs.I, costs.FB)
    chain = num_ranks * turn + extra_f + extra_i
    work = num_microbatches * (min(costs.F + costs.B, costs.FB) + (extra_f + extra_i + extra_w) / num_ranks)
    room = problem.limit - memory.parameters - memory.fixed - sum(min(0.0, m) for m in memory.extra.values())
    each = memory.residual_i + memory.residual_w
    if room < each * (1 - REL_TOLERANCE):
        return math.inf
    lived = num_microbatches * each * turn * num_ranks / 2
    return max(chain, work, lived / room if room else 0.0)


def check_placement(name: str, placement: Placement, num_ranks: int, num_microbatches: int) -> None:
    """Raise ValueError unless a placement has ``num_ranks`` ranks and its pipes can share the microbatches equally.

    Raise it, too, where ranks times microbatches exceed the limit of ``check_counts``.
    """
    given = f"{name}: got {num_ranks} ranks and {num_microbatches} microbatches"
    if placement.num_ranks != num_ranks:
        raise ValueError(
            f"{given}, but a placement of {placement.num_ranks} ranks; give num_ranks={placement.num_ranks}"
        )
    pipes = placement.num_pipes
    if num_microbatches < 1 or num_microbatches % pipes:
        low, high = num_microbatches // pipes * pipes, (num_microbatches // pipes + 1) * pipes
        nearest = f"{low} or {high}" if low > 0 else f"{max(high, pipes)}"
        raise ValueError(
            f"{given}, but the placement's {pipes} pipe(s) share the microbatches equally, so their number "
            f"must be a positive multiple of {pipes}; try {nearest}"
        )
    check_counts(name, num_ranks, num_microbatches)
