"""Stages that talk over a mesh axis: collectives are F's and I's, never W's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from declared_matmuls import grouped_matmul
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from split_checks import WIDTH, assert_parts, assert_trees_match, compiled, norm, normal, run_parts, vjp

from dualpipe_jax.split import split_backward
from dualpipe_jax.varying import vary as vary_over
from tests.jaxprs import applied

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
    "scale": np.ones(WIDTH, np.float32),
    "router": normal(1, WIDTH, EXPERTS),
    "up": normal(2, EXPERTS, WIDTH, HIDDEN),
    "down": normal(3, EXPERTS, HIDDEN, WIDTH),
}
SPECS = {"scale": P(), "router": P(), "up": P("ep"), "down": P("ep")}
X = normal(4, 2 * 4 * 6, WIDTH)


def vary(tree):
    return vary_over(tree, ("pp", "ep"))


def check_on_mesh(f, params, specs, x, *, check_vma, cast=True, has_aux=False):
    """Compares gradients of the split with those of jax.vjp; gives the plan."""
    plans = []

    def both(params, x, dy):
        if cast and check_vma:
            params, x, dy = vary((params, x, dy))
        plans.append(split_backward(f, has_aux).trace(params, x))
        _, pull, *_ = jax.vjp(f, params, x, has_aux=has_aux)
        return run_parts(plans[-1], params, x, dy)[1], pull(dy)

    outputs = jax.tree.map(
        lambda spec: EVERYWHERE if cast else spec, specs, is_leaf=lambda s: isinstance(s, P)
    )
    options = {"in_specs": (specs, EVERYWHERE, EVERYWHERE), "out_specs": ((outputs, EVERYWHERE),) * 2}
    mapped = jax.shard_map(both, mesh=MESH, check_vma=check_vma, **options)
    ours, theirs = compiled(mapped, params, x, x)
    assert_trees_match(theirs, ours, exact=False)
    assert_parts(plans[-1])
    return plans[-1]


@pytest.mark.parametrize(
    ("check_vma", "remat"), [(True, False), pytest.param(False, True, marks=pytest.mark.slow)]
)
def test_mixture_of_experts(check_vma, remat):
    f = jax.checkpoint(moe) if remat else moe
    plan = check_on_mesh(f, PARAMS, SPECS, X, check_vma=check_vma, has_aux=True)
    assert applied(plan, "forward")["all_to_all"] == 2
    assert applied(plan, "input")["all_to_all"] == (4 if remat else 2)


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_scanned_layers_of_remat_in_a_cond(check_vma):
    """A cond whose branches differ in what they hand over, typed as varying."""

    def layers(params, x):
        layer = jax.checkpoint(lambda x, p: (jnp.tanh(lax.all_to_all(x @ p, "ep", 0, 0, tiled=True)), None))
        return lax.cond(x.sum() > 1e9, lambda x: x, lambda x: lax.scan(layer, x, params)[0], x)

    params = normal(5, 3, WIDTH, WIDTH)
    x = normal(6, 2 * 4 * 8, WIDTH)
    check_on_mesh(layers, params, P(), x, check_vma=check_vma)


def test_gathered_parameters_are_scattered_in_the_input_part():
    """W has no collective, so this gradient is I's."""

    def f(params, x):
        w = lax.all_gather(params["w"], "ep", tiled=True)
        return jnp.sin(x @ w) @ params["v"]

    params = {"w": normal(1, WIDTH, WIDTH), "v": normal(2, WIDTH, WIDTH)}
    plan = check_on_mesh(f, params, {"w": P("ep"), "v": P()}, X, check_vma=False)
    assert applied(plan, "input")["reduce_scatter"] == 1
    assert plan.flops.input == 3 * plan.flops.weight
    assert all(kind.shape != (WIDTH, WIDTH) for kind in (*plan.residuals_i, *plan.residuals_w))


def test_replicated_parameters_are_summed_in_the_input_part():
    """Parameters that do not vary get a psum from vma; it too is I's."""

    def f(params, x):
        return jnp.sin(x @ params)

    plan = check_on_mesh(f, normal(1, WIDTH, WIDTH), P(), X, check_vma=True, cast=False)
    assert applied(plan, "input")["psum_invariant"] == 1


def test_types_that_vary_over_other_axes_have_a_plan_of_their_own():
    split = split_backward(lambda w, x: jnp.sin(x @ w))
    w, found = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32), []

    def inside(x):
        alike, varying = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.eval_shape(lambda x: x, x)
        found.extend(split.trace(w, kind).collectives("backward") for kind in (alike, varying))
        return x

    jax.jit(jax.shard_map(inside, mesh=MESH, in_specs=P("ep"), out_specs=P("ep"))).lower(X)
    assert found == [{}, {"psum_invariant": {"ep"}}]


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
    theirs = compiled(vjp(f), params, X, dy)
    assert_trees_match(theirs, ours, exact=False)
    assert_parts(plan)


VARYING = {
    "sum beside": lambda w, x: jnp.sin(x @ w) + lax.psum(jnp.cos(x), "ep"),
    "mean out": lambda w, x: lax.pmean(jnp.sin(x @ w), "ep"),
    "divided by a sum": lambda w, x: x @ w / lax.psum(jnp.sum(x * x), "ep"),
    "remat": jax.checkpoint(lambda w, x: jnp.sin(lax.psum(jnp.sin(x @ w), "ep") @ w)),
    "loop": lambda w, x: lax.scan(
        lambda c, _: (0.1 * lax.psum(jnp.sin(c @ w), "ep"), c.sum()), lax.psum(x, "ep"), None, length=2
    )[0],
    "choice": lambda w, x: lax.cond(
        x.sum() > 0, lambda x: lax.psum(jnp.sin(x @ w) @ w, "ep"), lambda x: lax.psum(jnp.cos(x @ w), "ep"), x
    ),
    "while": lambda w, x: lax.while_loop(
        lambda c: c < 3, lambda c: c + 1, lax.psum(x[0, 0] > 0, "ep")
    ).astype(x.dtype) * jnp.sin(x @ w),
}  # fmt: skip


@pytest.mark.parametrize("name", VARYING)
def test_what_does_not_vary_over_ep_waits_with_what_does(name):
    """Behind a barrier with others a sum over ep is typed as varying; so are slots."""
    check_on_mesh(lambda w, x: vary(VARYING[name](w, x)), normal(1, WIDTH, WIDTH), P(), X, check_vma=True)


def test_a_loss_beside_the_output_that_is_a_mean_over_ep():
    """Its cotangent does not vary over ep, nor need it."""

    def f(w, x):
        y = jnp.sin(x @ w)
        return y, {"balance": lax.pmean(jnp.sum(y * y), "ep"), "count": jnp.int32(3)}

    plans = []

    def both(w, x):
        w, x = vary((w, x))
        plan = split_backward(f).trace(w, x)
        plans.append(plan)
        (y, losses), pull = jax.vjp(f, w, x)
        seed = 0.5 * losses["balance"]
        dy = (y, {"balance": seed, "count": None})
        zero = np.zeros((), jax.dtypes.float0)
        varied = (y, {"balance": vary(seed), "count": 1})
        ours = [vary(run_parts(plan, w, x, given)[1]) for given in (dy, varied)]
        return [*ours, pull((y, {"balance": seed, "count": zero}))]

    mapped = jax.shard_map(both, mesh=MESH, in_specs=(P(), EVERYWHERE), out_specs=EVERYWHERE, check_vma=True)
    alike, varied, want = compiled(mapped, normal(1, WIDTH, WIDTH), X)
    assert_trees_match(want, alike, exact=False)
    assert_trees_match(want, varied, exact=False)
    assert plans[-1].y[1]["count"].dtype == jnp.int32


def test_a_broadcast_that_is_recomputed_is_the_input_parts():
    """Only GPUs run it, so it is traced and not run."""
    layer = jax.checkpoint(lambda w, x: jnp.sin(lax.pbroadcast(lax.stop_gradient(x), ("ep",), 0) @ w) + x)
    plans = []

    def on_device(x):
        plans.append(split_backward(layer).trace(jnp.ones((WIDTH, WIDTH)), x))
        return x

    jax.eval_shape(
        jax.shard_map(on_device, mesh=MESH, in_specs=P("ep"), out_specs=P("ep"), check_vma=False), X
    )
    assert applied(plans[0], "input")["pbroadcast"] and not applied(plans[0], "weight")["pbroadcast"]
    assert all(plans[0].collectives(part) == {"pbroadcast": {"ep"}} for part in ("forward", "backward"))


def test_all_primitives_are_named_those_of_a_backward_of_the_users_own_too():
    """A permute that only the backward does."""

    @jax.custom_vjp
    def rotate(x):
        return jnp.sin(x)

    rotate.defvjp(
        lambda x: (jnp.sin(x), None),
        lambda _, dy: (lax.ppermute(dy, "ep", [(k, (k + 1) % 4) for k in range(4)]),),
    )
    layer = jax.checkpoint(lambda w, x: (rotate(x @ w), None))
    found = []

    def on_device(w, x):
        plan = split_backward(lambda w, x: lax.scan(lambda x, w: layer(w, x), x, w)[0]).trace(w, x)
        found.append(plan)
        return x

    w = normal(1, 2, WIDTH, WIDTH)
    jax.eval_shape(
        jax.shard_map(on_device, mesh=MESH, in_specs=(P(), EVERYWHERE), out_specs=EVERYWHERE), w, X
    )
    forward, backward = (applied(found[0], part) for part in ("forward", "backward"))
    assert backward["ppermute"] and not forward["ppermute"]
    assert {"dot_general", "sin"} <= {*forward, *backward}
