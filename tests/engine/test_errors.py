"""Bad input: what was given, what is needed, what to do."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from dualpipe_jax import PipelineModel, make_mesh, pipeline_value_and_grad
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


def test_mesh_with_an_axis_too_many():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 1, 2), ("pp", "ep", "dp"), axis_types=(AxisType.Auto,) * 3)
    with pytest.raises(ValueError, match=r"only 'pp' and 'ep' are supported, not \['dp'\]"):
        run(mesh=mesh)


def test_ranks_of_the_schedule_against_the_mesh():
    with pytest.raises(
        ValueError, match="dualpipe is a schedule for 4 ranks, but the mesh has 2 on its 'pp' axis"
    ):
        run(mesh=make_mesh(2, 2))


def test_microbatch_count():
    with pytest.raises(
        ValueError, match=r"inputs has shape \(6, 4, 3\), so 6 microbatches, but.*for 8: reshape"
    ):
        run(data=models.data(6))


def test_microbatch_size():
    with pytest.raises(
        ValueError, match="targets has shape.*microbatch size 3 is not divisible by the 2 devices"
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


def test_stage_that_changes_shape_or_dtype():
    wide = PLAIN._replace(stage=lambda p, x: jnp.concatenate([x, x], -1))
    with pytest.raises(TypeError, match=re.escape("x float32[2, 3, 8] and returned float32[2, 3, 16]")):
        run(wide)
    low = PLAIN._replace(stage=lambda p, x: x.astype(jnp.bfloat16))
    with pytest.raises(
        TypeError, match=re.escape("returned bfloat16[2, 3, 8]; shapes and dtypes must be equal")
    ):
        run(low)


def test_aux_announced_and_not_given_and_the_reverse():
    with pytest.raises(TypeError, match="has_aux=True needs a stage that returns"):
        run(has_aux=True)
    with pytest.raises(TypeError, match="pass has_aux=True"):
        run(PLAIN._replace(stage=models.mlp))


def test_loss_that_is_no_scalar():
    with pytest.raises(TypeError, match="head_loss must return a scalar"):
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
    with pytest.raises(ValueError, match=f"^{part} contains a ppermute.*use all_to_all"):
        run(model)


def test_ranks_with_unequal_numbers_of_stages():
    placement = Placement(((0, 1, 1),))
    lopsided = Schedule("lopsided", placement, 8, ((), ()))
    with pytest.raises(ValueError, match=r"ranks hold \[1, 2\] stages; need equal numbers"):
        run(schedule=lopsided, mesh=make_mesh(2, 2))


def test_specs_that_do_not_fit():
    with pytest.raises(ValueError, match=r"param_specs\['stages'\]\['up'\].*'pp'"):
        run(param_specs={"stages": {"up": PartitionSpec("pp"), "bias": None, "down": None}})
    with pytest.raises(ValueError, match=r"params\['head'\] has shape.*11.*not divisible by the 2 devices"):
        run(param_specs={"head": PartitionSpec(None, "ep")})
    with pytest.raises(ValueError, match="param_specs.*prefix"):
        run(param_specs={"stages": {"up": None}})
    with pytest.raises(ValueError, match="param_specs.*stage"):
        run(param_specs={"stage": None})


def test_one_rank_needs_no_neighbours():
    loss, _ = run(schedule=one_f_one_b(1, 8), mesh=make_mesh(1, 2))
    assert np.isfinite(loss)
