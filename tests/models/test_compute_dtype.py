"""Matrices that are cast once a step: the same model as one that casts them where it uses them."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest

import models
from dualpipe_jax import Pipeline, make_mesh
from dualpipe_jax.engine.reference import reference_loss
from dualpipe_jax.schedule import dualpipe
from tests.models.decode.small_models import random_params, small


def build(num_stages, **changes):
    config = small(vocab=64, num_groups=1, compute_dtype=jnp.bfloat16, **changes)
    return models.deepseek(config, num_stages, ep_axis="ep", dispatch="capacity", platform="cpu")


def words(*shape):
    tokens = jax.random.randint(jax.random.key(1), shape, 0, 64)
    return {"inputs": tokens, "targets": jnp.roll(tokens, -1, -1)}


def test_what_is_named_is_read_in_no_other_dtype():
    """Rounded beforehand it gives the plain model's loss to the last bit; what is not named does not, if rounded."""
    config = build(1, num_mtp_layers=1, attention_bias=True).config
    model, params = models.deepseek(config, 1, platform="cpu"), jax.device_get(random_params(config))
    loss = reference_loss(model.staged)
    named = jax.tree.map(
        lambda dtype, part: jax.tree.map(lambda _: dtype is not None, part),
        model.compute_dtype,
        params,
        is_leaf=lambda node: node is None,
    )

    def rounded(which):
        def one(leaf, is_named):
            narrow = leaf.dtype == jnp.float32 and is_named is which
            return leaf.astype(jnp.bfloat16).astype(jnp.float32) if narrow else leaf

        return jax.tree.map(one, params, named)

    run = jax.jit(lambda params: loss(params, words(1, 2, 16))[0])
    assert any(jax.tree.leaves(named)) and run(rounded(True)) == run(params)
    assert run(rounded(False)) != run(params)


@pytest.mark.slow
def test_a_step_is_the_same_to_the_last_bit():
    """With a second pipe, whose copies travel cast."""
    model, batch, made = build(2, num_layers=2, num_dense_layers=0), words(4, 2, 8), []
    params = jax.device_get(
        random_params(dataclasses.replace(model.config, compute_dtype=jnp.float32), plan=2)
    )
    for dtype in (None, model.compute_dtype):
        how = dict(param_specs=model.param_specs, compute_dtype=dtype, accumulate_dtype=jnp.float32)
        pipeline = Pipeline(model.staged, dualpipe(2, 4), make_mesh(2, 2), **how)
        made.append(jax.device_get(jax.jit(pipeline.value_and_grad)(pipeline.place(params), batch)))
    chex.assert_trees_all_equal(*made)
