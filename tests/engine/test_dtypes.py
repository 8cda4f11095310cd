"""Sums and seeds keep what their dtypes can hold: low-precision losses, gathers in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dualpipe_jax import (
    Out,
    Pipeline,
    PipelineModel,
    StagedModel,
    make_mesh,
    pipeline_value_and_grad,
    reference_value_and_grad,
)
from dualpipe_jax.contract import staged
from dualpipe_jax.gradient_sum import GRADIENT_SUM, gradient_sum
from dualpipe_jax.schedule import dualpipe, one_f_one_b, zb_h1
from tests.engine import models
from tests.engine.models import assert_close, quick
from tests.engine.plain import plain_value_and_grad
from tests.jaxprs import named

MLP = models.MLP


def test_a_bfloat16_loss_does_not_round_the_seed():
    """1/3 in bfloat16 is 2e-3 off; so are gradients from a loss that is divided before it is float32."""

    def head(params, x, targets):
        return models.head_loss(params, x, targets).astype(jnp.bfloat16)

    model, params, data = MLP._replace(head_loss=head), models.init("mlp", 2)[0], models.data(3)
    step = pipeline_value_and_grad(model, one_f_one_b(2, 3), make_mesh(2, 1))
    _, want = quick(plain_value_and_grad(MLP))(params, *data)
    _, got = quick(step)(params, *data)
    assert_close(got, want)
    _, rounded = jax.jit(plain_value_and_grad(model))(params, *data)
    with pytest.raises(AssertionError):
        assert_close(rounded, want, 1e-3)


@pytest.mark.thin(2)
@pytest.mark.parametrize(("schedule", "sharded"), [(dualpipe, True), (zb_h1, False)])
def test_what_is_kept_in_float32_may_be_used_in_bfloat16(schedule, sharded):
    """As a plain model whose parameters are cast first, a second pipe's copies too; others stay as they are."""
    params, _ = models.init("mlp", 2)
    stored = {"stages": {"up": PartitionSpec("ep"), "bias": None, "down": None}}
    stored["shared"] = {"embed": PartitionSpec(None, "ep"), "head": None}

    def mlp(p, x):
        return x + jnp.tanh(x @ p["up"].astype(jnp.float32) + p["bias"]) @ p["down"]

    model = MLP._replace(stage=mlp)
    pipeline = Pipeline(
        staged(model, 2),
        schedule(2, 4),
        make_mesh(2, 2),
        storage_specs=stored if sharded else None,
        compute_dtype={"stages": {"up": jnp.bfloat16, "bias": None, "down": None}},
        accumulate_dtype=jnp.float32,
    )
    inputs, targets = models.data(4)
    (loss, _), grads = quick(pipeline.value_and_grad)(*models.given("mlp", 2, 4))
    cast = params | {"stages": params["stages"] | {"up": params["stages"]["up"].astype(jnp.bfloat16)}}
    wide = cast | {"stages": cast["stages"] | {"up": cast["stages"]["up"].astype(jnp.float32)}}
    plain = quick(plain_value_and_grad(model))
    expected, want = plain(wide, inputs, targets)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    exact, _ = plain(params, inputs, targets)
    assert abs(exact - expected) > 1e-5, "the cast can be seen"
    made = grads["shared"] | {"stages": grads["stages"]}
    made, want = jax.device_get((made, want))
    up = made["stages"].pop("up"), want["stages"].pop("up")
    assert up[0].dtype == np.float32
    assert np.linalg.norm(up[0] - up[1]) < 4e-3 * np.linalg.norm(up[1]), "each microbatch's is rounded once"
    assert_close(made, want)


@pytest.mark.thin(3)
@pytest.mark.parametrize("schedule", [dualpipe, zb_h1, one_f_one_b], ids=lambda schedule: schedule.__name__)
def test_gradients_of_bfloat16_products_are_not_rounded_before_they_are_summed(schedule):
    """Against NumPy in float64, with numbers that bfloat16 has: the sums are exact but for float32."""

    def rounded(a):
        return np.asarray(a).astype(jnp.bfloat16).astype(np.float32)

    params, batch = models.given("mlp", 2, 4)
    embed = params["shared"]["embed"] = rounded(params["shared"]["embed"])
    seen = rounded(np.random.default_rng(3).standard_normal((models.WIDTH, models.VOCAB)))

    def head_loss(head, x, targets):
        return jnp.sum(
            (x.astype(jnp.bfloat16) @ head).astype(jnp.float32)
            * jnp.asarray(seen)[targets[..., 0] % models.WIDTH][:, None]
        )

    model = PipelineModel(models.embed, lambda p, x: x + 0 * p["bias"].sum(), head_loss)
    pipeline = Pipeline(
        staged(model, 2),
        schedule(2, 4),
        make_mesh(2, 1),
        compute_dtype={"shared": {"embed": None, "head": jnp.bfloat16}},
        wide_gradients=True,
    )
    # YNNPACK's product of these dtypes waits for threads that the other rank's permute holds, for ever.
    options = {"xla_backend_optimization_level": 0, "xla_cpu_experimental_ynn_fusion_type": ""}
    step = jax.jit(pipeline.value_and_grad, compiler_options=options)
    _, grads = step(params, batch)
    x, weights = embed[batch["inputs"]], seen[batch["targets"][..., 0] % models.WIDTH]
    exact = np.einsum("mbsw,mbv->wv", x.astype(np.float64), weights.astype(np.float64)) / 4
    got = np.asarray(grads["shared"]["head"], np.float64)
    assert np.abs(got - exact).max() < 1e-6 * np.abs(exact).max()


def test_gradients_of_bfloat16_matrices_are_summed_in_float32_without_ynnpack():
    """Against NumPy in float64, over two dims of rows. With it, from JAX 0.11 on, XLA for CPU sums in bfloat16."""

    def stage(own, shared, x, at):
        return Out(losses={"weighted": jnp.mean((at.batch["x"] @ own) * at.batch["by"], dtype=jnp.float32)})

    rng = np.random.default_rng(5)
    batch = {name: rng.standard_normal((1, 2, 512, 32)).astype(jnp.bfloat16) for name in ("x", "by")}
    params = {"stages": jnp.ones((1, 32, 32), jnp.bfloat16), "shared": {}}
    pipeline = Pipeline(StagedModel({"only": stage}, ("only",)), one_f_one_b(1, 1), make_mesh(1))
    step = jax.jit(pipeline.value_and_grad, compiler_options={"xla_cpu_experimental_ynn_fusion_type": ""})
    got = np.asarray(step(params, batch)[1]["stages"][0], np.float64)
    x, by = (batch[name][0].reshape(-1, 32).astype(np.float64) for name in ("x", "by"))
    exact, once = x.T @ by / by.size, 2.0**-8
    # The cotangent, 1 / 32768 of a number, is exact; so only the sum is rounded.
    assert np.all(np.abs(got - exact) <= once * np.abs(exact) + 1e-6 * np.abs(exact).max())


def test_metrics_of_narrow_dtypes_are_summed_in_wide_ones():
    """Against NumPy in float64. Added in their own, bfloat16's end at 256 times the largest, and int8's at 127."""
    values = np.random.default_rng(4).uniform(0, 2, 256).astype(jnp.bfloat16)

    def stage(own, shared, x, at):
        number = jnp.sum(at.batch, dtype=at.batch.dtype)
        one = {
            name: jnp.ones((2,), name) for name in ("float16", "float8_e4m3fn", "int8", "uint16", "uint32")
        }
        metrics = {"values": number, "ones": one, "loss": {"of_one": number * own.astype(number.dtype)}}
        return Out(at.batch, {"loss": own * jnp.sum(at.batch.astype(jnp.float32))}, metrics)

    model = StagedModel({"all": stage}, ("all", "all"))
    params, batch = {"stages": jnp.ones(2), "shared": {}}, values[:, None]
    pipeline = Pipeline(model, one_f_one_b(2, 256), make_mesh(2))
    exact = 2 * values.astype(np.float64).sum()
    for step in (pipeline.value_and_grad, reference_value_and_grad(model)):
        (loss, report), _ = quick(step)(params, batch)
        assert report.metrics["values"].dtype == jnp.float32
        np.testing.assert_allclose([report.metrics["values"], 256 * loss], exact, rtol=1e-6)
        for name, ones in report.metrics["ones"].items():
            assert np.array_equal(ones, [512, 512]), name
            wide = {"f": "float32", "i": "int32"}.get(name[0], "uint32" if name == "uint32" else "int32")
            assert ones.dtype == wide, name
    by = jax.grad(lambda p: pipeline.loss(p, batch)[1].metrics["loss"]["of_one"])(params)
    np.testing.assert_allclose(by["stages"], exact / 2, rtol=1e-2)  # its products are bfloat16's


def test_numbers_of_python_take_the_dtype_of_what_they_meet():
    """As parameters and as leaves of x, against jax.value_and_grad; with these numbers bfloat16 rounds nothing."""

    def first(own, shared, x, at):
        return Out((at.batch @ own * shared["scale"], 0.5))

    def middle(own, shared, x, at):
        y, half = x
        return Out((y * half * shared["shifts"][0], half), metrics={"bytes": (y * half).dtype.itemsize})

    def last(own, shared, x, at):
        return Out(losses={"mean": jnp.mean((x[0] * x[1]).astype(jnp.float32))})

    def plain(params, batch):
        y = batch @ params["stages"][0] * params["shared"]["scale"]
        return jnp.mean((y * 0.5 * params["shared"]["shifts"][0] * 0.5).astype(jnp.float32))

    model = StagedModel({"first": first, "middle": middle, "last": last}, ("first", "middle", "last"))
    own, batch = jnp.ones((3, 2, 2), jnp.bfloat16), jnp.arange(8, dtype=jnp.bfloat16).reshape(2, 2, 2)
    params = {"stages": own, "shared": {"scale": 2.0, "shifts": jnp.full(2, 4.0)}}  # weak: of a Python number
    want = jax.value_and_grad(plain)(params, batch)
    (loss, report), grads = quick(Pipeline(model, one_f_one_b(3, 2), make_mesh(3)).value_and_grad)(
        params, batch
    )
    assert report.metrics["bytes"] == 2 * 2
    assert_close((loss, grads), want)


def test_complex_parameters_keep_their_imaginary_part():
    """Summed in float32 they are summed in complex64: against jax.value_and_grad of the plain model."""

    def stage(params, x):
        turned = x.astype(jnp.complex64) * params["turn"]
        return x + jnp.tanh(turned.real + turned.imag * x)

    model = PipelineModel(models.embed, stage, models.head_loss)
    params, _ = models.init("mlp", 2)
    turns = np.random.default_rng(5).standard_normal((2, 2, models.WIDTH), np.float32)
    params["stages"] = {"turn": turns[0] + 1j * turns[1]}
    data = models.data(2)
    step = pipeline_value_and_grad(model, one_f_one_b(2, 2), make_mesh(2, 1), accumulate_dtype=jnp.float32)
    _, got = quick(step)(params, *data)
    _, wanted = quick(plain_value_and_grad(model))(params, *data)
    got, wanted = got["stages"]["turn"], wanted["stages"]["turn"]
    assert got.dtype == jnp.complex64 and np.abs(np.imag(wanted)).max() > 0
    np.testing.assert_allclose(got, wanted, atol=2e-6 * np.abs(wanted).max(), rtol=0)


@pytest.mark.parametrize(
    "schedule, options", [(dualpipe, {"fuse_pairs": True}), (zb_h1, {"check_vma": True})]
)
def test_a_kernel_adds_gradients_to_their_sum(schedule, options):
    """In pairs, in B and in W, where zeros stand in the kernel's own text."""

    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def backward(saved, dy):
        x, w = saved
        rows, d_rows = (a.reshape(-1, a.shape[-1]) for a in (x, dy))
        return dy @ w.T, gradient_sum(w.shape, varying_like=x) + rows.T @ d_rows

    product.defvjp(lambda x, w: (x @ w, (x, w)), backward)

    def mlp(p, x):
        return x + product(jnp.tanh(product(x, p["up"]) + p["bias"]), p["down"])

    pipeline = Pipeline(
        staged(MLP._replace(stage=mlp), 2), schedule(2, 6), make_mesh(2, 1), wide_gradients=True, **options
    )
    step, given = pipeline.value_and_grad, models.given("mlp", 2, 6)
    marks = [eqn.params["name"] for eqn in named(jax.make_jaxpr(step)(*given).jaxpr, "name")]
    assert GRADIENT_SUM not in marks, "sums stand in the place of all zeros"
    (loss, _), grads = quick(step)(*given)
    params, _ = models.init("mlp", 2)
    expected, want = quick(plain_value_and_grad(MLP))(params, *models.data(6))
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_close(grads["shared"] | {"stages": grads["stages"]}, want)
