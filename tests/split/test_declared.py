"""Operations that declare their weight part: the same as those that do not."""

import jax
import jax.numpy as jnp
import pytest
from declared_matmuls import grouped_matmul, linear
from jax.experimental import pallas as pl
from split_checks import (
    BATCH,
    HIDDEN,
    WIDTH,
    assert_trees_match,
    check_split,
    norm,
    normal,
    step_by_step,
    vjp,
)

from dualpipe_jax.split import split_backward, split_vjp, weight_part
from tests.jaxprs import applied, total_bytes

X = normal(0, 2, BATCH, WIDTH)
PARAMS = {"up": normal(1, WIDTH, HIDDEN), "down": normal(2, HIDDEN, WIDTH), "scale": 1 + normal(3, WIDTH)}
GROUPED = {
    "up": normal(4, 2, WIDTH, HIDDEN),
    "down": normal(5, 2, HIDDEN, WIDTH),
    "scale": 1 + normal(3, WIDTH),
}


def plain_grouped(x, w):
    return jnp.einsum("ecd,edf->ecf", x, w)


def layer(matmul):
    return lambda params, x: (
        x + matmul(jax.nn.silu(matmul(norm(params["scale"], x), params["up"])), params["down"])
    )


ROUTES = {"linear": (linear, jnp.matmul, PARAMS), "grouped": (grouped_matmul, plain_grouped, GROUPED)}


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
def test_both_routes_agree(name, wrap):
    declared, plain, params = ROUTES[name]
    ours = check_split(wrap(layer(declared)), params, X)
    theirs = split_backward(wrap(layer(plain))).trace(params, X)
    for part in ("residuals_i", "residuals_w", "stash"):
        assert total_bytes(getattr(ours, part)) == total_bytes(getattr(theirs, part)), part
    assert ours.flops == theirs.flops
    assert ours.keep_input == theirs.keep_input
    want, got = (step_by_step(vjp(layer(matmul)), params, X, X) for matmul in (plain, declared))
    assert_trees_match(want, got, exact=False)


def test_stash_of_its_own():
    """The input part may hand over what it likes; the weight part gets that and the residuals."""

    @split_vjp
    def gain(x, weight):
        return x * weight

    gain.defsplit(
        lambda x, weight: (x * weight, (x, weight)),
        lambda residuals, dy: (dy * residuals[1], (dy * residuals[0]).sum(0)),
        lambda residuals, stash: stash,
    )
    plan = check_split(lambda w, x: jnp.sin(gain(x, w)), normal(1, WIDTH), X[0])
    assert [kind.shape for kind in plan.stash] == [(WIDTH,)]


def test_what_is_declared_is_not_moved():
    """Undeclared, the sum would run early, for it hands over less."""

    def kept(x, weight):
        return x * weight, (x, weight)

    def weight_gradient(residuals, dy):
        return (residuals[0] * dy).sum(0)

    declared, free, marked = (
        split_vjp(jnp.multiply),
        jax.custom_vjp(jnp.multiply),
        jax.custom_vjp(jnp.multiply),
    )
    declared.defsplit(kept, lambda residuals, dy: (dy * residuals[1], dy), weight_gradient)
    for gain, gradient in ((free, weight_gradient), (marked, weight_part(weight_gradient))):
        gain.defvjp(kept, lambda residuals, dy, g=gradient: (dy * residuals[1], g(residuals, dy)))
    for gain, shape in ((declared, (BATCH, WIDTH)), (marked, (BATCH, WIDTH)), (free, (WIDTH,))):
        plan = split_backward(lambda w, x, gain=gain: jnp.sin(gain(jnp.cos(x), w))).trace(
            normal(1, WIDTH), X[0]
        )
        assert [kind.shape for kind in plan.stash] == [shape]


def pallas_matmul(x, w):
    def kernel(x_ref, w_ref, out_ref):
        out_ref[...] = x_ref[...] @ w_ref[...]

    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x, w)


def pallas_both(x, w, dy):
    """dx and dw from one kernel."""

    def kernel(x_ref, w_ref, dy_ref, dx_ref, dw_ref):
        dx_ref[...] = dy_ref[...] @ w_ref[...].T
        dw_ref[...] = x_ref[...].T @ dy_ref[...]

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, w)]
    return pl.pallas_call(kernel, out_shape=shapes, interpret=True)(x, w, dy)


def test_kernels():
    """Two kernels are split; one that gives both gradients is the input part's."""

    @split_vjp
    def two(x, w):
        return pallas_matmul(x, w)

    two.defsplit(
        lambda x, w: (pallas_matmul(x, w), (x, w)),
        lambda residuals, dy: (pallas_matmul(dy, residuals[1].T), dy),
        lambda residuals, dy: pallas_matmul(residuals[0].T, dy),
    )
    one = jax.custom_vjp(pallas_matmul)
    one.defvjp(lambda x, w: (pallas_matmul(x, w), (x, w)), lambda residuals, dy: pallas_both(*residuals, dy))
    for matmul, kernels in ((two, (1, 1)), (one, (1, 0))):
        plan = check_split(lambda w, x, m=matmul: jnp.sin(m(jnp.sin(x), w)), PARAMS["up"], X[0])
        assert tuple(applied(plan, part)["pallas_call"] for part in ("input", "weight")) == kernels


def test_bfloat16_gradients_keep_their_dtypes():
    x, w = jnp.asarray(X, jnp.bfloat16), jnp.asarray(PARAMS["up"], jnp.bfloat16)
    y, pull = jax.vjp(linear, x, w)
    dx, dw = pull(y)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16,) * 3


def test_a_kernel_costs_what_it_states_and_not_what_is_seen_in_it():
    """Its body runs once for each step of a grid, which nobody outside multiplies by."""
    cost = pl.CostEstimate(flops=12345, transcendentals=0, bytes_accessed=0)

    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    def product(w, x):
        shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        return pl.pallas_call(kernel, out_shape=shape, cost_estimate=cost, interpret=True)(x, w)

    gradient = jax.custom_vjp(product)
    gradient.defvjp(lambda w, x: (product(w, x), (w, x)), lambda saved, dy: (product(dy, saved[1].T), dy))
    square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert split_backward(gradient).trace(square, square).flops == (12345, 12345, 0, 12345)
