"""A step's work cut into two halves of equal cost, so that each computes while the other's tokens travel.

A token costs what is the same for all, and its attention, which grows with its position.
"""

from collections.abc import Sequence
from typing import NamedTuple

from models.config import Config
from models.plan import matmul_costs


class Piece(NamedTuple):
    """Consecutive tokens of one prompt.

    Attributes:
      number: of the prompt, in the order given.
      start: the position of its first token.
      length: how many.
    """

    number: int
    start: int
    length: int

    def cost(self, fixed: float) -> float:
        """Positions attended to, and ``fixed`` more for each token."""
        return self.length * (fixed + self.start + (self.length - 1) / 2)


Half = list[Piece | None]
"""A piece of each row."""


def fixed_cost(config: Config) -> float:
    """What a token costs beside attention, in positions attended to, by matmuls of a layer with experts."""
    # Causal: on average half of the sequence.
    free, far = (matmul_costs(config, length).moe for length in (0, 2))
    return free / (far - free)


def halve(prompts: Sequence[tuple[int, int]], num_rows: int, size: int, fixed: float) -> tuple[Half, Half]:
    """Share the next tokens of prompts out over two halves; one after the other, the second may hear the first.

    As many as fit are taken, first come, first served. Rows that are left over go to those with most to come: such a
    prompt is cut, and has the same row in both halves, its later tokens in the second. Whole ones go where less is to
    do, the costly first; then cuts are made where they level the two.

    Args:
      prompts: of each the position from which on it is to be taken in, and how many tokens are left.
      num_rows: of a half.
      size: tokens of a row.
      fixed: see ``fixed_cost``.

    Returns:
      Both halves, ``num_rows`` long, None for a row without work.
    """
    taken = range(min(len(prompts), 2 * num_rows))
    longest = sorted((n for n in taken if prompts[n][1] > 1), key=lambda n: -prompts[n][1])
    cut = sorted(longest[: 2 * num_rows - len(taken)])
    whole = [Piece(n, prompts[n][0], min(prompts[n][1], size)) for n in taken if n not in cut]
    halves: tuple[list[Piece], list[Piece]] = ([], [])
    costs = [0.0, 0.0]
    for piece in sorted(whole, key=lambda piece: -piece.cost(fixed)):
        open_halves = [k for k in (0, 1) if len(halves[k]) < num_rows - len(cut)]
        k = min(open_halves, key=lambda k: costs[k])
        halves[k].append(piece)
        costs[k] += piece.cost(fixed)
    pairs = []
    for n in cut:
        start, left = prompts[n]
        total = min(left, 2 * size)
        lengths = range(max(1, total - size), min(size, total - 1) + 1)
        both = [(Piece(n, start, k), Piece(n, start + k, total - k)) for k in lengths]
        ahead = costs[0] - costs[1]
        pair = min(both, key=lambda both: abs(ahead + both[0].cost(fixed) - both[1].cost(fixed)))
        pairs.append(pair)
        costs = [cost + piece.cost(fixed) for cost, piece in zip(costs, pair, strict=True)]
    first, second = ([pair[k] for pair in pairs] + halves[k] for k in (0, 1))
    return first + [None] * (num_rows - len(first)), second + [None] * (num_rows - len(second))
