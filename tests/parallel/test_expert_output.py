"""The experts' last product and its combining as one: against every token with its own copy of its experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax.parallel import combine, combine_product, dispatch, expert_matmul, plan_two_hops
from dualpipe_jax.parallel.mesh import expert_axes
from dualpipe_jax.split import split_backward
from tests.jaxprs import applied, named
from tests.parallel import expert_layers
from tests.parallel.expert_layers import (
    TOKENS,
    D,
    F,
    K,
    check_dropped,
    close,
    fused_layer,
    layer,
    layer_case,
    on_devices,
    plain_layer,
    with_gradients,
)

E = 8
EXACT = functools.partial(expert_matmul, float8=True)
TOPK = expert_layers.choices(TOKENS, E)
plan_of = functools.partial(expert_layers.plan_of, num_experts=E)


@pytest.mark.parametrize(
    "method, num_ep, check_vma",
    [
        ("dropless", 2, True),
        ("capacity", 4, False),
        pytest.param("dropless", 1, True, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_the_plain_layers(method, num_ep, check_vma):
    """Those of weights that are zero, too, which are not."""
    args, target = layer_case(E)
    run = on_devices(num_ep, functools.partial(fused_layer, make=plan_of(method)), check_vma)
    got = with_gradients(run, target)(args, TOPK)
    close(got, plain_layer(E)(args, TOPK))
    assert np.all(np.abs(got[1][3][args[3] == 0]) > 0)


@pytest.mark.parametrize("method, bound", [("capacity", 4), ("dropless", 0.5)])
def test_dropped_assignments_have_no_gradient(method, bound):
    make = plan_of(method, axis_name=None, bound=bound)
    handle = jax.jit(make)(TOPK)
    kept = np.asarray(handle.slot_TK) < handle.assignment_S.size
    assert 0 < np.sum(~kept) == int(handle.dropped)
    check_dropped(functools.partial(fused_layer, make=make), E, TOPK, kept)


@pytest.mark.parametrize("method", ["capacity", pytest.param("dropless", marks=pytest.mark.slow)])
def test_gradients_over_two_hops_are_the_plain_layers(method):
    args, target = layer_case(E)

    def make(topk):
        return plan_two_hops(
            topk, E, expert_axes(2), lambda topk, here: expert_layers.plan_of(method, here)(topk)
        )

    run = on_devices((2, 2), functools.partial(fused_layer, make=make))
    close(with_gradients(run, target)(args, TOPK), plain_layer(E)(args, TOPK))


def linear_layer(x, w_in, w_out, weights, topk, make, matmul):
    handle = make(topk)
    rows = matmul(matmul(dispatch(x, handle), w_in, handle), w_out, handle)
    return combine(rows, weights, handle)


def fused_linear_layer(x, w_in, w_out, weights, topk, make, matmul):
    handle = make(topk)
    rows = matmul(dispatch(x, handle), w_in, handle)
    return combine_product(rows, w_out, weights, handle, matmul=matmul)


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    "apply, method, num_ep",
    [(fused_linear_layer, "capacity", 2), (linear_layer, "dropless", 2), (linear_layer, "capacity", 1)],
)
def test_eight_bits_are_as_exact_as_ever(apply, method, num_ep):
    """Small integers all the way, forward and backward: float8 payloads and matmuls equal plain ones bit for bit."""
    rng, D, F = np.random.default_rng(2), 132, 140

    def sparse(*shape):  # sums stay within 15
        return (rng.integers(-2, 3, shape) * (rng.random(shape) < 0.02)).astype(np.float32)

    x, target = (rng.integers(-2, 3, (TOKENS, D)).astype(np.float32) for _ in range(2))
    weights = np.exp2(rng.integers(-1, 2, (TOKENS, K))).astype(np.float32)
    args = x, sparse(E, D, F), sparse(E, F, D), weights

    def run(payload, matmul):
        layer = functools.partial(apply, make=plan_of(method, payload=payload), matmul=matmul)
        return with_gradients(on_devices(num_ep, layer), target)(args, TOPK)

    ours, plain = run("float8", EXACT), run("plain", expert_matmul)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(plain))
    jax.tree.map(np.testing.assert_array_equal, ours, plain)


def test_rounded_products_stay_apart():
    """The gradients of weights are of outputs as they were, not of rounded gradients."""
    rng, D, F = np.random.default_rng(3), 12, 20
    shapes = (TOKENS, D), (E, D, F), (E, F, D), (TOKENS, K), (TOKENS, D)
    *args, target = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    make = plan_of("capacity", axis_name=None)
    fused, apart = (
        with_gradients(functools.partial(apply, make=make, matmul=EXACT), target)(args, TOPK)
        for apply in (fused_linear_layer, linear_layer)
    )
    jax.tree.map(np.testing.assert_array_equal, fused, apart)


@pytest.mark.parametrize("method", ["capacity", "dropless"])
def test_bfloat16_is_weighted_and_summed_in_float32(method):
    """All gradients are NumPy's, rounded once: products of small integers are exact, weights have 11 bits, not 8."""
    rng, make = np.random.default_rng(4), plan_of(method, axis_name=None)
    x, d_out = rng.integers(-15, 16, (2, TOKENS, D))
    w = rng.integers(-2, 3, (E, D, D))
    weights = 1 + rng.integers(0, 1024, (TOKENS, K)) / 1024

    def rounded(exact):
        return np.asarray(exact, np.float32).astype(jnp.bfloat16)

    # In programs of their own: within one XLA may leave out the rounding between two parts. With YNNPACK it sums
    # gradients of bfloat16 matrices in bfloat16 on a CPU.
    @functools.partial(jax.jit, compiler_options={"xla_cpu_experimental_ynn_fusion_type": ""})
    def back(rows, w, weights, topk, d_out):
        _, pull = jax.vjp(lambda *given: combine_product(*given, make(topk)), rows, w, weights)
        return pull(d_out)

    rows = jax.jit(lambda x, topk: dispatch(x, make(topk)))(rounded(x), TOPK)
    d_rows, d_w, d_weights = back(rows, rounded(w), np.float32(weights), TOPK, rounded(d_out))
    pull = jax.jit(lambda d, topk: jax.vjp(lambda x: dispatch(x, make(topk)), rounded(x))[1](d)[0])
    d_hidden = np.einsum("tf,tkdf->tkd", d_out, w[TOPK])
    np.testing.assert_array_equal(d_weights, np.einsum("td,tkd->tk", x, d_hidden))
    of_rows = rounded(d_hidden * weights[..., None])
    np.testing.assert_array_equal(pull(d_rows, TOPK), rounded(np.sum(of_rows, 1, dtype=np.float64)))
    weighted = rounded(x[:, None] * weights[..., None]).astype(np.float64)
    for expert in range(E):
        wanted = np.einsum("tkd,tf->df", weighted * (expert == TOPK)[..., None], d_out)
        np.testing.assert_array_equal(d_w[expert], rounded(wanted))


@pytest.mark.parametrize("apply, exchanges, products", [(layer, 6, 8), (fused_layer, 7, 7)])
def test_recomputed_are_neither_the_product_nor_its_way_back(apply, exchanges, products):
    """Two exchanges and two products forward, as many and four backward; again, without the one, both and both."""
    args, _ = layer_case(E)
    again = jax.checkpoint(
        functools.partial(apply, make=plan_of("capacity")), policy=jax.checkpoint_policies.nothing_saveable
    )
    counts = []

    def run(args, topk):
        plan = split_backward(lambda args, topk: again(*args, topk)).trace(args, topk)
        counts.append(applied(plan, "forward") + applied(plan, "backward"))
        return topk

    jax.eval_shape(on_devices(2, run), args, TOPK)
    (both,) = counts
    assert (both["all_to_all"], both["dot_general"]) == (exchanges, products)


def test_what_is_kept_is_as_wide_as_the_hidden_layer():
    """Of the experts' outputs nothing is, though nothing is made again."""
    args, _ = layer_case(E)
    jaxpr = jax.make_jaxpr(
        lambda x, w_in, w_out, weights: jax.vjp(
            lambda *args: fused_layer(*args, TOPK, plan_of("capacity", axis_name=None)),
            x,
            w_in,
            w_out,
            weights,
        )
    )(*args)
    rows = E * TOKENS
    kept = [var.aval.shape for var in jaxpr.jaxpr.outvars if var.aval.size >= rows * F]
    wide = [shape for shape in kept if shape[-1] == D and np.prod(shape) == rows * D]
    assert len(wide) == 1  # what arrived, for the first matrix
    assert len(named(jaxpr.jaxpr, "dot_general")) == 2
