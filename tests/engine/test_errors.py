"""Bad input: what was given, what is needed, what to do."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from dualpipe_jax import Pipeline, PipelineModel, StagedModel, make_mesh, pipeline_value_and_grad, staged
from dualpipe_jax.schedule import Placement, Schedule, dualpipe, dualpipe_v, one_f_one_b
from tests.engine import models

PLAIN = PipelineModel(models.embed, lambda p, x: models.mlp(p, x)[0], models.head_loss)


def run(model=PLAIN, schedule=None, mesh=None, params=None, data=None, **options):
    schedule = schedule or dualpipe(4, 8)
    mesh = mesh or make_mesh(4, 2)
    if params is None:
        params, _ = models.init("mlp", schedule.placement.num_model_stages)
    return pipeline_value_and_grad(model, schedule, mesh, **options)(params, *(data or models.data(8)))


def test_mesh_without_an_axis():
    mesh = Mesh(np.array(jax.devices()[:4]), ("pp",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match=re.escape("mesh has the axes ('pp',), but 'ep' is missing")):
        run(mesh=mesh)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match="'pp' and 'ep' is missing.*make_mesh"):
        run(mesh=mesh)


def test_ranks_that_part_ways_in_a_way_that_there_is_not():
    with pytest.raises(ValueError, match=r"divergence='cond': there are 'loop', 'switch', 'none'"):
        Pipeline(staged(PLAIN, 4), dualpipe(4, 8), make_mesh(4, 2), divergence="cond")


def test_mesh_of_explicit_axes():
    mesh = jax.make_mesh((4, 2), ("pp", "ep"), axis_types=(AxisType.Explicit,) * 2)
    with pytest.raises(ValueError, match=r"'pp' and 'ep' must be AxisType.Auto: jax.make_mesh\(.*axis_types"):
        run(mesh=mesh)


def test_ranks_of_the_schedule_against_the_mesh():
    with pytest.raises(
        ValueError, match="dualpipe is a schedule for 4 ranks, but the mesh has 2 on its 'pp' axis"
    ):
        run(mesh=make_mesh(2, 2))


def test_microbatch_count():
    with pytest.raises(
        ValueError, match=r"'inputs'\] has shape \(6, 4, 3\), so 6 microbatches, but.*for 8: reshape"
    ):
        run(data=models.data(6))


def test_microbatch_size():
    with pytest.raises(
        ValueError, match="'targets'. has shape.*microbatch size 3 is not divisible by the 2 devices"
    ):
        run(data=models.data(8, size=3))


def test_stage_leaf_with_a_wrong_leading_dim():
    params, _ = models.init("mlp", 4)
    params["stages"]["bias"] = params["stages"]["bias"][:3]
    with pytest.raises(ValueError, match=r"params\['stages'\]\['bias'\] has shape \(3, 16\).*dualpipe has 4"):
        run(params=params)
    with pytest.raises(
        ValueError, match=r"\['up'\] has shape \(4, 8, 16\); its leading dim.*dualpipe_v has 8"
    ):
        run(schedule=dualpipe_v(4, 8), params=models.init("mlp", 4)[0])


def test_all_failures_at_once():
    params, _ = models.init("mlp", 3)
    with pytest.raises(ValueError) as error:
        run(params=params, data=models.data(6))
    assert len(re.findall("^- ", str(error.value), re.MULTILINE)) == 5


def test_params_with_other_keys():
    with pytest.raises(ValueError, match=r"keys \['embed', 'stages', 'head'\], got \['stages'\]"):
        run(params={"stages": jnp.ones(4)})
    model = staged(PLAIN, 4)
    with pytest.raises(ValueError, match=r"keys \['shared', 'stages'\], got \['stages'\]"):
        Pipeline(model, dualpipe(4, 8), make_mesh(4, 2)).value_and_grad({"stages": jnp.ones(4)}, {})


def test_as_many_stages_as_the_schedule_has():
    with pytest.raises(ValueError, match="model has 3 stages, but dualpipe on 4 ranks has 4 in a pipe"):
        Pipeline(staged(PLAIN, 3), dualpipe(4, 8), make_mesh(4, 2))


def test_kinds_that_there_are_not():
    with pytest.raises(ValueError, match=r"kind_of names \['a', 'c'\], but the kinds are \['a', 'b'\]"):
        StagedModel({"a": None, "b": None}, ("a", "c"))


def test_stage_that_changes_shape_or_dtype():
    wide = PLAIN._replace(stage=lambda p, x: jnp.concatenate([x, x], -1))
    with pytest.raises(
        TypeError, match=re.escape("'middle' must return what the next stage takes: the first stage")
    ):
        run(wide)
    low = PLAIN._replace(stage=lambda p, x: jnp.concatenate([x, x[..., :1]], -1)[..., 1:].astype(x.dtype))
    assert np.isfinite(run(low)[0])


@pytest.mark.parametrize("kind", ["middle", "last"])
def test_kinds_that_do_not_fit_together(kind):
    model = staged(PLAIN, 4)

    def other(own, shared, x, at):
        out = model.kinds[kind](own, shared, x, at)
        return out._replace(x=out.x.astype(jnp.bfloat16), metrics={"m": jnp.zeros(3)})

    def counted(own, shared, x, at):
        return model.kinds["first"](own, shared, x, at)._replace(metrics={"m": jnp.zeros(2)})

    changed = StagedModel({**model.kinds, kind: other, "first": counted}, model.kind_of)
    expected = (
        "float32.*bfloat16.* must be equal"
        if kind == "middle"
        else "'m'.*float32.2. in .*'first'.*float32.3."
    )
    with pytest.raises(TypeError, match=expected):
        step(changed)


def step(model):
    params, _ = models.init("mlp", 4)
    inputs, targets = models.data(8)
    given = {"stages": params["stages"], "shared": {"embed": params["embed"], "head": params["head"]}}
    return Pipeline(model, dualpipe(4, 8), make_mesh(4, 2)).value_and_grad(
        given, {"inputs": inputs, "targets": targets}
    )


def test_aux_announced_and_not_given_and_the_reverse():
    with pytest.raises(TypeError, match="has_aux=True needs a stage that returns"):
        run(has_aux=True)
    with pytest.raises(TypeError, match="pass has_aux=True"):
        run(PLAIN._replace(stage=models.mlp))


def test_loss_that_is_no_scalar():
    with pytest.raises(
        TypeError, match="each loss as a floating scalar, the mean over its examples; .*float32.2, 3"
    ):
        run(PLAIN._replace(head_loss=lambda p, x, t: jnp.mean(x @ p, -1)))


@pytest.mark.parametrize("part", ["embed", "stage", "head_loss"])
def test_ppermute_inside(part):
    def with_ring(function):
        def inner(p, x, *rest):
            shifted = jax.lax.ppermute(jax.tree.leaves(p)[0], "ep", [(0, 1), (1, 0)])
            y = function(p, x, *rest)
            return y + 0 * jnp.sum(jax.nn.relu(shifted))

        return jax.jit(inner)

    model = PLAIN._replace(**{part: with_ring(getattr(PLAIN, part))})
    with pytest.raises(ValueError, match="^a stage of kind '.*' contains a ppermute.*use all_to_all"):
        run(model)


def test_ppermute_in_a_backward_alone():
    @jax.custom_vjp
    def same(x):
        return x

    def backward(_, g):
        return (jax.lax.ppermute(g, "ep", [(0, 1), (1, 0)]),)

    same.defvjp(lambda x: (x, None), backward)
    model = PLAIN._replace(stage=lambda p, x: same(PLAIN.stage(p, x)))
    with pytest.raises(
        ValueError, match="backward of a stage of kind '.*' contains a ppermute.*use all_to_all"
    ):
        run(model)


def test_ranks_with_unequal_numbers_of_stages():
    placement = Placement(((0, 1, 1),))
    lopsided = Schedule("lopsided", placement, 8, ((), ()))
    with pytest.raises(ValueError, match=r"ranks hold \[1, 2\] stages; need equal numbers"):
        run(schedule=lopsided, mesh=make_mesh(2, 2))


def test_specs_that_do_not_fit():
    with pytest.raises(ValueError, match=r"param_specs\['stages'\]\['up'\].*'pp'"):
        run(param_specs={"stages": {"up": PartitionSpec("pp"), "bias": None, "down": None}})
    with pytest.raises(ValueError, match=r"\['head'\] has shape.*11.*not divisible by the 2 devices"):
        run(param_specs={"head": PartitionSpec(None, "ep")})
    with pytest.raises(ValueError, match="param_specs.*prefix"):
        run(param_specs={"stages": {"up": None}})
    with pytest.raises(ValueError, match="param_specs.*stage"):
        run(param_specs={"stage": None})


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (
            {"shared": {"embed": None, "head": PartitionSpec("tp")}},
            r"of this mesh only 'ep', 'pp' may be named, not 'tp'",
        ),
        (
            {"stages": {"up": PartitionSpec("pp"), "bias": None, "down": None}},
            r"\['up'\] is .*only 'ep' may be named",
        ),
        (
            {"stages": {"up": PartitionSpec("ep"), "bias": PartitionSpec(None, "ep"), "down": None}},
            "fewer than its spec",
        ),
        (
            {"shared": {"embed": PartitionSpec("pp"), "head": None}},
            "11, which its spec .* not divisible by the 4",
        ),
    ],
)
def test_storage_that_does_not_fit(stored, message):
    params, _ = models.init("mlp", 4)
    given = {"stages": params["stages"], "shared": {"embed": params["embed"], "head": params["head"]}}
    inputs, targets = models.data(8)
    mesh = jax.make_mesh((4, 2), ("pp", "ep"), axis_types=(AxisType.Auto,) * 2)
    pipeline = Pipeline(staged(PLAIN, 4), dualpipe(4, 8), mesh, storage_specs=stored)
    with pytest.raises(ValueError, match=message):
        pipeline.value_and_grad(given, {"inputs": inputs, "targets": targets})


def test_storage_that_contradicts_the_use():
    params, _ = models.init("mlp", 4)
    given = {"stages": params["stages"], "shared": {"embed": params["embed"], "head": params["head"]}}
    specs = {"stages": {"up": PartitionSpec("ep"), "bias": None, "down": None}}
    stored = {"stages": {"up": PartitionSpec(None, "ep"), "bias": None, "down": None}}
    pipeline = Pipeline(
        staged(PLAIN, 4), dualpipe(4, 8), make_mesh(4, 2), param_specs=specs, storage_specs=stored
    )
    inputs, targets = models.data(8)
    with pytest.raises(ValueError, match="each dim must be stored over the axes that it is used over, first"):
        pipeline.value_and_grad(given, {"inputs": inputs, "targets": targets})


def test_one_rank_needs_no_neighbours():
    loss, _ = run(schedule=one_f_one_b(1, 8), mesh=make_mesh(1, 2))
    assert np.isfinite(loss)
