"""Where and on what a stage runs: choices by platform, and residuals in the host's memory."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from split_checks import (
    BATCH,
    WIDTH,
    assert_trees_match,
    block_params,
    check_split,
    compiled,
    mlp,
    normal,
    run_parts,
    vjp,
)

from dualpipe_jax.split import split_backward
from tests.jaxprs import applied

X = normal(0, BATCH, WIDTH)
HOST = jax.memory.Space.Host


@jax.custom_vjp
def elsewhere(x):
    """A kernel that cannot be lowered for a CPU."""

    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


elsewhere.defvjp(lambda x: (elsewhere(x), x), lambda x, dy: (elsewhere(x) * dy,))


def by_platform(params, x):
    return lax.platform_dependent(
        mlp(params, x), cpu=jnp.sin, tpu=elsewhere, rocm=elsewhere, default=lambda x: elsewhere(2 * x)
    )


def by_platform_in_a_scan(params, x):
    return lax.scan(lambda x, layer: (by_platform(layer, x), None), x, params)[0]


@pytest.mark.parametrize(
    ("f", "num_layers"), [(jax.checkpoint(by_platform), None), (by_platform_in_a_scan, 2)]
)
def test_only_the_branch_of_the_platform_is_lowered(f, num_layers):
    check_split(f, block_params(num_layers=num_layers), X, run=compiled)


def lowered(function, *arguments):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()


def test_the_other_platforms_branches_are_still_there():
    def f(params, x):
        return lax.platform_dependent(x @ params["up"], cpu=jnp.sin, tpu=jnp.tanh)

    plan = split_backward(f).trace(block_params(), X)
    forward = lowered(plan.forward, block_params(), X)
    assert "tanh" in forward and "sine" not in forward


def offloading(params, x):
    first = checkpoint_name(jnp.sin(x @ params["up"]) @ params["down"], "kept")
    second = checkpoint_name(jnp.sin(first @ params["up"]) @ params["down"], "offloaded")
    return jnp.sin(second @ params["up"]) @ params["down"]


POLICY = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=["kept"],
    names_which_can_be_offloaded=["offloaded"],
    offload_src="device",
    offload_dst="pinned_host",
)
OFFLOADING = jax.checkpoint(offloading, policy=POLICY)


def layers(params, x):
    return lax.scan(lambda x, layer: (OFFLOADING(layer, x), None), x, params)[0]


def chosen(params, x):
    """One branch has something in the host's memory, the other the same in the device's."""
    return lax.cond(x.sum() > 0, OFFLOADING, jax.checkpoint(offloading, policy=saved), params, x)


saved = jax.checkpoint_policies.save_only_these_names("kept", "offloaded")
OFFLOADED = {
    "scan": (layers, block_params(num_layers=2), 2),
    "straight": (OFFLOADING, block_params(), 1),
    "cond": (chosen, block_params(), 1),
}


def on_host(arrays):
    return [jax.typeof(array).memory_space is HOST for array in arrays]


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", OFFLOADED)
def test_what_a_policy_offloads_waits_in_the_hosts_memory(name):
    f, params, count = OFFLOADED[name]
    spaces = []

    def parts(params, x, dy):
        _, _, residuals_i, residuals_w = plan.forward(params, x)
        _, stash = plan.backward_input(params, x, residuals_i, residuals_w, dy)
        spaces.append([on_host(arrays) for arrays in (residuals_i, residuals_w, stash)])
        return run_parts(plan, params, x, dy)[1]

    plan = split_backward(f).trace(params, X)
    got = compiled(parts, params, X, X)
    want = compiled(vjp(f), params, X, X)
    assert_trees_match(want, got, exact=False)
    assert spaces == [list(plan.offloaded)]
    kept = zip([*plan.residuals_i, *plan.residuals_w], [*plan.offloaded[0], *plan.offloaded[1]], strict=True)
    assert sum(kind.size for kind, host in kept if host) == count * X.size
    assert not any(plan.offloaded[2]), "W fetches it for itself"

    def residuals(params, x):
        closure = jax.tree.leaves(jax.vjp(f, params, x)[1])
        spaces.append(sum(array.size for array, host in zip(closure, on_host(closure), strict=True) if host))
        return x

    jax.eval_shape(residuals, params, X)
    assert spaces[-1] == count * X.size, "as much as jax.vjp leaves there"


def test_the_weights_part_fetches_what_it_needs():
    plan = split_backward(OFFLOADING).trace(block_params(), X)
    assert applied(plan, "weight")["device_put"] == 1
    assert [*plan.offloaded[0], *plan.offloaded[1]].count(True) == 1
