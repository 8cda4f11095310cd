"""Attention of few new tokens to a paged cache of latents, as one kernel for Hopper GPUs (H100, H200).

Plain JAX gathers the blocks of a row's table, and then reads the result twice, for scores and for values.
This kernel copies a block into shared memory, once for up to 64 queries (heads of new tokens), which compute
its scores there and add up its values, by an online softmax (Milakov and Gimelshein 2018) in float32. Rows of
many positions are split, so that more multiprocessors work on them; plain JAX combines the results of the
splits (Dao et al. 2023, "Flash-Decoding").

Its results were right on an H200, where tests/models/decode/test_paged.py ran, and in Pallas' simulator of
such a GPU.

Shape suffixes as in ``models.decode.attention``; T = B * S new tokens, Z splits of a row, X numbers of a position.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from dualpipe_jax.parallel import hopper_tiles, mosaic, tiles
from dualpipe_jax.parallel.kernel_cost import call_traced_once
from models.config import Config

TILE = 32
"""The number of positions whose scores are computed at once."""
STAGES = 2
"""The number of tiles that are copied from memory at the same time, 36 KiB each."""
_NUM_QUERIES = 64
"""The number of rows of a tensor core's product, so that many queries share a tile that was read."""
_MAX_NEW = 16
"""The number of a row's new tokens, padded with zeros: the least length over which a tensor core's product
sums."""
_COLUMNS = 64
"""The number of columns of the values that one product computes."""
_MIN_SPLIT = 64
"""The fewest positions of a split, where a row gets four splits or more. On an H200 a layer's attention to
256 positions, with the products before and after it, took 38 us without splits, for 1 row as for 16; with
four splits it took 27 us for 1 row and 28 us for 16."""
_MIN_SPLIT_OF_FEW = 256
"""The same where a row gets two or three splits: for 64 rows of 256 positions it took 40 us without splits,
46 us with two."""
_MAX_UNROLLED = 8
"""Up to this many splits are combined term by term, which is one kernel; the sums over an array of more are
two."""
_LOWEST = -1e30
"""A score lower than any other; finite, because its difference with itself must be 0."""


def takes(config: Config, num_new: int, block_size: int) -> bool:
    """Whether the kernel supports attention of these sizes.

    Latents and queries must have 16 bits; the values' part of a latent a multiple of 128 numbers, at most
    512; the rotated key 64 or 128 numbers; a layer 8, 16 or 32 heads or a multiple of 64; a row at most 16
    new tokens; and a block 8, 16 or 32 positions. V2, V2-Lite and V3 are such models.
    """
    return (
        mosaic.supports_dtype(config.compute_dtype)
        and config.kv_lora_rank % 128 == 0
        and config.kv_lora_rank <= 512
        and config.qk_rope_dim in (64, 128)
        and (config.num_heads in (8, 16, 32) or config.num_heads % _NUM_QUERIES == 0)
        and num_new <= _MAX_NEW
        and block_size in (8, 16, TILE)
    )


def attend(
    q_HTC: Array,
    q_HTX: Array,
    cache: Array,
    layer: int,
    tables_BM: Array,
    used_B: Array,
    new_BSL: Array,
    scale: float,
) -> Array:
    """Attend from queries, in the space of latents, to the cached positions and to new tokens up to their own.

    Args:
      q_HTC: the queries of all rows' new tokens, projected to the space of latents; heads first, as products
        make them.
      q_HTX: the queries before that projection; their last numbers are for the rotated keys.
      cache: see ``init_cache``; positions that are not used may hold anything.
      layer: the index of the layer in the cache.
      tables_BM: int32, the blocks of a row's positions.
      used_B: int32, the number of positions before the row's first new token.
      new_BSL: the latents of the new tokens, which are not in the cache.
      scale: the factor of the scores.

    Returns:
      The latents' sums, weighted by the softmax, [T, H, C] in the queries' dtype.
    """
    L, P, size, X = cache.shape
    (H, T, C), (B, S) = q_HTC.shape, new_BSL.shape[:2]
    num_positions = tables_BM.shape[1] * size
    shape = _Shape(num_splits(T * H // _Tile.of(H, S).rows, num_positions), scale * math.log2(math.e))
    new_BKX = jnp.pad(new_BSL, ((0, 0), (0, _MAX_NEW - S), (0, 0)))
    first_1 = jnp.full((1,), layer * P, jnp.int32)
    # The cost as if all positions of the tables were used.
    cost = pl.CostEstimate(
        flops=2 * T * H * num_positions * (X + C),
        transcendentals=T * H * num_positions,
        bytes_accessed=(B * num_positions * X + T * H * (X + C)) * cache.dtype.itemsize,
    )
    blocks_PKX = cache.reshape(L * P, size, X)
    made = call_traced_once(
        _kernel(shape), cost, tables_BM, used_B, first_1, q_HTC, q_HTX, blocks_PKX, new_BKX
    )
    if shape.splits == 1:
        return made[0]
    return _combine_splits(*made).astype(q_HTC.dtype)


def _combine_splits(out_ZTHC: Array, log_ZTH: Array) -> Array:
    """Combine the results of a row's splits into [T, H, C], weighted by the sums of their softmax.

    The base-2 logarithms of these sums are given.
    """
    if len(log_ZTH) > _MAX_UNROLLED:
        share_ZTH = jax.nn.softmax(log_ZTH * math.log(2), axis=0)
        return jnp.einsum("zth,zthc->thc", share_ZTH, out_ZTHC)
    top_TH = functools.reduce(jnp.maximum, list(log_ZTH))
    powers = [jnp.exp2(log_TH - top_TH)[..., None] for log_TH in log_ZTH]
    weighted = [out_THC * power for out_THC, power in zip(out_ZTHC, powers, strict=True)]
    return functools.reduce(jnp.add, weighted) / functools.reduce(jnp.add, powers)


class _Tile(NamedTuple):
    """The queries that share a tile of positions: this many heads of this many new tokens of one row."""

    heads: int
    tokens: int

    @property
    def rows(self) -> int:
        return self.heads * self.tokens

    @classmethod
    def of(cls, num_heads: int, num_new: int) -> "_Tile":
        heads = min(num_heads, _NUM_QUERIES)
        return cls(heads, num_new if heads * num_new <= _NUM_QUERIES else 1)


def num_splits(num_tiles: int, num_positions: int) -> int:
    """The number of splits of each row's positions, so that there is work for all multiprocessors."""
    room = hopper_tiles.SMS // num_tiles
    size = _MIN_SPLIT if min(room, num_positions // _MIN_SPLIT) > 3 else _MIN_SPLIT_OF_FEW
    return max(1, min(room, num_positions // size))


class _Shape(NamedTuple):
    splits: int
    scale: float


# Equal shapes return the same object, by which ``call_traced_once`` knows what it has traced.
@functools.cache
def _kernel(shape: _Shape) -> Any:
    return functools.partial(_attend, shape)


def _attend(
    shape: _Shape,
    tables_BM: Array,
    used_B: Array,
    first_1: Array,
    q_HTC: Array,
    q_HTX: Array,
    blocks_PKX: Array,
    new_BKX: Array,
) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    B, (H, T, C), (_, size, X) = len(tables_BM), q_HTC.shape, blocks_PKX.shape
    S, R, dtype = T // B, X - C, q_HTC.dtype
    tile_shape, half = _Tile.of(H, S), C // 2
    out_dtype = dtype if shape.splits == 1 else jnp.float32

    def paged_attention(
        tables_ref: Any,
        used_ref: Any,
        first_ref: Any,
        c_ref: Any,
        q_ref: Any,
        blocks_ref: Any,
        new_ref: Any,
        *refs: Any,
    ) -> None:
        *outs, c_smem, r_smem, new_smem, tiles_smem, p_smem, out_smem, log_smem, arrived, full, free = refs
        b, z, tokens, heads = (lax.axis_index(name) for name in ("row", "split", "tokens", "heads"))
        group = lax.axis_index("half")  # two warpgroups, each of which computes half of the values' columns
        used = used_ref[b]
        num_tiles = lax.div(used + jnp.int32(TILE - 1), jnp.int32(TILE))
        begin, end = (lax.div((z + place) * num_tiles, jnp.int32(shape.splits)) for place in (0, 1))
        first_token = tokens * tile_shape.tokens
        own_heads, rotated = pl.ds(heads * tile_shape.heads, tile_shape.heads), pl.ds(q_HTX.shape[2] - R, R)

        def fetch(tile: Any) -> None:
            slot = lax.rem(tile - begin, jnp.int32(STAGES))
            last = lax.div(used - 1, jnp.int32(size))
            for part in range(TILE // size):
                # A tile is always copied whole: past the last block that block is copied again, and masked
                # later.
                block = jnp.minimum(tile * jnp.int32(TILE // size) + part, last)
                plgpu.copy_gmem_to_smem(
                    blocks_ref.at[first_ref[0] + tables_ref[b, block]],
                    tiles_smem.at[pl.ds(pl.multiple_of(slot * TILE + part * size, size), size)],
                    full.at[slot],
                )

        @pl.when(group == 0)
        def _() -> None:
            for token in range(tile_shape.tokens):
                where, into = b * S + first_token + token, pl.ds(token * tile_shape.heads, tile_shape.heads)
                plgpu.copy_gmem_to_smem(c_ref.at[own_heads, where], c_smem.at[into], arrived)
                plgpu.copy_gmem_to_smem(q_ref.at[own_heads, where, rotated], r_smem.at[into], arrived)
            plgpu.copy_gmem_to_smem(new_ref.at[b], new_smem, arrived)
            for stage in range(STAGES):
                pl.when(begin + stage < end)(functools.partial(fetch, begin + stage))

        plgpu.barrier_wait(arrived)

        def attend_to_tile(tile_ref: Any, mask: Any, carry: Any) -> Any:
            top, total, *parts = carry

            def score(sum_ref: Any) -> Array:
                plgpu.wgmma(sum_ref, c_smem, tiles.transposed(tile_ref.at[:, pl.ds(0, C)]))
                plgpu.wgmma(sum_ref, r_smem, tiles.transposed(tile_ref.at[:, pl.ds(C, R)]))
                return sum_ref[...]

            length = tile_ref.shape[0]
            scores = pl.run_scoped(score, plgpu.ACC((_NUM_QUERIES, length))) * shape.scale
            scores = jnp.where(mask, scores, _LOWEST)
            higher = jnp.maximum(top, jnp.max(scores, axis=1))
            rescale = jnp.exp2(top - higher)
            powers = jnp.where(mask, jnp.exp2(scores - lax.broadcast_in_dim(higher, scores.shape, [0])), 0.0)
            total = total * rescale + jnp.sum(powers, axis=1)
            p_ref = p_smem.at[group, :, pl.ds(0, length)]
            p_ref[...] = powers.astype(dtype)
            plgpu.commit_smem()

            def one(place: int, part: Array) -> Array:
                def add_up(sum_ref: Any) -> Array:
                    columns = pl.ds(group * half + place * _COLUMNS, _COLUMNS)
                    plgpu.wgmma(sum_ref, p_ref, tile_ref.at[:, columns])
                    return sum_ref[...]

                more = pl.run_scoped(add_up, plgpu.ACC((_NUM_QUERIES, _COLUMNS)))
                return part * lax.broadcast_in_dim(rescale, part.shape, [0]) + more

            return higher, total, *(one(place, part) for place, part in enumerate(parts))

        def iota(length: int, dim: int) -> Array:
            return lax.broadcasted_iota(jnp.int32, (_NUM_QUERIES, length), dim)

        def new_tokens_step(_: Any, carry: Any) -> Any:
            token = first_token + lax.div(iota(_MAX_NEW, 0), jnp.int32(tile_shape.heads))
            return attend_to_tile(new_smem, iota(_MAX_NEW, 1) <= token, carry)

        def tile_step(tile: Any, carry: Any) -> Any:
            slot = lax.rem(tile - begin, jnp.int32(STAGES))
            tile_ref = tiles_smem.at[pl.ds(pl.multiple_of(slot * TILE, TILE), TILE)]
            plgpu.barrier_wait(full.at[slot])
            left = used - tile * TILE

            @pl.when(left < TILE)
            def _() -> None:
                # A block keeps what its last owner left, and a probability of 0 times NaN is NaN: zero these
                # rows. No copy is under way any more, so the loop may rewrite the memory of all tiles, as its
                # layout demands.
                row = iota(_COLUMNS, 0) - slot * TILE
                for place in range(half // _COLUMNS):
                    ref = tiles_smem.at[:, pl.ds(group * half + place * _COLUMNS, _COLUMNS)]
                    ref[...] = jnp.where((row >= left) & (row < TILE), jnp.zeros_like(ref[...]), ref[...])
                plgpu.commit_smem()

            carry = attend_to_tile(tile_ref, iota(TILE, 1) < left, carry)
            plgpu.barrier_arrive(free.at[slot])

            @pl.when(group == 0)
            def _() -> None:
                plgpu.barrier_wait(free.at[slot])
                pl.when(tile + STAGES < end)(functools.partial(fetch, tile + STAGES))

            return carry

        def constant(value: float) -> Array:
            return jnp.full((_NUM_QUERIES,), value, jnp.float32)

        zeros = jnp.zeros((_NUM_QUERIES, _COLUMNS), jnp.float32)
        carry = (constant(_LOWEST), constant(0.0), *([zeros] * (half // _COLUMNS)))
        carry = lax.fori_loop(0, (z == 0).astype(jnp.int32), new_tokens_step, carry)
        top, total, *parts = lax.fori_loop(begin, end, tile_step, carry)
        total = jnp.maximum(total, jnp.float32(1e-30))  # the sum is 0 in a split without any position
        for place, part in enumerate(parts):
            staged = out_smem.at[group]
            staged[...] = (part / lax.broadcast_in_dim(total, part.shape, [0])).astype(out_dtype)
            plgpu.commit_smem()
            columns = pl.ds(group * half + place * _COLUMNS, _COLUMNS)
            for token in range(tile_shape.tokens):
                where = z, b * S + first_token + token, own_heads, columns
                plgpu.copy_smem_to_gmem(
                    staged.at[pl.ds(token * tile_shape.heads, tile_shape.heads)], outs[0].at[where]
                )
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if shape.splits > 1:

            @pl.when(group == 0)
            def _() -> None:
                log_smem[...] = top + jnp.log2(total)
                plgpu.commit_smem()
                for token in range(tile_shape.tokens):
                    where = z, b * S + first_token + token, own_heads
                    plgpu.copy_smem_to_gmem(
                        log_smem.at[pl.ds(token * tile_shape.heads, tile_shape.heads)], outs[1].at[where]
                    )
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    out_type = [jax.ShapeDtypeStruct((shape.splits, T, H, C), out_dtype)]
    if shape.splits > 1:
        out_type.append(jax.ShapeDtypeStruct((shape.splits, T, H), jnp.float32))
    run = plgpu.kernel(
        paged_attention,
        out_type=out_type,
        scratch_types=[
            plgpu.SMEM((_NUM_QUERIES, C), dtype),
            plgpu.SMEM((_NUM_QUERIES, R), dtype),
            plgpu.SMEM((_MAX_NEW, X), dtype),
            plgpu.SMEM((STAGES * TILE, X), dtype),
            plgpu.SMEM((2, _NUM_QUERIES, TILE), dtype),
            plgpu.SMEM((2, _NUM_QUERIES, _COLUMNS), out_dtype),
            plgpu.SMEM((_NUM_QUERIES,), jnp.float32),
            plgpu.Barrier(num_arrivals=2 * tile_shape.tokens + 1),
            plgpu.Barrier(num_arrivals=TILE // size, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ],
        grid=(B, shape.splits, S // tile_shape.tokens, H // tile_shape.heads),
        grid_names=("row", "split", "tokens", "heads"),
        num_threads=2,
        thread_name="half",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    with jax.numpy_dtype_promotion("standard"):
        return run(tables_BM, used_B, first_1, q_HTC, q_HTX, blocks_PKX, new_BKX)
