"""Which model a run trains, and where its parameters lie."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import models
from dualpipe_jax.engine import place_stages
from dualpipe_jax.parallel import EP
from dualpipe_jax.schedule import Schedule
from train.config import ConfigError, TrainConfig

VOCAB = 256
"""Tokens are bytes."""


def byte(**changes: Any) -> models.Config:
    """The model of the default run, sized for two CPU cores and a few minutes: eight layers with experts."""
    ours = dict(
        num_heads=2,
        q_lora_rank=0,
        kv_lora_rank=32,
        qk_nope_dim=24,
        qk_rope_dim=8,
        v_head_dim=32,
        num_experts=8,
        top_k=2,
        num_groups=1,
        top_groups=1,
    )
    return models.tiny(**(ours | changes))


SIZES: dict[str, Callable[..., models.Config]] = {"byte": byte, "tiny": models.tiny, "small": models.small}


def model_config(config: TrainConfig) -> models.Config:
    """The model's numbers. Raises ConfigError for a size that there is not."""
    if config.model.name not in SIZES:
        raise ConfigError(f"--model {config.model.name}: there are {', '.join(SIZES)}")
    size = SIZES[config.model.name](vocab=VOCAB, compute_dtype=jnp.dtype(config.model.precision))
    if config.model.layers is None:
        return size
    return SIZES[config.model.name](
        vocab=VOCAB, compute_dtype=size.compute_dtype, num_layers=config.model.layers + size.num_dense_layers
    )


def make_model(config: TrainConfig, num_stages: int) -> models.Model:
    """The model cut into stages, its experts over ep.

    Where the stages are not equally deep, empty places run too, see ``models.deepseek``.

    Raises:
      ConfigError: there are fewer layers than stages, or ep cannot share the experts.
    """
    numbers = model_config(config)
    if numbers.num_moe_layers < num_stages:
        raise ConfigError(
            f"--schedule {config.mesh.schedule} --pp {config.mesh.pp}: {num_stages} stages need a layer each, --model "
            f"{config.model.name} has {numbers.num_moe_layers}; try --layers {num_stages}"
        )
    if numbers.num_experts % config.mesh.ep:
        raise ConfigError(f"--ep {config.mesh.ep}: must divide the {numbers.num_experts} experts of a layer")
    factor = config.model.capacity_factor if config.model.dispatch == "capacity" else None
    return models.deepseek(
        numbers, num_stages, ep_axis=EP, dispatch=config.model.dispatch, capacity_factor=factor
    )


def place(model: models.Model, params: Any, schedule: Schedule, mesh: Mesh) -> Any:
    """Params where the engine wants them: stages on their ranks, experts over ep, both ends everywhere."""

    def put(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    ends = {part: jax.tree.map(put, params[part], model.param_specs[part]) for part in ("embed", "head")}
    return ends | {"stages": place_stages(params["stages"], schedule, mesh, model.param_specs["stages"])}


def count_parameters(numbers: models.Config) -> tuple[int, int]:
    """Parameters in all, and those that take part in one token's way through the model."""
    shapes = jax.eval_shape(models.deepseek(numbers, 1).init, jax.random.key(0))
    routed = sum(
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes["stages"]["layers"])
        if "'experts'" in jax.tree_util.keystr(path)
    )
    total = models.num_params(shapes) - shapes["stages"]["routing"]["bias"].size
    return total, total - routed + routed * numbers.top_k // numbers.num_experts
