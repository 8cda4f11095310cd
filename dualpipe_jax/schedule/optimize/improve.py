"""Local improvement: change what is on the critical path, keep what does not lengthen the step."""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from dualpipe_jax.schedule.ir import Action, Op, Schedule, Slot
from dualpipe_jax.schedule.optimize.terms import Terms

_NEVER = math.inf


class Move(NamedTuple):
    """A slot without W's, which fill gaps by themselves: a forward, a backward, or both as a pair.

    ``f`` and ``b`` are values, ``stage * count + microbatch``, or -1; a ``split`` backward is an I.
    """

    f: int
    b: int
    split: bool = False


Moves = list[list[Move]]
"""The moves of each rank, in order."""


class Play(NamedTuple):
    """How moves went: ``starts[rank][index]`` of each, and when each rank was through, W's included."""

    makespan: float
    starts: list[list[float]]
    ends: list[float]

    def no_worse(self, other: "Play", eps: float) -> bool:
        """By the makespan or, where that is the same, by the ends of all ranks together."""
        if abs(self.makespan - other.makespan) > eps:
            return self.makespan < other.makespan
        return sum(self.ends) <= sum(other.ends) + eps


class Player:
    """Plays moves under given terms.

    A rank runs its moves in order, each as soon as its inputs are there; in the gaps, and where room is
    needed, it runs the W's that it owes, first in, first out. A gap counts if it holds the share ``fill`` of
    a W.
    """

    def __init__(self, terms: Terms, fill: float = 0.6):
        placement, count = terms.placement, terms.count
        stages = range(placement.num_stages)
        self.terms, self.fill = terms, fill
        self.f, self.i, self.w = (
            [cost for cost in of for _ in range(count)] for of in (terms.f, terms.i, terms.w)
        )
        self.rank = [rank for rank in placement.rank_of for _ in range(count)]
        self.y_delay = [terms.y_delay[stage] for stage in stages for _ in range(count)]
        self.dx_delay = [terms.dx_delay[stage] for stage in stages for _ in range(count)]
        self.entry = [placement.is_first(stage) for stage in stages for _ in range(count)]

    def cost(self, move: Move) -> float:
        """How long a move takes."""
        f, b, split = move
        if b < 0:
            return self.f[f]
        backward = self.i[b] if split else self.i[b] + self.w[b]
        return backward if f < 0 else self.f[f] + backward - self.terms.gain

    def play(self, moves: Moves, bound: float = _NEVER, out: list[list[Slot]] | None = None) -> Play | None:
        """Play; None if that hangs, overflows a rank's memory, or is seen to take longer than ``bound``.

        Into ``out`` go the slots of each rank, W's in their places.
        """
        run = _Run(self, moves, bound, out)
        ready = run.ready
        while ready:
            if not run.advance(ready.pop()):
                return None
        return run.finish()

    def schedule(self, moves: Moves, name: str) -> Schedule:
        """The moves as a schedule, with W's where playing put them."""
        orders: list[list[Slot]] = [[] for _ in moves]
        if self.play(moves, out=orders) is None:
            raise ValueError(f"{name}: moves that hang or do not fit the memory")
        placement = self.terms.placement
        return Schedule(name, placement, self.terms.count * placement.num_pipes, tuple(map(tuple, orders)))

    def slot(self, move: Move) -> Slot:
        """A move as a slot."""
        f, b, split = move
        forward = () if f < 0 else (Action(f // self.terms.count, Op.F, f % self.terms.count),)
        op = Op.I if split else Op.B
        return forward if b < 0 else (*forward, Action(b // self.terms.count, op, b % self.terms.count))


class _Run:
    """The state of one play."""

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
        self.waits: list[int | None] = [None for _ in ranks]  # the f or ~b whose input a rank waits for
        self.ready = list(ranks)

    def advance(self, rank: int) -> bool:
        """Play a rank up to the first move that waits; False if it cannot go on.

        The inner loop of the search: one function with its state in local names, for speed.
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
                self.waits[rank] = f if f >= 0 and y_at[f] == _NEVER else ~b
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
            if self._hand_over(rank, f, b, free):
                free += terms.blocking
        self.at[rank], self.free[rank], self.used[rank], self.todo[rank] = index, free, used, todo
        return True

    def _fill(
        self, rank: int, free: float, until: float, used: float, room: float, out: list[Slot] | None
    ) -> tuple[float, float]:
        """Run W's that fit the gap until the next move, or that must make room for it."""
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

    def _hand_over(self, rank: int, f: int, b: int, end: float) -> bool:
        """Let those who wait for a move's outputs know; return whether any of them is another rank."""
        player, count, sent = self.player, self.player.terms.count, False
        if f >= 0:
            delay = player.y_delay[f]
            if delay is None:
                self.dx_at[f] = end
            else:
                self.y_at[f + count] = end + delay
                sent = self._wake(rank, player.rank[f + count], f + count)
        if b >= 0:
            delay = player.dx_delay[b]
            if delay is not None:
                self.dx_at[b - count] = end + delay
                sent = self._wake(rank, player.rank[b - count], ~(b - count)) or sent
        return sent

    def _wake(self, rank: int, reader: int, value: int) -> bool:
        if reader != rank and self.waits[reader] == value:
            self.ready.append(reader)
        return reader != rank

    def finish(self) -> Play | None:
        """Run the W's that are left; None if some rank never got through."""
        if any(at < len(order) for at, order in zip(self.at, self.moves, strict=True)):
            return None
        for rank, free in enumerate(self.free):
            out = None if self.out is None else self.out[rank]
            self.free[rank], _ = self._fill(rank, free, _NEVER, 0.0, 0.0, out)
        return Play(max(self.free), self.starts, self.free)


def moves_of(schedule: Schedule) -> Moves:
    """What a schedule does, without its W's."""
    count = schedule.microbatches_per_pipe

    def move(slot: Slot) -> Move:
        f = next((stage * count + m for stage, op, m in slot if op is Op.F), -1)
        b = next((stage * count + m for stage, op, m in slot if op is not Op.F), -1)
        return Move(f, b, slot[-1].op is Op.I)

    return [[move(slot) for slot in order if slot[0].op is not Op.W] for order in schedule.orders]


def improve(
    player: Player,
    moves: Moves,
    tries: int,
    seed: int = 0,
    go_on: Callable[[float], bool] = lambda makespan: True,
) -> tuple[Moves, float]:
    """Change the moves on a critical path at random, ``tries`` times, keeping what is no worse.

    Deterministic for given arguments. Stops early where ``go_on``, asked with the makespan, says no. Returns
    new moves and their makespan.

    Raises:
      ValueError: if the moves hang or do not fit the memory.
    """
    dice, now = random.Random(seed), player.play(moves)
    if now is None:
        raise ValueError("improve: the moves hang or do not fit the memory; give some that can be played")
    moves = [list(order) for order in moves]
    path = _critical_path(player, moves, now)
    for _ in range(tries):
        if not go_on(now.makespan):
            break
        rank, index = dice.choice(path)
        changed = _change(player, moves[rank], index, dice)
        if changed is None:
            continue
        kept, moves[rank] = moves[rank], changed
        eps = player.terms.eps
        then = player.play(moves, now.makespan + eps)
        if then is not None and then.no_worse(now, eps):
            now, path = then, _critical_path(player, moves, then)
        else:
            moves[rank] = kept
    return moves, now.makespan


def _critical_path(player: Player, moves: Moves, play: Play) -> list[tuple[int, int]]:
    """(rank, index) of moves that follow one another without a gap, from the last of the step backwards."""
    count, eps = player.terms.count, 10 * player.terms.eps
    at_f = {move.f: (rank, index) for rank, order in enumerate(moves) for index, move in enumerate(order)}
    at_b = {move.b: (rank, index) for rank, order in enumerate(moves) for index, move in enumerate(order)}
    rank = max(range(len(moves)), key=play.ends.__getitem__)
    index = len(moves[rank]) - 1
    path = []
    while index >= 0:
        path.append((rank, index))
        f, b, _ = moves[rank][index]
        makers: list[tuple[int, int, float]] = []
        if f >= 0 and not player.entry[f]:
            makers.append((*at_f[f - count], player.y_delay[f - count] or 0.0))
        if b >= 0 and player.y_delay[b] is not None:
            makers.append((*at_b[b + count], player.dx_delay[b + count] or 0.0))
        start = play.starts[rank][index] - eps
        for maker, place, delay in makers:
            if (
                maker != rank
                and play.starts[maker][place] + player.cost(moves[maker][place]) + delay >= start
            ):
                rank, index = maker, place
                break
        else:
            index -= 1
    return path


def _change(player: Player, order: Sequence[Move], index: int, dice: random.Random) -> list[Move] | None:
    """A rank's moves with one change at ``index``; None if the dice name one that is not possible there."""
    move = order[index]
    kind = dice.random()
    if move.f >= 0 and move.b >= 0 and kind < 0.5:
        return _part(order, index, dice)
    if (move.f < 0 or move.b < 0) and player.terms.gain > 0 and kind < 0.4:
        return _pair(player, order, index, dice)
    if move.f < 0 and kind < 0.6:
        return [*order[:index], move._replace(split=not move.split), *order[index + 1 :]]
    to = index + dice.choice((-6, -4, -3, -2, -1, -1, -1, 1, 1, 1, 2, 3, 4, 6))
    rest = [*order[:index], *order[index + 1 :]]
    return [*rest[:to], move, *rest[to:]] if 0 <= to < len(order) else None


def _part(order: Sequence[Move], index: int, dice: random.Random) -> list[Move]:
    """A pair taken apart."""
    move = order[index]
    parts = [Move(move.f, -1), Move(-1, move.b, dice.random() < 0.5)]
    if dice.random() < 0.5:
        parts.reverse()
    return [*order[:index], *parts, *order[index + 1 :]]


def _pair(player: Player, order: Sequence[Move], index: int, dice: random.Random) -> list[Move] | None:
    """A single move paired with one nearby, in the place of either."""
    move, reach = order[index], 6
    others = [
        other
        for other in range(max(0, index - reach), min(len(order), index + reach + 1))
        if (order[other].f < 0 and move.b < 0) or (order[other].b < 0 and move.f < 0)
    ]
    if not others:
        return None
    other = dice.choice(others)
    pair = Move(max(move.f, order[other].f), max(move.b, order[other].b))
    if not strangers(player.terms, pair):
        return None
    early, late = sorted((index, other))
    between = order[early + 1 : late]
    middle = [pair, *between] if dice.random() < 0.5 else [*between, pair]
    return [*order[:early], *middle, *order[late + 1 :]]


def strangers(terms: Terms, pair: Move) -> bool:
    """Whether the two of a pair are of different microbatches."""
    of_a_pipe = terms.count * terms.placement.num_model_stages
    return pair.f % terms.count != pair.b % terms.count or pair.f // of_a_pipe != pair.b // of_a_pipe


def paired(terms: Terms, moves: Moves) -> Moves:
    """Neighbouring forwards and backwards made pairs, wherever they may be."""
    return [list(_merge(terms, order)) for order in moves]


def _merge(terms: Terms, order: Iterable[Move]) -> Iterable[Move]:
    held: Move | None = None
    for move in order:
        if held is not None:
            pair = Move(max(held.f, move.f), max(held.b, move.b))
            alone = min(held.f, held.b) < 0 and min(move.f, move.b) < 0
            if alone and min(pair) >= 0 and strangers(terms, pair):
                yield pair
                held = None
                continue
            yield held
        held = move
    if held is not None:
        yield held


def split_alone(moves: Moves, split: bool = True) -> Moves:
    """All backwards that are not in a pair split, or all made whole."""
    return [[move if move.f >= 0 else move._replace(split=split) for move in order] for order in moves]
