"""Fingerprints: against a plain sum in NumPy, on every mesh, and every flipped bit noticed."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dualpipe_jax.parallel import make_mesh
from train.state.fingerprint import fingerprint_on_host, fingerprints

DTYPES = [np.float32, np.int32, np.uint8, np.bool_, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]


def by_hand(array):
    """Word n times 2n + 1, in Python's unbounded integers."""
    width = array.dtype.itemsize
    words = np.frombuffer(np.ascontiguousarray(array).tobytes(), f"<u{width}")
    return sum(int(word) * (2 * place + 1) for place, word in enumerate(words)) % 2**32


def some(shape, dtype):
    bits = np.random.default_rng(0).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    return bits.view(dtype)[..., 0] if dtype is not np.bool_ else bits[..., 0] > 127


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_weighted_sum_of_words(dtype):
    arrays = {"a": some((6, 5, 4), dtype), "scalar": some((), dtype), "empty": some((0, 3), dtype)}
    found = fingerprints({name: jnp.asarray(array) for name, array in arrays.items()})
    wanted = {name: by_hand(array) for name, array in arrays.items()}
    assert found == wanted
    assert {name: fingerprint_on_host(array) for name, array in arrays.items()} == wanted


def test_on_the_host_it_is_summed_in_parts():
    array = some((3, 1 << 19), np.float32)
    assert fingerprint_on_host(array) == fingerprints({"a": jnp.asarray(array)})["a"]


def test_no_mesh_changes_it():
    array = some((8, 6, 4), np.float32)
    for pp, ep, spec in ((4, 2, ("pp", None, "ep")), (2, 4, (None, None, "ep")), (8, 1, ("pp",)), (1, 1, ())):
        placed = jax.device_put(array, NamedSharding(make_mesh(pp, ep), PartitionSpec(*spec)))
        assert fingerprints({"a": placed}) == {"a": by_hand(array)}


def test_every_flipped_bit_is_noticed():
    array = some((2, 2), np.float32)
    flipped = {}
    for bit in range(8 * array.nbytes):
        wrong = bytearray(array.tobytes())
        wrong[bit // 8] ^= 1 << bit % 8
        flipped[str(bit)] = jnp.asarray(np.frombuffer(wrong, np.uint32).reshape(array.shape))
    assert by_hand(array) not in fingerprints(flipped).values()


def test_order_counts():
    array = some((4, 4), np.float32)
    assert by_hand(array) != fingerprints({"a": jnp.asarray(array[::-1].copy())})["a"]
