"""A checksum of arrays, the same on every mesh, computed on their devices in one pass before and after the disk."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def fingerprint(array: jax.Array) -> jax.Array:
    """The sum of an array's words, each times the odd number 2 * place + 1, modulo 2^32: uint32.

    Any single flipped bit changes it, because multiplication by an odd factor loses no bit. Words have the dtype's
    width; values of 64 bits are two words. The order of integer addition does not matter, so the result is the same
    however the array is sharded.
    """
    bits = array.astype(jnp.uint8) if array.dtype == jnp.bool_ else array
    bits = jax.lax.bitcast_convert_type(bits, _BITS[bits.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for dim in range(bits.ndim):
        stride = jnp.uint32(math.prod(bits.shape[dim + 1 :]) % 2**32)
        place = place + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim) * stride
    return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)


def fingerprints(arrays: dict[str, jax.Array]) -> dict[str, int]:
    if not arrays:
        return {}
    sharding = next(iter(arrays.values())).sharding
    everywhere = (
        NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    )
    found = _program(everywhere)(arrays)
    return {name: int(value) for name, value in jax.device_get(found).items()}


def fingerprint_on_host(array: np.ndarray) -> int:
    """``fingerprint`` of an array that is not put on a device."""
    words = np.ascontiguousarray(array).reshape(-1)
    words = words.view(f"u{min(words.dtype.itemsize, 4)}")
    total = 0
    for start in range(0, len(words), _CHUNK):
        some = words[start : start + _CHUNK].astype(np.uint32)
        factors = (1 + 2 * np.arange(start, start + len(some))).astype(np.uint32)
        total += int(np.sum(some * factors, dtype=np.uint32))
    return total % 2**32


_CHUNK = 1 << 20
"""The number of words that are summed at a time, few enough to stay in a cache."""


@functools.cache
def _program(everywhere: NamedSharding | None) -> Callable[[dict[str, jax.Array]], dict[str, jax.Array]]:
    return jax.jit(lambda tree: jax.tree.map(fingerprint, tree), out_shardings=everywhere)
