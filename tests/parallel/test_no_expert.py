"""Assignments to no expert: every number outside 0..E-1 means none, and what is not sent adds nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax.parallel import (
    choose_copies,
    combine,
    dispatch,
    expert_matmul,
    plan_capacity,
    plan_dropless,
    plan_two_hops,
    share_copies,
)
from dualpipe_jax.parallel.expert_groups import grouped_matmul
from dualpipe_jax.parallel.mesh import expert_axes
from tests.parallel.expert_layers import on_devices

T, K, E, D, DEVICES = 6, 3, 8, 4, 4  # T tokens a device
AXES = expert_axes(2)
PLANS = {
    "capacity": lambda topk: plan_capacity(topk, E, axis_name=AXES),
    "dropless": lambda topk: plan_dropless(topk, E, AXES),
    "two hops, capacity": lambda topk: plan_two_hops(
        topk, E, AXES, lambda t, e: plan_capacity(t, e, None, "ep")
    ),
    "two hops, dropless": lambda topk: plan_two_hops(topk, E, AXES, lambda t, e: plan_dropless(t, e, "ep")),
}


def choices():
    """Distinct experts, a third of them replaced by numbers that are none, some of whose weights are not finite."""
    rng = np.random.default_rng(0)
    topk = np.argsort(rng.normal(size=(DEVICES * T, E)), axis=1)[:, :K].astype(np.int32)
    none = rng.random(topk.shape) < 1 / 3
    topk[none] = rng.choice([-1, -2, -E, -100, E, E + 1, 1000], size=none.sum())
    weights = rng.normal(size=topk.shape).astype(np.float32)
    weights[none] = rng.choice([np.nan, np.inf, -np.inf, 1], size=none.sum())
    return topk, none, weights, rng.normal(size=(DEVICES * T, D)).astype(np.float32)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_numbers_of_no_expert(plan):
    """An expert doubles what it gets: the sum over the rest of the assignments, in NumPy; and its gradients."""
    topk, none, weights, x = choices()

    def run(x, weights, topk):
        def layer(x, weights):
            handle = plan(topk)
            return combine(2 * dispatch(x, handle), weights, handle), handle.dropped[None]

        out, pull, dropped = jax.vjp(layer, x, weights, has_aux=True)
        return out, dropped, *pull(jnp.ones_like(out))

    out, dropped, by_x, by_weights = on_devices((2, 2), run)(x, weights, topk)
    counted = 2 * np.where(none, 0, weights).sum(1, keepdims=True)
    np.testing.assert_allclose(out, counted * x, rtol=1e-5, atol=1e-6)
    assert not np.any(dropped)
    np.testing.assert_allclose(by_x, np.broadcast_to(counted, x.shape), rtol=1e-5, atol=1e-6)
    want = np.where(none, 0, 2 * x.sum(1, keepdims=True))
    np.testing.assert_allclose(by_weights, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plan", [plan_capacity, plan_dropless])
def test_a_dropped_weight_may_be_anything(plan):
    """All want expert 0, which takes two: the others' weights are not finite."""
    topk, x = np.zeros((T, 1), np.int32), np.ones((T, D), np.float32)
    weights = np.array([1, 1, *[np.nan, np.inf] * 2], np.float32)[:, None]

    @jax.jit
    def run(x, weights, topk):
        handle = plan(topk, E, capacity=2) if plan is plan_capacity else plan(topk, E, buffer_factor=2 / T)
        return combine(dispatch(x, handle), weights, handle), handle.dropped

    out, dropped = run(x, weights, topk)
    assert dropped == T - 2
    np.testing.assert_array_equal(out, [[1] * D] * 2 + [[0] * D] * (T - 2))


@pytest.mark.parametrize("num_slots", [4, 5])
def test_copies_of_no_expert(num_slots):
    """With one copy of each and with several: those that are none stay none, and take no expert's turn."""
    held = np.arange(2 * num_slots).reshape(2, num_slots) % E
    copies = jnp.asarray(share_copies(held, E, near=False))
    topk = jnp.array([[0], [-1], [0], [E], [0], [-E]])
    got = np.asarray(choose_copies(topk, copies[0]))[:, 0]
    assert got[[1, 3, 5]].tolist() == [-1] * 3
    slots = np.flatnonzero(held.reshape(-1) == 0).tolist()
    assert sorted(set(got[[0, 2, 4]].tolist())) == slots


def test_a_kernel_that_there_is_not():
    """Misspelt, it once multiplied by another."""
    rows, w = jnp.ones((2, 1, 3, D)), jnp.ones((2, D, D))
    handle = plan_capacity(jnp.zeros((3, 1), jnp.int32), 2)
    with pytest.raises(ValueError, match=r"expert_matmul\(\) parameter kernel='raged' .*'plain', 'ragged'"):
        expert_matmul(rows, w, handle, kernel="raged")
    with pytest.raises(ValueError, match="kernel='float8' .*'plain', 'ragged'"):
        grouped_matmul(rows.reshape(-1, D), w, jnp.array([3, 3]), kernel="float8")
