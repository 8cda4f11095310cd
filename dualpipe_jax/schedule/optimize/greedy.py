"""A list scheduler: it simulates time and gives every idle rank the work that a policy prefers."""

import dataclasses
import heapq
import math
from typing import Literal

from dualpipe_jax.schedule.ir import Action, Op, Slot
from dualpipe_jax.schedule.optimize.terms import Terms

_NEVER = math.inf


@dataclasses.dataclass(frozen=True)
class Policy:
    """The preferences of an idle rank.

    Of several forwards, the deepest in its pipe always runs: its microbatch is nearest to the turn.

    Attributes:
      pair: whether to overlap a forward and a backward that could both run, if a pair gains time.
      match: whether to pair only a forward and a backward whose inputs come from the same neighbour; so
        neighbours stay in step.
      patience: how long to wait for a partner that is on its way, as a multiple of the time that a pair gains.
      forward_first: whether a forward goes before a backward, where both could run and are not paired.
      deep_backward: whether, of several backwards, the deepest in its pipe runs, which is the youngest; else
        the oldest runs.
      split: when to split a backward that runs alone into I and W: "always", "never", or at the "ends": within
        the rank's first ``2 * num_ranks`` backwards and after its last forward.
      owed: the most weight gradients that a rank owes before it runs them.
      fill: the share of a weight gradient that must be done before other work is known to arrive, or else it does
        not run; with 1 no other work waits for it, with 0 it runs in any gap.
      ahead: the most microbatches that a rank keeps, each counted in the rank's whole share of the model.
      burst: the number of microbatches after the first that may enter a pipe at the start of the step.
      pace: the time between later microbatches that enter, as a multiple of the time that the busiest rank works
        on a microbatch; with 0, all may enter as soon as memory allows.
    """

    pair: bool = True
    match: bool = False
    patience: float = 1.0
    forward_first: bool = False
    deep_backward: bool = False
    split: Literal["always", "never", "ends"] = "always"
    owed: float = math.inf
    fill: float = 0.5
    ahead: float = math.inf
    burst: int = 0
    pace: float = 0.0


def play_greedily(terms: Terms, policy: Policy) -> tuple[tuple[tuple[Slot, ...], ...], float]:
    """Orders and their makespan, where every idle rank starts the work that the policy prefers.

    Microbatches pass each stage in sequence. A rank starts a forward only if the microbatches that it then
    holds can all still be finished, oldest first, within its memory; so it never gets stuck, whatever the
    policy.
    """
    simulation = _Simulation(terms, policy)
    simulation.run()
    return tuple(tuple(rank.order) for rank in simulation.ranks), max(
        rank.free_at for rank in simulation.ranks
    )


@dataclasses.dataclass(slots=True)
class _Rank:
    number: int
    stages: tuple[int, ...]
    of_pipe: list[tuple[int, ...]]  # its stages in each pipe, the shallowest first
    room: float
    limit: float  # the most stages' worth of microbatches that the policy lets it keep
    forwards_left: int
    order: list[Slot] = dataclasses.field(default_factory=list)
    free_at: float = 0.0
    used: float = 0.0
    live: int = 0
    backwards: int = 0
    owed: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (stage, microbatch), oldest first
    paid: int = 0  # how many of those are done

    @property
    def owes(self) -> int:
        return len(self.owed) - self.paid


class _Simulation:
    """The state of all ranks, and the inputs that are on their way between them."""

    def __init__(self, terms: Terms, policy: Policy):
        placement, count = terms.placement, terms.count
        self.terms, self.policy, self.depth = terms, policy, placement.num_model_stages
        self.pairs = policy.pair and terms.gain > 0
        self.patience = policy.patience * terms.gain if self.pairs else -1.0
        self.num_first = 2 * placement.num_ranks
        self.ranks = [self._rank(number) for number in range(placement.num_ranks)]
        # For each stage: its next microbatch, and the time at which each microbatch's input arrives.
        self.next_f, self.next_b = [0] * placement.num_stages, [0] * placement.num_stages
        self.f_at = [
            self._entry_times() if placement.is_first(s) else [_NEVER] * count for s in range(len(terms.f))
        ]
        self.b_at = [[_NEVER] * count for _ in terms.f]
        self.events: list[tuple[float, int]] = []

    def _rank(self, number: int) -> _Rank:
        placement, held = self.terms.placement, self.terms.placement.stages_on[number]
        pipes = range(placement.num_pipes)
        of_pipe = [tuple(s for s in held if placement.pipe_of(s) == pipe) for pipe in pipes]
        limit = self.policy.ahead * self.depth / placement.num_ranks
        return _Rank(number, held, of_pipe, self.terms.room[number], limit, self.terms.count * len(held))

    def _entry_times(self) -> list[float]:
        """The time from which each microbatch may enter a pipe."""
        terms, policy = self.terms, self.policy
        saved = terms.gain if self.pairs else 0.0
        busiest = max(
            sum(terms.f[s] + terms.i[s] + terms.w[s] - saved for s in held)
            for held in terms.placement.stages_on
        )
        return [max(0.0, policy.pace * busiest * (m - policy.burst)) for m in range(terms.count)]

    def run(self) -> None:
        """Simulate until no rank has work left."""
        self.events = [(0.0, rank.number) for rank in self.ranks]
        while self.events:
            now, number = heapq.heappop(self.events)
            if self.ranks[number].free_at <= now + self.terms.eps:
                self._decide(self.ranks[number], now)

    def _decide(self, rank: _Rank, now: float) -> None:
        """Start work on an idle rank, or queue the rank for the time at which its next input arrives."""
        forwards, soon_f = self._arrived(rank, self.next_f, self.f_at, now)
        backwards, soon_b = self._arrived(rank, self.next_b, self.b_at, now)
        allowed = [stage for stage in forwards if self._fits(rank, stage)]
        if allowed and backwards:
            self._choose(rank, now, allowed, backwards)
        elif backwards:
            if soon_f - now < self.patience:
                self._wait(rank, now, soon_f)
            else:
                self._start_backward(rank, now, self._pick(backwards))
        elif allowed:
            if soon_b - now < self.patience:
                self._wait(rank, now, soon_b)
            elif rank.owes > self.policy.owed:
                self._start_w(rank, now)
            else:
                self._start_forward(rank, now, max(allowed))
        elif forwards and rank.owes:
            self._start_w(rank, now)  # makes room
        else:
            self._wait(rank, now, min(soon_f, soon_b))

    def _arrived(
        self, rank: _Rank, following: list[int], at: list[list[float]], now: float
    ) -> tuple[list[int], float]:
        """The stages whose next microbatch has arrived, and the time at which the next known one arrives."""
        there, soon, count = [], _NEVER, self.terms.count
        now += self.terms.eps
        for stage in rank.stages:
            microbatch = following[stage]
            if microbatch < count:
                arrival = at[stage][microbatch]
                if arrival <= now:
                    there.append(stage)
                elif arrival < soon:
                    soon = arrival
        return there, soon

    def _choose(self, rank: _Rank, now: float, forwards: list[int], backwards: list[int]) -> None:
        """Start a pair or one of the two, where a forward and a backward could run."""
        pair = self._pair(forwards, backwards) if self.pairs else None
        if pair is not None:
            self._start_pair(rank, now, *pair)
        elif self.policy.forward_first:
            self._start_forward(rank, now, max(forwards))
        else:
            self._start_backward(rank, now, self._pick(backwards))

    def _pick(self, backwards: list[int]) -> int:
        return max(backwards) if self.policy.deep_backward else min(backwards)

    def _pair(self, forwards: list[int], backwards: list[int]) -> tuple[int, int] | None:
        """The preferred forward and backward that may form a pair; None if no two may."""
        for b in backwards[::-1] if self.policy.deep_backward else backwards:
            for f in forwards[::-1]:
                different = self.next_f[f] != self.next_b[b] or f // self.depth != b // self.depth
                if different and not (self.policy.match and self._source(f, -1) != self._source(b, 1)):
                    return f, b
        return None

    def _source(self, stage: int, step: int) -> int:
        """The rank from which a stage's input comes; -1 at the ends of a pipe."""
        source = stage + step
        return self.terms.placement.rank_of[source] if source // self.depth == stage // self.depth else -1

    def _fits(self, rank: _Rank, stage: int) -> bool:
        """Whether the stage's next forward has room, and the rank can finish all its microbatches afterwards."""
        unit = self.terms.unit
        if rank.used + unit > rank.room:
            return False
        if rank.live >= rank.limit and not self._is_oldest(rank, stage):
            return False
        free = rank.room - rank.used - unit + rank.owes * (self.terms.kept + self.terms.stash)
        return free >= (len(rank.stages) - 1) * unit or self._can_finish_all(rank, stage, free)

    def _is_oldest(self, rank: _Rank, stage: int) -> bool:
        return self.next_f[stage] == min(self.next_b[s] for s in rank.stages)

    def _can_finish_all(self, rank: _Rank, stage: int, free: float) -> bool:
        """Whether the rank can finish all its microbatches, oldest first, if the stage's next one joins them.

        Each microbatch needs room for its remaining forwards on this rank, and then frees the memory that it holds.
        A microbatch that has not arrived yet counts, too: younger ones of another pipe must not take its room.
        """
        joins, unit = self.next_f[stage], self.terms.unit
        enough = (len(rank.stages) - 1) * unit
        oldest = min(self.next_b[s] for s in rank.stages)
        newest = max(self.next_f[s] for s in rank.stages)
        for microbatch in range(oldest, newest + 1):
            for stages in rank.of_pipe:
                ran = [
                    s for s in stages if self.next_f[s] > microbatch or (s == stage and joins == microbatch)
                ]
                if (len(stages) - len(ran)) * unit > free:
                    return False
                free += unit * sum(self.next_b[s] <= microbatch for s in ran)
                if free >= enough:
                    return True
        return True

    def _wait(self, rank: _Rank, now: float, soon: float) -> None:
        """Wait until ``soon``; run a W meanwhile, if the gap holds the share ``fill`` of it."""
        if rank.owes:
            stage, _ = rank.owed[rank.paid]
            if soon - now >= self.policy.fill * self.terms.w[stage] - self.terms.eps:
                self._start_w(rank, now)
                return
        if soon < _NEVER:
            heapq.heappush(self.events, (soon, rank.number))

    def _start_forward(self, rank: _Rank, now: float, stage: int) -> None:
        end = now + self.terms.f[stage]
        rank.order.append((Action(stage, Op.F, self.next_f[stage]),))
        self._finish(rank, end, self._forward(rank, end, stage))

    def _start_backward(self, rank: _Rank, now: float, stage: int) -> None:
        terms, microbatch, policy = self.terms, self.next_b[stage], self.policy
        fits = rank.used + terms.stash <= rank.room
        at_ends = not rank.forwards_left or rank.backwards < self.num_first
        split = policy.split == "always" or (policy.split == "ends" and at_ends)
        if rank.owes and (not fits or (split and rank.owes >= policy.owed)):
            self._start_w(rank, now)
            return
        end = now + terms.i[stage]
        if split and fits:
            rank.order.append((Action(stage, Op.I, microbatch),))
            rank.owed.append((stage, microbatch))
            rank.used += terms.kept + terms.stash
        else:
            rank.order.append((Action(stage, Op.B, microbatch),))
            end += terms.w[stage]
        self._finish(rank, end, self._backward(rank, end, stage))

    def _start_pair(self, rank: _Rank, now: float, f: int, b: int) -> None:
        end = now + self.terms.f[f] + self.terms.i[b] + self.terms.w[b] - self.terms.gain
        rank.order.append((Action(f, Op.F, self.next_f[f]), Action(b, Op.B, self.next_b[b])))
        self._finish(rank, end, max(self._forward(rank, end, f), self._backward(rank, end, b)))

    def _start_w(self, rank: _Rank, now: float) -> None:
        stage, microbatch = rank.owed[rank.paid]
        rank.paid += 1
        rank.used -= self.terms.kept + self.terms.stash
        rank.order.append((Action(stage, Op.W, microbatch),))
        self._finish(rank, now + self.terms.w[stage], 0.0)

    def _finish(self, rank: _Rank, end: float, held: float) -> None:
        rank.free_at = end + held
        heapq.heappush(self.events, (rank.free_at, rank.number))

    def _forward(self, rank: _Rank, end: float, stage: int) -> float:
        """Record a forward that ends at ``end``; return how long sending its output keeps the rank."""
        microbatch = self.next_f[stage]
        self.next_f[stage] += 1
        rank.used += self.terms.unit
        rank.live += 1
        rank.forwards_left -= 1
        delay = self.terms.y_delay[stage]
        if delay is None:
            self.b_at[stage][microbatch] = end
        else:
            self._send(rank, stage + 1, self.f_at[stage + 1], microbatch, end + delay)
        return self.terms.y_held[stage]

    def _backward(self, rank: _Rank, end: float, stage: int) -> float:
        """Record a backward that ends at ``end``; return how long sending its output keeps the rank."""
        microbatch = self.next_b[stage]
        self.next_b[stage] += 1
        rank.used -= self.terms.unit
        rank.live -= 1
        rank.backwards += 1
        delay = self.terms.dx_delay[stage]
        if delay is not None:
            self._send(rank, stage - 1, self.b_at[stage - 1], microbatch, end + delay)
        return self.terms.dx_held[stage]

    def _send(self, rank: _Rank, reader: int, at: list[float], microbatch: int, arrival: float) -> None:
        at[microbatch] = arrival
        there = self.terms.placement.rank_of[reader]
        # By a rounding error, a slot without duration may end before the time at which its idle reader last decided.
        if there != rank.number and self.ranks[there].free_at <= arrival + self.terms.eps:
            heapq.heappush(self.events, (max(arrival, self.ranks[there].free_at), there))
