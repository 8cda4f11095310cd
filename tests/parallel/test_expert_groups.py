"""The grouped matmul: against a loop over groups, forward and backward, whatever the sizes and blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from dualpipe_jax.parallel import expert_groups, make_mesh
from dualpipe_jax.parallel.expert_groups import grouped_matmul

R, G, D, F = 24, 4, 6, 5


def by_groups(x, w, sizes):
    y, start = np.zeros((len(x), w.shape[2]), x.dtype), 0
    for matrix, size in zip(w, sizes, strict=True):
        y[start : start + size] = x[start : start + size] @ matrix
        start += size
    return y


def gradients_by_groups(x, w, sizes, dy):
    dx, dw = np.zeros_like(x), np.zeros_like(w)
    start = 0
    for g, size in enumerate(sizes):
        rows = slice(start, start + size)
        dx[rows], dw[g] = dy[rows] @ w[g].T, x[rows].T @ dy[rows]
        start += size
    return dx, dw


def case(seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=s).astype(np.float32) for s in ((R, D), (G, D, F), (R, F)))


@functools.partial(jax.jit, static_argnames="block")
def value_and_vjp(x, w, sizes, dy, block):
    y, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, block=block), x, w)
    return y, vjp(dy)


@st.composite
def group_sizes(draw):
    cuts = sorted(draw(st.lists(st.integers(0, R), min_size=G, max_size=G)))
    return np.diff(cuts, prepend=0).astype(np.int32)


@settings(max_examples=40)
@example(sizes=np.array([0, 0, 0, R], np.int32), block=7)
@example(sizes=np.array([0, 0, 0, 0], np.int32), block=7)
@given(sizes=group_sizes(), block=st.sampled_from([1, 7, None]))
def test_equals_a_loop_over_groups(sizes, block):
    x, w, dy = case()
    y, grads = value_and_vjp(x, w, sizes, dy, block)
    np.testing.assert_allclose(y, by_groups(x, w, sizes), rtol=1e-5, atol=1e-5)
    for got, wanted in zip(grads, gradients_by_groups(x, w, sizes, dy), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_what_other_platforms_run_multiplies_alike():
    """``lax.ragged_dot`` also runs on CPU; only slowly."""
    x, w, dy = case(1)

    @jax.jit
    def by_ragged_dot(sizes):
        return lax.ragged_dot(x, w, sizes), expert_groups._gradient_by_ragged_dot(x, dy, sizes)

    for sizes in [(24, 0, 0, 0), (0, 0, 0, 24), (0, 0, 0, 0), (1, 1, 1, 1), (5, 0, 13, 6)]:
        y, dw = by_ragged_dot(np.array(sizes, np.int32))
        np.testing.assert_allclose(y, by_groups(x, w, sizes), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(dw, gradients_by_groups(x, w, sizes, dy)[1], rtol=1e-5, atol=1e-5)


def test_values_past_the_groups_do_not_leak():
    x, w, dy = case(2)
    x[10:], dy[10:] = np.nan, np.nan
    sizes = jnp.asarray([4, 0, 6, 0], jnp.int32)
    y, (dx, dw) = value_and_vjp(x, w, sizes, dy, 7)
    assert np.all(np.asarray(y)[10:] == 0) and np.all(np.asarray(dx)[10:] == 0)
    assert np.all(np.isfinite(y)) and np.all(np.isfinite(dx)) and np.all(np.isfinite(dw))


def test_bfloat16_accumulates_in_float32():
    x, w, dy = (jnp.asarray(a, jnp.bfloat16) for a in case(3))
    sizes = jnp.asarray([4, 0, 14, 6], jnp.int32)
    y, (dx, dw) = value_and_vjp(x, w, sizes, dy, 8)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16,) * 3
    x, w, dy = (np.asarray(a, np.float32) for a in (x, w, dy))
    wanted = (by_groups(x, w, sizes), *gradients_by_groups(x, w, sizes, dy))
    for got, want in zip((y, dx, dw), wanted, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("check_vma", [False, True])
def test_replicated_matrices_in_shard_map_get_everyones_gradient(check_vma):
    x, w, dy = case(4)
    sizes = np.asarray([3, 4, 0, 5, 1, 1, 8, 2], np.int32)

    def loss(w):
        def body(x, w, sizes, dy):
            w = jax.lax.pcast(w, "ep", to="varying") if not check_vma else w
            return jnp.sum(grouped_matmul(x, w, sizes) * dy)[None]

        run = jax.shard_map(
            body,
            mesh=make_mesh(1, 2),
            in_specs=(P("ep"), P(), P("ep"), P("ep")),
            out_specs=P("ep"),
            check_vma=check_vma,
        )
        return jnp.sum(run(x, w, sizes, dy))

    first = gradients_by_groups(x[:12], w, sizes[:4], dy[:12])[1]
    second = gradients_by_groups(x[12:], w, sizes[4:], dy[12:])[1]
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(w), first + second, rtol=1e-5, atol=1e-5)


def test_the_work_follows_the_rows_and_not_the_groups(monkeypatch):
    """Count the blocks multiplied: each group's rows, rounded up."""
    blocks = []
    window = expert_groups._window

    def counted(*args):
        blocks.append(args)
        return window(*args)

    monkeypatch.setattr(expert_groups, "_window", counted)
    x, w, _ = map(jnp.asarray, case())
    with jax.disable_jit():
        expert_groups._by_blocks(8, x, w, jnp.asarray([17, 0, 1, 6], jnp.int32))
    assert len(blocks) == 3 + 0 + 1 + 1


def test_errors_show_the_shapes():
    x, w, _ = case()
    with pytest.raises(ValueError, match=r"D is 6 in x_RD \[24, 6\] and 5 in w_GDF \[4, 5, 6\]"):
        grouped_matmul(x, w.swapaxes(1, 2), jnp.zeros(G, jnp.int32))
