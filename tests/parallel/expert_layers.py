"""A layer of experts, as dispatch does it and as plain arithmetic does; and what the tests of both are made of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from dualpipe_jax.parallel import (
    combine,
    combine_product,
    dispatch,
    expert_matmul,
    make_mesh,
    plan_capacity,
    plan_dropless,
)
from dualpipe_jax.parallel.mesh import expert_axes

TOKENS, K, D, F = 32, 3, 6, 5
METHODS = ("capacity", "dropless")


def plan_of(method, num_experts, axis_name="ep", bound=None, payload="plain"):
    """A plan with one number that bounds it: the capacity, or the buffer factor."""
    if method == "capacity":
        return lambda topk: plan_capacity(topk, num_experts, bound, axis_name, payload)
    return lambda topk: plan_dropless(topk, num_experts, axis_name, bound, payload)


def choices(num_tokens, num_experts, *, skew=0.5, seed=0):
    """Distinct random experts for each token; skew makes the low ones popular."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(num_tokens, num_experts)) - skew * np.arange(num_experts)
    return np.argsort(-logits, axis=1)[:, :K].astype(np.int32)


def on_devices(ep, function, check_vma=True, **options):
    """On so many devices, or (nodes, devices of a node): arguments and results are split along their first dim."""
    spec = P("ep" if isinstance(ep, int) else expert_axes(2))
    mapped = jax.shard_map(
        function, mesh=make_mesh(1, ep), in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    return jax.jit(mapped, **options)


def layer(x, w_in, w_out, weights, topk, make, fill=True):
    handle = make(topk)
    hidden = jnp.tanh(expert_matmul(dispatch(x, handle, fill=fill), w_in, handle))
    return combine(expert_matmul(hidden, w_out, handle), weights, handle)


def fused_layer(x, w_in, w_out, weights, topk, make, matmul=expert_matmul):
    """The same, with the last product and its combining as one."""
    handle = make(topk)
    hidden = jnp.tanh(matmul(dispatch(x, handle, fill=False), w_in, handle))
    return combine_product(hidden, w_out, weights, handle, matmul=matmul)


def layer_by_copies(x, w_in, w_out, weights, topk):
    """Every token with its own copy of its experts' matrices."""
    hidden = jnp.tanh(jnp.einsum("td,tkdf->tkf", x, jnp.asarray(w_in)[topk]))
    return jnp.einsum("tk,tkf,tkfd->td", weights, hidden, jnp.asarray(w_out)[topk])


@functools.cache
def layer_case(num_experts):
    """x, both matrices and weights, of which some are zero; and what the sums' gradients are."""
    rng = np.random.default_rng(3)
    shapes = (TOKENS, D), (num_experts, D, F), (num_experts, F, D), (TOKENS, K), (TOKENS, D)
    *args, target = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    args[3][::5, 1] = 0
    return args, target


def with_gradients(function, target):
    """The function's result, and the gradients of its arguments but the last from the result's cotangent."""

    def run(args, topk):
        out, pull = jax.vjp(lambda args: function(*args, topk), args)
        return out, *pull(target)

    compiled = jax.jit(run)
    return lambda args, topk: jax.device_get(compiled(list(args), topk))


@functools.cache
def plain_layer(num_experts):
    """The plain layer with gradients, compiled once."""
    return with_gradients(layer_by_copies, layer_case(num_experts)[1])


def check_dropped(run, num_experts, topk, kept):
    """Assignments that are not ``kept`` add nothing and have no gradient: the layer is the plain one without them."""
    args, target = layer_case(num_experts)
    got, (*rest, d_weights) = with_gradients(run, target)(args, topk)
    np.testing.assert_array_equal(d_weights[~kept], 0)
    want, (*want_rest, want_weights) = plain_layer(num_experts)([*args[:3], np.where(kept, args[3], 0)], topk)
    close((got, rest, d_weights[kept]), (want, want_rest, want_weights[kept]))


def close(got, want):
    """To 1e-6 of each leaf's largest entry."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-6 * max(1, np.abs(w).max()))
