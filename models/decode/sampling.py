"""From logits to tokens.

A token depends only on its own logits, its request's sampling parameters and its position: it is the same
whatever else is in the batch, in whichever row, with drafts or without.

Shape suffixes: B rows, S tokens of a row, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


class Sampling(NamedTuple):
    """How each row's tokens are chosen.

    Attributes:
      temperature: float32 [B], divides the logits; 0 takes the likeliest token.
      top_p: float32 [B], the probability of the candidates: only the fewest likeliest tokens that together
        reach it are drawn from, and always the likeliest (Holtzman et al. 2020, "nucleus sampling").
      seeds: uint32 [B], the seed of each row's request.
    """

    temperature: Array | np.ndarray
    top_p: Array | np.ndarray
    seeds: Array | np.ndarray


def sample(logits_BSV: Array, sampling: Sampling | None, positions_BS: Array) -> Array:
    """Choose the tokens at ``positions_BS``, int32 [B, S]; without ``sampling`` the likeliest ones.

    Whether ``sampling`` is None is known when a program is compiled, so there are two programs: a branch
    inside one would make a GPU wait for the host in every step, and sorting a vocabulary takes longer than a
    step of many models.
    """
    return choose(logits_BSV, sampling, positions_BS)[0]


def choose(logits_BSV: Array, sampling: Sampling | None, positions_BS: Array) -> tuple[Array, Array]:
    """Return the tokens of ``sample``, and whether all logits of each are finite, bool [B, S].

    Where they are not, the token is arbitrary.
    """
    greedy_BS, finite_BS = likeliest(logits_BSV)
    if sampling is None:
        return greedy_BS, finite_BS
    found_BS = draw(
        logits_BSV,
        jnp.asarray(sampling.temperature)[:, None],
        jnp.asarray(sampling.top_p)[:, None],
        uniforms(jnp.asarray(sampling.seeds), positions_BS),
    )
    tokens_BS = jnp.where(jnp.asarray(sampling.temperature)[:, None] > 0, found_BS, greedy_BS)
    return tokens_BS, finite_BS


def likeliest(logits: Array) -> tuple[Array, Array]:
    """Find the first of the largest logits, and whether all logits are finite, in one pass over the vocabulary.

    Args:
      logits: float32 [..., V].

    Returns:
      int32 [...], the token, which is arbitrary where not all logits are finite; and bool [...], whether they
      are.
    """
    token = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)

    def better(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        stays = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return jnp.where(stays, a[0], b[0]), jnp.where(stays, a[1], b[1]), a[2] & b[2]

    initial = jnp.float32(-jnp.inf), jnp.int32(logits.shape[-1] - 1), jnp.bool_(True)
    _, best, finite = lax.reduce((logits, token, jnp.isfinite(logits)), initial, better, [logits.ndim - 1])
    return best, finite


def uniforms(seeds_B: Array, positions_BS: Array) -> Array:
    """Return random numbers in [0, 1) that depend only on seed and position, float32 [B, S]."""

    def one(seed: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position))

    return jax.vmap(jax.vmap(one, (None, 0)))(seeds_B, positions_BS)


def draw(logits: Array, temperature: Array, top_p: Array, uniform: Array) -> Array:
    """Sample by inverting the distribution function over tokens in falling order of probability; equal ones by number.

    Args:
      logits: float32 [..., V].
      temperature: float32 [...]; where it is not positive the result means nothing.
      top_p: float32 [...].
      uniform: float32 [...], random numbers in [0, 1).

    Returns:
      The tokens, int32 [...].
    """
    order = jnp.argsort(-logits, axis=-1, stable=True)
    falling = jnp.take_along_axis(logits, order, axis=-1)
    positive = jnp.where(temperature > 0, temperature, 1)[..., None]
    probs = jax.nn.softmax(falling / positive, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    kept = (before < top_p[..., None]) | (jnp.arange(logits.shape[-1]) == 0)
    probs = jnp.where(kept, probs, 0)
    total = jnp.cumsum(probs, axis=-1)
    # The last token that is kept takes the probability that rounding leaves over.
    place = jnp.sum(total <= (uniform[..., None] * total[..., -1:]), axis=-1, dtype=jnp.int32)
    place = jnp.minimum(place, jnp.sum(kept, axis=-1, dtype=jnp.int32) - 1)
    return jnp.take_along_axis(order, place[..., None], axis=-1)[..., 0].astype(jnp.int32)
