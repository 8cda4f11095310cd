"""Slot pools hold whatever was in memory before: no slot is read before it is written."""

import jax.numpy as jnp
import pytest

from dualpipe_jax import Pipeline, make_mesh, staged
from dualpipe_jax.engine import slots
from dualpipe_jax.schedule import dualpipe, dualpipe_v, interleaved_1f1b
from tests.engine import models


def poison(shape, dtype, **_):
    """What nobody may read: no number, the largest integer, or true."""
    floating, integer = (jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer))
    worst = jnp.nan if floating else jnp.iinfo(dtype).max if integer else True
    return jnp.full(shape, worst, dtype)


@pytest.mark.parametrize(
    ("make", "kind", "divergence"),
    [
        (interleaved_1f1b, "mlp", "switch"),
        (dualpipe_v, "mlp", "none"),
        pytest.param(dualpipe, "moe", "loop", marks=pytest.mark.slow),
    ],
)
def test_nothing_that_was_there_before_is_read(monkeypatch, make, kind, divergence):
    monkeypatch.setattr(slots.lax, "empty", poison)
    schedule, fuse = make(2, 6), divergence != "switch"
    num_stages = schedule.placement.num_model_stages
    pipeline = Pipeline(
        staged(models.model(kind), num_stages, has_aux=True),
        schedule,
        make_mesh(2, 2),
        param_specs=models.init(kind, num_stages)[1],
        fuse_pairs=fuse,
        idle_sends=fuse,
        divergence=divergence,
    )
    (loss, report), grads = pipeline.value_and_grad(*models.given(kind, num_stages, 6))
    result = (loss, report.metrics["aux"]), grads["shared"] | {"stages": grads["stages"]}
    models.assert_same(result, models.oracle(kind, num_stages, 6))
