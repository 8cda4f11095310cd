"""Where the first value that is not finite began: in a stage, a head, or in a backward under a finite loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax import Out, Pipeline, PipelineModel, StagedModel, make_mesh, pipeline_value_and_grad
from dualpipe_jax.schedule import dualpipe, one_f_one_b, zb_h1
from tests.engine import models
from tests.engine.models import quick

FAR = models.VOCAB - 1


@jax.custom_vjp
def fragile(x):
    """The identity; where x is large its gradient is NaN."""
    return x


fragile.defvjp(lambda x: (x, x), lambda x, g: (jnp.where(x > 50, jnp.nan, g),))


def message(make, stage, head_loss, inputs, targets):
    params, _ = models.init("mlp", 2)
    params["embed"] = params["embed"].at[FAR].set(100.0)
    params["stages"]["number"] = jnp.asarray(np.arange(2))
    model = PipelineModel(models.embed, stage, head_loss)
    step = quick(pipeline_value_and_grad(model, make(2, 4), make_mesh(2, 1), debug_nans=True))
    with pytest.raises(Exception, match="first value that is not finite") as error:
        jax.block_until_ready(step(params, inputs, targets))
        jax.effects_barrier()
    loss, _ = step(params, jnp.zeros_like(inputs), jnp.zeros_like(targets))
    jax.effects_barrier()  # nothing is said of healthy values
    assert jnp.isfinite(loss)
    return str(error.value)


def test_a_stages_output():
    def stage(p, x):
        return jnp.where((p["number"] == 1) & (x[..., :1] > 50), jnp.nan, models.mlp(p, x)[0])

    inputs, targets = models.data(4)
    inputs = jnp.zeros_like(inputs).at[3, 3, 0].set(FAR)
    said = message(dualpipe, stage, models.head_loss, inputs, targets)
    assert "the loss is nan" in said and "in the forward of microbatch 3 at stage 1" in said


def test_a_gradient_under_a_finite_loss():
    """In halves: the I of microbatch 2 at the second stage, and not the W that comes of it."""

    def stage(p, x):
        return models.mlp(p, jnp.where(p["number"] == 1, fragile(x), x))[0]

    inputs, targets = models.data(4)
    inputs = jnp.where(inputs == FAR, 0, inputs).at[2, 1, 1].set(FAR)
    said = message(zb_h1, stage, models.head_loss, inputs, targets)
    assert "the gradient of the stage's input, in the backward of microbatch 2 at stage 1" in said
    assert "the loss is nan" not in said and "the loss is inf" not in said


def test_a_head_is_told_from_the_stage_before_it():
    """Its loss, not the stage's output."""

    def head_loss(p, x, targets):
        return models.head_loss(p, x, targets) + jnp.where((targets == FAR).any(), jnp.nan, 0.0)

    inputs, targets = models.data(4)
    targets = jnp.where(targets == FAR, 0, targets).at[3, 2, 0].set(FAR)
    said = message(one_f_one_b, models.MLP.stage, head_loss, jnp.zeros_like(inputs), targets)
    assert "the loss is nan" in said
    assert "is a loss, in the forward of microbatch 3 at stage 1" in said


def test_a_gradient_of_the_batch_is_told_from_those_of_parameters():
    """That of a root of zero is infinite; the parameter's is one."""

    def stage(own, shared, x, at):
        return Out(losses={"loss": jnp.mean(jnp.sqrt(at.batch)) + own})

    model, schedule = StagedModel({"only": stage}, ("only",)), one_f_one_b(1, 2)
    step = Pipeline(model, schedule, make_mesh(1), input_grads=True, debug_nans=True).value_and_grad
    with pytest.raises(
        Exception, match="is a gradient of the batch, in the backward of microbatch 1 at stage 0"
    ):
        batch = jnp.stack([jnp.ones(2), jnp.zeros(2)])
        jax.block_until_ready(step({"stages": jnp.ones(1), "shared": {}}, batch))
        jax.effects_barrier()


def test_watching_makes_xla_warn_of_nothing(capfd):
    """Of a program that no cache has, else XLA says nothing."""
    unlike = float(np.random.default_rng().uniform())
    model = PipelineModel(models.embed, lambda p, x: models.mlp(p, x)[0] * unlike, models.head_loss)
    step = quick(pipeline_value_and_grad(model, one_f_one_b(2, 4), make_mesh(2, 2), debug_nans=True))
    jax.block_until_ready(step(models.init("mlp", 2)[0], *models.data(4)))
    jax.effects_barrier()
    assert "rematerialization" not in capfd.readouterr().err
