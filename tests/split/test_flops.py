"""What I and W spend, against ``jax.vjp`` itself: its jaxpr's matmuls, counted here."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from split_checks import block, block_params, mlp, normal
from test_split import ATTENTION, BATCH, LAYERS, WIDTH, X, attention, choose, scanned

from dualpipe_jax.split import split_backward


def count(jaxpr, wanted):
    """FLOPs of the dot_generals that ``wanted`` outputs need."""
    live = {id(var) for var, want in zip(jaxpr.outvars, wanted, strict=True) if want}
    total = 0
    for eqn in reversed(jaxpr.eqns):
        needed = [id(var) in live for var in eqn.outvars]
        if not any(needed):
            continue
        live |= {id(var) for var in eqn.invars}
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            rows = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
            total += 2 * rows * math.prod(eqn.outvars[0].aval.shape)
        for inner in inside(eqn):
            same = len(inner.outvars) == len(needed) and eqn.primitive.name != "scan"
            total += eqn.params.get("length", 1) * count(
                inner, needed if same else [True] * len(inner.outvars)
            )
    return total


def inside(eqn):
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple) else (value,):
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns") and eqn.primitive.name != "custom_vjp_call":
                yield jaxpr


def flops_of(function, *arguments):
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return count(jaxpr, [True] * len(jaxpr.outvars))


def flops_of_vjp(f, params, x):
    """Those of the forward, and what ``jax.vjp`` spends besides."""
    dy = jax.eval_shape(f, params, x)

    def both(params, x, dy):
        y, pull = jax.vjp(f, params, x)
        return y, pull(dy)

    forward = flops_of(f, params, x)
    return forward, flops_of(both, params, x, dy) - forward


def tied(params, x):
    """Parameters used twice, a bias, a gather."""
    h = jnp.tanh(x @ params["up"] + params["bias"]) @ params["up"].T
    return h @ params["up"][:, :WIDTH]


POLICIES = jax.checkpoint_policies
CASES = {
    "linear": (lambda w, x: x @ w, normal(1, WIDTH, WIDTH), X),
    "mlp": (mlp, block_params(), X),
    "block": (block, block_params(), X),
    "attention": (attention, ATTENTION, normal(30, 2, 6, WIDTH)),
    "tied": (tied, block_params(), X),
    "scan": (scanned(block), LAYERS, X),
    "remat": (jax.checkpoint(block), block_params(), X),
    "dots_saveable": (jax.checkpoint(block, policy=POLICIES.dots_saveable), block_params(), X),
    "scan of remat": (scanned(jax.checkpoint(block)), LAYERS, X),
    "cond": (choose, block_params(), X),
    "frozen": (lambda p, x: (x @ lax.stop_gradient(p["up"])) @ p["down"], block_params(), X),
}


@pytest.mark.parametrize("name", CASES)
def test_input_and_weight_parts_spend_what_vjp_does(name):
    f, params, x = CASES[name]
    plan = split_backward(f).trace(params, x)
    assert (plan.flops.forward, plan.flops.input + plan.flops.weight) == flops_of_vjp(f, params, x)


def test_the_count_by_hand():
    forward, backward = flops_of_vjp(mlp, block_params(), X)
    assert forward == 2 * 2 * BATCH * WIDTH * 32 and backward == 2 * forward
    assert flops_of_vjp(scanned(mlp), LAYERS, X) == (3 * forward, 3 * backward)


def test_scans_inside_a_shard_map_count_as_often_as_they_run():
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    inner = jax.shard_map(scanned(mlp), mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    plain, wrapped = (split_backward(f).trace(LAYERS, X).flops for f in (scanned(mlp), inner))
    assert (wrapped.forward, wrapped.backward) == (plain.forward, plain.backward)


@pytest.mark.parametrize("stride, groups", [(1, 1), (3, 1), (2, 2)])
def test_each_gradient_of_a_convolution_spends_what_its_forward_does(stride, groups):
    """A strided one's dx is a convolution of dy with gaps, which are not multiplied; XLA counts the same."""

    def f(kernel, x):
        numbers, strides = ("NHWC", "HWIO", "NHWC"), (stride, stride)
        return lax.conv_general_dilated(
            x, kernel, strides, "VALID", dimension_numbers=numbers, feature_group_count=groups
        )

    kernel, x = normal(1, 3, 3, 4 // groups, 6), normal(2, 2, 9, 9, 4)
    outputs = f(kernel, x).size
    flops = split_backward(f).trace(kernel, x).flops
    assert flops == (2 * outputs * 9 * 4 // groups, 2 * flops.forward, flops.forward, flops.forward)
    if groups == 1:
        dx = jax.jit(lambda kernel, x, dy: jax.vjp(lambda x: f(kernel, x), x)[1](dy))
        cost = dx.lower(kernel, x, f(kernel, x)).compile().cost_analysis()
        assert cost["flops"] == flops.input
