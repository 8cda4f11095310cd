"""From options to a run that is ready to go."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from dualpipe_jax.engine import (
    PipelineModel,
    pipeline_apply,
    pipeline_value_and_grad,
    recommended_compiler_options,
    tpu_generation,
)
from dualpipe_jax.parallel import make_mesh
from dualpipe_jax.schedule import Schedule
from train.config import ConfigError, TrainConfig, make_schedule, too_few_devices
from train.data import Corpus, load_corpus
from train.model import make_model, place
from train.step import TrainState, Update, init_state, make_optimizer, make_update, warmup_cosine


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run consists of. Programs are compiled at their first use.

    Attributes:
      config: its options.
      schedule: who does what in which order.
      corpus: text to train on and text held out.
      state: before the first step; the first update takes its memory.
      update: one step.
      apply: ``apply(params, inputs, targets) -> ((loss, aux), outputs)``, forward only.
      learning_rate: of a step, numbered from 0.
    """

    config: TrainConfig
    schedule: Schedule
    corpus: Corpus
    state: TrainState
    update: Update
    apply: Callable[..., Any]
    learning_rate: optax.Schedule


def prepare(config: TrainConfig) -> Run:
    """Check what can be checked, read the data, make the model and its programs.

    Raises:
      ConfigError, DataError: options or data that will not do.
    """
    schedule = make_schedule(config)
    corpus = read_data(config)
    if jax.device_count() < config.mesh.pp * config.mesh.ep:
        raise ConfigError(too_few_devices(config, jax.device_count()))
    mesh = make_mesh(config.mesh.pp, config.mesh.ep)
    model = make_model(config, schedule.placement.num_model_stages)
    functions = PipelineModel(*model.functions)
    engine = dict(param_specs=model.param_specs, has_aux=True)
    value_and_grad = pipeline_value_and_grad(functions, schedule, mesh, **engine)
    learning_rate = warmup_cosine(
        config.optimizer.learning_rate, config.optimizer.steps, config.optimizer.warmup
    )
    optimizer = make_optimizer(
        learning_rate, clip=config.optimizer.clip, weight_decay=config.optimizer.weight_decay
    )
    state = init_state(place(model, model.init(jax.random.key(config.seed)), schedule, mesh), optimizer)
    device = mesh.devices.flat[0]
    options = recommended_compiler_options(device.platform, tpu_generation(device.device_kind))
    return Run(
        config=config,
        schedule=schedule,
        corpus=corpus,
        state=state,
        update=make_update(value_and_grad, optimizer, config.optimizer.bias_rate, state, options),
        apply=pipeline_apply(functions, schedule, mesh, **engine),
        learning_rate=learning_rate,
    )


def read_data(config: TrainConfig) -> Corpus:
    """The corpus, long enough for a sequence. Raises ConfigError or DataError."""
    corpus = load_corpus(config.data.paths)
    for what, tokens in (("to train on", corpus.train), ("held out", corpus.heldout)):
        if len(tokens) <= config.data.sequence:
            raise ConfigError(
                f"--data: {len(tokens)} bytes {what}, but --sequence {config.data.sequence} takes more; "
                "give more text or a shorter sequence"
            )
    return corpus
