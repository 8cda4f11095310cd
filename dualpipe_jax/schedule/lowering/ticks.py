"""Choose the tick in which each slot of a schedule runs.

A rank may start tick t + 1 once its neighbours have started tick t and the values that they sent then have
arrived, whether it needs them or not. So ticks tie ranks together more than the data does, and a slot in too late
a tick waits for a slot of a neighbour on which it does not depend. Placing is choosing an integer tick(s)
for each slot s such that the table ends when the event-driven timeline of the schedule ends:

  order      tick(next) >= tick(s) + 1 on the same rank
  data       tick(reader) >= tick(s) + 2 on another rank
  coupling   tick(b) <= tick(a) + d, for a on a rank d hops away that runs when b starts;
             tick(b) <= tick(a) + d - 1 if a only starts after b does

All are differences of two unknowns, so raising ticks until nothing is violated finds the least
solution. Where some constraints contradict each other, they form a cycle; one of its couplings then becomes
a true wait ("b starts after a ends"), the one that delays the end least, and the timeline moves.
Empty ticks are free in the model, and few: DualPipe needs 0 to 4 % more ticks than with each slot at its
earliest for usual costs.
"""

import bisect
import heapq
import itertools
from collections.abc import Sequence

import numpy as np

from dualpipe_jax.schedule.costs import REL_TOLERANCE, CostModel
from dualpipe_jax.schedule.lowering.flat import Channel, Flat, channels, topological

_LONGEST_CYCLE = 256
"""The longest chain of slots that is searched for a cycle. Cycles observed so far have 4 to 40 slots."""


def place(flat: Flat, costs: CostModel, rounds: int = 4) -> np.ndarray:
    """The tick of each slot, one slot per rank and tick: of the placements tried, the one that ends soonest.

    The first placement is ``earliest``, so the result is never worse than that. Each round solves all constraints
    anew for the timeline that the round before left. Rounds end when the table ends as early as that timeline with
    at most 3 % more ticks than ``earliest``. Sends are left out at first, since with them slots that start together
    obstruct each other and many waits result; then the rounds are run with sends.
    """
    ordered = topological(flat)
    early = earliest(flat, ordered)
    permutes, cost = channels(flat.schedule), flat.costs(costs)

    def score(ticks: np.ndarray) -> tuple[float, int]:
        work = np.zeros((int(ticks.max(initial=-1)) + 1, flat.schedule.num_ranks))
        work[ticks, flat.rank] = cost
        return float(f"{makespan(work, permutes, costs):.9g}"), len(work)

    best, best_score = early, score(early)
    fewest = best_score[1]
    for send in dict.fromkeys((0.0, costs.dearest_send)):
        timeline = _Timeline(flat, ordered, cost, send, permutes)
        for _ in range(rounds):
            reached = best_score[0] <= timeline.makespan + timeline.eps
            if timeline.steps_left <= 0 or (reached and best_score[1] <= 1.03 * fewest):
                break
            ticks = earliest(flat, ordered, _solve_constraints(timeline, early.tolist(), best_score[0]))
            best_score, best = min((best_score, best), (score(ticks), ticks), key=lambda found: found[0])
    return best


def earliest(flat: Flat, ordered: Sequence[int], at_least: Sequence[int] | None = None) -> np.ndarray:
    """Put each slot at the first tick that its rank and its inputs allow, but not before its entry of ``at_least``."""
    f_needs, g_needs, rank_of = flat.f_needs.tolist(), flat.g_needs.tolist(), flat.rank.tolist()
    ticks, last = list(at_least or [0] * flat.num_slots), [-1] * flat.schedule.num_ranks
    for slot in ordered:
        rank = rank_of[slot]
        tick = max(ticks[slot], last[rank] + 1)
        for need in (f_needs[slot], g_needs[slot]):
            if need >= 0:
                tick = max(tick, ticks[need] + 1 + (rank_of[need] != rank))
        ticks[slot] = last[rank] = tick
    return np.array(ticks, np.int64)


class _Timeline:
    """The start and end of each slot if it waits only for its rank, its data and the added waits.

    ``tail`` is the time from a slot's start to the end of the last slot that depends on it, ``turn`` its number in
    the order of the first start times; ``steps_left`` bounds the work spent on placing.
    """

    def __init__(
        self, flat: Flat, ordered: Sequence[int], cost: np.ndarray, send: float, permutes: Sequence[Channel]
    ):
        self.begin, self.rank = flat.begin.tolist(), flat.rank.tolist()
        self.cost, self.send = cost.tolist(), send
        num_slots, num_ranks = flat.num_slots, flat.schedule.num_ranks
        self.eps = REL_TOLERANCE * float(cost.sum())
        self.after: list[list[tuple[int, int]]] = [[] for _ in range(num_slots)]
        self.later: list[list[tuple[int, float]]] = [[] for _ in range(num_slots)]
        self.before: list[list[tuple[int, float]]] = [[] for _ in range(num_slots)]
        for slot in range(1, num_slots):
            if self.rank[slot] == self.rank[slot - 1]:
                self._link(slot - 1, slot, 1, self.cost[slot - 1])
        for needs in (flat.f_needs.tolist(), flat.g_needs.tolist()):
            for slot, need in enumerate(needs):
                if need >= 0 and self.rank[need] != self.rank[slot]:
                    self._link(need, slot, 2, self.cost[need] + send)
        self.sources = _sources(permutes, num_ranks)
        self.targets = [
            [r for r, sources in enumerate(self.sources) if rank in sources] for rank in range(num_ranks)
        ]

        self.steps_left = min(100 * num_slots, 200_000) + 4 * num_slots
        self.start = [0.0] * num_slots
        for slot in ordered:
            self.start[slot] = max((self.start[s] + delay for s, delay in self.before[slot]), default=0.0)
        self.end = [start + cost for start, cost in zip(self.start, self.cost, strict=True)]
        self.tail = self.cost.copy()
        for slot in reversed(ordered):
            self.tail[slot] = max(
                (delay + self.tail[s] for s, delay in self.later[slot]), default=self.cost[slot]
            )
        self.turn = [0] * num_slots
        for turn, slot in enumerate(sorted(ordered, key=self.start.__getitem__)):
            self.turn[slot] = turn

    @property
    def makespan(self) -> float:
        lasts = [last - 1 for first, last in itertools.pairwise(self.begin) if first < last]
        return max((self.end[last] for last in lasts), default=0.0)

    def _link(self, slot: int, reader: int, ticks: int, delay: float) -> None:
        self.after[slot].append((reader, ticks))
        self.later[slot].append((reader, delay))
        self.before[reader].append((slot, delay))

    def couplings(self, slot: int) -> list[tuple[int, int, float]]:
        """(a, most, delay): ``slot`` runs at most ``most`` ticks after slot a, or starts ``delay`` after it."""
        now, rank = self.start[slot] + self.eps, self.rank[slot]
        start, end, begin, send, found = self.start, self.end, self.begin, self.send, []
        hops, layer, seen = 1, self.sources[rank], {rank}
        while layer:
            beyond: list[int] = []
            for other in layer:
                if other in seen:
                    continue
                seen.add(other)
                a = bisect.bisect_right(end, now - hops * send, begin[other], begin[other + 1])
                if a == begin[other + 1]:
                    beyond += self.sources[other]
                elif start[a] + hops * send > now:
                    found.append((a, hops - 1, hops * send))
                    beyond += self.sources[other]
                else:
                    found.append((a, hops, self.cost[a] + hops * send))
            hops, layer = hops + 1, beyond
        return found

    def wait(self, slot: int, other: int, delay: float) -> list[int] | None:
        """Make ``slot`` start at least ``delay`` after the start of ``other``.

        Returns the slots whose couplings may have become tighter; None, with nothing changed, if that hangs.
        """
        self.later[other].append((slot, delay))
        self.before[slot].append((other, delay))
        was: dict[int, float] = {}
        todo = [(self.turn[slot], slot)]
        while todo:
            moved = heapq.heappop(todo)[1]
            self.steps_left -= 1
            start = max(self.start[earlier] + lag for earlier, lag in self.before[moved])
            if start > self.start[moved]:
                if moved == other:
                    self.later[other].pop()
                    self.before[slot].pop()
                    for back, at in was.items():
                        self.start[back] = at
                    return None
                was.setdefault(moved, self.start[moved])
                self.start[moved] = start
                for reader, _ in self.later[moved]:
                    heapq.heappush(todo, (self.turn[reader], reader))
        for moved in was:
            self.end[moved] = self.start[moved] + self.cost[moved]
        todo = [(-self.turn[other], other)]
        while todo:
            changed = heapq.heappop(todo)[1]
            self.steps_left -= 1
            tail = max(lag + self.tail[reader] for reader, lag in self.later[changed])
            if tail > self.tail[changed]:
                self.tail[changed] = tail
                for earlier, _ in self.before[changed]:
                    heapq.heappush(todo, (-self.turn[earlier], earlier))
        touched = [slot]
        for moved, before in was.items():
            for rank in self.targets[self.rank[moved]]:
                low, high = self.begin[rank], self.begin[rank + 1]
                first = bisect.bisect_left(self.start, before - self.eps, low, high)
                touched += range(
                    first, bisect.bisect_right(self.start, self.end[moved] + self.eps, first, high)
                )
        return touched


def _solve_constraints(timeline: _Timeline, ticks: list[int], limit: float) -> list[int]:
    """Raise ticks until no constraint is violated; couplings that cannot hold become waits of the timeline.

    Slots are visited in the order of time, so that a contradiction is found, and its wait added, before later
    slots are placed. When the steps run out, or once the timeline ends after ``limit``, remaining constraints stay
    violated.
    """
    after, couplings, turn = timeline.after, timeline.couplings, timeline.turn
    parent = [-1] * len(ticks)
    slot_of = sorted(range(len(ticks)), key=turn.__getitem__)
    todo = list(range(len(ticks)))
    queued = [True] * len(ticks)
    while todo and timeline.steps_left > 0:
        timeline.steps_left -= 1
        slot = slot_of[heapq.heappop(todo)]
        queued[slot] = False
        now, raised = ticks[slot], []
        for reader, lag in after[slot]:
            if now + lag > ticks[reader]:
                ticks[reader], parent[reader] = now + lag, slot
                raised.append(reader)
        for other, most, _ in couplings(slot):
            if now - most > ticks[other]:
                cycle = _find_cycle(parent, slot, other)
                if cycle and (broken := _break_cycle(timeline, cycle)) is not None:
                    raised += broken
                    if timeline.makespan > limit + timeline.eps:
                        timeline.steps_left = 0
                    continue
                ticks[other], parent[other] = now - most, slot
                raised.append(other)
        for other in raised:
            if not queued[other]:
                queued[other] = True
                heapq.heappush(todo, turn[other])
    return ticks


def _break_cycle(timeline: _Timeline, cycle: Sequence[int]) -> list[int] | None:
    """Turn the cheapest coupling of a cycle into a wait; None if the cycle is no contradiction any more.

    Returns the slots that ``wait`` returns; an empty list if every wait would hang, so that the delay remains.
    """
    total, choices = 0, []
    for slot, raised in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        lags = [lag for reader, lag in timeline.after[slot] if reader == raised]
        held = [(most, delay) for other, most, delay in timeline.couplings(slot) if other == raised]
        if lags:
            total += max(lags)
        elif held:
            (most, delay) = held[0]
            total -= most
            choices.append((timeline.start[raised] + delay + timeline.tail[slot], slot, raised, delay))
        else:
            return None
    if total <= 0:
        return None
    for _, slot, other, delay in sorted(choices):
        touched = timeline.wait(slot, other, delay)
        if touched is not None:
            return touched
    return []


def _find_cycle(parent: Sequence[int], slot: int, end: int) -> list[int]:
    """The slots from ``end`` to ``slot`` along which ticks were raised; empty if there is no such chain."""
    chain = [slot]
    while chain[-1] != end:
        if parent[chain[-1]] < 0 or len(chain) > _LONGEST_CYCLE:
            return []
        chain.append(parent[chain[-1]])
    return chain[::-1]


def _sources(permutes: Sequence[Channel], num_ranks: int) -> list[list[int]]:
    """The ranks that send to each rank."""
    pairs = {pair for channel in permutes for pair in channel.pairs}
    return [sorted(source for source, target in pairs if target == rank) for rank in range(num_ranks)]


def makespan(work: np.ndarray, permutes: Sequence[Channel], costs: CostModel) -> float:
    """The time that all ticks take, given the duration of each rank's unit in each tick, ``work`` [ticks, ranks].

    A rank starts tick t + 1 when its own work of tick t is done and the values that its neighbours sent at
    the start of tick t have arrived.
    """
    num_ranks = work.shape[1]
    sources = _sources(permutes, num_ranks)
    width = max(map(len, sources))
    index = np.array([[*s, *[num_ranks] * (width - len(s))] for s in sources], np.int64)
    delay = np.array([[costs.transfer(s, rank) for s in row] for rank, row in enumerate(index.tolist())])
    start = np.full(num_ranks + 1, 0.0)
    start[-1] = -np.inf
    for row in work:
        done = start[:-1] + row
        if width:
            done = np.maximum(done, (start[index] + delay).max(axis=1))
        start[:-1] = done
    return float(start[:-1].max())
