"""The pipelined loss as a term of a larger one: cotangents of the objective, of its parts and of metrics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax import Out, Pipeline, PipelineModel, StagedModel, make_mesh, pipeline_loss, reference_loss
from dualpipe_jax.schedule import dualpipe, one_f_one_b
from tests.engine import models
from tests.engine.models import assert_close, quick
from tests.engine.plain import plain_loss


def balanced(params, x):
    """An MLP whose aux holds a floating leaf to be optimized, one to be looked at, and a count."""
    y, positive = models.mlp(params, x)
    return y, {"balance": jnp.sum(jnp.tanh(y) ** 2) / 50, "seen": jnp.sum(y), "positive": positive}


@pytest.mark.thin(2)
@pytest.mark.parametrize("make", [one_f_one_b, dualpipe], ids=lambda make: make.__name__)
def test_a_function_of_the_loss_the_aux_and_the_parameters(make):
    """Were the aux dropped, as it once was, the gradients would be some percent off."""
    schedule = make(2, 4)
    model = PipelineModel(models.embed, balanced, models.head_loss)
    params, _ = models.init("mlp", schedule.placement.num_model_stages)
    data = models.data(4)

    def total(loss, of_aux=0.1):
        def function(params):
            value, aux = loss(params, *data)
            penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
            return jnp.sin(value) + of_aux * aux["balance"] + 1e-3 * penalty, (value, aux)

        return quick(jax.value_and_grad(function, has_aux=True))

    (_, (value, aux)), grads = total(pipeline_loss(model, schedule, make_mesh(2, 2), has_aux=True))(params)
    plain = plain_loss(model, has_aux=True)
    (_, (expected, expected_aux)), expected_grads = total(plain)(params)
    np.testing.assert_allclose(value, expected, rtol=2e-6)
    np.testing.assert_array_equal(aux["positive"], expected_aux["positive"])
    assert_close(grads, expected_grads)
    with pytest.raises(AssertionError):
        assert_close(total(plain, 0.0)(params)[1], expected_grads, rtol=1e-3)


def weighted_stage(own, shared, x, at, *, last):
    """A stage with a loss and a metric of its own; at the last one a loss of valid tokens too."""
    x = (at.batch["x"] @ shared["in"] if x is None else x) * jnp.cos(at.batch["x"][..., :1])
    y = x + jnp.tanh(x @ own)
    losses = {"balance": jnp.mean(jnp.tanh(y) ** 2)}
    if last:
        far = (y - 1) ** 2 * at.batch["valid"][..., None]
        losses["lm"] = jnp.sum(far) / jnp.sum(at.batch["valid"])
    return Out(y, losses, {"norm": jnp.sum(y**2), "count": jnp.sum(y > 0, dtype=jnp.int32)})


def test_every_figure_of_the_report_has_a_gradient():
    """Objective, one loss of several and a metric together, token-weighted, by params and by the batch."""
    kinds = {name: functools.partial(weighted_stage, last=name == "last") for name in ("first", "last")}
    model = StagedModel(kinds, ("first", "last"), lambda batch: {"lm": jnp.sum(batch["valid"])})
    rng = np.random.default_rng(0)
    params = {
        "stages": rng.standard_normal((2, 4, 4), np.float32),
        "shared": {"in": np.eye(4, dtype=np.float32)},
    }
    valid = rng.integers(1, 4, (3, 4, 2)).astype(np.float32)
    x = rng.standard_normal((3, 4, 2, 4), np.float32)

    def total(loss):
        def function(params, x):
            objective, report = loss(params, {"x": x, "valid": valid})
            return objective**2 + jnp.sin(report.losses["lm"]) + jnp.cos(report.metrics["norm"] / 40)

        return quick(jax.grad(function, argnums=(0, 1)))

    def plain(params, x):
        """All microbatches and parts at once: weights make the mean of their losses that of all valid tokens."""
        y, balance, norm = x @ params["shared"]["in"], 0.0, 0.0
        for own in params["stages"]:
            y = y * jnp.cos(x[..., :1])
            y = y + jnp.tanh(y @ own)
            balance, norm = balance + jnp.mean(jnp.tanh(y) ** 2), norm + jnp.sum(y**2)
        lm = jnp.sum((y - 1) ** 2 * valid[..., None]) / jnp.sum(valid)
        return (balance + lm) ** 2 + jnp.sin(lm) + jnp.cos(norm / 40)

    pipeline = Pipeline(model, one_f_one_b(2, 3), make_mesh(2, 1, dp=2), input_grads=True)
    want = quick(jax.grad(plain, argnums=(0, 1)))(params, x)
    for loss in (pipeline.loss, reference_loss(model, num_parts=2)):
        assert_close(total(loss)(params, x), want)


def test_a_cotangent_of_the_report_alone():
    """Nothing of the objective, so the head has a gradient of zeros."""
    model, schedule = PipelineModel(models.embed, balanced, models.head_loss), one_f_one_b(2, 3)
    params, _ = models.init("mlp", 2)
    data = models.data(3)
    loss = pipeline_loss(model, schedule, make_mesh(2, 1), has_aux=True)
    got = quick(jax.grad(lambda p: loss(p, *data)[1]["seen"]))(params)
    plain = plain_loss(model, has_aux=True)
    want = quick(jax.grad(lambda p: plain(p, *data)[1]["seen"]))(params)
    assert not np.any(want["head"]) and not np.any(got["head"])
    got.pop("head"), want.pop("head")
    assert_close(got, want)


def product_stage(own, shared, x, at):
    y = at.batch.astype(jnp.float32) * own.astype(jnp.float32)
    return Out(y, {"mean": jnp.mean(y)}, {"sum": jnp.sum(y)})


def product_grad(term, dtype, value=2.0**-10, **options):
    """The gradient of a term of the loss by the one weight, 1, of two microbatches of four equal values."""
    model, params = (
        StagedModel({"only": product_stage}, ("only",)),
        {"stages": jnp.ones(1, dtype), "shared": {}},
    )
    pipeline = Pipeline(model, one_f_one_b(1, 2), make_mesh(1), **options)
    batch = jnp.full((2, 4), value, dtype)
    return quick(jax.grad(lambda p: term(*pipeline.loss(p, batch))))(params)["stages"].astype(jnp.float32)


def test_a_loss_scale_that_float16_has_not():
    """In the parameters' dtype 2^16 is infinite."""
    np.testing.assert_array_equal(product_grad(lambda loss, _: loss * 2.0**16, jnp.float16), [2.0**6])
    both = product_grad(lambda loss, report: (loss - report.losses["mean"]) * 2.0**16, jnp.float16)
    np.testing.assert_array_equal(both, [0.0])


def test_cotangents_of_the_report_are_not_cast_to_the_compute_dtype():
    """In float16 2^-26 is zero; times 2^20, in float32, it is not."""
    for name, terms in (("losses", 1), ("metrics", 8)):

        def term(loss, report, name=name):
            return next(iter(getattr(report, name).values())) * 2.0**-26

        got = product_grad(term, jnp.float32, 2.0**20, compute_dtype=jnp.float16)
        np.testing.assert_array_equal(got, [terms * 2.0**-6])


def test_places_without_a_leaf_stay_without_one():
    """None in params, such as the bias of a layer that has none, and in a batch."""

    def stage(own, shared, x, at):
        y = at.batch["x"] * own["w"]
        return Out(y, {"mean": jnp.mean(y)})

    pipeline = Pipeline(
        StagedModel({"only": stage}, ("only",)), one_f_one_b(1, 2), make_mesh(1), input_grads=True
    )
    params = {"stages": {"w": jnp.full(1, 3.0), "b": None}, "shared": None}
    of = quick(jax.grad(lambda p, b: pipeline.loss(p, b)[0], argnums=(0, 1)))
    grads, by_batch = of(params, {"x": jnp.full((2, 4), 2.0), "mask": None})
    assert grads == {"stages": {"w": jnp.full(1, 2.0), "b": None}, "shared": None}
    assert by_batch["mask"] is None
    np.testing.assert_array_equal(by_batch["x"], np.full((2, 4), 3 / 8, np.float32))
