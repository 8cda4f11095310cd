"""Stages that stack their layers in one leaf and read them one by one: as good as leaves of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax import Out, Pipeline, StagedModel, make_mesh
from dualpipe_jax.schedule import dualpipe, dualpipe_v, zb_h1
from tests.engine.models import assert_close, quick

WIDTH, SIZE, LAYERS, MICROBATCHES = 8, 2, 3, 8


def layer(own, at, h):
    return h + jnp.tanh(h @ own["w"][at] + own["b"][at]) @ own["v"][at]


def first(own, shared, x, at):
    """Leaves a layer out, whose gradient is zero here."""
    x = at.batch["x"] * shared["scale"]
    return Out(layer(own, 2, layer(own, 0, x)))


def middle(own, shared, x, at):
    for number in range(LAYERS):
        x = layer(own, number, x)
    return Out(x)


def last(own, shared, x, at):
    """Reads one leaf whole, too."""
    x = layer(own, 1, x) @ own["w"].sum(0) * jnp.tanh(shared["tables"][0]) + shared["tables"][1]
    return Out(x, losses={"loss": jnp.mean((x - at.batch["y"]) ** 2)})


def plain_loss(params, batch, num_stages):
    def of_one(x, y):
        x = x * params["shared"]["scale"]
        for stage in range(num_stages):
            own = jax.tree.map(lambda leaf, stage=stage: leaf[stage], params["stages"])
            here = (0, 2) if stage == 0 else (1,) if stage == num_stages - 1 else range(LAYERS)
            for at in here:
                x = layer(own, at, x)
        tables = params["shared"]["tables"]
        x = x @ params["stages"]["w"][-1].sum(0) * jnp.tanh(tables[0]) + tables[1]
        return jnp.mean((x - y) ** 2)

    return jnp.mean(jax.vmap(of_one)(batch["x"], batch["y"]))


@pytest.mark.parametrize(
    ("make", "ranks", "frozen"), [(dualpipe, 4, False), (dualpipe_v, 2, False), (zb_h1, 4, True)]
)
def test_gradients_are_the_plain_models_and_no_leaf_is_copied_in_a_tick(make, ranks, frozen):
    rng = np.random.default_rng(0)
    schedule, mesh = make(ranks, MICROBATCHES), make_mesh(ranks)
    stages = schedule.placement.num_model_stages

    def normal(*shape):
        return rng.standard_normal(shape, np.float32) / 4

    own = {"w": normal(stages, LAYERS, WIDTH, WIDTH), "b": normal(stages, LAYERS, WIDTH)}
    own |= {"v": normal(stages, LAYERS, WIDTH, WIDTH)}
    params = {"stages": own, "shared": {"scale": normal(WIDTH), "tables": normal(2, WIDTH)}}
    batch = {name: normal(MICROBATCHES, SIZE, WIDTH) for name in "xy"}
    model = StagedModel(
        {"first": first, "middle": middle, "last": last}, ("first", *("middle",) * (stages - 2), "last")
    )
    pipeline = Pipeline(model, schedule, mesh, frozen={"stages": {"w": None, "b": None, "v": frozen}})
    (loss, _), grads = pipeline.value_and_grad(params, batch)
    want, wanted = quick(jax.value_and_grad(plain_loss), static_argnums=2)(params, batch, stages)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    if frozen:
        assert grads["stages"].pop("v") is None and wanted["stages"].pop("v") is not None
    assert_close(grads, wanted)
    sums = [total.shape for total in pipeline.state(params, batch).own.values()]
    on = schedule.placement.stages_on
    whole = {
        here.index(stage)
        for here in on
        for stage in here
        if schedule.placement.model_stage(stage) == stages - 1
    }
    assert sums.count((LAYERS, WIDTH, WIDTH)) == len(whole), "of w the last kind needs the whole"
    assert (LAYERS, WIDTH) not in sums and (2, WIDTH) not in sums
    assert sums.count((WIDTH,)) == LAYERS * len(on[0]) + 2 * len(whole), "of b, and of the tables"
    values = jax.tree.leaves(pipeline.sketch(params, batch).values)
    assert [value.shape for value in values].count((WIDTH, WIDTH)) == 2 * LAYERS * len(on[0]), "w and v"
