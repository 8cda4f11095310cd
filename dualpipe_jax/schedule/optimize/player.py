"""Simulate moves under given terms, fast enough for the inner loop of a search."""

import math
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from dualpipe_jax.schedule.ir import Action, Op, Schedule, Slot
from dualpipe_jax.schedule.optimize.moves import Move, Moves
from dualpipe_jax.schedule.optimize.terms import Terms

_NEVER = math.inf
Entry = TypeVar("Entry")


class Play(NamedTuple):
    """Simulated moves: ``starts[rank][index]`` of each move, and the time at which each rank ended, W's included."""

    makespan: float
    starts: list[list[float]]
    ends: list[float]

    def no_worse(self, other: "Play", eps: float) -> bool:
        """Whether the makespan is shorter or, if it is the same, the sum of all ranks' ends is no larger."""
        if abs(self.makespan - other.makespan) > eps:
            return self.makespan < other.makespan
        return sum(self.ends) <= sum(other.ends) + eps


class Player:
    """Simulates moves under given terms.

    A rank runs its moves in order, each as soon as its inputs have arrived. It runs the W's that it owes, first
    in, first out, in gaps and where a move needs memory. A W runs in a gap that holds the share ``fill`` of it.
    """

    def __init__(self, terms: Terms, fill: float = 0.6):
        placement, count = terms.placement, terms.count
        self.terms, self.fill = terms, fill

        def each(of_stages: Iterable[Entry]) -> list[Entry]:
            """Repeat entries of stages for each of their values, which are numbered stage by stage."""
            return [entry for entry in of_stages for _ in range(count)]

        self.f, self.i, self.w = each(terms.f), each(terms.i), each(terms.w)
        self.rank = each(placement.rank_of)
        self.y_delay, self.dx_delay = each(terms.y_delay), each(terms.dx_delay)
        self.y_held, self.dx_held = each(terms.y_held), each(terms.dx_held)
        self.entry = each(map(placement.is_first, range(placement.num_stages)))

    def cost(self, move: Move) -> float:
        f, b, split = move
        if b < 0:
            return self.f[f]
        backward = self.i[b] if split else self.i[b] + self.w[b]
        return backward if f < 0 else self.f[f] + backward - self.terms.gain

    def play(self, moves: Moves, bound: float = _NEVER, out: list[list[Slot]] | None = None) -> Play | None:
        """Simulate moves; None if they hang, overflow a rank's memory, or certainly take longer than ``bound``.

        The slots of each rank are appended to ``out``, W's in their places.
        """
        run = _Run(self, moves, bound, out)
        ready = run.ready
        while ready:
            if not run.advance(ready.pop()):
                return None
        return run.finish()

    def schedule(self, moves: Moves, name: str) -> Schedule:
        """The moves as a schedule, with W's where ``play`` puts them.

        Raises:
          ValueError: the moves hang or do not fit the memory.
        """
        orders: list[list[Slot]] = [[] for _ in moves]
        if self.play(moves, out=orders) is None:
            raise ValueError(f"{name}: moves that hang or do not fit the memory")
        placement = self.terms.placement
        return Schedule(name, placement, self.terms.count * placement.num_pipes, tuple(map(tuple, orders)))

    def slot(self, move: Move) -> Slot:
        f, b, split = move
        forward = () if f < 0 else (Action(f // self.terms.count, Op.F, f % self.terms.count),)
        op = Op.I if split else Op.B
        return forward if b < 0 else (*forward, Action(b // self.terms.count, op, b % self.terms.count))


class _Run:
    def __init__(self, player: Player, moves: Moves, bound: float, out: list[list[Slot]] | None):
        self.player, self.moves, self.bound, self.out = player, moves, bound, out
        ranks = range(len(moves))
        self.y_at = [0.0 if entry else _NEVER for entry in player.entry]  # when a forward's input is there
        self.dx_at = [_NEVER] * len(player.f)
        self.at, self.free = [0] * len(moves), [0.0] * len(moves)
        self.used, self.paid = [0.0] * len(moves), [0] * len(moves)
        self.todo = [sum(map(player.cost, order)) for order in moves]
        self.owed: list[list[int]] = [[] for _ in ranks]
        self.starts: list[list[float]] = [[] for _ in ranks]
        self.awaited: list[int | None] = [None for _ in ranks]  # the f or ~b for whose input a rank waits
        self.ready = list(ranks)

    def advance(self, rank: int) -> bool:
        """Simulate a rank up to its first move that waits; False if memory or the bound is exceeded.

        This is the inner loop of the search: one function with its state in local names, for speed.
        """
        player, terms, order, starts = self.player, self.player.terms, self.moves[rank], self.starts[rank]
        y_at, dx_at, owed, room = self.y_at, self.dx_at, self.owed[rank], terms.room[rank]
        free, used, todo, index = self.free[rank], self.used[rank], self.todo[rank], self.at[rank]
        out = None if self.out is None else self.out[rank]
        unit, stash, returned = terms.unit, terms.stash, terms.unit - terms.kept
        while index < len(order):
            move = order[index]
            f, b, split = move
            start = y_at[f] if f >= 0 else 0.0
            if b >= 0 and dx_at[b] > start:
                start = dx_at[b]
            if start == _NEVER:
                self.awaited[rank] = f if f >= 0 and y_at[f] == _NEVER else ~b
                break
            needs = unit if f >= 0 else stash if split else 0.0
            if self.paid[rank] < len(owed) and (start > free or used + needs > room):
                before = free
                free, used = self._fill(rank, free, start, used, room - needs, out)
                todo -= free - before
            if free > start:
                start = free
            if used + needs > room or start + todo > self.bound:
                return False
            cost = player.cost(move)
            used += needs
            if split:
                used -= returned
                owed.append(b)
                todo += player.w[b]
            elif b >= 0:
                used -= unit
            if out is not None:
                out.append(player.slot(move))
            starts.append(start)
            free = start + cost
            todo -= cost
            index += 1
            free += self._record_outputs(rank, f, b, free)
        self.at[rank], self.free[rank], self.used[rank], self.todo[rank] = index, free, used, todo
        return True

    def _fill(
        self, rank: int, free: float, until: float, used: float, room: float, out: list[Slot] | None
    ) -> tuple[float, float]:
        """Run W's that fit the gap before the next move, or that must free memory for it; return new (free, used)."""
        player, terms, owed = self.player, self.player.terms, self.owed[rank]
        paid = self.paid[rank]
        while paid < len(owed):
            cost = player.w[owed[paid]]
            if until - free < player.fill * cost - terms.eps and used <= room:
                break
            if until <= free and used <= room:
                break
            free += cost
            used -= terms.kept + terms.stash
            if out is not None:
                out.append((Action(owed[paid] // terms.count, Op.W, owed[paid] % terms.count),))
            paid += 1
        self.paid[rank] = paid
        return free, used

    def _record_outputs(self, rank: int, f: int, b: int, end: float) -> float:
        """Record a move's outputs, and queue ranks that wait for them; return how long sending them keeps the rank."""
        player, count, held = self.player, self.player.terms.count, 0.0
        if f >= 0:
            delay = player.y_delay[f]
            if delay is None:
                self.dx_at[f] = end
            else:
                self.y_at[f + count] = end + delay
                self._queue_if_waiting(rank, player.rank[f + count], f + count)
                held = player.y_held[f]
        if b >= 0:
            delay = player.dx_delay[b]
            if delay is not None:
                self.dx_at[b - count] = end + delay
                self._queue_if_waiting(rank, player.rank[b - count], ~(b - count))
                held = max(held, player.dx_held[b])
        return held

    def _queue_if_waiting(self, rank: int, reader: int, value: int) -> None:
        if reader != rank and self.awaited[reader] == value:
            self.ready.append(reader)

    def finish(self) -> Play | None:
        """Run the remaining W's; None if some rank has not run all its moves."""
        if any(at < len(order) for at, order in zip(self.at, self.moves, strict=True)):
            return None
        for rank, free in enumerate(self.free):
            out = None if self.out is None else self.out[rank]
            self.free[rank], _ = self._fill(rank, free, _NEVER, 0.0, 0.0, out)
        return Play(max(self.free), self.starts, self.free)
