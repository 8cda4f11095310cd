"""Scores of tokens: their log-probabilities by the model's own logits, before temperature and top_p.

Shape suffixes: B rows, S tokens of a row, K likeliest tokens, V vocabulary.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

MAX_LIKELIEST = 20
"""The largest number of likeliest tokens that a score can list."""


class Score(NamedTuple):
    """One token of a text.

    Attributes:
      token: the token's number.
      logprob: the natural logarithm of the probability that the model gives the token after all tokens before
        it.
      likeliest: the likeliest tokens at its position, each with its own logprob, the likeliest first.
    """

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]


class Scores(NamedTuple):
    """The scores of tokens as arrays, on the device.

    Attributes:
      logprobs: float32 [B, S], the log-probabilities of the tokens.
      likeliest: int32 [B, S, K], the likeliest tokens at each position, in falling order.
      likeliest_logprobs: float32 [B, S, K], the log-probabilities of those.
    """

    logprobs: Array
    likeliest: Array
    likeliest_logprobs: Array

    def of(self, row: int, start: int, tokens: list[int], num_likeliest: int) -> Iterator[Score]:
        """Yield the scores of a row's tokens from index ``start`` on; the arrays must be on the host."""
        for place, token in enumerate(tokens, start):
            numbers = self.likeliest[row, place, :num_likeliest].tolist()
            logprobs = self.likeliest_logprobs[row, place, :num_likeliest].tolist()
            likeliest = tuple(zip(numbers, logprobs, strict=True))
            yield Score(token, float(self.logprobs[row, place]), likeliest)


def score(logits_BSV: Array, tokens_BS: Array) -> Scores:
    """Compute the scores of tokens from the logits at their positions."""
    logprobs_BSV = jax.nn.log_softmax(logits_BSV.astype(jnp.float32), axis=-1)
    own_BS = jnp.take_along_axis(logprobs_BSV, tokens_BS[..., None], axis=-1)[..., 0]
    best_BSK, likeliest_BSK = jax.lax.top_k(logprobs_BSV, min(MAX_LIKELIEST, logits_BSV.shape[-1]))
    return Scores(own_BS, likeliest_BSK.astype(jnp.int32), best_BSK)
