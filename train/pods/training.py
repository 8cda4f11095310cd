"""The trainer's step as shapes, for ``dualpipe_jax.pods``, for each of DeepSeek's models by name."""

from typing import Any

import jax
import jax.numpy as jnp

import models
from dualpipe_jax.pods import Dispatch, Plan, Program, Setting, Update
from dualpipe_jax.schedule import Schedule
from train.model import check_eight_bits, count_parameters, in_precision, model_flops, named_config, staged
from train.state.layout import Layout, abstract_state
from train.step import make_optimizer, make_update


def make_training_step(name: str, setting: Setting, **changes: float) -> Program:
    """Make a model's training step.

    Args:
      name: the name of the model in ``models.MODELS``.
      setting: the plan, schedule and mesh of the step.
      changes: the fields of the model's configuration that differ.

    Raises:
      ValueError: the options do not fit together or the devices.
    """
    plan, schedule = setting.plan, setting.schedule
    num_stages = schedule.placement.num_model_stages
    layers = None if plan.layers_per_stage is None else plan.layers_per_stage * num_stages
    config = in_precision(named_config(name, layers, changes), plan)
    if config.num_experts % plan.ep:
        raise ValueError(f"--ep {plan.ep}: must divide the {config.num_experts} experts of {name}")
    if isinstance(setting.mesh, jax.sharding.Mesh):
        check_eight_bits(plan, setting.mesh.devices.flat[0])
    model = staged(config, _layers(plan, config, schedule), plan, setting.platform)
    layout = Layout(model, schedule, setting.mesh, optimizer_of(plan.moments), plan.shard)
    return step_program(layout, (schedule.num_microbatches, plan.batch, plan.sequence))


def optimizer_of(moments: str = "float32") -> Any:
    """The trainer's optimizer; its learning rate does not matter here."""
    return make_optimizer(1e-4, clip=1.0, weight_decay=0.1, moments=moments)


def step_program(layout: Layout, tokens: tuple[int, int, int]) -> Program:
    """The trainer's step on batches of (microbatches, microbatch size, sequence), with its state in this layout."""
    model, config = layout.model, layout.model.config
    total, active = count_parameters(config)

    def update(params: Any) -> Update:
        state = abstract_state(params, layout.optimizer, layout.shard)

        def lower(value_and_grad: Any, batch: Any) -> Any:
            train_step: Any = make_update(value_and_grad, layout.optimizer, 1e-3, state)
            return train_step.lower(state, batch)

        return Update(state.opt_state, lower)

    token_shape = jax.ShapeDtypeStruct(tokens, jnp.int32)
    num_microbatches, batch, sequence = tokens
    return Program(
        model=model.staged,
        params=jax.eval_shape(model.init, jax.random.key(0)),
        batch={"inputs": token_shape, "targets": token_shape},
        tokens=num_microbatches * batch * sequence,
        flops=model_flops(config, active, sequence),
        param_specs=model.param_specs,
        pipeline={"compute_dtype": model.compute_dtype, "storage_specs": layout.storage_specs},
        update=update,
        active=active,
        total=total,
        dispatch=dispatch_of(config),
        counted="6 for each parameter that a token meets but the embedding, and 3 x causal attention",
        routed=routed_flops(config),
        stage_layers=model.layout.plan,
    )


def routed_flops(config: models.Config) -> float:
    """The part of ``model_flops`` that a token's routed experts take, three matrices each."""
    layers = config.num_moe_layers + config.num_mtp_layers
    return 6.0 * layers * config.top_k * 3 * config.dim * config.expert_hidden


def dispatch_of(config: models.Config) -> Dispatch:
    """How a layer's tokens choose their experts."""
    token_bytes = config.dim * jnp.dtype(config.compute_dtype).itemsize
    return Dispatch(config.num_experts, config.top_k, token_bytes, config.num_groups, config.top_groups)


def _layers(plan: Plan, config: models.Config, schedule: Schedule) -> tuple[int, ...]:
    """The number of layers of each stage.

    With ``layers_per_stage`` equally many layers with experts, and the dense ones on the first stage besides;
    otherwise ``plan.stage_layers``, or layers that balance the stages' times.
    """
    if plan.layers_per_stage is None:
        try:
            return models.given_plan(config, schedule, plan.stage_layers)
        except ValueError as error:
            if not plan.stage_layers:
                raise
            raise ValueError(f"--stage-layers {' '.join(map(str, plan.stage_layers))}: {error}") from None
    num_layers = [plan.layers_per_stage] * schedule.placement.num_model_stages
    return (config.num_dense_layers + num_layers[0], *num_layers[1:])
