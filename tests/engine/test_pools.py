"""Slot pools hold whatever was in memory before: no slot is read before it is written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax import PipelineModel, make_mesh
from dualpipe_jax.contract import staged
from dualpipe_jax.engine import Pipeline, slots
from dualpipe_jax.schedule import dualpipe, dualpipe_v, interleaved_1f1b
from tests.engine import models

MODEL = PipelineModel(models.embed, lambda p, x: models.moe(p, x)[0], models.head_loss)


def poison(shape, dtype, **_):
    """What nobody may read: no number, the largest integer, or true."""
    floating, integer = (jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer))
    worst = jnp.nan if floating else jnp.iinfo(dtype).max if integer else True
    return jnp.full(shape, worst, dtype)


def step(schedule, divergence, fuse_pairs):
    stages = schedule.placement.num_model_stages
    params, specs = models.init("moe", stages)
    given = {"stages": params["stages"], "shared": {"embed": params["embed"], "head": params["head"]}}
    inputs, targets = models.data(schedule.num_microbatches)
    pipeline = Pipeline(
        staged(MODEL, stages),
        schedule,
        make_mesh(2, 2),
        param_specs={"stages": specs["stages"]},
        fuse_pairs=fuse_pairs,
        idle_sends=fuse_pairs,
        divergence=divergence,
    )
    batch = {"inputs": inputs, "targets": targets}
    (loss, _), gradients = pipeline.value_and_grad(pipeline.place(given), batch)
    return [leaf for leaf in jax.tree.leaves((loss, gradients)) if leaf.dtype != jax.dtypes.float0]


@pytest.mark.parametrize(
    ("make", "divergence"), [(dualpipe, "loop"), (dualpipe_v, "none"), (interleaved_1f1b, "switch")]
)
def test_nothing_that_was_there_before_is_read(monkeypatch, make, divergence):
    schedule = make(2, 6)
    fuse = divergence != "switch"
    clean = step(schedule, divergence, fuse)
    monkeypatch.setattr(slots.lax, "empty", poison)
    poisoned = step(schedule, divergence, fuse)
    for one, other in zip(clean, poisoned, strict=True):
        assert np.isfinite(np.asarray(one)).all()
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
