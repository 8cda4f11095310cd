"""Two programs in one order: the same results, and collectives that alternate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dualpipe_jax import make_mesh, split_backward
from dualpipe_jax.engine.interleave import _turns
from dualpipe_jax.engine.trees import accumulate
from tests.engine import models

NUM_EP = 2


@functools.cache
def case(remat=None):
    """A MoE stage of two layers on two devices, traced there; arguments of a forward and of a backward."""
    params, specs = models.init("moe", 2)
    specs = {
        name: PartitionSpec(None, "ep") if spec else PartitionSpec() for name, spec in specs["stages"].items()
    }
    x = jax.random.normal(jax.random.key(1), (2, 4, models.SEQ, models.WIDTH))
    return params["stages"], specs, x, models.model("moe", remat).stage


def run(work, remat=None):
    params, specs, x, stage = case(remat)

    def layers(params, x):
        for k in range(2):
            x, _ = stage(jax.tree.map(lambda leaf, k=k: leaf[k], params), x)
        return x

    def on_device(params, x):
        plan = split_backward(layers).trace(params, x[0])
        return work(plan, params, x)

    mesh = make_mesh(1, NUM_EP, jax.devices()[:NUM_EP])
    spec = PartitionSpec(None, "ep")
    return (
        jax.shard_map(
            on_device, mesh=mesh, in_specs=(specs, spec), out_specs=PartitionSpec("ep"), check_vma=False
        ),
        params,
        x,
    )


def both(pair):
    def work(plan, params, x):
        saved = plan.forward(params, x[0])
        forward, backward = (params, x[1]), (params, x[0], *saved[2:], saved[0])
        sums = [jnp.ones(p.shape) for p in jax.tree.leaves(params) if p.dtype == jnp.float32]
        if pair:
            made, *grads = plan.pair(forward, backward, sums)
        else:
            made, (dparams, dx) = plan.forward(*forward), plan.backward(*backward)
            grads = accumulate(sums, dparams), dx
        return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32)[None], (made, list(grads)))

    return work


@pytest.mark.parametrize("remat", [None, "all"])
def test_a_pair_is_its_forward_and_its_backward(remat):
    outcome = [
        jax.jit(function)(*arguments) for function, *arguments in (run(both(p), remat) for p in (True, False))
    ]
    together, apart = (jax.tree.leaves(jax.device_get(tree)) for tree in outcome)
    assert len(together) >= 7, "y, residuals, sums and dx"
    for got, want in zip(together, apart, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def collectives(remat):
    """Whose each all_to_all of the pair is, in order, and how many barriers tie them."""
    function, *arguments = run(lambda plan, params, x: _pair_only(plan, params, x), remat)
    text = jax.jit(function).lower(*arguments).as_text(debug_info=False)
    return text.count("all_to_all"), text.count("optimization_barrier")


def _pair_only(plan, params, x):
    kept = [jnp.ones(kind.shape, kind.dtype) for kind in (*plan.residuals_i, *plan.residuals_w)]
    cut = len(plan.residuals_i)
    sums = [jnp.zeros(p.shape) for p in jax.tree.leaves(params) if p.dtype == jnp.float32]
    made, *grads = plan.pair((params, x[1]), (params, x[0], kept[:cut], kept[cut:], x[0]), sums)
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32)[None], (made, list(grads)))


def test_every_collective_is_tied_to_what_hides_it():
    count, barriers = collectives(None)
    assert count == 8, "two layers, each there and back, forwards and backwards"
    assert barriers == count


def test_collectives_take_turns():
    assert _turns(2, 2) == [1, 0, 1, 0]
    assert _turns(2, 4) == [1, 0, 1, 1, 0, 1]
    assert _turns(3, 1) == [0, 1, 0, 0]
    assert _turns(0, 2) == [1, 1]
    assert _turns(0, 0) == []
