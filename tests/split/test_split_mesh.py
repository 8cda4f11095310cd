"""Stages that talk over a mesh axis: collectives are F's and I's, never W's."""

import jax
import jax.numpy as jnp
import pytest
from declared_matmuls import grouped_matmul
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from split_checks import WIDTH, assert_parts, assert_trees_match, compiled, norm, normal, run_parts

from dualpipe_jax.split import split_backward
from dualpipe_jax.split.varying import vary as vary_over

EXPERTS, HIDDEN = 8, 24
MESH = jax.make_mesh((2, 4), ("pp", "ep"), axis_types=(AxisType.Auto,) * 2)
EVERYWHERE = P(("pp", "ep"))


def moe(params, x):
    """Top-1 routing; x [tokens, D] and two experts on each device."""
    h = norm(params["scale"], x)
    gates = jax.nn.softmax(h @ params["router"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS, dtype=x.dtype)
    sent = lax.all_to_all(jnp.einsum("te,td->etd", chosen, h), "ep", 0, 1, tiled=True)
    out = grouped_matmul(jax.nn.silu(jnp.einsum("etd,edf->etf", sent, params["up"])), params["down"])
    back = lax.all_to_all(out, "ep", 1, 0, tiled=True)
    y = x + jnp.einsum("etd,te->td", back, chosen * gates) + 0.1 * lax.psum(h, "ep")
    return y, lax.psum(chosen.sum(0).astype(jnp.int32), "ep")


PARAMS = {
    "scale": jnp.ones(WIDTH),
    "router": normal(1, WIDTH, EXPERTS),
    "up": normal(2, EXPERTS, WIDTH, HIDDEN),
    "down": normal(3, EXPERTS, HIDDEN, WIDTH),
}
SPECS = {"scale": P(), "router": P(), "up": P("ep"), "down": P("ep")}
X = normal(4, 2 * 4 * 6, WIDTH)


def vary(tree):
    return vary_over(tree, ("pp", "ep"))


def run_both(f, params, specs, x, *, check_vma, cast=True, has_aux=False):
    """Gradients of the split and of jax.vjp, each in a shard_map, and the plan."""
    plans = []

    def prepare(*trees):
        return vary(trees) if cast and check_vma else trees

    def ours(params, x, dy):
        params, x, dy = prepare(params, x, dy)
        plans.append(split_backward(f, has_aux).trace(params, x))
        return run_parts(plans[-1], params, x, dy)[1]

    def theirs(params, x, dy):
        params, x, dy = prepare(params, x, dy)
        _, pull, *_ = jax.vjp(f, params, x, has_aux=has_aux)
        return pull(dy)

    outputs = jax.tree.map(
        lambda spec: EVERYWHERE if cast else spec, specs, is_leaf=lambda s: isinstance(s, P)
    )

    def mapped(body):
        options = {"in_specs": (specs, EVERYWHERE, EVERYWHERE), "out_specs": (outputs, EVERYWHERE)}
        return compiled(jax.shard_map(body, mesh=MESH, check_vma=check_vma, **options), params, x, x)

    return mapped(ours), mapped(theirs), plans[-1]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("remat", [False, True])
def test_mixture_of_experts(check_vma, remat):
    f = jax.checkpoint(moe) if remat else moe
    ours, theirs, plan = run_both(f, PARAMS, SPECS, X, check_vma=check_vma, has_aux=True)
    assert_trees_match(theirs, ours, exact=False)
    assert_parts(plan)
    assert plan.counts("forward")["all_to_all"] == 2
    assert plan.counts("input")["all_to_all"] == (4 if remat else 2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_scanned_layers_of_remat_in_a_cond(check_vma):
    """A cond whose branches differ in what they hand over, typed as varying."""

    def layers(params, x):
        layer = jax.checkpoint(lambda x, p: (jnp.tanh(lax.all_to_all(x @ p, "ep", 0, 0, tiled=True)), None))
        return lax.cond(x.sum() > 1e9, lambda x: x, lambda x: lax.scan(layer, x, params)[0], x)

    params = normal(5, 3, WIDTH, WIDTH)
    x = normal(6, 2 * 4 * 8, WIDTH)
    ours, theirs, plan = run_both(layers, params, P(), x, check_vma=check_vma)
    assert_trees_match(theirs, ours, exact=False)
    assert_parts(plan)


def test_gathered_parameters_are_scattered_in_the_input_part():
    """W has no collective, so this gradient is I's."""

    def f(params, x):
        w = lax.all_gather(params["w"], "ep", tiled=True)
        return jnp.sin(x @ w) @ params["v"]

    params = {"w": normal(1, WIDTH, WIDTH), "v": normal(2, WIDTH, WIDTH)}
    ours, theirs, plan = run_both(f, params, {"w": P("ep"), "v": P()}, X, check_vma=False)
    assert_trees_match(theirs, ours, exact=False)
    assert_parts(plan)
    assert plan.counts("input")["reduce_scatter"] == 1
    assert plan.flops.input == 3 * plan.flops.weight
    assert all(kind.shape != (WIDTH, WIDTH) for kind in (*plan.residuals_i, *plan.residuals_w))


def test_replicated_parameters_are_summed_in_the_input_part():
    """Parameters that do not vary get a psum from vma; it too is I's."""

    def f(params, x):
        return jnp.sin(x @ params)

    ours, theirs, plan = run_both(f, normal(1, WIDTH, WIDTH), P(), X, check_vma=True, cast=False)
    assert_trees_match(theirs, ours, exact=False)
    assert_parts(plan)
    assert plan.counts("input")["psum_invariant"] == 1


def test_plan_of_a_shard_map_inside():
    """A shard_map in the stage is atomic."""

    def f(params, x):
        inner = jax.shard_map(
            lambda w, x: lax.psum(jnp.sin(x @ w), "ep"), mesh=MESH, in_specs=(P(), P("ep")), out_specs=P()
        )
        return inner(params["v"], x) @ params["w"]

    params = {"w": normal(1, WIDTH, WIDTH), "v": normal(2, WIDTH, WIDTH)}
    plan = split_backward(f).trace(params, X)
    dy = normal(3, *plan.y.shape)
    ours = compiled(lambda *args: run_parts(plan, *args)[1], params, X, dy)
    theirs = compiled(lambda params, x, dy: jax.vjp(f, params, x)[1](dy), params, X, dy)
    assert_trees_match(theirs, ours, exact=False)
    assert_parts(plan)
