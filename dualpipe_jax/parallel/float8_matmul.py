"""The experts' matmul in eight bits, forward and backward, as DeepSeek-V3 trains (section 3.3 of its report).

Of the report it takes

- the three products of a linear in e4m3: forward, gradient of the input, gradient of the weights;
- tiles along what is summed over: activations and gradients 1 x 128, weights 128 x 128, and 128 x 1 for both sides of
  the weights' gradient;
- the sum of each 128 products times its two scales, added up in float32;
- what is kept for the backward: the input in eight bits, made 128 x 1 from that;
- weights rounded from what the optimizer keeps, never kept rounded.

Not of it: e5m6 for what follows attention, scales that are no powers of two, and the SwiGLU's inputs in eight bits.

Each block of 128 is one matmul of XLA's here: the numbers are right everywhere, but no kernel keeps the sum in
registers, and nobody has timed it on an accelerator.

Shape suffixes: R rows of all groups, G groups, M rows of an equal group, D in, F out; M, N and K of one product, K
summed over; A blocks of it.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from dualpipe_jax.parallel.expert_groups import block_of, multiply_blocks, sum_blocks
from dualpipe_jax.parallel.float8 import TILE, Tiled, dequantize, quantize, spread
from dualpipe_jax.varying import vary_alike

_ROW, _COLUMN, _SQUARE = (1, TILE), (TILE, 1), (TILE, TILE)


def float8_matmul(x: Array, w_GDF: Array, group_sizes_G: Array | None = None) -> Array:
    """Multiply each group of rows by its own matrix, in e4m3.

    Args:
      x: floating; [G, M, D], or with group sizes [R, D]: the rows of group 0, then of group 1, ...; further rows are
        ignored.
      w_GDF: one matrix per group, of x's dtype.
      group_sizes_G: int32, rows of each group; the sum must not exceed R.

    Returns:
      [G, M, F] or [R, F] of x's dtype; zeros past the last group. The gradients are products in e4m3, too, of tiles of
      at most 128 of a group's rows for the matrices'; rows of infinities or NaNs give NaNs.

    Raises:
      ValueError: the shapes or dtypes do not fit together.

    """
    groups = x.shape[0] if group_sizes_G is None else group_sizes_G.shape[0]
    if x.ndim != (3 if group_sizes_G is None else 2) or w_GDF.shape[:2] != (groups, x.shape[-1]):
        raise ValueError(
            f"float8_matmul: x {x.shape} in {groups} groups asks for w of shape ({groups}, {x.shape[-1]}, F), got "
            f"{w_GDF.shape}."
        )
    if x.dtype != w_GDF.dtype:
        raise ValueError(f"float8_matmul: x is {x.dtype} and w {w_GDF.dtype}; they must be alike.")
    return _matmul(*vary_alike((x, w_GDF, group_sizes_G)))


def _product(a: Array, a_AM: Array, b: Array, b_AN: Array, sides: tuple[int, int]) -> Array:
    """Sum over blocks of K of the blocks' products times their scales.

    Args:
      a: FLOAT8 [M, K] or [K, M]; all arrays may have a dim of groups in front.
      a_AM: its scales for each block of K.
      b, b_AN: the same of [K, N] or [N, K].
      sides: which dim K is of each.

    Returns:
      float32 [M, N].

    """
    batch = tuple(range(a.ndim - 2))
    num_blocks, dims = a_AM.shape[-2], tuple(side + len(batch) for side in sides)
    contracted = ((dims[:1], dims[1:]), (batch, batch))

    def scaled(a: Array, b: Array, k: Array | int) -> Array:
        product_MN = lax.dot_general(a, b, contracted, preferred_element_type=jnp.float32)
        return product_MN * a_AM[..., k, :, None] * b_AN[..., k, None, :]

    if num_blocks == 1:
        return scaled(a, b, 0)
    a, b = _filled(a, dims[0], num_blocks * TILE), _filled(b, dims[1], num_blocks * TILE)

    def block(k: Array | int) -> Array:
        ours = lax.dynamic_slice_in_dim(a, k * TILE, TILE, dims[0])
        return scaled(ours, lax.dynamic_slice_in_dim(b, k * TILE, TILE, dims[1]), k)

    return lax.fori_loop(1, num_blocks, lambda k, sum_MN: sum_MN + block(k), block(0))


def _filled(values: Array, dim: int, size: int) -> Array:
    """Zeros at the end of a dim, so that the last block is whole."""
    edges = [(0, 0)] * values.ndim
    edges[dim] = (0, size - values.shape[dim])
    return jnp.pad(values, edges)


def _by_rows(rows: Tiled, w: Tiled) -> Array:
    """Rows in tiles of 1 x 128 times a matrix: float32 [M, N], or of groups."""
    w_AN = spread(w.scales, (1, TILE), (w.scales.shape[-2], w.values.shape[-1]))
    return _product(rows.values, rows.scales.swapaxes(-2, -1), w.values, w_AN, (1, 0))


def _outer(x_KM: Array, dy_KN: Array) -> Array:
    """The gradient of a matrix, from rows K: float32 [M, N], or of groups."""
    x, dy = quantize(x_KM, _COLUMN), quantize(dy_KN, _COLUMN)
    return _product(x.values, x.scales, dy.values, dy.scales, (0, 0))


def _transposed(w: Tiled) -> Tiled:
    return Tiled(w.values.swapaxes(1, 2), w.scales.swapaxes(1, 2))


@jax.custom_vjp
def _matmul(x: Array, w_GDF: Array, sizes_G: Array | None) -> Array:
    return _matmul_fwd(x, w_GDF, sizes_G)[0]


def _matmul_fwd(x: Array, w_GDF: Array, sizes_G: Array | None):
    rows, w = quantize(x, _ROW), quantize(w_GDF, _SQUARE)
    return _multiply(rows, w, sizes_G, x.dtype).astype(x.dtype), (rows, w, sizes_G)


def _matmul_bwd(saved: tuple[Tiled, Tiled, Array | None], dy: Array):
    rows, w, sizes_G = saved
    dx = _multiply(quantize(dy, _ROW), _transposed(w), sizes_G, dy.dtype)
    x = dequantize(rows, _ROW, dy.dtype)
    dw_GDF = _outer(x, dy) if sizes_G is None else sum_blocks(min(TILE, x.shape[0]), _outer, x, dy, sizes_G)
    return dx.astype(dy.dtype), dw_GDF.astype(dy.dtype), None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _multiply(rows: Tiled, w: Tiled, sizes_G: Array | None, dtype: jnp.dtype) -> Array:
    """Rows times their groups' matrices: float32 of equal groups, ``dtype`` of others, block by block."""
    if sizes_G is None:
        return _by_rows(rows, w)
    num_rows = rows.values.shape[0]
    block = min(block_of(num_rows, sizes_G.shape[0]), num_rows)
    return multiply_blocks(block, _by_rows, rows, w, sizes_G, dtype)
