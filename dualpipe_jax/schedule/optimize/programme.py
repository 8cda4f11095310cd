"""The integer programme of ``optimum``: it decides whether a schedule ends within a number of time steps."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dualpipe_jax.installing import install_command
from dualpipe_jax.schedule.costs import REL_TOLERANCE
from dualpipe_jax.schedule.ir import Action, Op, Placement, Slot
from dualpipe_jax.schedule.optimize.bounds import reaches
from dualpipe_jax.schedule.optimize.problem import Problem

_MOST_VARIABLES = 50_000


class _Kind(NamedTuple):
    """A kind of slot: its actions without microbatch numbers, its rank, and the window of its starts, in steps."""

    actions: tuple[tuple[Op, int], ...]
    rank: int
    duration: int
    first: int
    last: int
    column: int

    @property
    def width(self) -> int:
        return max(0, self.last - self.first + 1)


class Programme:
    """The question whether a schedule ends within ``horizon`` steps, as an integer programme.

    Variable t of a kind is the number of its slots that have started by step t. Microbatches are not told apart:
    the numbers of slots that have ended limit the numbers of slots that may start.
    """

    def __init__(self, placement: Placement, problem: Problem, horizon: int):
        self.placement, self.horizon = placement, horizon
        self.costs, self.memory, self.limit = problem.costs, problem.memory, problem.limit
        self.each = problem.num_microbatches // placement.num_pipes
        self.around = reaches(placement, self.costs)
        self.kinds: list[_Kind] = []
        for rank, stages in enumerate(placement.stages_on):
            for actions in self._possible(stages):
                self._add(rank, actions)
        self.size = sum(kind.width for kind in self.kinds)
        self.rows: list[
            tuple[dict[int, float], float]
        ] = []  # factors by column, and the lower limit of their sum
        if self.size > _MOST_VARIABLES:
            raise ValueError(
                f"optimum: {placement.num_ranks} ranks, {problem.num_microbatches} microbatches and {horizon} steps "
                f"of time make {self.size} variables, more than {_MOST_VARIABLES}; give fewer, or costs "
                "with a greater common unit"
            )

    def _possible(self, stages: tuple[int, ...]) -> Iterator[tuple[tuple[Op, int], ...]]:
        for stage in stages:
            yield from (((op, stage),) for op in (Op.F, Op.I, Op.W))
        if self.memory.stash and self.limit < math.inf:  # else I then W is never worse than B
            yield from (((Op.B, stage),) for stage in stages)
        if self.costs.FB < self.costs.F + self.costs.B:  # else B then F is never worse
            yield from (((Op.F, f), (Op.B, b)) for f in stages for b in stages)

    def _add(self, rank: int, actions: tuple[tuple[Op, int], ...]) -> None:
        duration = round(self.costs.of(tuple(Action(s, op, 0) for op, s in actions), self.placement))
        if duration < 1:  # starts alone then do not tell what runs first
            slot = " and ".join(f"the {op} of stage {stage}" for op, stage in actions)
            raise ValueError(
                f"optimum: {slot} takes no time; it needs costs above 0 at all stages: take less away by extra"
            )
        first, after = 0.0, 0.0
        for op, stage in actions:
            reach = self.around[stage]
            starts = reach.head if op is Op.F else reach.early + (reach.i if op is Op.W else 0)
            ends = reach.rest if op is Op.F else 0 if op is Op.W else reach.tail
            first, after = max(first, starts), max(after, ends)
        last = self.horizon - duration - round(after)
        column = self.kinds[-1].column + self.kinds[-1].width if self.kinds else 0
        self.kinds.append(_Kind(actions, rank, duration, round(first), last, column))

    def solve(self, time_limit: float) -> tuple[tuple[Slot, ...], ...] | None:
        """The orders of a schedule; an empty tuple if the time ran out, None if there is no such schedule."""
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError as error:
            raise ImportError(f"optimum needs SciPy: {install_command('scipy')}") from error
        self._add_constraints()
        if any(least > 0 and not row for row, least in self.rows):
            return None
        entries = [
            (n, column, value) for n, (row, _) in enumerate(self.rows) for column, value in row.items()
        ]
        at, columns, values = zip(*entries, strict=True)
        matrix = csr_array((values, (at, columns)), shape=(len(self.rows), self.size))
        result = milp(
            np.zeros(self.size),
            integrality=np.ones(self.size),
            bounds=Bounds(0, self.each),
            constraints=LinearConstraint(matrix, [least for _, least in self.rows], np.inf),
            options={"time_limit": time_limit},
        )
        if result.status == 2:
            return None
        return () if result.x is None else self._orders_from(np.round(result.x).astype(int))

    def _add_constraints(self) -> None:
        for kind in self.kinds:
            for t in range(kind.first + 1, kind.last + 1):
                self._at_least(0, (1, [kind], t), (-1, [kind], t - 1))
        for stage in range(self.placement.num_stages):
            self._complete(stage)
        for t in range(self.horizon):
            for rank in range(self.placement.num_ranks):
                self._one_at_a_time(rank, t)
                self._fits(rank, t)
            for stage in range(self.placement.num_stages):
                self._in_order(stage, t)

    def _holding(self, stage: int, *ops: Op) -> list[_Kind]:
        return [kind for kind in self.kinds if any((op, stage) in kind.actions for op in ops)]

    def _complete(self, stage: int) -> None:
        end = self.horizon
        self._at_least(self.each, (1, self._holding(stage, Op.F), end))
        self._at_least(-self.each, (-1, self._holding(stage, Op.F), end))
        self._at_least(self.each, (1, self._holding(stage, Op.I, Op.B), end))
        self._at_least(self.each, (1, self._holding(stage, Op.W, Op.B), end))

    def _one_at_a_time(self, rank: int, t: int) -> None:
        here = [kind for kind in self.kinds if kind.rank == rank]
        running = [term for k in here for term in ((-1, [k], t), (1, [k], t - k.duration))]
        self._at_least(-1, *running)

    def _in_order(self, stage: int, t: int) -> None:
        """Require that no more slots have started at a stage than have ended where their inputs come from."""
        forwards, backwards = self._holding(stage, Op.F), self._holding(stage, Op.I, Op.B)
        if not self.placement.is_first(stage):
            self._follows(forwards, self._holding(stage - 1, Op.F), t)
        if self.placement.is_last(stage):
            self._follows(backwards, forwards, t)
        else:
            self._follows(backwards, self._holding(stage + 1, Op.I, Op.B), t)
        self._follows(self._holding(stage, Op.W), self._holding(stage, Op.I), t)

    def _follows(self, later: list[_Kind], earlier: list[_Kind], t: int) -> None:
        hop = round(self.costs.transfer(earlier[0].rank, later[0].rank))
        self._at_least(0, (-1, later, t), *((1, [kind], t - hop - kind.duration) for kind in earlier))

    def _fits(self, rank: int, t: int) -> None:
        if self.limit == math.inf:
            return
        kept: list[tuple[float, list[_Kind], int]] = []
        for kind in self.kinds:
            if kind.rank == rank:
                changes = [self.memory.before_and_after[op] for op, _ in kind.actions]
                kept.append((-sum(taken for taken, _ in changes), [kind], t))
                kept.append((sum(freed for _, freed in changes), [kind], t - kind.duration))
        room = self.limit * (1 + REL_TOLERANCE) - self.memory.at_rest(self.placement, rank)
        # The solver's tolerance is absolute.
        largest = max((abs(size) for size, _, _ in kept), default=0) or 1
        self._at_least(-room / largest, *((size / largest, kinds, start) for size, kinds, start in kept))

    def _at_least(self, least: float, *terms: tuple[float, list[_Kind], int]) -> None:
        """Add a row: the sum over (factor, kinds, step) of factor * (slots started by step) is at least ``least``."""
        row: dict[int, float] = {}
        for factor, kinds, t in terms:
            for kind in kinds:
                if kind.width and t >= kind.first and factor:
                    column = kind.column + min(t, kind.last) - kind.first
                    row[column] = row.get(column, 0) + factor
        row = {column: factor for column, factor in row.items() if factor}
        if row or least > 0:
            self.rows.append((row, least))

    def _orders_from(self, counts: np.ndarray) -> tuple[tuple[Slot, ...], ...]:
        """Orders from counts: slots sorted by start, microbatches numbered in the order of each stage."""
        started: list[list[tuple[int, _Kind]]] = [[] for _ in range(self.placement.num_ranks)]
        for kind in self.kinds:
            before = 0
            for t, count in enumerate(counts[kind.column : kind.column + kind.width], kind.first):
                started[kind.rank] += [(t, kind)] * (int(count) - before)
                before = int(count)
        return tuple(tuple(_numbered(sorted(slots, key=lambda slot: slot[0]))) for slots in started)


def _numbered(slots: list[tuple[int, _Kind]]) -> Iterator[Slot]:
    seen: dict[tuple[bool, int], int] = {}
    owed: dict[int, list[int]] = {}
    for _, kind in slots:
        actions = []
        for op, stage in kind.actions:
            if op is Op.W:
                microbatch = owed[stage].pop(0)
            else:
                microbatch = seen.get((op is Op.F, stage), 0)
                seen[op is Op.F, stage] = microbatch + 1
            if op is Op.I:
                owed.setdefault(stage, []).append(microbatch)
            actions.append(Action(stage, op, microbatch))
        yield tuple(actions)
