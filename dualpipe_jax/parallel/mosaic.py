"""Grouped matmul on Hopper and Blackwell GPUs: Pallas' Mosaic kernels that multiply each row once, whatever the groups'
sizes.

A tile without rows loads and multiplies nothing, so a buffer that is an eighth full takes a fifth of the time that
JAX's own kernel takes (``jax.experimental.pallas.ops.gpu.ragged_dot_mgpu``, which skips no tile). Where groups have few
rows, as in a decode step, the time is that of reading matrices: a Hopper then reads the matrix of a group once for each
block of ``ROWS`` rows that holds rows of the group, and no other matrix. Gradients of matrices are added, in float32,
to their sum over the microbatches so far; JAX's own kernel rounds them to the rows' dtype.

All kernels take types of 16 bits, and the product on a Hopper also eight bits. They take widths that ``LANES`` divides;
this module pads others. No kernel runs on a CPU: ``emulate`` computes what they would write, for tests.

Shape suffixes: R rows, G groups, D in, F out; K rows of a block.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from dualpipe_jax.gradient_sum import gradient_sum
from dualpipe_jax.parallel import blackwell_tiles, hopper_tiles, mosaic_emulated
from dualpipe_jax.parallel.float8 import TILE, Tiled, dequantize
from dualpipe_jax.parallel.group_rows import group_starts, group_tiles, nonempty_groups
from dualpipe_jax.parallel.kernel_cost import call_traced_once
from dualpipe_jax.parallel.tiles import (
    BYTES,
    HALVES,
    LANES,
    ROWS,
    Blocks,
    Slots,
    TileProgram,
    Tiles,
    loaded,
    run,
    transposed,
)

TILES: Mapping[str, Tiles] = {"hopper": hopper_tiles, "blackwell": blackwell_tiles}
"""How each GPU computes tiles, by the name of the kernel in ``expert_groups``."""

_PIECE = 64
"""The number of columns of a result that are written to memory at once: shared memory has no room for all."""


class Walk(NamedTuple):
    """How a kernel goes through its tiles.

    Attributes:
      stages: the number of blocks that are loaded from memory at once.
      snake: the number of neighbouring tiles along the result's width that are computed after each other, so that the
        rows that they share are still in the cache.
    """

    stages: int = 4
    snake: int = 2


MATRIX, TRANSPOSED, GRADIENT = Walk(), Walk(), Walk(stages=3, snake=8)
"""The walks of the product, of the product with transposed matrices and of the gradient, chosen by measurements on an
H200: ``scripts/bench gpu --parts walks`` tries others."""
FEW_ROWS = Walk(stages=6)
"""The walk of a Hopper's product of few rows: it loads 96 KiB of a matrix at once to a multiprocessor. It has not been
measured."""


def supports_dtype(dtype: Any) -> bool:
    """Return whether the kernels take the dtype: bfloat16 and float16."""
    return dtype in (jnp.bfloat16, jnp.float16)


def product(
    tiles: Tiles,
    x_RD: Array,
    w_GDF: Array,
    sizes_G: Array,
    *,
    transpose: bool = False,
    emulate: bool = False,
) -> Array:
    """Multiply each group's rows by its matrix.

    Args:
      tiles: one of ``TILES``.
      x_RD: the rows, of a dtype of 16 bits; with ``transpose`` [R, F].
      w_GDF: the matrices, of the same dtype.
      sizes_G: int32, the number of rows of each group.
      transpose: multiply by the transposed matrices, which are read in the order in which they lie.
      emulate: compute the same in plain JAX.

    Returns:
      [R, F] of x's dtype, with ``transpose`` [R, D]; zeros past the last group.
    """
    rows, width = x_RD.shape[0], w_GDF.shape[1 if transpose else 2]
    few = tiles is hopper_tiles and not transpose and rows <= ROWS * len(sizes_G)
    x_RD = _pad_rows(x_RD, ROWS if few else LANES)
    w_GDF = _padded(w_GDF, (0, -w_GDF.shape[1] % LANES, -w_GDF.shape[2] % LANES))
    if emulate:
        y_RF = mosaic_emulated.product(x_RD, w_GDF, sizes_G, transpose)[:rows, :width]
    else:
        num_read = min(rows, len(sizes_G)) if few else len(sizes_G)
        written = x_RD.shape[0] * width * x_RD.dtype.itemsize
        cost = _cost(x_RD, width, num_read * w_GDF.size // len(w_GDF) * x_RD.dtype.itemsize + written)
        if few:
            y_RF = call_traced_once(_product_of_few_rows, cost, x_RD, w_GDF, sizes_G, num_read=num_read)
        else:
            y_RF = call_traced_once(
                _product_of_many_rows, cost, x_RD, w_GDF, sizes_G, tiles=tiles, transpose=transpose
            )
        y_RF = y_RF[:rows, :width]
    return _zero_unused_rows(y_RF, sizes_G)


def scaled_product(
    x8_RD: Tiled, w8_GFD: Tiled, sizes_G: Array, dtype: Any, *, emulate: bool = False
) -> Array:
    """Multiply each group's rows by its transposed matrix, both in eight bits, on a Hopper.

    The tensor cores sum 128 products at a time, in fewer bits than float32 has (about 14, says DeepSeek-V3's report,
    section 3.3.2); these sums, times their two scales, are added up in float32.

    Args:
      x8_RD: the rows, in tiles of 1 x 128.
      w8_GFD: the matrices, transposed, in tiles of 128 x 128.
      sizes_G: int32, the number of rows of each group.
      dtype: the dtype of the result, of 16 bits.
      emulate: compute the same in plain JAX.

    Returns:
      [R, F] of ``dtype``; zeros past the last group.
    """
    rows, width = x8_RD.values.shape[0], w8_GFD.values.shape[1]
    x_RD, w_GFD = _pad_rows(x8_RD.values), w8_GFD.values
    w_GFD = _padded(w_GFD, (0, -w_GFD.shape[1] % LANES, -w_GFD.shape[2] % LANES))
    if emulate:
        decoded = (dequantize(x8_RD, (1, TILE), jnp.float32), dequantize(w8_GFD, (TILE, TILE), jnp.float32))
        y_RF = mosaic_emulated.product(*decoded, sizes_G, transpose=True).astype(dtype)
    else:
        scales_KR = _padded(x8_RD.scales.T, (0, -(-len(x_RD) // LANES) * LANES - rows))
        given = x_RD, w_GFD, sizes_G, scales_KR, w8_GFD.scales
        cost = _cost(x_RD, width, w_GFD.size + len(x_RD) * width * jnp.dtype(dtype).itemsize)
        y_RF = call_traced_once(
            _product_of_many_rows, cost, *given, tiles=hopper_tiles, transpose=True, dtype=jnp.dtype(dtype)
        )
    return _zero_unused_rows(y_RF[:rows, :width], sizes_G)


def _zero_unused_rows(y_RF: Array, sizes_G: Array) -> Array:
    """Put zeros into rows of no group: the kernels do not write them, so they may hold anything."""
    filled_R = jnp.arange(len(y_RF), dtype=jnp.int32) < group_starts(sizes_G)[-1] + sizes_G[-1]
    return jnp.where(filled_R[:, None], y_RF, 0)


def gradient(tiles: Tiles, x_RD: Array, dy_RF: Array, sizes_G: Array, *, emulate: bool = False) -> Array:
    """Sum the outer products of each group's rows.

    Where 128 divides the widths they are added to ``gradient_sum``.

    Args:
      tiles: one of ``TILES``.
      x_RD: the rows, of a dtype of 16 bits; rows past the last group are ignored.
      dy_RF: the gradients of the product's rows, of the same dtype.
      sizes_G: int32, the number of rows of each group.
      emulate: compute the same in plain JAX.

    Returns:
      float32 [G, D, F].
    """
    shape = len(sizes_G), x_RD.shape[1], dy_RF.shape[1]
    x_RD, dy_RF = _pad_rows(x_RD), _pad_rows(dy_RF)
    padded = *shape[:1], x_RD.shape[1], dy_RF.shape[1]
    so_far = gradient_sum(shape, varying_like=x_RD)
    if padded != shape:  # a padded sum is another array, so nothing is added in place
        so_far = _padded(so_far, tuple(p - s for p, s in zip(padded, shape, strict=True)))
    given = x_RD, dy_RF, sizes_G, so_far
    made = mosaic_emulated.add_gradient(*given) if emulate else add_gradient(tiles, *given)
    return made if padded == shape else made[:, : shape[1], : shape[2]]


def add_gradient(
    tiles: Tiles, x_RD: Array, dy_RF: Array, sizes_G: Array, so_far_GDF: Array, walk: Walk = GRADIENT
) -> Array:
    """Compute ``gradient`` for widths that ``LANES`` divides and at least 128 rows, and add it to a sum in place."""
    cost = _cost(x_RD, dy_RF.shape[1], dy_RF.size * dy_RF.dtype.itemsize + 2 * so_far_GDF.size * 4)
    given = x_RD, dy_RF, sizes_G, so_far_GDF
    return call_traced_once(_gradient, cost, *given, in_place=_SUM_OPERAND, tiles=tiles, walk=walk)


def _pad_rows(array: Array, least: int = LANES) -> Array:
    """Pad with zeros to at least ``least`` rows, to a number of rows that 8 divides and a width that LANES divides."""
    rows, width = array.shape
    return _padded(array, (max(least, -(-rows // 8) * 8) - rows, -width % LANES))


def _padded(array: Array, missing: tuple[int, ...]) -> Array:
    return jnp.pad(array, [(0, after) for after in missing]) if any(missing) else array


def _cost(x_RD: Array, width: int, moved: int) -> pl.CostEstimate:
    """Return the cost if the groups fill all rows, as many groups as possible having rows.

    ``moved`` is the number of bytes that are read and written, without those of x.
    """
    moved += x_RD.size * x_RD.dtype.itemsize
    return pl.CostEstimate(flops=2 * x_RD.size * width, transcendentals=0, bytes_accessed=moved)


class _ProductTile(NamedTuple):
    """A tile of a product: those rows of one block that belong to one group, by the columns of both halves.

    Attributes:
      group: the index of the group.
      before: the number of rows before the block.
      first: the first row of the block that belongs to the group.
      rows: the number of rows of the block that belong to the group.
      columns: the index of the tile's columns, in units of two times ``LANES``.
      steps: see ``TileProgram``.
    """

    group: Array
    before: Array
    first: Array
    rows: Array
    columns: Array
    steps: Array


def _product_of_many_rows(
    x_RD: Array,
    w_GDF: Array,
    sizes_G: Array,
    *scales: Array,
    tiles: Tiles,
    transpose: bool = False,
    dtype: Any = None,
    walk: Walk | None = None,
) -> Array:
    """Compute the product of groups of many rows; a block with rows of several groups is walked once for each group.

    With operands of eight bits, ``scales`` are those of the rows, [K, R], and of the matrices, [G, F / LANES, K], K
    being the number of blocks of D, and ``dtype`` is that of the result.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    R, D = x_RD.shape
    F = w_GDF.shape[1 if transpose else 2]
    dtype, at_once = dtype or x_RD.dtype, BYTES // x_RD.dtype.itemsize
    walk = walk or (TRANSPOSED if transpose else MATRIX)
    table = group_tiles(sizes_G, LANES, R)
    grid = len(table[0]), pl.cdiv(F, HALVES * LANES)

    def of_many(
        groups_ref: Any,
        blocks_ref: Any,
        starts_ref: Any,
        ends_ref: Any,
        x_ref: Any,
        w_ref: Any,
        *refs: Any,
    ) -> None:
        *scale_refs, y_ref, slots = refs

        def find(index: Array) -> _ProductTile:
            place, columns = plgpu.planar_snake(index, grid, 1, walk.snake)
            before = blocks_ref[place] * LANES
            first = jnp.maximum(starts_ref[place] - before, 0)
            rows = jnp.minimum(ends_ref[place] - before, LANES) - first
            steps = jnp.where(rows > 0, jnp.int32(D // at_once), jnp.int32(0))
            return _ProductTile(groups_ref[place], before, first, rows, columns, steps)

        def load(tile: _ProductTile, step: Array, slot: Array) -> None:
            summed, arrived = pl.ds(step * at_once, at_once), slots.arrived.at[slot]
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(tile.before, LANES), summed], slots.left.at[slot], arrived)
            for column, columns, block in slots.right_blocks(slot):
                own = pl.ds(tile.columns * HALVES * LANES + column, columns)
                where = (tile.group, own, summed) if transpose else (tile.group, summed, own)
                plgpu.copy_gmem_to_smem(w_ref.at[where], block, arrived)

        def operands(slot: Array, w_block: Any) -> tuple[Any, Any]:
            return slots.left.at[slot], transposed(w_block) if transpose else w_block

        def find_scales(tile: _ProductTile, step: Array, half: Array) -> list[Array]:
            of_rows_ref, of_matrices_ref = scale_refs
            own = jnp.minimum(HALVES * tile.columns + half, F // LANES - 1)
            of_matrix = of_matrices_ref[tile.group, own, step]
            first_rows = [tile.before + first for first in range(0, LANES, ROWS)]
            return [loaded(of_rows_ref.at[step, pl.ds(row, ROWS)]) * of_matrix for row in first_rows]

        def write(tile: _ProductTile, half: Any, put: Callable[[Any, int], None]) -> None:
            own = HALVES * tile.columns + half
            piece_ref = slots.result.at[half]

            @pl.when(
                own < F // LANES
            )  # if LANES goes into F an odd number of times, the last tile has one half
            def _() -> None:
                for column in range(0, LANES, _PIECE):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    put(piece_ref, column)
                    plgpu.commit_smem()
                    _copy_rows(piece_ref, y_ref, tile.before, own * LANES + column, tile.first, tile.rows)

        by = find_scales if scales else None
        tiles.compute_tiles(slots, TileProgram(grid[0] * grid[1], find, load, operands, write, scales=by))

    blocks = Blocks(
        walk.stages,
        x_RD.dtype,
        left=(LANES, at_once),
        right=(LANES, at_once) if transpose else (at_once, LANES),
        result=jax.ShapeDtypeStruct((LANES, _PIECE), dtype),
    )
    given = *table, x_RD, w_GDF, *scales
    made, warpgroups = jax.ShapeDtypeStruct((R, F), dtype), tiles.warpgroups(masks=False)
    return run(of_many, made, *given, sms=tiles.SMS, scratch=[tiles.slots(blocks)], warpgroups=warpgroups)


def _product_of_few_rows(x_RD: Array, w_GDF: Array, sizes_G: Array, *, num_read: int) -> Array:
    """Compute a Hopper's product of groups of few rows; the matrix of a group without rows is not read.

    A group's matrix is read once for each block of ``ROWS`` rows that holds rows of the group. At most ``num_read``
    groups have rows: the kernel's grid has that many places, each of which takes time even without a group.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    (R, D), F = x_RD.shape, w_GDF.shape[2]
    groups_S, starts_S, ends_S = nonempty_groups(sizes_G, num_read)

    def of_few(
        groups_ref: Any, starts_ref: Any, ends_ref: Any, x_ref: Any, w_ref: Any, y_ref: Any, tile_smem: Any
    ) -> None:
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
                        grid=(D // ROWS,),
                        in_specs=[
                            plgpu.BlockSpec((ROWS, ROWS), lambda d: (block, d), delay_release=1),
                            plgpu.BlockSpec((ROWS, LANES), lambda d: (d, f), delay_release=1),
                        ],
                        max_concurrent_steps=FEW_ROWS.stages,
                    )(x_ref, w_DF)
                    return sum_ref[...]

                made = pl.run_scoped(multiply, plgpu.ACC((ROWS, LANES)))
                before = block * ROWS
                first = jnp.maximum(start, before) - before
                num_rows = jnp.minimum(end, before + ROWS) - before - first
                tile_smem[...] = made.astype(x_RD.dtype)
                plgpu.commit_smem()
                _copy_rows(tile_smem, y_ref, before, f * LANES, first, num_rows)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            past = lax.div(end + jnp.int32(ROWS - 1), jnp.int32(ROWS))
            first_block = lax.div(start, jnp.int32(ROWS))
            lax.fori_loop(first_block, jnp.where(end > start, past, first_block), one_block, None)

    made = jax.ShapeDtypeStruct((R, F), x_RD.dtype)
    tile = plgpu.SMEM((ROWS, LANES), x_RD.dtype)
    return run(of_few, made, groups_S, starts_S, ends_S, x_RD, w_GDF, sms=hopper_tiles.SMS, scratch=[tile])


def _copy_rows(tile_ref: Any, y_ref: Any, before: Any, column: Any, first: Any, num_rows: Any) -> None:
    """In a kernel: start copies of ``num_rows`` rows of a tile, from ``first`` on, to their place in y.

    The tile's first row belongs to row ``before`` of y, its first column to column ``column`` of y.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows, width = tile_ref.shape
    row = first
    # The size of a copy must be known to the compiler, so the rows are copied in powers of two.
    for size in (1 << power for power in reversed(range(rows.bit_length()))):
        here = num_rows & size

        @pl.when(here != 0)
        def _(row: Any = row, size: int = size) -> None:
            where = y_ref.at[pl.ds(before + row, size), pl.ds(column, width)]
            plgpu.copy_smem_to_gmem(tile_ref.at[pl.ds(row, size)], where)

        row = row + here


_SUM_OPERAND = 4
"""The index, among the operands of the gradient's kernel, of the sum that the kernel adds to."""


class _GradientTile(NamedTuple):
    """A tile of a group's gradient.

    Attributes:
      group: the index of the group.
      d: the index of the tile's rows, in units of ``LANES``.
      columns: the index of the tile's columns, in units of two times ``LANES``.
      start, end: the first row of the group, and the row past its last.
      block: the first block of ``ROWS`` rows that holds rows of the group.
      steps: the number of such blocks.
    """

    group: Array
    d: Array
    columns: Array
    start: Array
    end: Array
    block: Array
    steps: Array


def _gradient(
    x_RD: Array, dy_RF: Array, sizes_G: Array, so_far_GDF: Array, tiles: Tiles, walk: Walk
) -> Array:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    D = x_RD.shape[1]
    G, F = len(sizes_G), dy_RF.shape[1]
    grid = D // LANES, pl.cdiv(F, HALVES * LANES)

    def kernel(
        starts_ref: Any, ends_ref: Any, x_ref: Any, dy_ref: Any, so_far_ref: Any, dw_ref: Any, slots: Slots
    ) -> None:
        del so_far_ref  # the result has the same memory: the kernel adds to what is there

        def find(index: Array) -> _GradientTile:
            num = jnp.int32(grid[0] * grid[1])
            group = lax.div(index, num)
            d, columns = plgpu.planar_snake(lax.rem(index, num), grid, 1, walk.snake)
            start, end = starts_ref[group], ends_ref[group]
            first = lax.div(start, jnp.int32(ROWS))
            past = lax.div(end + jnp.int32(ROWS - 1), jnp.int32(ROWS))
            steps = jnp.where(end > start, past - first, 0)
            return _GradientTile(group, d, columns, start, end, first, steps)

        def load(tile: _GradientTile, step: Array, slot: Array) -> None:
            rows, arrived = pl.ds((tile.block + step) * ROWS, ROWS), slots.arrived.at[slot]
            plgpu.copy_gmem_to_smem(
                x_ref.at[rows, pl.ds(tile.d * LANES, LANES)], slots.left.at[slot], arrived
            )
            for column, columns, block in slots.right_blocks(slot):
                own = pl.ds(tile.columns * HALVES * LANES + column, columns)
                plgpu.copy_gmem_to_smem(dy_ref.at[rows, own], block, arrived)

        def operands(slot: Array, dy_block: Any) -> tuple[Any, Any]:
            return transposed(slots.left.at[slot]), dy_block

        def row_bounds(tile: _GradientTile, step: Array) -> tuple[Array, Array]:
            before = (tile.block + step) * ROWS
            return tile.start - before, tile.end - before

        def write(tile: _GradientTile, half: Any, put: Callable[[Any, int], None]) -> None:
            own = HALVES * tile.columns + half
            piece_ref = slots.result.at[half]

            @pl.when(own < F // LANES)
            def _() -> None:
                for column in range(0, LANES, _PIECE):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    put(piece_ref, column)
                    plgpu.commit_smem()
                    where = tile.group, pl.ds(tile.d * LANES, LANES), pl.ds(own * LANES + column, _PIECE)
                    plgpu.copy_smem_to_gmem(piece_ref, dw_ref.at[where], reduction_op="add")

        tiles.compute_tiles(
            slots, TileProgram(G * grid[0] * grid[1], find, load, operands, write, row_bounds)
        )

    ends_G = jnp.cumsum(sizes_G)
    operands = ends_G - sizes_G, ends_G, x_RD, dy_RF, so_far_GDF
    blocks = Blocks(
        walk.stages,
        x_RD.dtype,
        left=(ROWS, LANES),
        right=(ROWS, LANES),
        result=jax.ShapeDtypeStruct((LANES, _PIECE), jnp.float32),
    )
    slots = tiles.slots(blocks, masks=True)
    made = jax.ShapeDtypeStruct((G, D, F), jnp.float32)
    warpgroups = tiles.warpgroups(masks=True)
    return run(kernel, made, *operands, sms=tiles.SMS, scratch=[slots], warpgroups=warpgroups)
