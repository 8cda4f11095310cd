"""Lazy arrays: what NumPy gives of the whole array, and nothing is read that was not asked for."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from models.lazy import Lazy, is_lazy, lazily, on_host, read_all

WHOLE = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)


class Counted:
    """A lazy array, and at which indices it was read."""

    def __init__(self, order=0):
        self.read = []
        self.lazy = Lazy(WHOLE.shape, WHOLE.dtype, self._read, order)

    def _read(self, index):
        self.read.append(index)
        return WHOLE[index]


ROWS = np.asarray([2, 0, 2])


@pytest.mark.parametrize(
    "of_lazy, of_numpy, read",
    [
        (lambda a: a, lambda a: a, [()]),
        (lambda a: a[1], lambda a: a[1], [(1,)]),
        (lambda a: a[1][3], lambda a: a[1, 3], [(1, 3)]),
        (lambda a: a.take(ROWS), lambda a: a[ROWS], [(2,), (0,), (2,)]),
        (lambda a: a.take(ROWS)[1], lambda a: a[ROWS][1], [(0,)]),
        (lambda a: a[2].take(ROWS).take(ROWS[:2])[0], lambda a: a[2, ROWS[ROWS[:2]]][0], [(2, 2)]),
        (lambda a: a.expanded(), lambda a: a[None], [()]),
        (lambda a: a.expanded()[0][1], lambda a: a[1], [(1,)]),
        (lambda a: a[0].astype(ml_dtypes.bfloat16), lambda a: np.asarray(jnp.asarray(a[0], jnp.bfloat16)), [(0,)]),
        (lambda a: list(a)[1], lambda a: a[1], [(1,)]),
        (lambda a: a[1].map(lambda part: part.T), lambda a: a[1].T, [(1,)]),
        (lambda a: a[1].map(lambda part: part.T)[0], lambda a: a[1].T[0], [(1,)]),
    ],
)  # fmt: skip
def test_parts_are_what_numpy_takes_of_the_whole_and_are_read_alone(of_lazy, of_numpy, read):
    counted, wanted = Counted(), of_numpy(WHOLE)
    part = of_lazy(counted.lazy)
    assert counted.read == [] and len(part) == len(wanted)
    assert (part.shape, part.ndim, part.dtype) == (wanted.shape, wanted.ndim, wanted.dtype)
    found = np.asarray(part)
    assert found.dtype == wanted.dtype and counted.read == read
    np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))


def test_what_lies_together_is_read_together():
    first, second, third = Counted(2), Counted(1), Counted(2)
    tree, taken = {"a": first.lazy, "b": [second.lazy[0], third.lazy], "c": WHOLE[0], "d": None}, []

    def put(leaf, name):
        taken.append(name)
        return np.asarray(leaf)

    assert is_lazy(tree) and not is_lazy(WHOLE)
    found = read_all(put, tree, {"a": "a", "b": ["b0", "b1"], "c": "c", "d": None})
    assert taken == ["b0", "a", "b1"]
    np.testing.assert_array_equal(found["b"][0], WHOLE[0])
    np.testing.assert_array_equal(found["b"][1], WHOLE)
    assert found["c"] is tree["c"] and found["d"] is None


def test_arrays_are_taken_as_they_are():
    tree = lazily({"of JAX": jnp.asarray(WHOLE), "of NumPy": WHOLE, "lazy": Counted().lazy})
    for leaf in tree.values():
        np.testing.assert_array_equal(leaf.take(ROWS), WHOLE[ROWS])
        np.testing.assert_array_equal(on_host(leaf), WHOLE)
    np.testing.assert_array_equal(on_host(jnp.asarray(WHOLE)), WHOLE)
