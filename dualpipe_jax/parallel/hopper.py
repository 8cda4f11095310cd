"""Grouped matmul on Hopper GPUs (H100, H200): Pallas kernels that multiply each row once, whatever the groups' sizes.

A tile without rows loads and multiplies nothing, so a buffer that is an eighth full takes a fifth of the time that
JAX's own kernel does (``jax.experimental.pallas.ops.gpu.ragged_dot_mgpu``, which passes over none). Where groups have
few rows, as in a step of decode, which takes as long as it reads matrices, each matrix that is asked for is read once.
Gradients of matrices are added, in float32, to their sum over the microbatches so far; JAX's own kernel rounds them to
the rows' dtype. All take 16 bits, and widths that ``LANES`` divides; others are padded here. None runs on a CPU:
``emulate`` computes what they would write, tile by tile, for tests.

Shape suffixes: R rows, G groups, D in, F out; K rows of a block.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from dualpipe_jax.gradient_sum import gradient_sum
from dualpipe_jax.parallel.group_rows import filled, starts, walks
from dualpipe_jax.parallel.kernel_cost import once

LANES = 128
"""Tiles of the result are so many numbers wide, and as many rows high."""
_ROWS = 64
"""Rows that the gradient's kernel multiplies at once, and numbers of a row that the product's does: 128 bytes."""


class Walk(NamedTuple):
    """How a kernel goes through its tiles.

    Attributes:
      stages: blocks that are on their way from memory at once.
      snake: tiles along the result's width that follow each other, so that rows they share are still in the cache.
    """

    stages: int = 5
    snake: int = 8


MATRIX, TRANSPOSED, GRADIENT = Walk(), Walk(), Walk()
"""As measured: ``scripts/bench gpu --parts walks`` tries others."""
FEW = Walk(stages=6)
"""Of the product of few rows: 96 KiB of a matrix on their way to a multiprocessor. Nobody measured it."""
SMS = 132
"""Multiprocessors of an H100 SXM and of an H200, each of which walks its share of the tiles."""


def takes(dtype: Any) -> bool:
    """Whether the kernels know the dtype."""
    return dtype in (jnp.bfloat16, jnp.float16)


def product(
    x_RD: Array, w_GDF: Array, sizes_G: Array, *, transpose: bool = False, emulate: bool = False
) -> Array:
    """Multiply each group's rows by its matrix.

    Args:
      x_RD: in 16 bits; with ``transpose`` [R, F].
      w_GDF: of the same dtype.
      sizes_G: int32.
      transpose: multiply by the transposed matrices, which are read as they lie.
      emulate: compute the same in plain JAX.

    Returns:
      [R, F] of x's dtype, with ``transpose`` [R, D]; zeros past the last group.
    """
    rows, width = x_RD.shape[0], w_GDF.shape[1 if transpose else 2]
    few = not transpose and rows <= _ROWS * len(sizes_G)
    x_RD = _rows(x_RD, _ROWS if few else LANES)
    w_GDF = _padded(w_GDF, (0, -w_GDF.shape[1] % LANES, -w_GDF.shape[2] % LANES))
    if emulate:
        y_RF = _emulated_product(x_RD, w_GDF, sizes_G, transpose)[:rows, :width]
    else:
        num_read = min(rows, len(sizes_G)) if few else len(sizes_G)
        written = x_RD.shape[0] * width * x_RD.dtype.itemsize
        cost = _cost(x_RD, width, num_read * w_GDF.size // len(w_GDF) * x_RD.dtype.itemsize + written)
        run = _by_transposed if transpose else _of_few if few else _by_matrix
        y_RF = once(run, cost, x_RD, w_GDF, sizes_G)[:rows, :width]
    # Rows of no group are not written: what is there may be anything.
    filled_R = jnp.arange(rows, dtype=jnp.int32) < starts(sizes_G)[-1] + sizes_G[-1]
    return jnp.where(filled_R[:, None], y_RF, 0)


def gradient(x_RD: Array, dy_RF: Array, sizes_G: Array, *, emulate: bool = False) -> Array:
    """Sum each group's rows' outer products.

    Where 128 divides the widths they are added to ``gradient_sum``.

    Args:
      x_RD: in 16 bits; what lies past the last group is not read.
      dy_RF: of the same dtype.
      sizes_G: int32.
      emulate: compute the same in plain JAX.

    Returns:
      float32 [G, D, F].
    """
    shape = len(sizes_G), x_RD.shape[1], dy_RF.shape[1]
    x_RD, dy_RF = _rows(x_RD), _rows(dy_RF)
    padded = *shape[:1], x_RD.shape[1], dy_RF.shape[1]
    so_far = gradient_sum(shape, beside=x_RD)
    if padded != shape:  # a sum with edges would be another array
        so_far = _padded(so_far, tuple(p - s for p, s in zip(padded, shape, strict=True)))
    if emulate:
        made = so_far + _emulated_gradient(x_RD, dy_RF, sizes_G)
    else:
        cost = _cost(x_RD, padded[2], dy_RF.size * dy_RF.dtype.itemsize + 2 * so_far.size * 4)
        made = once(_gradient, cost, x_RD, dy_RF, sizes_G, so_far, in_place=_SO_FAR)
    return made if padded == shape else made[:, : shape[1], : shape[2]]


def _rows(array: Array, least: int = LANES) -> Array:
    """With zeros, so that there are so many rows at least, whose number 8 divides, and LANES their width."""
    rows, width = array.shape
    return _padded(array, (max(least, -(-rows // 8) * 8) - rows, -width % LANES))


def _padded(array: Array, missing: tuple[int, ...]) -> Array:
    return jnp.pad(array, [(0, after) for after in missing]) if any(missing) else array


def _cost(x_RD: Array, width: int, moved: int) -> pl.CostEstimate:
    """If the groups fill all rows, each as few as there can be; ``moved`` are bytes of all but x."""
    moved += x_RD.size * x_RD.dtype.itemsize
    return pl.CostEstimate(flops=2 * x_RD.size * width, transcendentals=0, bytes_accessed=moved)


def _by_matrix(
    x_RD: Array, w_GDF: Array, sizes_G: Array, transpose: bool = False, walk: Walk = MATRIX
) -> Array:
    """The product of groups of many rows; a block of rows in which groups meet is walked once for each."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    R, D = x_RD.shape
    F = w_GDF.shape[1 if transpose else 2]
    table = walks(sizes_G, LANES, R)
    tiles = len(table[0]), F // LANES

    def by_matrix(
        groups_ref: Any, blocks_ref: Any, starts_ref: Any, ends_ref: Any, x_ref: Any, w_ref: Any, y_ref: Any
    ) -> None:
        @plgpu.nd_loop((tiles[0] * tiles[1],), collective_axes="sm")
        def one_tile(loop: Any) -> None:
            place, f = plgpu.planar_snake(loop.index[0], tiles, 1, walk.snake)
            block = blocks_ref[place]
            before = block * LANES
            first = jnp.maximum(starts_ref[place] - before, 0)
            num_rows = jnp.minimum(ends_ref[place] - before, LANES) - first

            def multiply(sum_ref: Any) -> Array:
                def one_step(_: Any, x_LK: Any, w_tile: Any) -> None:
                    plgpu.wgmma(sum_ref, x_LK, transposed(w_tile) if transpose else w_tile)

                @pl.when(num_rows > 0)
                def _() -> None:
                    plgpu.emit_pipeline(
                        one_step,
                        grid=(D // _ROWS,),
                        in_specs=[
                            plgpu.BlockSpec((LANES, _ROWS), lambda k: (block, k), delay_release=1),
                            plgpu.BlockSpec((LANES, _ROWS), lambda k: (f, k), delay_release=1)
                            if transpose
                            else plgpu.BlockSpec((_ROWS, LANES), lambda k: (k, f), delay_release=1),
                        ],
                        max_concurrent_steps=walk.stages,
                    )(x_ref, w_ref.at[groups_ref[place]])

                return sum_ref[...]

            made = pl.run_scoped(multiply, plgpu.ACC((LANES, LANES)))
            write_rows(made.astype(x_RD.dtype), y_ref, before, f, first, num_rows)

    return _on_all(by_matrix, jax.ShapeDtypeStruct((R, F), x_RD.dtype), *table, x_RD, w_GDF)


def _by_transposed(x_RF: Array, w_GDF: Array, sizes_G: Array) -> Array:
    return _by_matrix(x_RF, w_GDF, sizes_G, transpose=True, walk=TRANSPOSED)


def _of_few(x_RD: Array, w_GDF: Array, sizes_G: Array) -> Array:
    """The product of groups of few rows: the matrix of a group without any is not read, those of others once."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    (R, D), (G, _, F) = x_RD.shape, w_GDF.shape
    groups_S, starts_S, ends_S = filled(sizes_G, min(R, G))

    def of_few(groups_ref: Any, starts_ref: Any, ends_ref: Any, x_ref: Any, w_ref: Any, y_ref: Any) -> None:
        @plgpu.nd_loop((len(groups_S), F // LANES), collective_axes="sm")
        def one_tile(loop: Any) -> None:
            place, f = loop.index
            start, end = starts_ref[place], ends_ref[place]
            w_DF = w_ref.at[groups_ref[place]]

            def one_block(block: Array, carry: None) -> None:
                def multiply(sum_ref: Any) -> Array:
                    def one_step(_: Any, x_KD: Any, w_DL: Any) -> None:
                        plgpu.wgmma(sum_ref, x_KD, w_DL)

                    plgpu.emit_pipeline(
                        one_step,
                        grid=(D // _ROWS,),
                        in_specs=[
                            plgpu.BlockSpec((_ROWS, _ROWS), lambda d: (block, d), delay_release=1),
                            plgpu.BlockSpec((_ROWS, LANES), lambda d: (d, f), delay_release=1),
                        ],
                        max_concurrent_steps=FEW.stages,
                    )(x_ref, w_DF)
                    return sum_ref[...]

                made = pl.run_scoped(multiply, plgpu.ACC((_ROWS, LANES)))
                before = block * _ROWS
                first = jnp.maximum(start, before) - before
                num_rows = jnp.minimum(end, before + _ROWS) - before - first
                write_rows(made.astype(x_RD.dtype), y_ref, before, f, first, num_rows)

            past = lax.div(end + jnp.int32(_ROWS - 1), jnp.int32(_ROWS))
            first_block = lax.div(start, jnp.int32(_ROWS))
            lax.fori_loop(first_block, jnp.where(end > start, past, first_block), one_block, None)

    return _on_all(of_few, jax.ShapeDtypeStruct((R, F), x_RD.dtype), groups_S, starts_S, ends_S, x_RD, w_GDF)


def _on_all(kernel: Any, made: jax.ShapeDtypeStruct, *arrays: Array, scratch: Sequence[Any] = ()) -> Array:
    """Run a kernel on all multiprocessors, over whose axis "sm" it shares out its tiles."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    run = plgpu.kernel(
        kernel,
        out_type=made,
        scratch_types=scratch,
        grid=(SMS,),
        grid_names=("sm",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    with jax.numpy_dtype_promotion("standard"):
        return run(*arrays)


def write_rows(made_TL: Array, y_ref: Any, before: Any, f: Any, first: Any, num_rows: Any) -> None:
    """In a kernel: write some rows of a tile, from ``first`` on, whose place in y begins behind ``before`` rows.

    ``f`` is the number of its columns' tile.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    @functools.partial(pl.run_scoped, tile_ref=plgpu.SMEM(made_TL.shape, dtype=made_TL.dtype))
    def write(tile_ref: Any) -> None:
        tile_ref[...] = made_TL
        plgpu.commit_smem()
        # What is copied has a size known beforehand: so the rows go in powers of two.
        row = first
        for size in (1 << power for power in reversed(range(len(made_TL).bit_length()))):
            here = num_rows & size

            @pl.when(here != 0)
            def _(row: Any = row, size: int = size) -> None:
                where = y_ref.at[pl.ds(before + row, size), pl.ds(f * LANES, LANES)]
                plgpu.copy_smem_to_gmem(tile_ref.at[pl.ds(row, size)], where)

            row = row + here
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


_SO_FAR = 4
"""The place, among the operands of the gradient's kernel, of the sum that it adds to."""


def _gradient(x_RD: Array, dy_RF: Array, sizes_G: Array, so_far_GDF: Array, walk: Walk = GRADIENT) -> Array:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    R, D = x_RD.shape
    G, F = len(sizes_G), dy_RF.shape[1]
    tiles = D // LANES, F // LANES

    def kernel(
        starts_ref: Any,
        ends_ref: Any,
        x_ref: Any,
        dy_ref: Any,
        so_far_ref: Any,
        dw_ref: Any,
        tile_ref: Any,
        arrived: Any,
    ) -> None:
        @plgpu.nd_loop((G, tiles[0] * tiles[1]), collective_axes="sm")
        def one_tile(loop: Any) -> None:
            group, tile = loop.index
            d, f = plgpu.planar_snake(tile, tiles, 1, walk.snake)
            where = group, pl.ds(d * LANES, LANES), pl.ds(f * LANES, LANES)
            # It is on its way while the rows are multiplied.
            plgpu.copy_gmem_to_smem(so_far_ref.at[where], tile_ref, arrived)
            start, end = starts_ref[group], ends_ref[group]
            first = lax.div(start, jnp.int32(_ROWS))
            past = lax.div(end + jnp.int32(_ROWS - 1), jnp.int32(_ROWS))
            num_blocks = jnp.where(end > start, past - first, 0)
            # It may reach past the rows: no block there is read.
            rows = pl.ds(pl.multiple_of(first * _ROWS, _ROWS), R)

            def add_up(sum_ref: Any) -> Array:
                def one_block(index: Any, x_KD: Any, dy_KF: Any) -> None:
                    block = index[0]

                    @pl.when((block == 0) | (block == num_blocks - 1))
                    def _() -> None:
                        # Both: what lies past the groups may be anything, and 0 * nan is nan.
                        for ref in (x_KD, dy_KF):
                            row_KL = (
                                plgpu.layout_cast(
                                    lax.broadcasted_iota(jnp.int32, (_ROWS, LANES), 0), plgpu.Layout.WGMMA
                                )
                                + (first + block) * _ROWS
                            )
                            ref[...] = jnp.where(
                                (row_KL >= start) & (row_KL < end), ref[...], jnp.zeros_like(ref[...])
                            )
                        plgpu.commit_smem()

                    plgpu.wgmma(sum_ref, transposed(x_KD), dy_KF)

                @pl.when(num_blocks > 0)
                def _() -> None:
                    plgpu.emit_pipeline(
                        one_block,
                        grid=(num_blocks,),
                        in_specs=[
                            plgpu.BlockSpec((_ROWS, LANES), lambda block: (block, d), delay_release=1),
                            plgpu.BlockSpec((_ROWS, LANES), lambda block: (block, f), delay_release=1),
                        ],
                        max_concurrent_steps=walk.stages,
                    )(x_ref.at[rows, :], dy_ref.at[rows, :])

                return sum_ref[...]

            total = pl.run_scoped(add_up, plgpu.ACC((LANES, LANES)))
            plgpu.barrier_wait(arrived)
            tile_ref[...] = tile_ref[...] + total
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile_ref, dw_ref.at[where])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    ends_G = jnp.cumsum(sizes_G)
    operands = ends_G - sizes_G, ends_G, x_RD, dy_RF, so_far_GDF
    scratch = plgpu.SMEM((LANES, LANES), jnp.float32), plgpu.Barrier()
    return _on_all(kernel, jax.ShapeDtypeStruct((G, D, F), jnp.float32), *operands, scratch=scratch)


def transposed(ref: Any) -> Any:
    """A view of a block in shared memory, by the method that jax 0.11 has in place of a function."""
    if hasattr(ref, "transpose"):
        return ref.transpose((1, 0))
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.transpose_ref(ref, (1, 0))


def _emulated_product(x_RD: Array, w_GDF: Array, sizes_G: Array, transpose: bool) -> Array:
    """What the product's kernel leaves: rows of no group are not written, here they are NaN."""
    matrices = w_GDF.swapaxes(1, 2) if transpose else w_GDF
    ends_G = jnp.cumsum(sizes_G)
    row_R = jnp.arange(x_RD.shape[0], dtype=jnp.int32)
    y_RF = jnp.full((x_RD.shape[0], matrices.shape[2]), jnp.nan, jnp.float32)
    for group in range(len(matrices)):
        here_R = (row_R >= ends_G[group] - sizes_G[group]) & (row_R < ends_G[group])
        whole_RF = jnp.matmul(x_RD, matrices[group], preferred_element_type=jnp.float32)
        y_RF = jnp.where(here_R[:, None], whole_RF, y_RF)
    return y_RF.astype(x_RD.dtype)


def _emulated_gradient(x_RD: Array, dy_RF: Array, sizes_G: Array) -> Array:
    """What the gradient's kernel sums, block by block: whole blocks of rows, of which the first and the last are
    masked. A block may reach past the rows, where it reads zeros."""
    past = -len(x_RD) % _ROWS
    x_BKD, dy_BKF = (jnp.pad(a, ((0, past), (0, 0))).reshape(-1, _ROWS, a.shape[1]) for a in (x_RD, dy_RF))
    ends_G = jnp.cumsum(sizes_G)
    block_B = jnp.arange(len(x_BKD), dtype=jnp.int32)
    row_BK = block_B[:, None] * _ROWS + jnp.arange(_ROWS, dtype=jnp.int32)

    def one(start: Array, end: Array) -> Array:
        first, last = start // _ROWS, (end + _ROWS - 1) // _ROWS - 1
        edge_B = (block_B == first) | (block_B == last)
        inside_BK = jnp.where(edge_B[:, None], (row_BK >= start) & (row_BK < end), True)
        walked_BK = inside_BK & ((block_B >= first) & (block_B <= last) & (end > start))[:, None]
        x, dy = (jnp.where(walked_BK[..., None], a, jnp.zeros_like(a)) for a in (x_BKD, dy_BKF))
        return jnp.einsum("bkd,bkf->df", x, dy, preferred_element_type=jnp.float32)

    return jax.vmap(one)(ends_G - sizes_G, ends_G)
