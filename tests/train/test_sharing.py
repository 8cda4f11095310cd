"""What is shared out: where each array lies, that a step's gradients and the steps themselves are the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import models
from dualpipe_jax.engine import Pipeline, reference_value_and_grad
from dualpipe_jax.parallel import EP, make_mesh
from dualpipe_jax.pods.program import abstract_mesh
from dualpipe_jax.schedule import dualpipe
from tests.engine.models import quick
from train.sharing import share_out
from train.state import Layout, shardings, trainable
from train.step import make_optimizer

NUMBERS = models.tiny(
    num_layers=3,
    num_experts=4,
    num_groups=1,
    top_groups=1,
    top_k=2,
    dim=16,
    expert_hidden=8,
    vocab=64,
)
SCHEDULE, MESH = dualpipe(2, 4), (2, 2, 2)
OPTIMIZER = make_optimizer(0.01, clip=0.5, weight_decay=0.1)


@pytest.mark.parametrize(
    ("spec", "shape", "expected"),
    [
        (P(), (), P()),
        (P(), (128,), P()),
        (P("pp"), (2, 128), P("pp")),  # a vector of each stage
        (P("pp"), (2, 24, 16), P("pp", ("dp", "ep"))),
        (P("pp"), (2, 12, 20), P("pp", "ep", "dp")),
        (P("pp"), (2, 9, 5), P("pp")),
        (P("pp", "ep"), (2, 8, 6, 10), P("pp", "ep", None, "dp")),
        (P(None, "ep"), (6, 64), P(("dp", "pp"), "ep")),
        (P("ep", "dp"), (16, 96), P("ep", ("dp", "pp"))),
    ],
)
def test_an_array_is_cut_where_all_axes_divide_it_or_each_does(spec, shape, expected):
    """By hand: two replicas, two ranks, or three where they are free, and four devices for experts."""
    lies = NamedSharding(abstract_mesh(3 if "pp" not in spec else 2, 4, dp=2), spec)
    found = share_out(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=lies))
    assert found.sharding.is_equivalent_to(NamedSharding(lies.mesh, expected), len(shape)), found.sharding
    again = share_out(found)
    assert again.sharding.spec == found.sharding.spec


@functools.cache
def built(axis=EP):
    return models.deepseek(NUMBERS, 2, ep_axis=axis)


@functools.cache
def layout_of(shard):
    pp, ep, dp = MESH
    return Layout(built(), SCHEDULE, make_mesh(pp, ep, dp=dp), OPTIMIZER, shard)


@functools.cache
def pipeline_of(shard):
    layout = layout_of(shard)
    return Pipeline(
        built().staged,
        SCHEDULE,
        layout.mesh,
        param_specs=built().param_specs,
        storage_specs=layout.storage_specs,
        compute_dtype=built().compute_dtype,
    )


def words(seed=1):
    tokens = jax.random.randint(jax.random.key(seed), (4, 4, 17), 0, 64)
    return {"inputs": tokens[..., :-1], "targets": tokens[..., 1:]}


@pytest.mark.slow
def test_gradients_of_what_is_stored_in_parts_are_the_plain_models():
    layout, pipeline = layout_of("parameters"), pipeline_of("parameters")
    state = layout.init(jax.random.key(0))
    (loss, _), grads = quick(pipeline.value_and_grad)(state.params, words())
    plain = built(None)
    (wanted, _), wanted_grads = quick(reference_value_and_grad(plain.staged))(
        plain.init(jax.random.key(0)), words()
    )
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    lies = shardings(trainable(state.params))
    for grad, lie in zip(jax.tree.leaves(trainable(grads)), jax.tree.leaves(lies), strict=True):
        assert grad.sharding.is_equivalent_to(lie, grad.ndim)
    found = trainable(jax.device_get(pipeline.unplace(grads)))
    expected = trainable(jax.device_get(wanted_grads))
    leaves = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, got), want in leaves:
        most = np.abs(want).max()
        assert most > 0, path
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * most, err_msg=jax.tree_util.keystr(path))
