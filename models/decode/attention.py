"""Attention of new tokens to all that a cache of latents knows of their request.

Shape suffixes as in ``models.attention``, and L = C + R, the numbers of a cached position.
"""

import jax
import jax.numpy as jnp
from jax import Array

from models.attention import Attention, softmax_scale
from models.config import Config
from models.decode.cache import Rows, read, write


def absorbing_is_cheaper(config: Config, num_tokens: int) -> bool:
    """Whether so many new tokens of a row had better meet the latents as they are.

    Multiplications of a head for each cached position: absorbed, scores and values are as wide as the latents; else
    they are as wide as heads, but every position's keys and values are made of its latents first.
    """
    nope, rot, value = config.qk_nope_dim, config.qk_rope_dim, config.v_head_dim
    absorbed = num_tokens * (2 * config.kv_lora_rank + rot)
    return absorbed <= num_tokens * (nope + rot + value) + config.kv_lora_rank * (nope + value)


def cached_attention(
    attention: Attention, x_BSD: Array, cache: Array, layer: int, rows: Rows, absorbed: bool | None = None
) -> tuple[Array, Array]:
    """Attend from each new token to itself and all before it.

    Absorbed (DeepSeek-V2, section 2.1.2), the matrix that makes keys of latents goes to the queries, and that of the
    values to what was attended to: neither keys nor values are ever made.

    Args:
      attention: the layer.
      x_BSD: activations of the rows' tokens.
      cache: see ``init_cache``.
      layer: its place there.
      rows: the tokens.
      absorbed: which of the two forms; None for the cheaper one. They are equal up to rounding.

    Returns:
      x's like, and the cache with the new tokens in it.

    """
    config = attention.config
    q_BSHX = attention.queries(x_BSD, rows.positions)
    cache = write(cache, layer, rows, jnp.concatenate(attention.latents(x_BSD, rows.positions), axis=-1))
    latents_BKL = read(cache, layer, rows)
    heard_BSK = jnp.arange(latents_BKL.shape[1], dtype=jnp.int32) <= rows.positions[..., None]
    kernel = attention.kv_b_proj.kernel[...].astype(x_BSD.dtype)
    kernel_CHX = kernel.reshape(config.kv_lora_rank, config.num_heads, -1)
    if absorbed is None:
        absorbed = absorbing_is_cheaper(config, x_BSD.shape[1])
    form = _absorbed if absorbed else _expanded
    out_BSHV = form(config, q_BSHX, latents_BKL, heard_BSK, kernel_CHX)
    return attention.o_proj(out_BSHV.reshape(*x_BSD.shape[:2], -1)), cache


def _absorbed(
    config: Config, q_BSHX: Array, latents_BKL: Array, heard_BSK: Array, kernel_CHX: Array
) -> Array:
    nope = config.qk_nope_dim
    q_BSHC = jnp.einsum("bshn,chn->bshc", q_BSHX[..., :nope], kernel_CHX[..., :nope])
    q_BSHL = jnp.concatenate([q_BSHC, q_BSHX[..., nope:]], axis=-1)
    scores_BHSK = jnp.einsum("bshl,bkl->bhsk", q_BSHL, latents_BKL, preferred_element_type=jnp.float32)
    probs_BHSK = _probs(config, scores_BHSK, heard_BSK, latents_BKL.dtype)
    out_BSHC = jnp.einsum("bhsk,bkc->bshc", probs_BHSK, latents_BKL[..., : config.kv_lora_rank])
    return jnp.einsum("bshc,chv->bshv", out_BSHC, kernel_CHX[..., nope:])


def _expanded(
    config: Config, q_BSHX: Array, latents_BKL: Array, heard_BSK: Array, kernel_CHX: Array
) -> Array:
    nope = config.qk_nope_dim
    c_BKC, k_BKR = latents_BKL[..., : config.kv_lora_rank], latents_BKL[..., config.kv_lora_rank :]
    kv_BKHX = jnp.einsum("bkc,chx->bkhx", c_BKC, kernel_CHX)
    k_BKHR = jnp.broadcast_to(k_BKR[:, :, None], (*kv_BKHX.shape[:3], config.qk_rope_dim))
    k_BKHX = jnp.concatenate([kv_BKHX[..., :nope], k_BKHR], axis=-1)
    scores_BHSK = jnp.einsum("bshx,bkhx->bhsk", q_BSHX, k_BKHX, preferred_element_type=jnp.float32)
    probs_BHSK = _probs(config, scores_BHSK, heard_BSK, latents_BKL.dtype)
    return jnp.einsum("bhsk,bkhv->bshv", probs_BHSK, kv_BKHX[..., nope:])


def _probs(config: Config, scores_BHSK: Array, heard_BSK: Array, dtype: jnp.dtype) -> Array:
    scores_BHSK = jnp.where(heard_BSK[:, None], scores_BHSK * softmax_scale(config), -jnp.inf)
    return jax.nn.softmax(scores_BHSK, axis=-1).astype(dtype)
