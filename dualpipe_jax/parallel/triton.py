"""Grouped matmul on any GPU: Pallas kernels in Triton that multiply each row once, whatever the groups' sizes.

They serve A100s, and float32 on all GPUs; the kernels for 16 bits on a Hopper or Blackwell are in ``mosaic``. A tile
with rows of several groups is walked once for each group, and each walk writes the rows of its group. From jax 0.11 on
JAX calls Pallas' Triton deprecated and points to Mosaic, which does not run on an A100. ``is_available`` says whether
JAX still has Triton.

Shape suffixes: R rows, G groups, D in, F out; T walks of a tile of rows.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from dualpipe_jax.gradient_sum import gradient_sum
from dualpipe_jax.parallel.group_rows import group_tiles
from dualpipe_jax.parallel.kernel_cost import call_traced_once
from dualpipe_jax.varying import shape_like

plgpu: Any
try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # deprecated, and gone one day
    plgpu = None


class Tiles(NamedTuple):
    """Settings of a kernel. The sizes of the tiles that it multiplies at once are powers of two, at least 16.

    Attributes:
      rows: the height of a tile of the result: rows, or for gradients numbers along D.
      inner: the size of a tile along the dim that is summed over; for gradients that dim is the rows.
      outer: the width of a tile of the result.
      swizzle: the number of tiles, one above the other in the result, that are computed after each other, so that the
        operands that they share are still in the cache.
      warps: the number of warps, of 32 threads each, that compute one tile.
      stages: the number of tiles that are loaded from memory at once.
    """

    rows: int = 128
    inner: int = 32
    outer: int = 128
    swizzle: int = 8
    warps: int = 8
    stages: int = 3


NARROW, WIDE = Tiles(inner=64), Tiles(rows=64, outer=64, warps=4)
"""Settings for types of 16 bits and for float32, as usual for such kernels. Others were not tried: on an H200 the first
reaches 480 to 507 TFLOP/s, the Hopper kernels of ``mosaic`` 579 to 624."""


class _Settings(NamedTuple):
    """The settings of one call.

    Attributes:
      transpose: multiply by transposed matrices.
      tiles: the sizes of tiles.
      exact: multiply float32 in all its bits, not as TensorFloat32.
      interpret: run in Pallas' interpreter.
    """

    transpose: bool
    tiles: Tiles
    exact: bool
    interpret: bool


def is_available() -> bool:
    """Return whether this version of JAX has Pallas' Triton."""
    return plgpu is not None


def product(
    x_RD: Array, w_GDF: Array, sizes_G: Array, *, transpose: bool = False, interpret: bool = False
) -> Array:
    """Multiply each group's rows by its matrix, with sums in float32.

    Float32 is multiplied as XLA does it on a GPU: as TensorFloat32, with 10 bits of mantissa, unless
    ``jax.default_matmul_precision`` says otherwise.

    Args:
      x_RD: the rows; with ``transpose`` [R, F].
      w_GDF: the matrices, of the same dtype.
      sizes_G: int32, the number of rows of each group.
      transpose: multiply by the transposed matrices, which are read in the order in which they lie.
      interpret: run in Pallas' interpreter, for tests on a CPU.

    Returns:
      [R, F] of x's dtype, with ``transpose`` [R, D]; zeros past the last group.
    """
    rows, width = x_RD.shape[0], w_GDF.shape[1 if transpose else 2]
    tiles = _tiles(x_RD.dtype)
    # Few rows per group, as in a decode step, need no high tile.
    tiles = tiles._replace(rows=min(tiles.rows, max(16, pl.next_power_of_2(-(-rows // len(sizes_G))))))
    run = _cached_partial(_product, _Settings(transpose, tiles, _wants_full_precision(), interpret))
    moved = (x_RD.size + w_GDF.size + rows * width) * x_RD.dtype.itemsize
    y_RF = call_traced_once(run, _cost(x_RD, width, moved), x_RD, w_GDF, sizes_G)
    # The kernel does not write rows of no group: they may hold anything.
    filled_R = jnp.arange(rows, dtype=jnp.int32) < jnp.sum(sizes_G, dtype=jnp.int32)
    return jnp.where(filled_R[:, None], y_RF, 0)


def gradient(x_RD: Array, dy_RF: Array, sizes_G: Array, *, interpret: bool = False) -> Array:
    """Sum the outer products of each group's rows, and add them to ``gradient_sum``.

    Args:
      x_RD: the rows; rows past the last group are not read.
      dy_RF: the gradients of the product's rows, of the same dtype.
      sizes_G: int32, the number of rows of each group.
      interpret: run in Pallas' interpreter, for tests on a CPU.

    Returns:
      float32 [G, D, F].
    """
    run = _cached_partial(_gradient, _Settings(False, _tiles(x_RD.dtype), _wants_full_precision(), interpret))
    so_far = gradient_sum((len(sizes_G), x_RD.shape[1], dy_RF.shape[1]), varying_like=x_RD)
    moved = (x_RD.size + dy_RF.size) * x_RD.dtype.itemsize + 2 * 4 * so_far.size
    return call_traced_once(run, _cost(x_RD, dy_RF.shape[1], moved), x_RD, dy_RF, sizes_G, so_far)


_cached_partial = functools.cache(functools.partial)
"""``functools.partial``, but the same function for equal arguments, as ``kernel_cost.call_traced_once`` needs it."""


def _wants_full_precision() -> bool:
    """Return whether ``jax.default_matmul_precision`` asks for all bits of float32."""
    asked = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return asked in ("highest", "float32", "F32_F32_F32")


def _tiles(dtype: Any) -> Tiles:
    return NARROW if dtype.itemsize == 2 else WIDE


def _cost(x_RD: Array, width: int, moved: int) -> pl.CostEstimate:
    """Return the cost if the groups fill all rows; ``moved`` is the number of bytes that are read and written."""
    return pl.CostEstimate(flops=2 * x_RD.size * width, transcendentals=0, bytes_accessed=moved)


def _product(settings: _Settings, x_RD: Array, w_GDF: Array, sizes_G: Array) -> Array:
    (R, D), tiles = x_RD.shape, settings.tiles
    F = w_GDF.shape[1 if settings.transpose else 2]
    groups_T, blocks_T, starts_T, ends_T = group_tiles(sizes_G, tiles.rows, R)

    def kernel(
        groups_ref: Any,
        blocks_ref: Any,
        starts_ref: Any,
        ends_ref: Any,
        x_ref: Any,
        w_ref: Any,
        y_ref: Any,
    ) -> None:
        walk, tile = _swizzled(pl.program_id(0), len(groups_T), pl.cdiv(F, tiles.outer), tiles.swizzle)
        start, end = starts_ref[walk], ends_ref[walk]
        row = blocks_ref[walk] * tiles.rows + _indices(tiles.rows)
        column = tile * tiles.outer + _indices(tiles.outer)
        is_own, is_there = (row >= start) & (row < end), column < F

        @pl.when(start < end)
        def _() -> None:
            def one(step: Array, total: Array) -> Array:
                inner = step * tiles.inner + _indices(tiles.inner)
                x = _load(x_ref, row, inner, is_own, inner < D)
                if settings.transpose:
                    w = _load(w_ref, column, inner, is_there, inner < D, groups_ref[walk])
                else:
                    w = _load(w_ref, inner, column, inner < D, is_there, groups_ref[walk])
                return total + _dot(settings, x, w, trans_b=settings.transpose)

            zeros = jnp.zeros((tiles.rows, tiles.outer), jnp.float32)
            total = lax.fori_loop(0, pl.cdiv(D, tiles.inner), one, zeros)
            where = y_ref.at[row[:, None], column[None]]
            plgpu.store(where, total.astype(x_RD.dtype), mask=is_own[:, None] & is_there[None])

    shape = shape_like(x_RD, (R, F), x_RD.dtype)
    grid = len(groups_T) * pl.cdiv(F, tiles.outer)
    return _call(kernel, settings, grid, shape)(groups_T, blocks_T, starts_T, ends_T, x_RD, w_GDF)


def _gradient(settings: _Settings, x_RD: Array, dy_RF: Array, sizes_G: Array, so_far_GDF: Array) -> Array:
    D, F, G, tiles = x_RD.shape[1], dy_RF.shape[1], len(sizes_G), settings.tiles
    high, wide = pl.cdiv(D, tiles.rows), pl.cdiv(F, tiles.outer)

    def kernel(starts_ref: Any, ends_ref: Any, x_ref: Any, dy_ref: Any, so_far_ref: Any, dw_ref: Any) -> None:
        group = lax.div(pl.program_id(0), jnp.int32(high * wide))
        d, f = _swizzled(lax.rem(pl.program_id(0), jnp.int32(high * wide)), high, wide, tiles.swizzle)
        start, end = starts_ref[group], ends_ref[group]
        d, f = d * tiles.rows + _indices(tiles.rows), f * tiles.outer + _indices(tiles.outer)

        def one(step: Array, total: Array) -> Array:
            row = start + step * tiles.inner + _indices(tiles.inner)
            # Both are masked: rows past the groups may hold anything, and 0 * nan is nan.
            x = _load(x_ref, row, d, row < end, d < D)
            dy = _load(dy_ref, row, f, row < end, f < F)
            return total + _dot(settings, x, dy, trans_a=True)

        zeros = jnp.zeros((tiles.rows, tiles.outer), jnp.float32)
        num_steps = lax.div(end - start + jnp.int32(tiles.inner - 1), jnp.int32(tiles.inner))
        total = lax.fori_loop(0, num_steps, one, zeros)
        where = group, d[:, None], f[None]
        so_far = _load(so_far_ref, d, f, d < D, f < F, group)
        plgpu.store(dw_ref.at[where], so_far + total, mask=(d < D)[:, None] & (f < F)[None])

    ends_G = jnp.cumsum(sizes_G)
    shape = shape_like(x_RD, (G, D, F), jnp.float32)
    operands = ends_G - sizes_G, ends_G, x_RD, dy_RF, so_far_GDF
    return _call(kernel, settings, G * high * wide, shape, in_place=len(operands) - 1)(*operands)


def _swizzled(number: Array, high: int, wide: int, most: int) -> tuple[Array, Array]:
    """Return the row and column of a tile by its number: strips of at most ``most`` rows are walked by columns."""
    strip = lax.div(number, jnp.int32(most * wide))
    inside = lax.rem(number, jnp.int32(most * wide))
    num_rows = jnp.minimum(high - strip * most, most)
    return strip * most + lax.rem(inside, num_rows), lax.div(inside, num_rows)


def _indices(size: int) -> Array:
    return lax.iota(jnp.int32, size)


def _load(ref: Any, row: Array, column: Array, is_row: Array, is_column: Array, *place: Array) -> Array:
    """Load a tile, with zeros where the masks are false."""
    where = ref.at[*place, row[:, None], column[None]]
    return plgpu.load(where, mask=is_row[:, None] & is_column[None], other=0.0)


def _dot(settings: _Settings, a: Array, b: Array, *, trans_a: bool = False, trans_b: bool = False) -> Array:
    return plgpu.dot(a, b, trans_a, trans_b, allow_tf32=not settings.exact).astype(jnp.float32)


def _call(
    kernel: Any, settings: _Settings, grid: int, shape: jax.ShapeDtypeStruct, in_place: int | None = None
) -> Any:
    options = plgpu.CompilerParams(num_warps=settings.tiles.warps, num_stages=settings.tiles.stages)
    called = pl.pallas_call(
        kernel,
        shape,
        grid=(grid,),
        interpret=settings.interpret,
        compiler_params=options,
        name="grouped_matmul",
        input_output_aliases={} if in_place is None else {in_place: 0},
    )

    def run(*arrays: Array) -> Array:
        with jax.numpy_dtype_promotion("standard"):
            return called(*arrays)

    return run
