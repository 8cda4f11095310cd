"""How layers are shared out over stages that all have equally many places."""

from collections.abc import Sequence

import numpy as np


def share_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Share layers as equally as possible; stages with one layer less stand at the ends.

    The ends have the embedding and the output projection besides. First and last stage take turns, so that
    the two stages of a DualPipe rank, s and num_stages - 1 - s, are as deep as each other wherever they can.

    >>> share_layers(58, 16)
    (3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 3, 3)
    """
    deep = -(-num_layers // num_stages)
    shares = [deep] * num_stages
    for short in range(deep * num_stages - num_layers):
        shares[short // 2 if short % 2 == 0 else num_stages - 1 - short // 2] -= 1
    return tuple(shares)


def places_of(shares: Sequence[int]) -> np.ndarray:
    """Number the layers by stage and place: int32 [P, L], -1 in the places that stay empty.

    >>> places_of((1, 2))
    array([[ 0, -1],
           [ 1,  2]], dtype=int32)
    """
    filled = np.arange(max(shares)) < np.asarray(shares)[:, None]
    return np.where(filled, np.cumsum(filled).reshape(filled.shape) - 1, -1).astype(np.int32)


def check_shares(shares: Sequence[int], num_layers: int, num_stages: int) -> None:
    """Raise ValueError unless the shares are of so many stages and add up to so many layers."""
    wrong = []
    if len(shares) != num_stages:
        wrong.append(f"it names {len(shares)} stages of {num_stages}")
    if any(share < 0 for share in shares):
        wrong.append("a stage cannot have fewer than 0 layers")
    if sum(shares) != num_layers:
        wrong.append(f"its sum is {sum(shares)}, the layers with experts are {num_layers}")
    if wrong:
        raise ValueError(
            f"deepseek: layers_per_stage {tuple(shares)}: {'; '.join(wrong)}. "
            f"Equal shares are {share_layers(num_layers, num_stages)}."
        )
