"""The experts' matmul of numbers in eight bits, forward and backward.

It follows the training of DeepSeek-V3 (section 3.3 of its report) in these points:

- the three products of a linear layer in e4m3: forward, gradient of the input, gradient of the weights;
- tiles along the dim that is summed over: activations and gradients 1 x 128, weights 128 x 128, and 128 x 1 for both
  sides of the weights' gradient;
- the sum of each 128 products times its two scales, added up in float32;
- the input kept for the backward in eight bits, from which its tiles of 128 x 1 are made;
- weights rounded from those that the optimizer keeps, once a step (``made_once``).

It does not take from V3: e5m6 for the inputs of the linear layer after attention, scales that are no powers of two, and
the SwiGLU's inputs in eight bits.

Scales are powers of two, so a rounded number times its scale is exact in bfloat16, and the products of two such numbers
are exact in float32. So the sum over blocks, of each block's products times its two scales, equals one ordinary product
of the rounded and decoded numbers, up to the order of float32's sums. This module computes that ordinary product, by
the same programs as any other product of experts, on any device. The numbers are V3's; the speed is at best that of
bfloat16, since rounding takes additional time. It saves memory: the inputs of the weights' gradient are kept in eight
bits. Only a Hopper multiplies in eight bits, in the forward and the gradient of the input: see
``mosaic.scaled_product``.

Shape suffixes: those of ``expert_groups``; M rows of an equal group.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from dualpipe_jax.made_once import made_once
from dualpipe_jax.parallel import mosaic
from dualpipe_jax.parallel.expert_groups import Kernel, multiply_groups
from dualpipe_jax.parallel.float8 import TILE, Tiled, dequantize, quantize
from dualpipe_jax.varying import vary_alike

_ROW, _COLUMN, _SQUARE = (1, TILE), (TILE, 1), (TILE, TILE)


def float8_matmul(
    rows: Array,
    w_GDF: Array,
    group_sizes_G: Array | None = None,
    *,
    kernel: Kernel = "plain",
    gradient: Kernel | None = None,
    interpret: bool = False,
) -> Array:
    """Multiply each group of rows by its own matrix, all rounded to e4m3.

    Args:
      rows: floating. Without group sizes [G, M, D], or with more dims between G and D; with group sizes [R, D]: the
        rows of group 0, then of group 1, ...; further rows are ignored.
      w_GDF: one matrix per group, of the rows' dtype.
      group_sizes_G: int32, the number of rows of each group; the sum must not exceed R.
      kernel, gradient, interpret: see ``multiply_groups``. Numbers of 16 bits are given to it in bfloat16, others in
        their own dtype. But "hopper" multiplies numbers of 16 bits in e4m3, also rows of equal groups, except for the
        matrices' gradient.

    Returns:
      [G, M, F] or [R, F] of the rows' dtype; zeros past the last group. The gradients are products of e4m3, too. For
      the matrices' gradient, 128 consecutive rows of M or of R share a scale; in R these may be the last rows of one
      group and the first rows of the next. A row with an infinity or a NaN gives NaNs.

    Raises:
      TypeError, ValueError: see ``multiply_groups``; or the shapes or dtypes do not fit together.

    """
    groups = rows.shape[0] if group_sizes_G is None else group_sizes_G.shape[0]
    fits = rows.ndim > 2 if group_sizes_G is None else rows.ndim == 2
    if not fits or w_GDF.shape[:2] != (groups, rows.shape[-1]):
        raise ValueError(
            f"float8_matmul: rows {rows.shape} in {groups} groups ask for w of shape ({groups}, {rows.shape[-1]}, F), "
            f"got {w_GDF.shape}."
        )
    if rows.dtype != w_GDF.dtype:
        raise ValueError(f"float8_matmul: rows are {rows.dtype} and w {w_GDF.dtype}; they must be alike.")
    choice = kernel, gradient, interpret
    w8 = Tiled(*map(made_once, quantize(lax.stop_gradient(w_GDF), _SQUARE)))
    w8_GFD = (
        Tiled(*(made_once(part.swapaxes(1, 2)) for part in w8))
        if _multiplies_float8(choice, rows.dtype)
        else None
    )
    return _matmul(choice, *vary_alike((rows, w_GDF, w8, w8_GFD, group_sizes_G)))


_KernelChoice = tuple[Kernel, Kernel | None, bool]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(
    choice: _KernelChoice, rows: Array, w_GDF: Array, w8: Tiled, w8_GFD: Tiled | None, sizes_G: Array | None
) -> Array:
    return _matmul_fwd(choice, rows, w_GDF, w8, w8_GFD, sizes_G)[0]


def _matmul_fwd(
    choice: _KernelChoice, rows: Array, w_GDF: Array, w8: Tiled, w8_GFD: Tiled | None, sizes_G: Array | None
):
    del w_GDF  # there to take the gradient
    rows8 = quantize(_zero_unused_rows(rows, sizes_G), _ROW)
    if w8_GFD is not None:
        y = _float8_product(choice, sizes_G, rows8, w8_GFD, rows.dtype)
    else:
        exact = _exact_dtype(rows.dtype)
        y = _grouped_product(choice, sizes_G, dequantize(rows8, _ROW, exact), dequantize(w8, _SQUARE, exact))
    return y.astype(rows.dtype), (rows8, w8, sizes_G)


def _matmul_bwd(choice: _KernelChoice, saved: tuple[Tiled, Tiled, Array | None], dy: Array):
    rows8, w8, sizes_G = saved
    exact, dy = _exact_dtype(dy.dtype), _zero_unused_rows(dy, sizes_G)
    by_columns = _round_to_float8(dequantize(rows8, _ROW, exact), _COLUMN, exact)
    _, pull = jax.vjp(
        functools.partial(_grouped_product, choice, sizes_G), by_columns, dequantize(w8, _SQUARE, exact)
    )
    # Each gradient takes other tiles of dy. ``pull`` returns both gradients; the unused one is never computed.
    d_w = pull(_round_to_float8(dy, _COLUMN, exact))[1]
    if _multiplies_float8(choice, dy.dtype):
        d_rows = _float8_product(choice, sizes_G, quantize(dy, _ROW), w8, dy.dtype)
    else:
        d_rows = pull(_round_to_float8(dy, _ROW, exact))[0]
    return d_rows.astype(dy.dtype), d_w.astype(dy.dtype), None, None, None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _zero_unused_rows(rows: Array, sizes_G: Array | None) -> Array:
    """Return the rows with zeros past the last group: those may hold anything, and share tiles with its rows."""
    if sizes_G is None:
        return rows
    filled_R = jnp.arange(rows.shape[0], dtype=jnp.int32) < jnp.sum(sizes_G, dtype=jnp.int32)
    return jnp.where(filled_R[:, None], rows, 0)


def _grouped_product(choice: _KernelChoice, sizes_G: Array | None, rows: Array, w_GDF: Array) -> Array:
    kernel, gradient, interpret = choice
    return multiply_groups(rows, w_GDF, sizes_G, kernel=kernel, gradient=gradient, interpret=interpret)


def _multiplies_float8(choice: _KernelChoice, dtype: Any) -> bool:
    """Whether the kernel multiplies numbers in eight bits as they are."""
    return choice[0] == "hopper" and mosaic.supports_dtype(dtype)


def _float8_product(
    choice: _KernelChoice, sizes_G: Array | None, rows8: Tiled, w8_GFD: Tiled, dtype: Any
) -> Array:
    """Multiply rows by transposed matrices, which lie in the order in which tensor cores read eight bits."""
    rows, groups = rows8.values.shape[:-1], len(w8_GFD.values)
    if sizes_G is None:
        sizes_G = jnp.full(groups, math.prod(rows) // groups, jnp.int32)
    merged = Tiled(*(part.reshape(-1, part.shape[-1]) for part in rows8))
    merged, w8_GFD, sizes_G = vary_alike((merged, w8_GFD, sizes_G))
    return mosaic.scaled_product(merged, w8_GFD, sizes_G, dtype, emulate=choice[2]).reshape(*rows, -1)


def _round_to_float8(x: Array, tile: tuple[int, int], dtype: Any) -> Array:
    return dequantize(quantize(x, tile), tile, dtype)


def _exact_dtype(dtype: Any) -> Any:
    """Return the dtype in which decoded numbers are exact: float16 has the bits, but not the range."""
    return jnp.bfloat16 if dtype.itemsize == 2 else dtype
