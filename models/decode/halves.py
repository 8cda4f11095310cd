"""A step's work cut into two halves of equal cost, so that each computes while the other's tokens travel.

The cost of a token is a fixed part, the same for all tokens, and its attention, which grows with its
position.
"""

from collections.abc import Sequence
from typing import NamedTuple

from models.config import Config
from models.plan import matmul_costs


class Piece(NamedTuple):
    """Consecutive tokens of one prompt.

    Attributes:
      number: the index of the prompt in the order given.
      start: the position of its first token.
      length: the number of tokens.
    """

    number: int
    start: int
    length: int

    def cost(self, fixed: float) -> float:
        """The number of positions before each token, and ``fixed``, summed over the tokens."""
        return self.length * (fixed + self.start + (self.length - 1) / 2)


HalfPieces = list[Piece | None]
"""The piece of each row; None for a row without work."""


def fixed_cost(config: Config) -> float:
    """The cost of a token without attention, in positions attended to, by the matmuls of a layer with experts."""
    # Causal attention reads half of the sequence on average: one position of two.
    free, far = (matmul_costs(config, length).moe for length in (0, 2))
    return free / (far - free)


def halve(
    prompts: Sequence[tuple[int, int]], num_rows: int, size: int, fixed: float
) -> tuple[HalfPieces, HalfPieces]:
    """Share the next tokens of prompts out over two halves, of which the second may attend to the first's tokens.

    As many prompts as fit are taken, first come, first served. Rows that are left over go to the prompts with
    most tokens left: such a prompt is cut, and has the same row in both halves, its later tokens in the
    second. The other prompts are shared out first, the costly ones before the rest, each to the half that
    costs less so far; then each cut is made where it levels the two halves best.

    Args:
      prompts: for each prompt the position of the next token to take in, and the number of tokens that are
        left.
      num_rows: the number of rows of one half.
      size: the number of tokens of a row.
      fixed: see ``fixed_cost``.

    Returns:
      Both halves, ``num_rows`` long, None for a row without work.
    """
    chosen = range(min(len(prompts), 2 * num_rows))
    longest = sorted((n for n in chosen if prompts[n][1] > 1), key=lambda n: -prompts[n][1])
    cut = sorted(longest[: 2 * num_rows - len(chosen)])
    whole = [Piece(n, prompts[n][0], min(prompts[n][1], size)) for n in chosen if n not in cut]
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
