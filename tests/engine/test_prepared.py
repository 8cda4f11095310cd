"""What stages make of parameters alone: gradients are the plain model's, and no more is led back than there is."""

import jax
import jax.numpy as jnp
import numpy as np

from dualpipe_jax import Out, Pipeline, StagedModel, make_mesh
from dualpipe_jax.schedule import dualpipe
from tests.engine.models import assert_close, quick
from tests.jaxprs import equations

WIDTH, RANK, HIDDEN, RANKS, MICROBATCHES, SIZE = 6, 2, 5, 2, 4, 3


def first(own, shared, x, at):
    return Out(
        at.batch["x"] @ (own["w"] + own["a"] @ own["b"]) + jnp.tanh(at.batch["x"] @ own["up"]) @ own["down"]
    )


def last(own, shared, x, at):
    y = x @ own["w"] @ (own["b"].T @ own["b"]) + jnp.tanh(x @ own["up"]) @ own["down"]
    return Out(y, losses={"loss": jnp.mean((y - at.batch["y"]) ** 2)})


def plain_loss(params, batch):
    def of_one(x, y):
        own = [
            jax.tree.map(lambda leaf, stage=stage: leaf[stage], params["stages"]) for stage in range(RANKS)
        ]
        at = type("At", (), {"batch": {"x": x, "y": y}})
        return last(own[1], {}, first(own[0], {}, None, at).x, at).losses["loss"]

    return jnp.mean(jax.vmap(of_one)(batch["x"], batch["y"]))


def given():
    rng = np.random.default_rng(0)
    shapes = {
        "w": (WIDTH, WIDTH),
        "a": (WIDTH, RANK),
        "b": (RANK, WIDTH),
        "up": (WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
    }
    own = {name: rng.standard_normal((RANKS, *shape), np.float32) / 2 for name, shape in shapes.items()}
    params = {"stages": own, "shared": {}}
    batch = {name: rng.standard_normal((MICROBATCHES, SIZE, WIDTH), np.float32) for name in "xy"}
    return params, batch


def built(**options):
    model = StagedModel({"first": first, "last": last}, ("first", "last"))
    return Pipeline(model, dualpipe(RANKS, MICROBATCHES), make_mesh(RANKS), **options)


def test_gradients_are_led_back_to_the_leaves_that_values_are_made_of_alone():
    (params, batch), pipeline = given(), built()
    (loss, _), grads = quick(lambda *args: pipeline.value_and_grad(*args))(params, batch)
    want, wanted = quick(jax.value_and_grad(plain_loss))(params, batch)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    assert_close(grads, wanted)
    traced = jax.make_jaxpr(pipeline.value_and_grad)(params, batch)
    zeros = [
        eqn.outvars[0].aval.shape
        for around, eqn in equations(traced.jaxpr)
        if eqn.primitive.name == "broadcast_in_dim" and not eqn.invars[0].aval.shape and "while" not in around
    ]
    more = zeros.count((WIDTH, RANK)) - zeros.count((WIDTH, HIDDEN))
    assert more == RANKS, "where the first kind leads back nothing, of each of a rank's stages"


def squares(pipeline, *arguments):
    """How many matrices of the width a rank holds that were made once."""
    return [leaf.shape for leaf in jax.tree.leaves(pipeline.sketch(*arguments).values)].count((WIDTH, WIDTH))


def test_kinds_share_places_of_values_that_both_have_gradients_or_have_none():
    """The last stage makes its matrix of b alone: where b is frozen, it has no gradient, and the first stage's has."""
    params, batch = given()
    assert squares(built(), params, batch) == RANKS, "one in each of a rank's stages"
    pipeline = built(frozen={"stages": dict.fromkeys(params["stages"], False) | {"b": True}})
    assert squares(pipeline, params, batch) == 2 * RANKS
    (loss, _), grads = quick(lambda *args: pipeline.value_and_grad(*args))(params, batch)
    want, wanted = quick(jax.value_and_grad(plain_loss))(params, batch)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for name in ("w", "a", "up", "down"):
        np.testing.assert_allclose(grads["stages"][name], wanted["stages"][name], rtol=2e-5, atol=1e-6)
    assert grads["stages"]["b"] is None
