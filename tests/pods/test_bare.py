"""The pair with nothing around it: both orders compute the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from dualpipe_jax.parallel import make_mesh
from dualpipe_jax.pods.bare import lower_bare_pair
from dualpipe_jax.pods.program import Blueprint
from dualpipe_jax.schedule import dualpipe
from train.pods.training import optimizer_of, step_of
from train.state.layout import Layout


@pytest.fixture(scope="module")
def blueprint():
    numbers = models.byte(num_layers=2, num_dense_layers=0)
    model = models.deepseek(numbers, 2, ep_axis="ep", dispatch="capacity", capacity_factor=1.0)
    mesh = make_mesh(2, 2)
    program = step_of(Layout(model, dualpipe(2, 6), mesh, optimizer_of()), (6, 2, 8))
    return Blueprint(program, dualpipe(2, 6), mesh)


def results(lowered):
    """What it computes from noise."""
    compiled = lowered.compile()
    types, random = jax.tree.leaves(lowered.args_info), np.random.default_rng(0)
    noise = [0.1 * random.standard_normal(t.shape) * jnp.issubdtype(t.dtype, jnp.floating) for t in types]
    arguments, _ = lowered.in_tree.unflatten(a.astype(t.dtype) for a, t in zip(noise, types, strict=True))
    # None where nothing reads an argument.
    shardings = jax.tree.leaves(compiled.input_shardings[0], is_leaf=lambda leaf: leaf is None)
    leaves = map(jax.device_put, jax.tree.leaves(arguments), shardings)
    return compiled(*jax.tree.unflatten(jax.tree.structure(arguments), leaves))


def test_both_orders_compute_the_same(blueprint):
    plain, ordered = (results(lower_bare_pair(blueprint, ordered=ordered)) for ordered in (False, True))
    assert len(plain) == len(ordered) > 30
    for one, other in zip(plain, ordered, strict=True):
        np.testing.assert_allclose(np.float32(one), np.float32(other), rtol=1e-5, atol=1e-6)
    assert sum(np.abs(np.float32(one)).max() > 0 for one in plain) > len(plain) - 3


def test_nothing_stands_around_it(blueprint):
    text = lower_bare_pair(blueprint, ordered=True).as_text()
    assert "all_to_all" in text and "optimization_barrier" in text
    assert "stablehlo.while" not in text and "collective_permute" not in text
    assert "optimization_barrier" not in lower_bare_pair(blueprint, ordered=False).as_text()
