"""What stages may hold inside: offloaded residuals, code by platform, sums over ep, a further mesh axis."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dualpipe_jax import PipelineModel, make_mesh, pipeline_value_and_grad
from dualpipe_jax.schedule import dualpipe, one_f_one_b, zb_h1
from tests.engine import models
from tests.engine.models import assert_close, quick
from tests.engine.plain import plain_value_and_grad


def compare(stage, make, *, ep=1, head_loss=models.head_loss, mesh=None, params=None, oracle=None, **options):
    """Against the plain model; ``oracle`` where that is written otherwise."""
    model = PipelineModel(models.embed, stage, head_loss)
    plain = model if oracle is None else PipelineModel(models.embed, *oracle)
    given = models.init("mlp", 2)[0]
    data = models.data(3 if make is not dualpipe else 4)
    schedule = make(2, data[0].shape[0])
    step = quick(pipeline_value_and_grad(model, schedule, mesh or make_mesh(2, ep), **options))
    result = step(given if params is None else params, *data)
    assert_close(result, quick(plain_value_and_grad(plain))(given, *data))


@pytest.mark.thin(2)
@pytest.mark.parametrize("make", [zb_h1, one_f_one_b], ids=lambda make: make.__name__)
def test_residuals_that_a_policy_offloads(make):
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["kept"],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def stage(params, x):
        hidden = checkpoint_name(jnp.sin(x @ params["up"] + params["bias"]), "hidden")
        out = checkpoint_name(jnp.tanh(hidden) @ params["down"], "kept")
        return x + jnp.tanh(out)

    compare(jax.checkpoint(stage, policy=policy), make)


@pytest.mark.thin(2)
@pytest.mark.parametrize("make", [dualpipe, zb_h1], ids=lambda make: make.__name__)
def test_code_by_platform(make):
    """The branch for others does not compile here: no callback of it, and it would be wrong."""

    def stage(params, x):
        return lax.platform_dependent(
            params,
            x,
            cpu=models.MLP.stage,
            default=lambda params, x: jnp.full_like(x, jnp.nan) * models.MLP.stage(params, x),
        )

    compare(stage, make, oracle=(models.MLP.stage, models.head_loss), fuse_pairs=True)


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("make", "fuse", "check"), [(dualpipe, True, True), (zb_h1, False, False), (zb_h1, False, True)]
)
def test_sums_over_ep_in_a_stage_and_in_the_head(make, fuse, check):
    """Statistics over the whole microbatch, as of a batch norm, and a loss whose mean is taken inside."""

    def stage(params, x):
        mean = lax.pmean(jnp.mean(x, 0), "ep")
        square = lax.psum(jnp.sum(x**2, 0), "ep")
        return models.MLP.stage(params, x - mean) / jnp.sqrt(1 + square)

    def plain(params, x):
        return models.MLP.stage(params, x - jnp.mean(x, 0)) / jnp.sqrt(1 + jnp.sum(x**2, 0))

    def head(params, x, targets):
        return lax.pmean(models.head_loss(params, x, targets), "ep")

    compare(
        stage, make, ep=2, head_loss=head, oracle=(plain, models.head_loss), fuse_pairs=fuse, check_vma=check
    )


def test_a_further_axis_is_the_compilers():
    """Tensor parallelism by the sharding of parameters; results are equal."""
    mesh = jax.make_mesh((2, 1, 2), ("pp", "ep", "tp"), axis_types=(AxisType.Auto,) * 3)
    params = models.init("mlp", 2)[0]
    specs = {"up": (None, None, "tp"), "bias": (None, "tp"), "down": (None, "tp", None)}
    params["stages"] = {
        name: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*specs[name])))
        for name, leaf in params["stages"].items()
    }

    def stage(params, x):
        hidden = jnp.tanh(x @ params["up"] + params["bias"])
        return x + hidden @ params["down"]

    compare(stage, zb_h1, mesh=mesh, params=params)
