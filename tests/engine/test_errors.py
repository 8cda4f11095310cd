"""Bad input: what was given, what is needed, what to do."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from dualpipe_jax import Pipeline, StagedModel, make_mesh, pipeline_value_and_grad, staged
from dualpipe_jax.schedule import Placement, Schedule, dualpipe, dualpipe_v, one_f_one_b
from tests.engine import models

PLAIN = models.MLP


def run(model=PLAIN, schedule=None, mesh=None, params=None, data=None, **options):
    schedule = schedule or dualpipe(4, 8)
    mesh = mesh or make_mesh(4, 2)
    if params is None:
        params, _ = models.init("mlp", schedule.placement.num_model_stages)
    return pipeline_value_and_grad(model, schedule, mesh, **options)(params, *(data or models.data(8)))


def run_staged(model=None, params=None, mesh=None, **options):
    given, batch = models.given("mlp", 4, 8)
    pipeline = Pipeline(model or staged(PLAIN, 4), dualpipe(4, 8), mesh or make_mesh(4, 2), **options)
    return pipeline.value_and_grad(given if params is None else params, batch)


def mesh_of(names, axis_type=AxisType.Auto):
    devices = np.array(jax.devices()[: 2 ** len(names)]).reshape((2,) * len(names))
    return Mesh(devices, names, axis_types=(axis_type,) * len(names))


def with_stages(**leaves):
    params, _ = models.init("mlp", 4)
    return params | {"stages": params["stages"] | leaves}


def of_stages(**specs):
    return {"stages": {"up": None, "bias": None, "down": None} | specs}


def of_ends(**specs):
    return {"shared": {"embed": None, "head": None} | specs}


def doubled(p, x):
    return jnp.concatenate([x, x], -1)


def refitted(kind):
    """Of a model's kinds one returns another dtype and another metric than the first."""
    model = staged(PLAIN, 4)

    def other(own, shared, x, at):
        out = model.kinds[kind](own, shared, x, at)
        return out._replace(x=out.x.astype(jnp.bfloat16), metrics={"m": jnp.zeros(3)})

    def counted(own, shared, x, at):
        return model.kinds["first"](own, shared, x, at)._replace(metrics={"m": jnp.zeros(2)})

    return StagedModel({**model.kinds, kind: other, "first": counted}, model.kind_of)


def with_ring(part):
    """A hop around ep in one of a model's functions."""

    def inner(p, x, *rest):
        shifted = jax.lax.ppermute(jax.tree.leaves(p)[0], "ep", [(0, 1), (1, 0)])
        return getattr(PLAIN, part)(p, x, *rest) + 0 * jnp.sum(jax.nn.relu(shifted))

    return PLAIN._replace(**{part: jax.jit(inner)})


def with_ring_backwards():
    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.ppermute(g, "ep", [(0, 1), (1, 0)]),))
    return PLAIN._replace(stage=lambda p, x: same(PLAIN.stage(p, x)))


LOPSIDED = Schedule("lopsided", Placement(((0, 1, 1),)), 8, ((), ()))
EXPLICIT = mesh_of(("pp", "ep"), AxisType.Explicit)
TWO_AXES = jax.make_mesh((4, 2), ("pp", "ep"), axis_types=(AxisType.Auto,) * 2)
RING = "stage of kind '.*' contains a ppermute.*use all_to_all"
STORED = {
    "of this mesh only 'ep', 'pp' may be named, not 'tp'": of_ends(head=P("tp")),
    r"\['up'\] is .*only 'ep' may be named": of_stages(up=P("pp")),
    "fewer than its spec": of_stages(up=P("ep"), bias=P(None, "ep")),
    "11, which its spec .* not divisible by the 4": of_ends(embed=P("pp")),
}
USED = {
    r"param_specs\['stages'\]\['up'\].*'pp'": of_stages(up=P("pp")),
    r"param_specs\['stages'\]\['up'\] is 'ep': give a PartitionSpec, such as P\('ep'\)": of_stages(up="ep"),
    r"\['head'\] has shape.*11.*not divisible by the 2 devices": {"head": P(None, "ep")},
    "param_specs.*prefix": {"stages": {"up": None}},
    "param_specs.*stage": {"stage": None},
}
MESHES = {
    r"mesh has the axes \('pp',\), but 'ep' is missing": mesh_of(("pp",)),
    "'pp' and 'ep' is missing.*make_mesh": mesh_of(("x", "y")),
    r"'pp' and 'ep' must be AxisType.Auto: jax.make_mesh\(.*axis_types": EXPLICIT,
    "dualpipe is a schedule for 4 ranks, but the mesh has 2 on its 'pp' axis": make_mesh(2, 2),
}
DATA = {
    r"'inputs'\] has shape \(6, 4, 3\), so 6 microbatches, but.*for 8: reshape": models.data(6),
    "'targets'. has shape.*size 3 is not divisible by the 2 devices": models.data(8, size=3),
}
VALUES = {
    **{message: partial(run, mesh=mesh) for message, mesh in MESHES.items()},
    **{message: partial(run, data=data) for message, data in DATA.items()},
    **{message: partial(run, param_specs=specs) for message, specs in USED.items()},
    **{message: partial(run_staged, mesh=TWO_AXES, storage_specs=specs) for message, specs in STORED.items()},
    "each dim must be stored over the axes that it is used over, first": partial(
        run_staged, param_specs=of_stages(up=P("ep")), storage_specs=of_stages(up=P(None, "ep"))
    ),
    "divergence='cond' .*'loop', 'switch', 'none'": partial(run_staged, divergence="cond"),
    r"params\['stages'\]\['bias'\] has shape \(3, 16\).*dualpipe has 4": partial(
        run, params=with_stages(bias=np.ones((3, 16), np.float32))
    ),
    r"\['up'\] has shape \(4, 8, 16\); its leading dim.*dualpipe_v has 8": partial(
        run, schedule=dualpipe_v(4, 8), params=with_stages()
    ),
    r"keys \['embed', 'stages', 'head'\], got \['stages'\]": partial(run, params={"stages": np.ones(4)}),
    r"keys \['shared', 'stages'\], got \['stages'\]": partial(run_staged, params={"stages": np.ones(4)}),
    "model has 3 stages, but dualpipe on 4 ranks has 4 in a pipe": partial(run_staged, staged(PLAIN, 3)),
    r"kind_of names \['a', 'c'\], but the kinds are \['a', 'b'\]": partial(
        StagedModel, {"a": len, "b": len}, ("a", "c")
    ),
    r"alike says 'b': 'c'; both must be among the kinds, \['a', 'b'\]": partial(
        StagedModel, {"a": len, "b": len}, ("a", "b"), alike={"b": "c"}
    ),
    r"alike says 'c': 'b'; .* be like no other itself": partial(
        StagedModel, dict.fromkeys("abc", len), ("a", "b", "c"), alike={"b": "a", "c": "b"}
    ),
    r"ranks hold \[1, 2\] stages; need equal numbers": partial(run, schedule=LOPSIDED, mesh=make_mesh(2, 2)),
    f"backward of a {RING}": partial(run, with_ring_backwards()),
}
TYPES = {
    "'middle' must return what the next stage takes: the first": partial(run, PLAIN._replace(stage=doubled)),
    "float32.*bfloat16.* must be equal": partial(run_staged, refitted("middle")),
    r"'m'.*float32.2. in .*'first'.*float32.3.": partial(run_staged, refitted("last")),
    "has_aux=True needs a stage that returns": partial(run, has_aux=True),
    "pass has_aux=True": partial(run, PLAIN._replace(stage=models.mlp)),
    "each loss as a floating scalar, the mean over its examples; .*float32.2, 3": partial(
        run, PLAIN._replace(head_loss=lambda p, x, t: jnp.mean(x @ p, -1))
    ),
}


@pytest.mark.parametrize("message", VALUES)
def test_values_that_do_not_fit(message):
    with pytest.raises(ValueError, match=message):
        VALUES[message]()


@pytest.mark.parametrize("message", TYPES)
def test_functions_that_do_not_fit(message):
    with pytest.raises(TypeError, match=message):
        TYPES[message]()


@pytest.mark.parametrize("part", ["embed", "stage", "head_loss"])
def test_ppermute_inside(part):
    with pytest.raises(ValueError, match=f"^a {RING}"):
        run(with_ring(part))


def test_all_failures_at_once():
    with pytest.raises(ValueError) as error:
        run(params=models.init("mlp", 3)[0], data=models.data(6))
    assert len(re.findall("^- ", str(error.value), re.MULTILINE)) == 5


def test_one_rank_needs_no_neighbours_and_a_stage_may_take_another_way_to_what_it_returns():
    def stage(p, x):
        return jnp.concatenate([x, x[..., :1]], -1)[..., 1:].astype(x.dtype)

    loss, _ = run(PLAIN._replace(stage=stage), schedule=one_f_one_b(1, 8), mesh=make_mesh(1, 2))
    assert np.isfinite(loss)
