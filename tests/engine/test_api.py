"""The engine's other entrances: placed stages, jax.grad, forward only, mixed precision, finding NaNs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dualpipe_jax import (
    PipelineModel,
    PlacedStages,
    make_mesh,
    pipeline_apply,
    pipeline_loss,
    pipeline_value_and_grad,
    place_stages,
    sequential_loss,
    sequential_value_and_grad,
    unplace_stages,
)
from dualpipe_jax.schedule import dualpipe, dualpipe_v, one_f_one_b, zb_h1
from tests.engine import models
from tests.engine.test_gradients import assert_same, oracle

MAKES = pytest.mark.parametrize("make", [dualpipe, dualpipe_v, zb_h1], ids=lambda make: make.__name__)


def setup(make, num_ranks=4, num_ep=2, num_microbatches=8, kind="moe"):
    schedule = make(num_ranks, num_microbatches)
    params, specs = models.init(kind, schedule.placement.num_model_stages)
    return schedule, make_mesh(num_ranks, num_ep), params, specs, models.data(num_microbatches)


@pytest.mark.thin(3)
@MAKES
def test_placed_stages_stay_on_their_ranks(make):
    schedule, mesh, params, specs, data = setup(make)
    placed = params | {"stages": place_stages(params["stages"], schedule, mesh, specs["stages"])}
    step = pipeline_value_and_grad(models.model("moe"), schedule, mesh, param_specs=specs, has_aux=True)
    value, grads = step(placed, *data)
    assert isinstance(grads["stages"], PlacedStages)
    for stage, given in zip(grads["stages"].local, placed["stages"].local, strict=True):
        assert stage["w1"].sharding.is_equivalent_to(given["w1"].sharding, stage["w1"].ndim)
    floats = jax.tree.map(lambda g: g if g.dtype != jax.dtypes.float0 else np.zeros(g.shape), grads["stages"])
    back = unplace_stages(floats, schedule)
    expected = oracle("moe", schedule.placement.num_model_stages, 8)
    back = {k: expected[1]["stages"][k] if back[k].dtype == np.float64 else back[k] for k in back}
    integer = [k for k, g in expected[1]["stages"].items() if g.dtype == jax.dtypes.float0]
    assert_same((value, grads | {"stages": back | {k: expected[1]["stages"][k] for k in integer}}), expected)


@MAKES
def test_placing_is_undone_by_unplacing(make):
    schedule, mesh, params, specs, _ = setup(make)
    placed = place_stages(params["stages"], schedule, mesh, specs["stages"])
    jax.tree.map(np.testing.assert_array_equal, unplace_stages(placed, schedule), params["stages"])


def test_no_resharding_of_placed_stages_but_the_mirror():
    """DualPipe on placed stages: nothing gathers parameters; the one exchange is the mirrored copy's."""
    schedule, mesh, params, specs, data = setup(dualpipe)
    placed = params | {"stages": place_stages(params["stages"], schedule, mesh, specs["stages"])}
    step = pipeline_value_and_grad(models.model("moe"), schedule, mesh, param_specs=specs, has_aux=True)
    text = step.lower(placed, *data).compile().as_text()
    assert "all-gather" not in text and "collective-permute" in text


@pytest.mark.thin(3)
@MAKES
def test_grad_through_the_pipelined_loss(make):
    schedule, mesh, params, specs, data = setup(make)
    pipelined = pipeline_loss(models.model("moe"), schedule, mesh, param_specs=specs, has_aux=True)
    plain = sequential_loss(models.model("moe"), has_aux=True)

    def with_penalty(loss):
        def total(params):
            value, aux = loss(params, *data)
            penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(params) if p.dtype == jnp.float32)
            return jnp.sin(value) + 1e-3 * penalty, aux

        return jax.jit(jax.value_and_grad(total, has_aux=True, allow_int=True))

    assert_same(with_penalty(pipelined)(params), jax.device_get(with_penalty(plain)(params)))
    np.testing.assert_allclose(pipelined(params, *data)[0], plain(params, *data)[0], rtol=1e-6)


def test_loss_composes_with_optax_and_custom_weights():
    schedule, mesh, params, _, data = setup(dualpipe, kind="mlp")
    model = models.model("mlp")
    model = model._replace(stage=lambda p, x: models.mlp(p, x)[0])
    loss = pipeline_loss(model, schedule, mesh)
    optimizer = optax.sgd(0.02)

    @jax.jit
    def update(params, state):
        value, grads = jax.value_and_grad(lambda p: 2 * loss(p, *data))(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    state, values = optimizer.init(params), []
    for _ in range(4):
        params, state, value = update(params, state)
        values.append(float(value))
    assert values == sorted(values, reverse=True)


def test_inputs_are_not_silently_given_zero_gradients():
    schedule, mesh = one_f_one_b(2, 2), make_mesh(2, 1)
    model = PipelineModel(
        lambda p, x: x * p, lambda p, x: jnp.tanh(p * x), lambda p, x, t: jnp.mean((x - t) ** 2)
    )
    params = {"embed": jnp.ones(()), "stages": jnp.ones(2), "head": jnp.ones(())}
    x = jnp.ones((2, 2, 3))
    loss = pipeline_loss(model, schedule, mesh)
    with pytest.raises(ValueError, match="differentiable by params only"):
        jax.grad(loss, argnums=1)(params, x, x)


@MAKES
def test_forward_only(make):
    schedule, mesh, params, specs, data = setup(make)
    apply = pipeline_apply(models.model("moe"), schedule, mesh, param_specs=specs, has_aux=True)
    (loss, aux), outputs = jax.device_get(apply(params, *data))
    (expected, expected_aux), _ = oracle("moe", schedule.placement.num_model_stages, 8)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, aux, expected_aux)
    head = jax.vmap(lambda x, t: models.head_loss(params["head"], x, t))(outputs, data[1])
    np.testing.assert_allclose(head.mean(), expected, rtol=1e-6)


def test_forward_only_keeps_no_residuals():
    schedule, mesh, params, specs, data = setup(dualpipe, num_microbatches=16)
    arguments = (models.model("moe"), schedule, mesh)
    apply = pipeline_apply(*arguments, param_specs=specs, has_aux=True)
    step = pipeline_value_and_grad(*arguments, param_specs=specs, has_aux=True)
    temporary = [f.lower(params, *data).compile().memory_analysis().temp_size_in_bytes for f in (apply, step)]
    assert temporary[0] < temporary[1] / 2


def test_bfloat16_compute_with_float32_accumulators():
    schedule, mesh, params, _, data = setup(dualpipe, kind="mlp")
    model = PipelineModel(models.embed, lambda p, x: models.mlp(p, x)[0], models.head_loss)
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    step = pipeline_value_and_grad(model, schedule, mesh, accumulate_dtype=jnp.float32)
    loss, grads = step(low, *data)
    exact_loss, exact = jax.jit(sequential_value_and_grad(model))(
        jax.tree.map(lambda p: p.astype(jnp.float32), low), *data
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype("float32")}
    np.testing.assert_allclose(loss, exact_loss, rtol=1e-2)
    for got, want in zip(jax.tree.leaves(jax.device_get(grads)), jax.tree.leaves(exact), strict=True):
        assert np.linalg.norm(got - want) < 0.03 * np.linalg.norm(want)


@pytest.mark.parametrize("make", [dualpipe, one_f_one_b], ids=lambda make: make.__name__)
def test_a_nan_is_traced_to_its_microbatch_and_stage(make):
    schedule, mesh, params, _, (inputs, targets) = setup(make, kind="mlp")

    def stage(p, x):
        return jnp.where((p["stage"] == 2) & (x[..., :1] > 50), jnp.nan, models.mlp(p, x)[0])

    params["stages"]["stage"] = jnp.arange(4)
    params["embed"] = params["embed"].at[models.VOCAB - 1].set(100.0)
    inputs = jnp.zeros_like(inputs).at[5, 3, 0].set(models.VOCAB - 1)
    model = PipelineModel(models.embed, stage, models.head_loss)
    step = pipeline_value_and_grad(model, schedule, mesh, debug_nans=True)
    with pytest.raises(Exception, match="loss is nan.*microbatch 5 at stage 2"):
        jax.block_until_ready(step(params, inputs, targets))
        jax.effects_barrier()
    healthy = step(params, jnp.zeros_like(inputs), targets)
    jax.effects_barrier()
    assert np.isfinite(healthy[0])
