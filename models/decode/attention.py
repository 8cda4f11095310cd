"""Attention of new tokens to all latents of their request in the cache.

Shape suffixes as in ``models.attention``, and L = C + R, the width of a cached position.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from models.attention import Attention, softmax_scale
from models.config import Config
from models.decode import paged
from models.decode.cache import Rows, read
from models.kernels import this_gpu_kind
from models.lazy import Lazy


def absorbing_is_cheaper(config: Config, num_tokens: int) -> bool:
    """Whether the absorbed form of attention costs less than the other for ``num_tokens`` new tokens of a row.

    The cost is a head's multiplications for each cached position. In the absorbed form scores and values are
    as wide as the latents; in the other they are as wide as heads, but each position's keys and values are
    made of its latents first.
    """
    nope, rot, value = config.qk_nope_dim, config.qk_rope_dim, config.v_head_dim
    absorbed = num_tokens * (2 * config.kv_lora_rank + rot)
    return absorbed <= num_tokens * (nope + rot + value) + config.kv_lora_rank * (nope + value)


Before = tuple[Rows, Array]
"""Other rows, whose tokens come before, and one layer's latents of them, [B, S, L]; see
``cached_attention``."""


def cached_attention(
    attention: Attention,
    x_BSD: Array,
    cache: Array,
    layer: int,
    rows: Rows,
    before: Before | None = None,
    *,
    absorbed: bool | None = None,
    fresh: bool = False,
    kernel: bool = False,
) -> tuple[Array, Array]:
    """Attend from each new token to itself and all tokens before it.

    In the absorbed form (DeepSeek-V2, section 2.1.2) the matrix that makes keys of latents is applied to the
    queries, and the matrix that makes values is applied to the result of attention: neither keys nor values
    are ever computed.

    Args:
      attention: the layer, whose ``kv_b_proj`` is ``PerHeadProjection``.
      x_BSD: the activations of the rows' tokens.
      cache: see ``init_cache``.
      layer: the index of the layer in the cache.
      rows: the new tokens.
      before: as many other rows, which are not in the cache yet. Where row b of both has the same table, the
        tokens of ``before`` come before those of ``rows``.
      absorbed: whether to use the absorbed form; None for the cheaper form. The forms are equal up to
        rounding.
      fresh: promises that all rows start at 0: then the cache is not read, and attention that is not absorbed
        and has no ``before`` is the layer's own, which may be a kernel.
      kernel: whether the kernel of ``paged`` may compute absorbed attention that is not fresh and has no
        ``before``; it does so on a Hopper GPU where it takes the shapes.

    Returns:
      An array like ``x_BSD``, and the new tokens' latents, [B, S, L].
    """
    config = attention.config
    B, S = x_BSD.shape[:2]
    q_BSHX = attention.queries(x_BSD, rows.positions)
    new_BSL = jnp.concatenate(attention.latents(x_BSD, rows.positions), axis=-1)
    kv_b_proj: Any = attention.kv_b_proj
    weights = kv_b_proj.in_dtype(x_BSD.dtype)
    if absorbed is None:
        absorbed = absorbing_is_cheaper(config, S)
    if fresh and before is None and not absorbed:
        q, k, v = (a.swapaxes(1, 2) for a in (q_BSHX, *_keys_and_values(config, new_BSL, weights)))
        out_BSHV = attention.attend(q, k, v, softmax_scale(config)).swapaxes(1, 2)
    elif (
        kernel
        and absorbed
        and not fresh
        and before is None
        and paged.takes(config, S, cache.shape[2])
        and this_gpu_kind(x_BSD.dtype) == "hopper"
    ):
        out_BSHV = _absorbed_by_kernel(config, q_BSHX, cache, layer, rows, new_BSL, weights)
    else:
        form = _absorbed if absorbed else _expanded
        attended = _attended_latents(cache, layer, rows, new_BSL, before, fresh)
        out_BSHV = form(config, q_BSHX, attended, weights)
    return attention.o_proj(out_BSHV.reshape(B, S, -1)), new_BSL


class HeadWeights(NamedTuple):
    """``kv_b_proj`` as a matrix for each head: between queries and latents, [H, N, C], and for values, [H, C, V].

    In this layout absorbed attention reads them in every step without transposing them.
    """

    queries: Array
    values: Array


class PerHeadProjection(nnx.Module):
    """``kv_b_proj`` as ``HeadWeights``; see ``split_by_head``."""

    def __init__(self, config: Config):
        H, C = config.num_heads, config.kv_lora_rank
        self.queries = nnx.Param(jnp.zeros((H, config.qk_nope_dim, C), config.compute_dtype))
        self.values = nnx.Param(jnp.zeros((H, C, config.v_head_dim), config.compute_dtype))

    def in_dtype(self, dtype: Any) -> HeadWeights:
        """Its matrices, cast to ``dtype``."""
        return HeadWeights(self.queries[...].astype(dtype), self.values[...].astype(dtype))


def split_by_head(config: Config, kernel_CHX: Array | Lazy) -> dict[str, Array | Lazy]:
    """The parameters of ``PerHeadProjection``, from the kernel of ``kv_b_proj``; lazy if the kernel is lazy."""
    nope = config.qk_nope_dim
    parts = {
        "queries": lambda kernel: kernel[..., :nope].transpose(1, 2, 0),
        "values": lambda kernel: kernel[..., nope:].transpose(1, 0, 2),
    }
    if isinstance(kernel_CHX, Lazy):
        return {name: kernel_CHX.map(make) for name, make in parts.items()}
    return {name: make(kernel_CHX) for name, make in parts.items()}


class _Attended(NamedTuple):
    """Latents to attend to, [B, K, L], and whether a new token attends to each of them, bool [B or 1, S or 1, K]."""

    latents: Array
    mask: Array


def _attended_latents(
    cache: Array, layer: int, rows: Rows, new_BSL: Array, before: Before | None, fresh: bool
) -> list[_Attended]:
    S = new_BSL.shape[1]
    cached_B = jnp.asarray(rows.starts)
    preceding = []
    if before is not None:
        others, latents_BSL = before
        same_B = jnp.all(jnp.asarray(rows.tables) == jnp.asarray(others.tables), axis=1) & (
            others.lengths > 0
        )
        cached_B = jnp.where(same_B, others.starts, cached_B)
        preceding = [_Attended(latents_BSL, (others.live & same_B[:, None])[:, None])]
    if fresh:
        places = np.arange(S)
        return [_Attended(new_BSL, jnp.asarray(places <= places[:, None])[None]), *preceding]
    cached_BKL, cached_BK = read(cache, layer, rows.tables, cached_B)
    # The new latents are inserted among the cached ones, so that there is one softmax over one array.
    index_BK = jnp.arange(cached_BKL.shape[1], dtype=jnp.int32) - jnp.asarray(rows.starts)[:, None]
    after_BSK = index_BK[:, None] - jnp.arange(S, dtype=jnp.int32)[:, None]
    mask_BSK = cached_BK[:, None] | ((index_BK >= 0)[:, None] & (after_BSK <= 0))
    return [_Attended(_insert_new(cached_BKL, new_BSL, index_BK), mask_BSK), *preceding]


def _insert_new(cached_BKL: Array, new_BSL: Array, index_BK: Array) -> Array:
    """Insert new latents among cached ones; ``index_BK`` says which of the new ones each position gets, if any."""
    num_new = new_BSL.shape[1]
    if num_new > 1:
        index_BK1 = jnp.clip(index_BK, 0, num_new - 1)[..., None]
        new_BSL = jnp.take_along_axis(new_BSL, index_BK1, axis=1, mode="promise_in_bounds")
    return jnp.where(((index_BK >= 0) & (index_BK < num_new))[..., None], new_BSL, cached_BKL)


def _absorbed_by_kernel(
    config: Config, q_BSHX: Array, cache: Array, layer: int, rows: Rows, new_BSL: Array, weights: HeadWeights
) -> Array:
    """``_absorbed`` by the kernel of ``paged``, which takes queries heads first, the layout of a product by heads."""
    B, S, H, X = q_BSHX.shape
    q_HTX = q_BSHX.reshape(B * S, H, X).swapaxes(0, 1)
    nope, tables_BM, starts_B = config.qk_nope_dim, jnp.asarray(rows.tables), jnp.asarray(rows.starts)
    q_HTC = jnp.einsum("htn,hnc->htc", q_HTX[..., :nope], weights.queries)
    scale = softmax_scale(config)
    out_THC = paged.attend(q_HTC, q_HTX, cache, layer, tables_BM, starts_B, new_BSL, scale)
    return jnp.einsum("thc,hcv->thv", out_THC, weights.values).reshape(B, S, H, -1)


def _absorbed(config: Config, q_BSHX: Array, attended: Sequence[_Attended], weights: HeadWeights) -> Array:
    nope, C = config.qk_nope_dim, config.kv_lora_rank
    q_BSHC = jnp.einsum("bshn,hnc->bshc", q_BSHX[..., :nope], weights.queries)
    q_BSHL = jnp.concatenate([q_BSHC, q_BSHX[..., nope:]], axis=-1)
    # Heads are the last dim but one, as the product by heads makes them.
    scores = [
        jnp.einsum("bshl,bkl->bshk", q_BSHL, part.latents, preferred_element_type=jnp.float32)
        for part in attended
    ]
    probs = _probs(config, scores, attended, heads=2)
    outs = [
        jnp.einsum("bshk,bkc->bshc", p, part.latents[..., :C])
        for p, part in zip(probs, attended, strict=True)
    ]
    return jnp.einsum("bshc,hcv->bshv", functools.reduce(jnp.add, outs), weights.values)


def _expanded(config: Config, q_BSHX: Array, attended: Sequence[_Attended], weights: HeadWeights) -> Array:
    keys, values = zip(*(_keys_and_values(config, part.latents, weights) for part in attended), strict=True)
    scores = [jnp.einsum("bshx,bkhx->bhsk", q_BSHX, k, preferred_element_type=jnp.float32) for k in keys]
    probs = _probs(config, scores, attended, heads=1)
    return functools.reduce(
        jnp.add, [jnp.einsum("bhsk,bkhv->bshv", p, v) for p, v in zip(probs, values, strict=True)]
    )


def _keys_and_values(config: Config, latents_BKL: Array, weights: HeadWeights) -> tuple[Array, Array]:
    c_BKC, k_BKR = latents_BKL[..., : config.kv_lora_rank], latents_BKL[..., config.kv_lora_rank :]
    k_BKHN = jnp.einsum("bkc,hnc->bkhn", c_BKC, weights.queries)
    k_BKHR = jnp.broadcast_to(k_BKR[:, :, None], (*k_BKHN.shape[:3], config.qk_rope_dim))
    v_BKHV = jnp.einsum("bkc,hcv->bkhv", c_BKC, weights.values)
    return jnp.concatenate([k_BKHN, k_BKHR], axis=-1), v_BKHV


def _probs(config: Config, scores: Sequence[Array], attended: Sequence[_Attended], heads: int) -> list[Array]:
    """One softmax over the scores of all parts, which are never concatenated; ``heads`` is the dim of heads in them."""
    scale = softmax_scale(config)
    masked = [
        jnp.where(jnp.expand_dims(part.mask, heads), score * scale, -jnp.inf)
        for score, part in zip(scores, attended, strict=True)
    ]
    top = functools.reduce(jnp.maximum, [jnp.max(score, axis=-1, keepdims=True) for score in masked])
    powers = [jnp.exp(score - top) for score in masked]
    total = functools.reduce(jnp.add, [jnp.sum(power, axis=-1, keepdims=True) for power in powers])
    return [(power / total).astype(part.latents.dtype) for power, part in zip(powers, attended, strict=True)]
