"""Gradients that products make in the dtype of their sums, against float64 NumPy on the same rounded numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from split_checks import step_by_step

from dualpipe_jax.parallel.expert_groups import grouped_matmul
from dualpipe_jax.split import split_backward

LENGTH, WIDTH = 64, 32


def numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


X, DY = numbers(LENGTH, WIDTH), numbers(LENGTH, WIDTH, seed=1)
EXACT = np.asarray(X, np.float64).T @ np.asarray(DY, np.float64)  # of x @ w
W = numbers(WIDTH, WIDTH, seed=2)


def gradients(function, *params, sums):
    """By B, which I and W together must equal, and by jax.vjp."""
    split = split_backward(lambda params, x: function(*params, x), sums=sums)

    def parts(params, dy):
        _, residuals = split.forward(params, X)
        whole = split.backward(params, X, residuals, dy)
        dx, stash = split.backward_input(params, X, residuals, dy)
        return whole, (split.backward_weight(params, X, residuals, stash), dx)

    def plain(params, dy):
        return jax.vjp(lambda *params: function(*params, X), *params)[1](dy)

    whole, halves = step_by_step(parts, params, DY)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(halves), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
    return whole[0], step_by_step(plain, params, DY)


def error(got, want):
    return np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max()


PLAIN = {
    "product": (lambda w, x: x @ w, W, EXACT),
    "transposed": (lambda w, x: x @ w.T, W, EXACT.T),
    "reshaped": (
        lambda w, x: x @ w.reshape(WIDTH, WIDTH),
        W.reshape(4, WIDTH // 4, WIDTH),
        EXACT.reshape(4, -1, WIDTH),
    ),
    "in parts": (lambda w, x: jnp.concatenate([x @ part for part in jnp.split(w, 2, axis=1)], 1), W, EXACT),
    "filled up and cut": (lambda w, x: (x @ jnp.concatenate([w, jnp.zeros_like(w)], 1))[:, :WIDTH], W, EXACT),
    "twice": (lambda w, x: x @ w + x @ w, W, 2 * EXACT),
    "by a kernel that sums in float32": (
        lambda w, x: grouped_matmul(x, w.reshape(1, WIDTH, WIDTH), jnp.full(1, LENGTH, jnp.int32)),
        W,
        EXACT,
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_gradient_is_not_rounded_to_its_parameters_dtype(name):
    function, w, exact = PLAIN[name]
    (wide,), (rounded,) = gradients(function, w, sums=[jnp.float32])
    assert wide.dtype == jnp.float32 and wide.shape == w.shape
    assert error(wide, exact) < 1e-6 and error(rounded, exact) > 1e-3


def test_what_is_no_product_or_is_not_wider_stays_as_it_is():
    scale = numbers(WIDTH, seed=3)
    got, want = gradients(lambda w, scale, x: (x @ w) * scale, W, scale, sums=[None, jnp.float32])
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
    w = W.astype(jnp.float32)
    (same,), (plain,) = gradients(
        lambda w, x: (x.astype(jnp.float32) @ w).astype(x.dtype), w, sums=[jnp.bfloat16]
    )
    assert same.dtype == jnp.float32
    np.testing.assert_array_equal(same, plain)


@pytest.mark.parametrize(
    "function, w",
    [
        (lambda w, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0], numbers(3, WIDTH, WIDTH)),
        (lambda w, x: jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0], W),
        (lambda w, x: (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(x.dtype), W),
    ],
    ids=["stacked by a scan", "summed by a scan", "rounded from a third dtype"],
)
def test_what_is_made_otherwise_stays_as_it_is(function, w):
    (got,), (want,) = gradients(function, w, sums=[jnp.float32])
    assert got.dtype == want.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_what_somebody_else_reads_stays_as_it_is():
    """Two parameters with one gradient: neither may change under the other."""
    (a, b), (want, _) = gradients(lambda a, b, x: x @ (a + b), W, W, sums=[jnp.float32, None])
    for one in (a, b):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(want, np.float32))


def test_a_product_by_a_named_algorithm_keeps_its_dtype():
    def function(w, x):
        return jax.lax.dot(x, w, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32)

    plans = [split_backward(function, sums=[dtype]).trace(W, X) for dtype in (jnp.float32, None)]
    one, other = (plan.programs.backward.outputs[0].dtype for plan in plans)
    assert one == other
