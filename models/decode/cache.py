"""The cache of latents, in blocks of positions that requests take and give back.

For each token a layer keeps ``kv_lora_rank + qk_rope_dim`` numbers, whatever the number of heads: the
compressed keys and values, normalised, and the rotated key that heads share. A request's positions lie in
blocks that need not be neighbours; its table lists them (Kwon et al. 2023, "PagedAttention").

Shape suffixes: B rows, S new tokens of a row, K positions of a row's table, P blocks, M blocks of a table, X numbers
of a position.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dualpipe_jax.arguments import typechecked
from models.config import Config


class Rows(NamedTuple):
    """New tokens; each row is of one request, and all tokens of a request are in one row.

    Attributes:
      tokens: int32 [B, S]; what lies beyond a row's length is ignored.
      starts: int32 [B], the position of a row's first token.
      lengths: int32 [B], how many tokens a row has; 0 where there is no request.
      tables: int32 [B, M], the blocks of a row's positions, in order; arbitrary blocks beyond those.
    """

    tokens: Array | np.ndarray
    starts: Array | np.ndarray
    lengths: Array | np.ndarray
    tables: Array | np.ndarray

    @property
    def positions(self) -> Array:
        """The position of each token, int32 [B, S]."""
        return jnp.asarray(self.starts)[:, None] + jnp.arange(self.tokens.shape[1], dtype=jnp.int32)

    @property
    def live(self) -> Array:
        """Whether there is a token, bool [B, S]."""
        return jnp.arange(self.tokens.shape[1], dtype=jnp.int32) < jnp.asarray(self.lengths)[:, None]


@typechecked
def init_cache(config: Config, num_blocks: int, block_size: int) -> Array:
    """Return an empty cache, [layers, P, block_size, X] in the compute dtype.

    The layers of modules of multi-token prediction come after the model's.

    Raises:
      ValueError: a size is below 1.
      MemoryError: there are 2**63 bytes or more, at which JAX does not raise but ends the process.
    """
    if num_blocks < 1 or block_size < 1:
        raise ValueError(
            f"init_cache: num_blocks {num_blocks} and block_size {block_size} must both be at least 1."
        )
    layers = config.num_layers + config.num_mtp_layers
    width = config.kv_lora_rank + config.qk_rope_dim
    shape = layers, num_blocks, block_size, width
    if math.prod(shape) * np.dtype(config.compute_dtype).itemsize >= 2**63:
        raise MemoryError(f"init_cache: no memory holds a cache of {shape}")
    return jnp.zeros(shape, config.compute_dtype)


def write(cache: Array, rows: Rows, latents: Sequence[Array]) -> Array:
    """Return the cache with the latents of the rows' tokens.

    Args:
      cache: see ``init_cache``.
      rows: the tokens.
      latents: an array [B, S, X] for each of the first layers.
    """
    L, P, size, X = cache.shape
    positions_BS = rows.positions
    column_BS = jnp.minimum(positions_BS // size, rows.tables.shape[1] - 1)
    block_BS = jnp.take_along_axis(jnp.asarray(rows.tables), column_BS, axis=1)
    # One index over the blocks of all layers: with two indices XLA would transpose the cache and copy it.
    layer_L = jnp.arange(len(latents), dtype=jnp.int32)[:, None, None]
    place_LBS = (layer_L * P + block_BS) * size + positions_BS % size
    new_NX = jnp.stack(latents).reshape(-1, X)
    # Each token has a place of its own, also those that are dropped, so that writes need not wait for each
    # other.
    nowhere_N = L * P * size + jnp.arange(len(new_NX), dtype=jnp.int32)
    live_LBS = jnp.broadcast_to(rows.live, place_LBS.shape)
    place_N = jnp.where(live_LBS.reshape(-1), place_LBS.reshape(-1), nowhere_N)
    flat = cache.reshape(L * P * size, X).at[place_N].set(new_NX, mode="drop", unique_indices=True)
    return flat.reshape(cache.shape)


def read(cache: Array, layer: int, tables: Array | np.ndarray, until_B: Array) -> tuple[Array, Array]:
    """Return one layer's latents of every position that tables have room for, and whether it is before ``until_B``.

    A block keeps what its last owner left, perhaps NaN, and a probability of 0 times NaN is NaN: so all
    positions that are not before ``until_B`` read as zeros.

    Returns:
      [B, K, X] and bool [B, K].
    """
    L, P, size, X = cache.shape
    blocks = cache.reshape(L * P, size, X)[layer * P + jnp.asarray(tables)]
    found_BKX = blocks.reshape(blocks.shape[0], -1, X)
    before_BK = jnp.arange(found_BKX.shape[1], dtype=jnp.int32) < until_B[:, None]
    return jnp.where(before_BK[..., None], found_BKX, 0), before_BK


@functools.cache
def put_block(sharding: Any) -> Callable[[Array, int, np.ndarray], Array]:
    """Return ``(cache, block, new) -> cache``, which writes a block into a cache of this sharding, in place."""
    put = functools.partial(lax.dynamic_update_index_in_dim, axis=1)
    return jax.jit(lambda cache, block, new: put(cache, new, block), donate_argnums=0, out_shardings=sharding)


@jax.jit
def get_block(cache: Array, block: int) -> Array:
    """Return one block of all layers, [layers, block_size, X]."""
    return lax.dynamic_index_in_dim(cache, block, axis=1, keepdims=False)
