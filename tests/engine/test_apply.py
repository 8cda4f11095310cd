"""Forward only, and where parameters are put."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dualpipe_jax import Out, Pipeline, PlacedStages, StagedModel, make_mesh
from dualpipe_jax.contract import staged
from dualpipe_jax.schedule import dualpipe, dualpipe_v, one_f_one_b
from tests.engine import models
from tests.engine.models import assert_close, quick

SPECS = {"stages": {"up": PartitionSpec(None, "ep"), "bias": PartitionSpec("ep"), "down": None}}
STORED = {"up": PartitionSpec("dp", "ep"), "bias": PartitionSpec("ep"), "down": PartitionSpec("dp")}
STORED_ENDS = {"embed": PartitionSpec(None, ("pp", "dp")), "head": None}


def setup(make, num_microbatches=4, *, ep=1, dp=1, **options):
    schedule = make(2, num_microbatches)
    stages = schedule.placement.num_model_stages
    pipeline = Pipeline(staged(models.MLP, stages), schedule, make_mesh(2, ep, dp=dp), **options)
    return pipeline, *models.given("mlp", stages, num_microbatches)


@jax.jit
def plain(params, batch):
    """Outputs of the last stage, and the loss."""

    def one(inputs, targets):
        x = params["shared"]["embed"][inputs]
        for stage in range(params["stages"]["up"].shape[0]):
            x = models.MLP.stage(jax.tree.map(lambda leaf, stage=stage: leaf[stage], params["stages"]), x)
        return x, models.head_loss(params["shared"]["head"], x, targets)

    outputs, losses = jax.vmap(one)(batch["inputs"], batch["targets"])
    return outputs, losses.mean()


# On which rank the last stage stands for each half of the microbatches.
LAST = {dualpipe: (1, 0), one_f_one_b: (1, 1), dualpipe_v: (0, 0)}


@pytest.mark.thin(2)
@pytest.mark.parametrize("make", LAST, ids=lambda make: make.__name__)
def test_outputs_where_they_are_asked_for(make):
    pipeline, params, batch = setup(make, ep=2)
    outputs, loss = plain(params, batch)
    everywhere = quick(lambda p, b: pipeline.apply(p, b, outputs="everywhere"))(params, batch)
    np.testing.assert_allclose(everywhere.objective, loss, rtol=1e-6)
    np.testing.assert_allclose(everywhere.outputs, outputs, rtol=1e-5, atol=1e-6)
    there = quick(lambda p, b: pipeline.apply(p, b, outputs="last_rank"))(params, batch)
    assert there.outputs.shape == (2, *outputs.shape)
    assert there.outputs.sharding.spec[0] == "pp", "sent nowhere"
    for half, rank in zip((slice(0, 2), slice(2, 4)), LAST[make], strict=True):
        np.testing.assert_allclose(there.outputs[rank, half], outputs[half], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", LAST, ids=lambda make: make.__name__)
def test_outputs_have_the_dtypes_of_the_last_stage(make):
    """Truths are no counts of them, and keys are keys, of their own kind."""

    def middle(own, shared, x, at):
        return Out(at.batch if x is None else x)

    def end(own, shared, x, at):
        keys = jax.random.split(jax.random.key(3, impl="rbg"), x.shape)
        return Out({"large": x > 0.5, "keys": keys, "byte": jnp.full(x.shape, 200, jnp.uint8)})

    schedule = make(2, 4)
    last = schedule.placement.num_model_stages - 1
    model = StagedModel({"middle": middle, "end": end}, ("middle",) * last + ("end",))
    batch = np.random.default_rng(0).uniform(size=(4, 6)).astype(np.float32)
    params = {"stages": jnp.ones(last + 1), "shared": {}}
    pipeline = Pipeline(model, schedule, make_mesh(2))
    keys = jax.random.key_data(jax.random.split(jax.random.key(3, impl="rbg"), 6))
    for where in ("everywhere", "last_rank"):
        outputs = quick(lambda p, b, where=where: pipeline.apply(p, b, outputs=where))(params, batch).outputs
        assert outputs["large"].dtype == bool and outputs["byte"].dtype == jnp.uint8
        assert outputs["keys"].dtype == jax.random.key(0, impl="rbg").dtype
        ranks = LAST[make] if where == "last_rank" else (..., ...)
        for half, rank in zip((slice(0, 2), slice(2, 4)), ranks, strict=True):
            made = jax.tree.map(lambda leaf, rank=rank: leaf[rank], outputs)
            np.testing.assert_array_equal(made["large"][half], batch[half] > 0.5)
            np.testing.assert_array_equal(made["byte"][half], np.full((2, 6), 200))
            np.testing.assert_array_equal(jax.random.key_data(made["keys"])[half], np.stack([keys, keys]))


def test_each_stage_microbatch_and_part_has_a_key_of_its_own():
    """The plain model's keys, with which others compare, are made by the same function."""

    def stage(own, shared, x, at):
        return Out((at.batch if x is None else x).at[:, at.stage].set(jax.random.uniform(at.key)))

    model, params = StagedModel({"all": stage}, ("all", "all")), {"stages": jnp.ones(2), "shared": {}}
    pipeline = Pipeline(model, dualpipe(2, 4), make_mesh(2, 2))
    apply = quick(lambda *given: pipeline.apply(*given, outputs="everywhere"))
    drawn = apply(params, jnp.zeros((4, 2, 2)), jax.random.key(0)).outputs
    assert len(np.unique(drawn)) == 4 * 2 * 2


def test_without_targets_there_is_no_loss():
    pipeline, params, batch = setup(dualpipe)
    outputs, _ = plain(params, batch)
    without_outputs = jax.eval_shape(pipeline.apply, params, batch)
    assert without_outputs.outputs is None and without_outputs.report.losses
    bare = {"inputs": batch["inputs"]}
    made = quick(lambda p, b: pipeline.apply(p, b, outputs="everywhere"))(params, bare)
    assert not made.report.losses and made.objective == 0
    np.testing.assert_allclose(made.outputs, outputs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [dualpipe, dualpipe_v], ids=lambda make: make.__name__)
def test_what_is_placed_lies_as_it_is_stored_and_comes_back(make):
    stored = {"stages": STORED, "shared": STORED_ENDS}
    pipeline, params, _ = setup(make, dp=2, ep=2, param_specs=SPECS, storage_specs=stored)
    placed = pipeline.place(params)
    assert isinstance(placed["stages"], PlacedStages)
    jax.tree.map(np.testing.assert_array_equal, pipeline.unplace(placed), params)
    ranks = [[0, 1], [3, 2]][: len(placed["stages"].local)]
    mesh = pipeline.mesh
    for stages, local in zip(ranks, placed["stages"].local, strict=True):
        for name, leaf in local.items():
            assert leaf.sharding.spec == PartitionSpec("pp", *STORED[name]), name
            for shard in leaf.addressable_shards:
                where = dict(zip(mesh.axis_names, np.argwhere(mesh.devices == shard.device)[0], strict=True))
                whole = np.asarray(params["stages"][name][stages[where["pp"]]])
                np.testing.assert_array_equal(shard.data[0], whole[shard.index[1:]])
    assert placed["shared"]["embed"].sharding.spec == STORED_ENDS["embed"]
    shardings = pipeline.shardings(jax.eval_shape(lambda: params))
    assert jax.tree.map(lambda leaf: leaf.sharding, placed) == shardings


def test_parameters_are_made_where_they_belong():
    """``jax.jit(init, out_shardings=...)``; a step on them gives gradients that lie alike."""
    pipeline, params, batch = setup(dualpipe_v)
    placed = pipeline.place(params)

    def init():
        return pipeline.placed(setup(dualpipe_v)[1])

    made = jax.jit(init, out_shardings=pipeline.shardings(params))()
    assert jax.tree.map(lambda a: a.sharding, made) == jax.tree.map(lambda a: a.sharding, placed)
    _, grads = quick(pipeline.value_and_grad)(made, batch)
    for got, leaf in zip(jax.tree.leaves(grads), jax.tree.leaves(made), strict=True):
        assert got.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
    want = jax.jit(jax.grad(lambda p: plain(p, batch)[1]))(params)
    assert_close(pipeline.unplace(grads), want, 1e-5)
