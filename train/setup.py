"""From options to a run that is ready to go."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dualpipe_jax.engine import Pipeline
from dualpipe_jax.inspect import recommended_compiler_options, tpu_generation
from dualpipe_jax.parallel import make_mesh, over_nodes
from dualpipe_jax.schedule import Schedule
from train.config import ConfigError, TrainConfig, make_schedule
from train.data import Batch, Corpus, open_corpus
from train.devices import num_devices, too_few_devices
from train.evaluate import make_evaluate
from train.model import has_selection_bias, make_model, refuse_eight_bits, room
from train.placement import placed_layout, slots_of
from train.processes import batch_sharding, refuse_idle, share_out
from train.state import Layout, TrainState
from train.step import Update, make_optimizer, make_update, warmup_cosine


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run consists of. Programs are compiled at their first use.

    Attributes:
      config: its options.
      schedule: who does what in which order.
      corpus: text to train on and text held out.
      layout: where the state lies.
      update: one step.
      evaluate: ``evaluate(params)``, the held-out loss in nats per token.
      learning_rate: of a step, numbered from 0.
    """

    config: TrainConfig
    schedule: Schedule
    corpus: Corpus
    layout: Layout
    update: Update
    evaluate: Callable[[Any], float]
    learning_rate: optax.Schedule

    @functools.cached_property
    def bytes_per_token(self) -> float:
        """Bytes of text for each token of what the held-out loss is measured on; 1 where tokens are bytes."""
        if self.corpus.vocabulary.file is None:
            return 1.0
        num_tokens = num_bytes = 0
        for batch, weights in self.corpus.heldout_batches(
            self.config.data.eval_sequences, self.config.batch_shape
        ):
            targets = batch["targets"][weights > 0]
            num_tokens += targets.size
            num_bytes += sum(len(self.corpus.decode(row).encode()) for row in targets)
        return num_bytes / num_tokens

    def held_out(self, params: Any) -> dict[str, float]:
        """The held-out loss, in nats per token and in bits per byte of text: of one text equal for all tokenizers."""
        nats = self.evaluate(params)
        return {"heldout_loss": nats, "heldout_bits_per_byte": nats / math.log(2) / self.bytes_per_token}

    def init(self) -> TrainState:
        """The state before the first step."""
        return self.layout.init(jax.random.key(self.config.seed))

    def batch(self, number: int) -> Batch:
        """A batch, numbered from 0, as global arrays; only what this process's devices hold is drawn."""
        shape = self.config.batch_shape
        draw = functools.partial(self.corpus.train_batch, self.config.seed, number, shape)
        return share_out(draw, shape[:2], batch_sharding(self.layout.mesh))


def prepare(config: TrainConfig) -> Run:
    """Check what can be checked, read the data, make the model and its programs. Makes no array.

    Raises:
      ConfigError, DataError: options or data that will not do.
    """
    schedule = make_schedule(config)
    corpus = read_data(config)
    if jax.device_count() < num_devices(config):
        raise ConfigError(too_few_devices(config, jax.device_count()))
    mesh, asked = _mesh(config), config.optimizer
    refuse_idle(mesh, jax.process_count())
    refuse_eight_bits(config, mesh.devices.flat[0])
    model = make_model(config, schedule, corpus.vocab)
    learning_rate = warmup_cosine(asked.learning_rate, asked.steps, asked.warmup)
    optimizer = make_optimizer(
        learning_rate, clip=asked.clip, weight_decay=asked.weight_decay, moments=asked.moments
    )
    layout = Layout(model, schedule, mesh, optimizer, asked.shard)
    num_slots = slots_of(config, model.config.num_experts)
    judged = make_model(config, schedule, corpus.vocab, lossless=True)
    if num_slots is not None:
        # What may be dropped is counted by source device: then a copy has to relieve the device that has it, too.
        layout = placed_layout(layout, num_slots, near=room(config) is None)
        judged = dataclasses.replace(judged, param_specs=layout.model.param_specs)
    pipeline = Pipeline(
        model.staged,
        schedule,
        mesh,
        param_specs=layout.model.param_specs,
        storage_specs=layout.storage_specs,
        compute_dtype=model.compute_dtype,
        accumulate_dtype=jnp.dtype(asked.gradient_sums),
    )
    bias_rate = asked.bias_rate if has_selection_bias(model.config) else 0.0
    return Run(
        config=config,
        schedule=schedule,
        corpus=corpus,
        layout=layout,
        update=make_update(
            pipeline.value_and_grad, optimizer, bias_rate, layout.abstract, compiler_options(mesh)
        ),
        evaluate=make_evaluate(
            judged,
            schedule,
            mesh,
            corpus.heldout_batches(config.data.eval_sequences, config.batch_shape),
            layout.storage_specs,
        ),
        learning_rate=learning_rate,
    )


def _mesh(config: TrainConfig) -> jax.sharding.Mesh:
    asked = config.mesh
    try:
        return make_mesh(asked.pp, over_nodes(asked.ep, asked.ep_nodes), dp=asked.dp)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def compiler_options(mesh: jax.sharding.Mesh) -> dict[str, str]:
    """What the compiler for the mesh's devices is told."""
    device = mesh.devices.flat[0]
    return recommended_compiler_options(device.platform, tpu_generation(device.device_kind))


def read_data(config: TrainConfig) -> Corpus:
    """The corpus, long enough for a sequence. Raises DataError."""
    corpus = open_corpus(config.data.paths, config.data.weights, config.data.tokenizer)
    corpus.check(config.data.sequence)
    return corpus
