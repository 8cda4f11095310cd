"""A schedule as moves: the forwards and backwards of each rank; a ``Player`` then places the W's in gaps."""

from collections.abc import Iterable
from typing import NamedTuple

from dualpipe_jax.schedule.ir import Op, Schedule, Slot
from dualpipe_jax.schedule.optimize.terms import Terms


class Move(NamedTuple):
    """A slot other than a W, since W's are placed in gaps later: a forward, a backward, or both as a pair.

    ``f`` and ``b`` are values, ``stage * count + microbatch``, or -1; a ``split`` backward is an I.
    """

    f: int
    b: int
    split: bool = False

    @property
    def is_pair(self) -> bool:
        """Whether the move is a forward and a backward together."""
        return self.f >= 0 and self.b >= 0


Moves = list[list[Move]]
"""The moves of each rank, in order."""


def moves_of(schedule: Schedule) -> Moves:
    count = schedule.microbatches_per_pipe

    def move(slot: Slot) -> Move:
        f = next((stage * count + m for stage, op, m in slot if op is Op.F), -1)
        b = next((stage * count + m for stage, op, m in slot if op is not Op.F), -1)
        return Move(f, b, slot[-1].op is Op.I)

    return [[move(slot) for slot in order if slot[0].op is not Op.W] for order in schedule.orders]


def of_different_microbatches(terms: Terms, pair: Move) -> bool:
    """Whether the forward and the backward of a pair are of different microbatches."""
    of_a_pipe = terms.count * terms.placement.num_model_stages
    return pair.f % terms.count != pair.b % terms.count or pair.f // of_a_pipe != pair.b // of_a_pipe


def paired(terms: Terms, moves: Moves) -> Moves:
    """The moves with neighbouring forwards and backwards of different microbatches joined into pairs."""
    return [_paired(terms, order) for order in moves]


def _paired(terms: Terms, order: Iterable[Move]) -> list[Move]:
    found: list[Move] = []
    for move in order:
        if found and not found[-1].is_pair and not move.is_pair:
            pair = Move(max(found[-1].f, move.f), max(found[-1].b, move.b))
            if pair.is_pair and of_different_microbatches(terms, pair):
                found[-1] = pair
                continue
        found.append(move)
    return found


def split_alone(moves: Moves, split: bool = True) -> Moves:
    """The moves with all backwards outside pairs split, or with all of them whole."""
    return [[move if move.f >= 0 else move._replace(split=split) for move in order] for order in moves]
