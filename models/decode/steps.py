"""The two programs that serving runs, prefill of a chunk of prompts and a step of decode.

Both are pure functions of weights, cache and rows.

Shape suffixes: B rows, S new tokens of a row, D model dim.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from dualpipe_jax.functional import Tree
from models.decode.cache import Rows
from models.decode.model import Before, Decoder, LayerOutputs
from models.decode.sampling import Sampling, choose
from models.decode.scores import Scores, score


class Prefilled(NamedTuple):
    """The results of one chunk of prompts.

    Attributes:
      tokens: int32 [B], the token that follows a row's last one.
      finite: bool [B], whether all logits of that token are finite.
      drafts: int32 [B], a guess at the token after that; -1 without drafts.
      scores: the scores of the token that follows each of the rows' tokens [B, S]; None if they were not
        asked for.
    """

    tokens: Array
    finite: Array
    drafts: Array
    scores: Scores | None = None


class Decoded(NamedTuple):
    """The results of one step of decode.

    Attributes:
      tokens: int32 [B, S], the token that follows each of a row's tokens.
      accepted: int32 [B], how many of ``tokens`` count: one, and one more for a draft that was right; 0 for
        rows that were fed nothing.
      num_fed: int32 [B], the number of tokens that a row was fed; the second is a draft.
      finite: bool [B], whether the logits of all tokens that count are finite.
      drafts: int32 [B], a guess at the token after those that count; -1 without drafts.
      scores: the scores of ``tokens``; None if they were not asked for.
    """

    tokens: Array
    accepted: Array
    num_fed: Array
    finite: Array
    drafts: Array
    scores: Scores | None = None


def prefill(
    model: Decoder,
    drafting: bool,
    scoring: bool,
    weights: Tree,
    cache: Array,
    rows: Rows,
    next_tokens: Array | np.ndarray,
    sampling: Sampling | None,
    before: Before | None = None,
) -> tuple[Prefilled, LayerOutputs]:
    """Take in the next chunk of prompts.

    Args:
      model: the model's functions.
      drafting: whether to draft; then the latents of the draft module's layer are returned as well.
      scoring: whether to score tokens, for which the logits of all positions are computed.
      weights: as ``model.prepare`` made them.
      cache: see ``init_cache``; it is only read.
      rows: the tokens of the chunk.
      next_tokens: int32 [B], the prompt's token after the chunk, for each row; -1 where the prompt ends with the
        chunk.
      sampling: the sampling of the rows; None if all take the likeliest token.
      before: rows that come before these and are not in the cache yet.
    """
    x_BSD, made = model.forward(weights, cache, rows, before)
    last_B = jnp.maximum(rows.lengths - 1, 0)
    logits_B1V = model.logits(weights, _at(x_BSD, last_B))
    tokens_B1, finite_B1 = choose(logits_B1V, sampling, jnp.asarray(rows.starts + rows.lengths)[:, None])
    tokens_B, finite_B = tokens_B1[:, 0], finite_B1[:, 0]
    next_B = jnp.where(next_tokens < 0, tokens_B, next_tokens)
    index = jnp.arange(x_BSD.shape[1], dtype=jnp.int32)
    shifted_BS = jnp.roll(jnp.asarray(rows.tokens), -1, axis=1)
    nexts_BS = jnp.where(index == last_B[:, None], next_B[:, None], shifted_BS)
    drafts_B = jnp.full_like(tokens_B, -1)
    if drafting:
        ahead = rows._replace(tokens=nexts_BS)
        drafts_B, more = _drafts(model, weights, cache, ahead, x_BSD, last_B, before)
        made += more
    scores = score(model.logits(weights, x_BSD), nexts_BS) if scoring else None
    return Prefilled(tokens_B, finite_B, drafts_B, scores), made


def decode(
    model: Decoder,
    drafting: bool,
    scoring: bool,
    weights: Tree,
    cache: Array,
    rows: Rows,
    sampling: Sampling | None,
) -> tuple[Decoded, LayerOutputs]:
    """Feed each row its newest token and, where rows have two tokens, a draft of the next; see ``prefill``.

    A draft counts if the same token would have been chosen without it. Sampling depends only on logits, seed
    and position, so the text is the same as without drafts (Leviathan et al. 2023, for a draft model that is
    certain).
    """
    x_BSD, made = model.forward(weights, cache, rows)
    logits_BSV = model.logits(weights, x_BSD)
    tokens_BS, finite_BS = choose(logits_BSV, sampling, rows.positions + 1)
    accepted_B = jnp.minimum(rows.lengths, 1)
    if tokens_BS.shape[1] > 1:
        right_B = (rows.lengths > 1) & (rows.tokens[:, 1] == tokens_BS[:, 0])
        accepted_B = accepted_B + right_B.astype(jnp.int32)
    counts_BS = jnp.arange(tokens_BS.shape[1], dtype=jnp.int32) < accepted_B[:, None]
    finite_B = jnp.all(finite_BS | ~counts_BS, axis=1)
    drafts_B = jnp.full_like(accepted_B, -1)
    if drafting:
        ahead = rows._replace(tokens=tokens_BS, lengths=accepted_B)
        last_B = jnp.maximum(accepted_B - 1, 0)
        drafts_B, more = _drafts(model, weights, cache, ahead, x_BSD, last_B)
        made += more
    scores = score(logits_BSV, tokens_BS) if scoring else None
    return Decoded(tokens_BS, accepted_B, jnp.asarray(rows.lengths), finite_B, drafts_B, scores), made


def _drafts(
    model: Decoder,
    weights: Tree,
    cache: Array,
    rows: Rows,
    x_BSD: Array,
    last_B: Array,
    before: Before | None = None,
) -> tuple[Array, LayerOutputs]:
    """The likeliest token after a row's last one, by the draft module, and what its layer made of all tokens."""
    x_BSD, made = model.draft(weights, cache, rows, x_BSD, before)
    logits_B1V = model.draft_logits(weights, _at(x_BSD, last_B))
    return jnp.argmax(logits_B1V[:, 0], axis=-1).astype(jnp.int32), made


def _at(x_BSD: Array, index_B: Array) -> Array:
    """Each row's x at its own index, [B, 1, D]."""
    return jnp.take_along_axis(x_BSD, index_B[:, None, None], axis=1)
