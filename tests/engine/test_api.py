"""The engine's other entrances: placed stages, forward only, the loss, mixed precision."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dualpipe_jax import (
    Pipeline,
    PipelineModel,
    PlacedStages,
    make_mesh,
    pipeline_apply,
    pipeline_loss,
    pipeline_value_and_grad,
    place_stages,
    reference_value_and_grad,
    sequential_loss,
    sequential_value_and_grad,
    unplace_stages,
)
from dualpipe_jax.schedule import dualpipe, dualpipe_v, gpipe, one_f_one_b, zb_h1
from tests.engine import models
from tests.engine.plain import plain_value_and_grad


def setup(make, num_microbatches=4, kind="moe"):
    schedule = make(2, num_microbatches)
    num_ep = 2 if kind == "moe" else 1
    params, specs = models.init(kind, schedule.placement.num_model_stages)
    return schedule, make_mesh(2, num_ep), params, specs, models.data(num_microbatches)


@pytest.mark.thin(3)
@pytest.mark.parametrize("make", [dualpipe, dualpipe_v, zb_h1], ids=lambda make: make.__name__)
def test_placed_stages_stay_on_their_ranks(make):
    """They come back as they were, nothing gathers parameters; DualPipe's one exchange is the mirrored copy's."""
    schedule, mesh, params, specs, data = setup(make)
    stages = place_stages(params["stages"], schedule, mesh, specs["stages"])
    jax.tree.map(np.testing.assert_array_equal, unplace_stages(stages, schedule), params["stages"])
    placed = params | {"stages": stages}
    step = pipeline_value_and_grad(models.model("moe"), schedule, mesh, param_specs=specs, has_aux=True)
    program = step.lower(placed, *data).compile()
    text = program.as_text()
    assert "all-gather" not in text and "collective-permute" in text
    value, grads = program(placed, *data)
    assert isinstance(grads["stages"], PlacedStages)
    for stage, given in zip(grads["stages"].local, placed["stages"].local, strict=True):
        assert stage["w1"].sharding.is_equivalent_to(given["w1"].sharding, stage["w1"].ndim)
    expected = models.oracle("moe", schedule.placement.num_model_stages, 4)
    integer = {k: g for k, g in expected[1]["stages"].items() if g.dtype == jax.dtypes.float0}
    floats = jax.tree.map(lambda g: np.zeros(g.shape) if g.dtype == jax.dtypes.float0 else g, grads["stages"])
    back = unplace_stages(floats, schedule)
    models.assert_same((value, grads | {"stages": back | integer}), expected)


def test_loss_composes_with_optax():
    """And is the same where nobody asks for gradients."""
    schedule, mesh, params, _, data = setup(one_f_one_b, kind="mlp")
    loss = pipeline_loss(models.MLP, schedule, mesh)
    optimizer = optax.sgd(0.02)

    @jax.jit
    def update(params, state):
        value, grads = jax.value_and_grad(lambda p: 2 * loss(p, *data))(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    alone = jax.jit(loss)(params, *data)
    state, values = optimizer.init(params), []
    for _ in range(4):
        params, state, value = update(params, state)
        values.append(float(value))
    assert values == sorted(values, reverse=True)
    np.testing.assert_allclose(2 * alone, values[0], rtol=1e-6)
    np.testing.assert_allclose(alone, models.oracle("mlp", 2, 4)[0][0], rtol=1e-6)


@pytest.mark.parametrize("divergence", ["loop", pytest.param("switch", marks=pytest.mark.slow)])
def test_gradients_have_derivatives_too(divergence):
    """Hessian times a vector: forward over reverse as loops, reverse over reverse as branches."""
    schedule, mesh = one_f_one_b(2, 2), make_mesh(2, 1)
    params, batch = models.init("mlp", 2)[0], models.data(2)
    vector = jax.tree.map(lambda leaf: jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), params)

    def place(tree):
        return tree | {"stages": place_stages(tree["stages"], schedule, mesh)}

    def of(function, point, along):
        if divergence == "loop":
            return jax.jvp(function, (point,), (along,))[1]
        return jax.vjp(function, point)[1](along)[0]

    plain = plain_value_and_grad(models.MLP)
    step = pipeline_value_and_grad(models.MLP, schedule, mesh, divergence=divergence)
    found = of(lambda params: step(params, *batch)[1], place(params), place(vector))
    expected = of(lambda params: plain(params, *batch)[1], params, vector)
    models.assert_close(found | {"stages": unplace_stages(found["stages"], schedule)}, expected)


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


@pytest.mark.thin(3)
@pytest.mark.parametrize("make", [dualpipe, dualpipe_v, zb_h1], ids=lambda make: make.__name__)
def test_forward_only(make):
    schedule, mesh, params, specs, data = setup(make)
    apply = pipeline_apply(models.model("moe"), schedule, mesh, param_specs=specs, has_aux=True)
    (loss, aux), outputs = jax.device_get(apply(params, *data))
    (expected, expected_aux), _ = models.oracle("moe", schedule.placement.num_model_stages, 4)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, aux, expected_aux)
    head = jax.jit(jax.vmap(lambda x, t: models.head_loss(params["head"], x, t)))(outputs, data[1])
    np.testing.assert_allclose(np.mean(head), expected, rtol=1e-6)


def test_the_public_oracle_is_the_plain_model():
    _, _, params, _, data = setup(one_f_one_b)
    oracle = sequential_value_and_grad(models.model("moe"), has_aux=True)
    models.assert_same(models.quick(oracle)(params, *data), models.oracle("moe", 2, 4))


@pytest.mark.parametrize("shapes", [((2,), (3,)), ((), ()), ()])
def test_the_oracle_is_not_of_as_many_stages_as_it_likes(shapes):
    stages = {str(number): jnp.ones(shape) for number, shape in enumerate(shapes)}
    params, x = {"embed": jnp.ones(()), "stages": stages, "head": jnp.ones(())}, jnp.ones((2, 2, 3))
    model = PipelineModel(lambda p, x: x * p, lambda p, x: x, lambda p, x, t: jnp.mean((x * p - t) ** 2))
    with pytest.raises(ValueError, match="must have leaves of one leading dim, the number of stages"):
        sequential_value_and_grad(model)(params, x, x)
    with pytest.raises(ValueError, match="params must be a dict with the keys .'shared', 'stages'., got"):
        reference_value_and_grad(model)(params, {"inputs": x, "targets": x})


def test_the_oracle_reads_a_list_as_the_pipeline_does_or_not_at_all():
    """It took two leaves of four stages for two stages, and gave another loss."""
    model = PipelineModel(
        lambda p, x: x * p, lambda p, x: x * p[0] + jnp.sum(p[1]), lambda p, x, t: jnp.mean((x * p - t) ** 2)
    )
    x, want = jnp.ones((2, 2, 3)), 1.0
    for scale in range(1, 5):
        want = want * scale + 2
    stages = [jnp.arange(1.0, 5.0), jnp.ones((4, 2))]
    params = {"embed": jnp.ones(()), "stages": stages, "head": jnp.ones(())}
    np.testing.assert_allclose(sequential_loss(model)(params, x, x), (want - 1) ** 2, rtol=1e-6)
    alike = params | {"stages": [stages[0], jnp.full(4, 2.0)]}
    with pytest.raises(
        ValueError, match="2 alike trees of leaves .4, .*: that may be 2 stages, or one tree of 4"
    ):
        sequential_loss(model)(alike, x, x)
    as_tuple = alike | {"stages": tuple(alike["stages"])}
    np.testing.assert_allclose(sequential_loss(model)(as_tuple, x, x), (want - 1) ** 2, rtol=1e-6)


def test_a_stage_may_have_nothing_to_say_besides():
    params = {"embed": jnp.ones(()), "stages": jnp.ones(1), "head": jnp.ones(())}
    model = PipelineModel(
        lambda p, x: x * p, lambda p, x: (p * x, None), lambda p, x, t: jnp.mean((x * p - t) ** 2)
    )
    x = jnp.ones((2, 2, 3))
    pipelined = pipeline_value_and_grad(model, one_f_one_b(1, 2), make_mesh(1), has_aux=True)
    for step in (pipelined, sequential_value_and_grad(model, has_aux=True)):
        (loss, aux), _ = step(params, x, 3 * x)
        assert (float(loss), aux) == (4.0, None)


def test_a_pipeline_takes_the_simplest_model_as_it_is():
    given, schedule = models.given("mlp", 2, 4), one_f_one_b(2, 4)
    (loss, report), grads = Pipeline(models.MLP, schedule, make_mesh(2, 1)).value_and_grad(*given)
    plain = models.quick(plain_value_and_grad(models.MLP))(*models.flat(given))
    public, by_public = models.quick(reference_value_and_grad(models.MLP))(*given)
    np.testing.assert_allclose((loss, report.losses["loss"], public[0]), plain[0], rtol=1e-6)
    for found in (grads, by_public):
        models.assert_close(models.flat((found, given[1]))[0], plain[1])


def test_options_of_leaves_go_by_the_names_of_parts():
    schedule, mesh, params, _, data = setup(one_f_one_b, kind="mlp")
    options = dict(
        frozen={"embed": True}, input_grads=True, compute_dtype=dict.fromkeys(params, jnp.bfloat16)
    )
    loss, grads = pipeline_value_and_grad(models.MLP, schedule, mesh, **options)(params, *data)
    narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    want, by_plain = models.quick(plain_value_and_grad(models.MLP))(narrow, *data)
    np.testing.assert_allclose(loss, want, rtol=1e-2)
    wide = models.oracle("mlp", 2, 4)[0][0]
    assert abs(loss - wide) > 1e-5 * wide, "computed in bfloat16"
    assert grads["embed"] is None and set(grads) == {*params, "batch"}
    assert jax.tree.leaves(grads["stages"])[0].dtype == jnp.float32
    got, wanted = (np.asarray(g["head"], np.float32) for g in jax.device_get((grads, by_plain)))
    assert np.linalg.norm(got - wanted) < 3e-2 * np.linalg.norm(wanted)
    with pytest.raises(ValueError, match="compute_dtype must be a dict with keys among .*, got .'stage'"):
        pipeline_value_and_grad(models.MLP, schedule, mesh, compute_dtype={"stage": jnp.bfloat16})


def test_forward_only_keeps_no_residuals():
    schedule, mesh, params, _, data = setup(gpipe, num_microbatches=16, kind="mlp")
    made = [make(models.MLP, schedule, mesh) for make in (pipeline_apply, pipeline_value_and_grad)]
    temporary = [f.lower(params, *data).compile().memory_analysis().temp_size_in_bytes for f in made]
    assert temporary[0] < temporary[1] / 2


def test_bfloat16_compute_with_float32_accumulators():
    schedule, mesh, params, _, data = setup(zb_h1, kind="mlp")
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    step = pipeline_value_and_grad(models.MLP, schedule, mesh, accumulate_dtype=jnp.float32)
    loss, grads = step(low, *data)
    exact_loss, exact = jax.jit(plain_value_and_grad(models.MLP))(
        jax.tree.map(lambda p: p.astype(jnp.float32), low), *data
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype("float32")}
    np.testing.assert_allclose(loss, exact_loss, rtol=1e-2)
    for got, want in zip(*map(jax.tree.leaves, jax.device_get((grads, exact))), strict=True):
        assert np.linalg.norm(got - want) < 0.03 * np.linalg.norm(want)
        assert np.any(got != got.astype(jnp.bfloat16)), "no sum in bfloat16 in another dtype"
