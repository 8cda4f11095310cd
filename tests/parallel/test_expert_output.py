"""The experts' last product and its combining as one: against every token with its own copy of its experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dualpipe_jax.parallel import (
    combine_product,
    dispatch,
    expert_axes,
    expert_matmul,
    make_mesh,
    plan_capacity,
    plan_dropless,
    plan_two_hops,
)
from dualpipe_jax.split import split_backward
from tests.jaxprs import named
from tests.parallel.expert_layers import fused_layer, layer, layer_by_copies

TOKENS, K, E, D, F = 32, 3, 8, 6, 5
METHODS = ("capacity", "dropless")
EXACT = functools.partial(expert_matmul, kernel="float8")


def choices(num_tokens=TOKENS):
    logits = np.random.default_rng(0).normal(size=(num_tokens, E)) - 0.5 * np.arange(E)
    return np.argsort(-logits, axis=1)[:, :K].astype(np.int32)


@functools.cache
def arrays():
    """x, both matrices, weights of which some are zero; and what the sums' gradients are."""
    rng = np.random.default_rng(1)
    shapes = ((TOKENS, D), (E, D, F), (E, F, D), (TOKENS, K), (TOKENS, D))
    *args, target = (rng.normal(size=s).astype(np.float32) for s in shapes)
    args[3][::5, 1] = 0
    return args, target


def plan_of(method, axis="ep", bound=None, payload="plain"):
    if method == "capacity":
        return lambda topk, experts=E: plan_capacity(topk, experts, bound, axis, payload)
    return lambda topk, experts=E: plan_dropless(topk, experts, axis, bound, payload)


def on_devices(ep, fn, check_vma=True):
    """On so many devices, or (nodes, devices of a node); everything is split along its first dim."""
    spec = P("ep" if isinstance(ep, int) else expert_axes(ep[0]))
    return jax.shard_map(fn, mesh=make_mesh(1, ep), in_specs=spec, out_specs=spec, check_vma=check_vma)


def value_and_grad(run, args, target, topk):
    def loss(*args):
        return jnp.sum(run(*args, topk) * target)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(*args)


def close(got, wanted):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), got, wanted)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_ep, check_vma", [(1, True), (2, True), (4, False)])
def test_gradients_are_the_plain_layers(method, num_ep, check_vma):
    """Those of weights that are zero, too, which are not."""
    args, target = arrays()
    run = on_devices(num_ep, functools.partial(fused_layer, make=plan_of(method)), check_vma)
    got = value_and_grad(run, args, target, choices())
    close(got, value_and_grad(layer_by_copies, args, target, choices()))
    assert np.all(np.abs(got[1][3][args[3] == 0]) > 0)


@pytest.mark.parametrize("method, bound", [("capacity", 4), ("dropless", 0.5)])
def test_dropped_assignments_have_no_gradient(method, bound):
    args, target = arrays()
    make, topk = plan_of(method, None, bound), choices()
    handle = make(topk)
    kept = np.asarray(handle.slot_TK) < handle.assignment_S.size
    assert 0 < np.sum(~kept) == int(handle.dropped)

    def by_copies(x, w_in, w_out, weights, topk):
        return layer_by_copies(x, w_in, w_out, jnp.where(kept, weights, 0), topk)

    got = value_and_grad(functools.partial(fused_layer, make=make), args, target, topk)
    close(got, value_and_grad(by_copies, args, target, topk))
    np.testing.assert_array_equal(got[1][3][~kept], 0)


@pytest.mark.parametrize("method", ["capacity", pytest.param("dropless", marks=pytest.mark.slow)])
def test_gradients_over_two_hops_are_the_plain_layers(method):
    args, target = arrays()
    second = plan_of(method)

    def make(topk):
        return plan_two_hops(topk, E, expert_axes(2), second)

    run = on_devices((2, 2), functools.partial(fused_layer, make=make))
    close(
        value_and_grad(run, args, target, choices()), value_and_grad(layer_by_copies, args, target, choices())
    )


def test_eight_bits_are_as_exact_as_ever():
    """Small integers all the way: float8 payloads and matmuls equal plain ones bit for bit."""
    rng, D, F = np.random.default_rng(2), 132, 140

    def sparse(*shape):  # sums stay within 15
        return (rng.integers(-2, 3, shape) * (rng.random(shape) < 0.02)).astype(np.float32)

    x, target = (rng.integers(-2, 3, (TOKENS, D)).astype(np.float32) for _ in range(2))
    weights = np.exp2(rng.integers(-1, 2, (TOKENS, K))).astype(np.float32)
    args = x, sparse(E, D, F), sparse(E, F, D), weights

    def run(payload, matmul):
        def linear(x, w_in, w_out, weights, topk):
            handle = plan_of("capacity", payload=payload)(topk)
            rows = matmul(dispatch(x, handle), w_in, handle)
            return combine_product(rows, w_out, weights, handle, matmul=matmul)

        return value_and_grad(on_devices(2, linear), args, target, choices())

    ours, plain = run("float8", EXACT), run("plain", expert_matmul)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(plain))
    jax.tree.map(np.testing.assert_array_equal, ours, plain)


@pytest.mark.parametrize("apply, exchanges, products", [(layer, 6, 8), (fused_layer, 7, 7)])
def test_recomputed_are_neither_the_product_nor_its_way_back(apply, exchanges, products):
    """Two exchanges and two products forward, as many and four backward; again, without the one, both and both."""
    args, _ = arrays()
    again = jax.checkpoint(
        functools.partial(apply, make=plan_of("capacity")), policy=jax.checkpoint_policies.nothing_saveable
    )
    counts = []

    def run(args, topk):
        plan = split_backward(lambda args, topk: again(*args, topk)).trace(args, topk)
        counts.append(plan.counts("forward") + plan.counts("backward"))
        return topk

    jax.eval_shape(on_devices(2, run), args, choices())
    (both,) = counts
    assert (both["all_to_all"], both["dot_general"]) == (exchanges, products)


def test_what_is_kept_is_as_wide_as_the_hidden_layer():
    """Of the experts' outputs nothing is, though nothing is made again."""
    args, _ = arrays()
    jaxpr = jax.make_jaxpr(
        lambda x, w_in, w_out, weights: jax.vjp(
            lambda *args: fused_layer(*args, choices(), plan_of("capacity", None)), x, w_in, w_out, weights
        )
    )(*args)
    rows = E * TOKENS
    kept = [var.aval.shape for var in jaxpr.jaxpr.outvars if var.aval.size >= rows * F]
    wide = [shape for shape in kept if shape[-1] == D and np.prod(shape) == rows * D]
    assert len(wide) == 1  # what arrived, for the first matrix
    assert len(named(jaxpr.jaxpr, "dot_general")) == 2
