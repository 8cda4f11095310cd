"""Local improvement: change moves on the critical path, and keep changes that do not lengthen the step."""

import random
from collections.abc import Callable, Iterator, Sequence

from dualpipe_jax.schedule.optimize.moves import (
    Move,
    Moves,
    moves_of,
    of_different_microbatches,
    paired,
    split_alone,
)
from dualpipe_jax.schedule.optimize.player import Play, Player
from dualpipe_jax.schedule.optimize.search_state import DEFAULT_FILL, Found, FoundSchedules, MemoryLevel

_Start = tuple[float, Player, Moves]
"""The makespan of moves, the player that simulates them, and the moves."""


def polish(found_schedules: FoundSchedules, level: MemoryLevel, budget: float, most: float) -> None:
    """Improve the shortest schedules that fit a level, and add the best result to ``found_schedules``.

    The best four share a quarter of the budget, then the best two another, and the best one gets the rest.
    ``budget`` counts the moves simulated; ``most`` is the most changes tried for each.
    """
    starts: list[_Start] = []
    for found in found_schedules.best(6, level.limit):
        if level.promising_placements(found_schedules.shortest(level.limit)):
            starts += _variants(found_schedules, level, found)
    starts.sort(key=lambda start: start[0])
    for keep, share in ((4, 0.25), (2, 0.25), (1, 0.5)):
        improved = []
        for _, player, moves in starts[:keep]:
            tries = round(min(most, budget / sum(map(len, moves)) * share / keep))
            moves, makespan = improve(player, moves, tries, seed=keep, go_on=level.promising_placements)
            improved.append((makespan, player, moves))
        starts = sorted(improved, key=lambda start: start[0])
    for _, player, moves in starts:
        found_schedules.add(player.schedule(moves, "search"), player.fill)


def _variants(found_schedules: FoundSchedules, level: MemoryLevel, found: Found) -> Iterator[_Start]:
    """A schedule's moves as they are and, when it is tried first, variants of them.

    The variants pair neighbours, split all backwards or make them whole, or use other values of ``fill``.
    Schedules that a player made have no variants.
    """
    moves, new = moves_of(found.schedule), found.fill is None and found.number not in found_schedules.varied
    found_schedules.varied.add(found.number)
    fill = DEFAULT_FILL if found.fill is None else found.fill
    placement = found.schedule.placement
    player = level.player(placement, fill)
    starts = [(player, moves)]
    if new:
        starts += [(player, paired(player.terms, moves))]
        starts += [(player, split_alone(moves, split)) for split in (True, False)]
        starts += [(level.player(placement, fill), moves) for fill in (0.3, 1.0)]
    for player, variant in starts:
        play = player.play(variant)
        if play is not None:
            yield play.makespan, player, variant


def improve(
    player: Player,
    moves: Moves,
    tries: int,
    seed: int = 0,
    go_on: Callable[[float], object] = lambda makespan: True,
) -> tuple[Moves, float]:
    """Change the moves on a critical path at random, ``tries`` times, and keep changes that are no worse.

    The result is the same for the same arguments. It stops early if ``go_on(makespan)`` is false. Returns new
    moves and their makespan.

    Raises:
      ValueError: if the moves hang or do not fit the memory.
    """
    rng, now = random.Random(seed), player.play(moves)
    if now is None:
        raise ValueError("improve: the moves hang or do not fit the memory; give some that can be played")
    moves = [list(order) for order in moves]
    path = _critical_path(player, moves, now)
    for _ in range(tries):
        if not go_on(now.makespan):
            break
        rank, index = rng.choice(path)
        changed = _change(player, moves[rank], index, rng)
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
    """The (rank, index) of moves that follow one another without a gap, from the last move of the step backwards."""
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


def _change(player: Player, order: Sequence[Move], index: int, rng: random.Random) -> list[Move] | None:
    """A rank's moves with one random change at ``index``; None if the change drawn is not possible there."""
    move = order[index]
    kind = rng.random()
    if move.is_pair and kind < 0.5:
        return _separate(order, index, rng)
    if not move.is_pair and player.terms.gain > 0 and kind < 0.4:
        return _pair(player, order, index, rng)
    if move.f < 0 and kind < 0.6:
        return [*order[:index], move._replace(split=not move.split), *order[index + 1 :]]
    to = index + rng.choice((-6, -4, -3, -2, -1, -1, -1, 1, 1, 1, 2, 3, 4, 6))
    rest = [*order[:index], *order[index + 1 :]]
    return [*rest[:to], move, *rest[to:]] if 0 <= to < len(order) else None


def _separate(order: Sequence[Move], index: int, rng: random.Random) -> list[Move]:
    move = order[index]
    parts = [Move(move.f, -1), Move(-1, move.b, rng.random() < 0.5)]
    if rng.random() < 0.5:
        parts.reverse()
    return [*order[:index], *parts, *order[index + 1 :]]


def _pair(player: Player, order: Sequence[Move], index: int, rng: random.Random) -> list[Move] | None:
    """The order with a single move and one nearby joined into a pair at the place of either; None if impossible."""
    move, reach = order[index], 6
    others = [
        other
        for other in range(max(0, index - reach), min(len(order), index + reach + 1))
        if (order[other].f < 0 and move.b < 0) or (order[other].b < 0 and move.f < 0)
    ]
    if not others:
        return None
    other = rng.choice(others)
    pair = Move(max(move.f, order[other].f), max(move.b, order[other].b))
    if not of_different_microbatches(player.terms, pair):
        return None
    early, late = sorted((index, other))
    between = order[early + 1 : late]
    middle = [pair, *between] if rng.random() < 0.5 else [*between, pair]
    return [*order[:early], *middle, *order[late + 1 :]]
