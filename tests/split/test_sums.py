"""Kernels that add a parameter's gradient to its sum, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from split_checks import step_by_step

from dualpipe_jax.gradient_sum import GRADIENT_SUM, gradient_sum
from dualpipe_jax.parallel.expert_groups import grouped_matmul
from dualpipe_jax.split import split_backward
from dualpipe_jax.split.run import evaluate
from tests.jaxprs import named

RNG = np.random.default_rng(0)
X, DY = (RNG.integers(-3, 4, size=(256, 8)).astype(np.float32) for _ in range(2))  # whose sums are exact
W = RNG.integers(-3, 4, size=(8, 8)).astype(np.float32)
SUM = RNG.integers(-9, 9, size=(8, 8)).astype(np.float32)


@jax.custom_vjp
def product(x, w):
    return x @ w


def backward(saved, dy):
    x, w = saved
    made = gradient_sum(w.shape, varying_like=x) + jnp.matmul(x.T, dy, preferred_element_type=jnp.float32)
    return dy @ w.T, made.astype(w.dtype)


product.defvjp(lambda x, w: (x @ w, (x, w)), backward)


def parts(function, w, sums):
    """B's gradient and I's and W's, of a plan whose sum is given, and what the methods give."""
    plan = split_backward(lambda w, x: function(x, w), sums=sums).trace(w, X)

    def run(w, total):
        y, _, residuals_i, residuals_w = plan.forward(w, X)
        dx, stash = plan.backward_input(w, X, residuals_i, residuals_w, jnp.asarray(DY, y.dtype))
        both, _ = plan.backward(w, X, residuals_i, residuals_w, jnp.asarray(DY, y.dtype))
        added = None
        if plan.sums:
            arguments = plan.backward_arguments(w, X, residuals_i, residuals_w, jnp.asarray(DY, y.dtype))
            whole = evaluate(plan.programs.backward, [*arguments[:-1], total])[0]
            added = whole, evaluate(plan.programs.weight, [w, X, *residuals_w, *stash, total])[0]
        return added, (both, plan.backward_weight(w, X, residuals_w, stash)), dx

    return plan, step_by_step(run, w, SUM)


def test_the_sum_stands_where_the_kernel_asked_for_it():
    plan, (added, gradients, dx) = parts(product, W, [jnp.float32])
    assert list(plan.sums) == [0] and plan.flops.weight == 2 * 256 * 8 * 8
    for one in added:
        np.testing.assert_array_equal(one, SUM + X.T @ DY)
    for one in gradients:  # zeros stand for a sum, as under jax.grad
        np.testing.assert_array_equal(one, X.T @ DY)
    np.testing.assert_array_equal(dx, DY @ W.T)
    np.testing.assert_array_equal(jax.grad(lambda w: jnp.sum(product(X, w) * DY))(W), X.T @ DY)


def in_parts(saved, dy):
    x, w = saved
    outer = lambda part: jnp.matmul(x.T, part, preferred_element_type=jnp.float32)  # noqa: E731
    made = (
        gradient_sum(w.shape, varying_like=x).at[:, :3].add(outer(dy[:, :3])).at[:, 3:].add(outer(dy[:, 3:]))
    )
    return dy @ w.T, made.astype(w.dtype)


def in_another_shape(saved, dy):
    x, w = saved
    outer = jnp.einsum("rhv,rd->hvd", x.reshape(-1, 2, 4), dy, preferred_element_type=jnp.float32)
    made = (gradient_sum(w.shape, varying_like=x).reshape(2, 4, 8) + outer).reshape(w.shape)
    return dy @ w.T, made.astype(w.dtype)


@pytest.mark.parametrize("rule, times", [(in_parts, 1), (in_another_shape, 1), (backward, 3)])
def test_what_only_adds_hands_the_sum_on(rule, times):
    """Part by part, in another shape, and of a parameter that is used twice."""
    one = jax.custom_vjp(lambda x, w: x @ w)
    one.defvjp(lambda x, w: (x @ w, (x, w)), rule)
    function = one if times == 1 else lambda x, w: one(x, w) + one(x, 2 * w)
    plan, (added, gradients, _) = parts(function, W, [jnp.float32])
    assert list(plan.sums) == [0]
    # Twice w makes twice the gradient; the sum goes into one of the two kernels.
    wanted = times * X.T @ DY
    for one in added:
        np.testing.assert_array_equal(one, SUM + wanted)
    for one in gradients:
        np.testing.assert_array_equal(one, wanted)


def test_no_sum_is_handed_on_through_what_does_more_than_add():
    """What turns a sum's sign, what reads it half-way, and what makes dx as well."""

    def negative(saved, dy):
        x, w = saved
        return dy @ w.T, -(gradient_sum(w.shape, varying_like=x) - x.T @ dy)

    def read_twice(saved, dy):
        x, w = saved
        half = gradient_sum(w.shape, varying_like=x).at[:, :3].add(x.T @ dy[:, :3])
        return dy @ w.T + half.sum(), half.at[:, 3:].add(x.T @ dy[:, 3:])

    def with_dx(saved, dy):
        """One kernel makes both, so it is I's, which has no sums."""
        x, w = saved

        def step(carry):
            done, dx, dw = carry
            return done + 1, dx + dy @ w.T, dw + x.T @ dy

        zeros = jnp.zeros_like(x), gradient_sum(w.shape, varying_like=x)
        return jax.lax.while_loop(lambda carry: carry[0] < 1, step, (0, *zeros))[1:]

    for rule in (negative, read_twice, with_dx):
        function = jax.custom_vjp(lambda x, w: x @ w)
        function.defvjp(lambda x, w: (x @ w, (x, w)), rule)
        plan, (_, gradients, _) = parts(function, W, [jnp.float32])
        assert not plan.sums
        for one in gradients:
            np.testing.assert_array_equal(one, X.T @ DY)


def test_a_rounded_parameters_gradient_is_added_before_it_is_rounded():
    w = jnp.asarray(W, jnp.bfloat16)
    plan, (added, _, _) = parts(lambda x, w: product(x.astype(w.dtype), w), w, [jnp.float32])
    assert list(plan.sums) == [0]
    for one in added:
        assert one.dtype == jnp.float32
        np.testing.assert_array_equal(one, SUM + X.T @ DY)


ON_GPU = jax.default_backend() == "gpu"
ON_HOPPER = ON_GPU and jax.devices()[0].compute_capability == "9.0"


@pytest.mark.parametrize(
    "kernel, dtype, interpret",
    [
        ("megablox", jnp.float32, True),
        ("triton", jnp.float32, True),
        ("hopper", jnp.bfloat16, True),
        pytest.param(
            "triton", jnp.bfloat16, False, marks=pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
        ),
        pytest.param(
            "hopper",
            jnp.bfloat16,
            False,
            marks=pytest.mark.skipif(not ON_HOPPER, reason="needs an H100 or an H200"),
        ),
    ],
)
def test_kernels_of_grouped_products_add_to_the_sum(kernel, dtype, interpret):
    """Of three groups, one without rows, whose sum stays as it is."""
    sizes, rng = (100, 0, 150), np.random.default_rng(1)
    x, dy = (rng.integers(-3, 4, size=(256, width)).astype(np.float32) for width in (128, 256))
    w = rng.integers(-3, 4, size=(3, 128, 256)).astype(np.float32)
    total = rng.integers(-9, 9, size=w.shape).astype(np.float32)
    x[250:], dy[250:] = np.nan, np.nan  # of no group

    def function(w, x):
        product = "ragged" if kernel == "megablox" else kernel
        return grouped_matmul(x, w, jnp.array(sizes), kernel=product, gradient=kernel, interpret=interpret)

    given = [jnp.asarray(a, dtype) for a in (w, x, dy)]
    plan = split_backward(function, sums=[jnp.float32]).trace(*given[:2])
    assert list(plan.sums) == [0]

    def run(w, x, dy, total):
        _, _, residuals_i, residuals_w = plan.forward(w, x)
        arguments = plan.backward_arguments(w, x, residuals_i, residuals_w, dy)
        whole = evaluate(plan.programs.backward, [*arguments[:-1], total])[0]
        _, stash = plan.backward_input(w, x, residuals_i, residuals_w, dy)
        return whole, evaluate(plan.programs.weight, [w, x, *residuals_w, *stash, total])[0]

    ends = np.cumsum(sizes)
    made = [x[end - size : end].T @ dy[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    for found in jax.jit(run)(*given, total):
        np.testing.assert_array_equal(found, total + np.stack(made))
    text = jax.make_jaxpr(run)(*given, total)
    assert not [eqn for eqn in named(text.jaxpr, "name") if eqn.params["name"] == GRADIENT_SUM]


@pytest.mark.parametrize(
    "function, sums",
    {
        "it is not summed": (product, None),
        "it is summed in another dtype": (product, [jnp.bfloat16]),
        "something is done to it": (lambda x, w: product(x, w.T), [jnp.float32]),
    }.values(),
)
def test_otherwise_it_stays_a_gradient(function, sums):
    plan, (added, gradients, _) = parts(function, W, sums)
    assert added is None and not plan.sums
    wanted = jax.grad(lambda w: jnp.sum(function(X, w) * DY))(W)
    for one in gradients:
        np.testing.assert_array_equal(one, wanted)


def test_zeros_of_another_name_are_zeros():
    @jax.custom_vjp
    def other(x, w):
        return x @ w

    def back(saved, dy):
        x, w = saved
        return dy @ w.T, jax.ad_checkpoint.checkpoint_name(jnp.zeros(w.shape), "kept") + x.T @ dy

    other.defvjp(lambda x, w: (x @ w, (x, w)), back)
    plan, (added, gradients, _) = parts(other, W, [jnp.float32])
    assert added is None and not plan.sums
    np.testing.assert_array_equal(gradients[0], X.T @ DY)


def test_a_gradient_of_two_parameters_is_added_to_neithers_sum():
    split = split_backward(lambda ws, x: product(x, ws[0] + ws[1]), sums=[jnp.float32] * 2)
    plan = split.trace((W, W), X)
    assert not plan.sums
    _, _, residuals_i, residuals_w = plan.forward((W, W), X)
    both, _ = plan.backward((W, W), X, residuals_i, residuals_w, DY)
    for one in both:
        np.testing.assert_array_equal(one, X.T @ DY)
