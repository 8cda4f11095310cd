"""Numbers of eight bits: e4m3 values in tiles, each tile with one scale.

A tile is a block of numbers that share a scale: DeepSeek-V3 (section 3.3 of its report) has tiles of 1 x 128 for
activations and their gradients, and of 128 x 128 for weights. The scale brings the tile's largest magnitude to at most
448, the largest number of e4m3. Scales are powers of two, as V3 has for the rows that it dispatches, so that

- decoding is exact in bfloat16: a value has four significant bits, and the scale changes only its exponent;
- encoding decoded numbers again does not change them, whether for a second hop or for a matmul.

The price is a bit of range at the bottom of a tile, not of precision: the error of a number is at most 2^-4 of the
number; for numbers below 2^-6 of the scale it is at most 2^-10 of the scale, less than 2^-17 of the tile's largest.

An all-zero tile has the smallest scale. Infinities and NaNs do not count for the scale of their tile: they become NaN,
which e4m3 has, and do not change their neighbours.

Shape suffixes: M rows, N columns, A x B tiles, S rows of a buffer, D model dim, W bytes of a row.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

FLOAT8 = jnp.float8_e4m3fn
"""The type e4m3: four bits of exponent, three of mantissa; no infinity, one NaN."""

TILE = 128
"""The length of a tile's long side, in numbers."""

_MANTISSA_BITS = 23
_MANTISSA_OF_LARGEST = 0x600000  # of 448 = 1.75 * 2^8 in float32
_EXPONENT_OF_LARGEST = 8

MIN_COMPUTE_CAPABILITY = (8, 9)
"""The lowest compute capability of a GPU with this type: that of Ada. Hopper has (9, 0)."""


class Tiled(NamedTuple):
    """An array in eight bits.

    Attributes:
      values: FLOAT8 [..., M, N].
      scales: float32 [..., A, B], the scale of each tile. Tiles at the edges may be smaller than the others.
    """

    values: Array
    scales: Array


def quantize(x: Array, tile: tuple[int, int]) -> Tiled:
    """Round to e4m3, to nearest, ties to even.

    Args:
      x: floating [..., M, N].
      tile: the numbers of rows and columns that share a scale.

    """
    wide = x.astype(jnp.float32)
    scales = _power_of_two(_largest(jnp.where(jnp.isfinite(wide), jnp.abs(wide), 0), tile))
    return Tiled((wide * broadcast_scales(1 / scales, tile, x.shape)).astype(FLOAT8), scales)


def dequantize(tiled: Tiled, tile: tuple[int, int], dtype: Any) -> Array:
    """Return the values times their scales, [..., M, N] of ``dtype``."""
    return (
        tiled.values.astype(jnp.float32) * broadcast_scales(tiled.scales, tile, tiled.values.shape)
    ).astype(dtype)


def broadcast_scales(scales: Array, tile: tuple[int, int], shape: tuple[int, ...]) -> Array:
    """Repeat each tile's scale for all of its numbers: [..., A, B] to ``shape``."""
    rows, columns = tile
    full = jnp.repeat(jnp.repeat(scales, rows, axis=-2), columns, axis=-1)
    return full[..., : shape[-2], : shape[-1]]


def _largest(magnitudes: Array, tile: tuple[int, int]) -> Array:
    """Return the largest magnitude of each tile, [..., A, B]; tiles at the edges are filled up with zeros."""
    sizes = zip(magnitudes.shape[-2:], tile, strict=True)
    edges = [(0, 0)] * (magnitudes.ndim - 2) + [(0, -size % side) for size, side in sizes]
    padded = jnp.pad(magnitudes, edges)
    *outer, M, N = padded.shape
    return jnp.max(padded.reshape(*outer, M // tile[0], tile[0], N // tile[1], tile[1]), axis=(-3, -1))


def _power_of_two(largest: Array) -> Array:
    """Return the smallest power of two that is a normal number and divides ``largest`` to at most 448."""
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    # A mantissa above that of 448 carries into the exponent.
    carried = (bits + (2**_MANTISSA_BITS - 1 - _MANTISSA_OF_LARGEST)) >> _MANTISSA_BITS
    return _from_exponent(jnp.maximum(carried - _EXPONENT_OF_LARGEST, 1))


def _from_exponent(exponent: Array) -> Array:
    """Return two to the power of exponent - 127, as float32; zero for 0."""
    # A product, not a shift: the backward may compute products again, but would keep the results of shifts.
    return lax.bitcast_convert_type(exponent.astype(jnp.int32) * 2**_MANTISSA_BITS, jnp.float32)


def encode(rows_SD: Array) -> Array:
    """Encode rows as bytes: e4m3 in tiles of 1 x 128, then the exponents of their scales.

    Returns:
      uint8 [S, W], W = D + ceil(D / 128): 0.504 of bfloat16's bytes. A row of zero bytes stands for a row of zeros.

    """
    tiled = quantize(rows_SD, (1, TILE))
    exponents = (lax.bitcast_convert_type(tiled.scales, jnp.int32) >> _MANTISSA_BITS).astype(jnp.uint8)
    return jnp.concatenate([lax.bitcast_convert_type(tiled.values, jnp.uint8), exponents], axis=-1)


def decode(bytes_SW: Array, dim: int, dtype: Any) -> Array:
    """Decode the bytes that ``encode`` returned to rows [S, dim] of ``dtype``, which are rounded."""
    values = lax.bitcast_convert_type(bytes_SW[..., :dim], FLOAT8)
    return dequantize(Tiled(values, _from_exponent(bytes_SW[..., dim:])), (1, TILE), dtype)


def check_device(device: Any) -> None:
    """Refuse a device that does not convert to float8.

    CPUs and TPUs convert, and so do GPUs from ``MIN_COMPUTE_CAPABILITY`` on. ``float8_matmul`` says which devices also
    multiply in float8.

    Args:
      device: a device of JAX's, present or only compiled for.

    Raises:
      ValueError: the device has no such type.

    """
    capability = getattr(device, "compute_capability", None)
    if device.platform not in ("gpu", "cuda", "rocm") or capability is None:
        return
    if _version(str(capability)) < MIN_COMPUTE_CAPABILITY:
        raise ValueError(
            f"float8: {device.device_kind} has compute capability {capability}, and e4m3 takes 8.9 or above (Ada, "
            "Hopper, Blackwell). Leave the experts' matmul and the dispatch's payload as they are by default."
        )


def _version(text: str) -> tuple[int, ...]:
    return (
        tuple(int(part) for part in text.split("."))
        if text.replace(".", "").isdigit()
        else MIN_COMPUTE_CAPABILITY
    )
