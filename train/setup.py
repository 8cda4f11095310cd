"""Prepare a run from its options."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dualpipe_jax.engine import Pipeline
from dualpipe_jax.inspect import recommended_compiler_options
from dualpipe_jax.inspect.compiler import tpu_generation
from dualpipe_jax.parallel import make_mesh
from dualpipe_jax.parallel.mesh import over_nodes
from dualpipe_jax.schedule import Schedule
from dualpipe_jax.step_options import StepOptions
from models.recipes import Recipe
from train.config import ConfigError, TrainConfig, make_schedule
from train.data import Batch, Corpus, open_corpus
from train.evaluate import make_evaluate
from train.model import has_selection_bias, make_model, refuse_eight_bits
from train.processes.devices import too_few_devices
from train.processes.group import batch_sharding, make_global_batch, refuse_idle
from train.progress import Progress
from train.recipe import follow, run_recipe
from train.state.layout import Layout, TrainState
from train.state.placement import placed_layout, slots_per_device
from train.step import Update, make_optimizer, make_update


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run. Programs are compiled at their first use.

    Attributes:
      config: the options of the run.
      schedule: the pipeline schedule.
      corpus: the text to train on and the held-out text.
      layout: how the state is placed on the devices.
      update: the program of one step, compiled once for each number of microbatches that steps of ``recipe`` have.
      evaluate: ``evaluate(params)``, the held-out loss in nats per token.
      recipe: the learning rate, the batch size and more of every step.
    """

    config: TrainConfig
    schedule: Schedule
    corpus: Corpus
    layout: Layout
    update: Update
    evaluate: Callable[[Any], float]
    recipe: Recipe

    @functools.cached_property
    def bytes_per_token(self) -> float:
        """The mean number of bytes of text per token of the held-out sequences; 1 if tokens are bytes."""
        if self.corpus.vocabulary.file is None:
            return 1.0
        num_tokens = num_bytes = 0
        for batch, weights in self.corpus.heldout_batches(
            self.config.data.eval_sequences, self.config.batch_shape
        ):
            inputs, targets = (batch[name][weights > 0].reshape(-1) for name in ("inputs", "targets"))
            num_tokens += targets.size
            num_bytes += self.corpus.vocabulary.count_bytes(targets, inputs)
        return num_bytes / num_tokens

    def held_out(self, params: Any) -> dict[str, float]:
        """The held-out loss in nats per token, and in bits per byte of text, which is comparable across tokenizers."""
        nats = self.evaluate(params)
        return {"heldout_loss": nats, "heldout_bits_per_byte": nats / math.log(2) / self.bytes_per_token}

    def init(self) -> TrainState:
        return self.layout.init(jax.random.key(self.config.seed))

    def batch(self, step: int, progress: Progress | None = None) -> Batch:
        """The batch of ``step``, counted from 0, as global arrays; this process draws only what its devices hold.

        If ``progress`` is None, the run has skipped no batches and was never resumed with other options.
        """
        _, size, sequence = self.config.batch_shape
        shape = self.recipe.batch_size(step) // size, size, sequence
        begin = (progress or Progress(self.recipe)).sequences_read(step)
        draw = functools.partial(self.corpus.train_batch, self.config.seed, step, shape, begin=begin)
        return make_global_batch(draw, shape[:2], batch_sharding(self.layout.mesh))

    def compiles(self, step: int) -> bool:
        """Whether ``step`` is the first one, or its batch has another size than that of the step before."""
        return step == 0 or self.recipe.batch_size(step) != self.recipe.batch_size(step - 1)


def in_its_precision(config: TrainConfig) -> TrainConfig:
    """The options with ``step.precision`` filled in, so that the run's record has it: float32 on CPU, bfloat16 on
    accelerators, whose matrix units and kernels of attention and experts are for 16 bits.
    """
    if config.step.precision is not None:
        return config
    precision: Any = "float32" if config.launch.devices == "cpu" else "bfloat16"
    return dataclasses.replace(config, step=dataclasses.replace(config.step, precision=precision))


def prepare(config: TrainConfig) -> Run:
    """Check the options, read the data, and make the model and its programs. Makes no parameters yet.

    Raises:
      ConfigError, DataError: options or data are invalid.
    """
    config = in_its_precision(follow(config))
    schedule = make_schedule(config)
    if jax.device_count() < config.step.num_devices:
        raise ConfigError(too_few_devices(config, jax.device_count()))
    mesh, asked = _mesh(config), config.step
    refuse_idle(mesh, jax.process_count())
    options = compiler_options(mesh, asked)
    refuse_eight_bits(config, mesh.devices.flat[0])
    corpus = read_data(config)
    model = make_model(config, schedule, corpus.vocab)
    recipe = run_recipe(config, model.config)
    optimizer = make_optimizer(
        recipe.learning_rate,
        clip=recipe.clip,
        weight_decay=recipe.weight_decay,
        b1=recipe.b1,
        b2=recipe.b2,
        moments=asked.moments,
    )
    layout = Layout(model, schedule, mesh, optimizer, asked.shard)
    num_slots = slots_per_device(config, model.config.num_experts)
    judged = make_model(config, schedule, corpus.vocab, lossless=True)
    if num_slots is not None:
        # With bounded room, drops are counted by source device: a copy must then relieve the device that has it, too.
        layout = placed_layout(layout, num_slots, near=asked.room is None)
        judged = dataclasses.replace(judged, param_specs=layout.model.param_specs)

    @functools.cache
    def update_of(num_microbatches: int) -> Update:
        pipeline = Pipeline(
            model.staged,
            make_schedule(config, num_microbatches),
            mesh,
            param_specs=layout.model.param_specs,
            storage_specs=layout.storage_specs,
            compute_dtype=model.compute_dtype,
            accumulate_dtype=jnp.dtype(asked.gradient_sums),
            fuse_pairs=None if asked.overlap else False,
        )
        return make_update(
            pipeline.value_and_grad,
            optimizer,
            recipe.bias_rate if has_selection_bias(model.config) else 0.0,
            layout.abstract,
            options,
            recipe.mtp_weight if model.config.num_mtp_layers else None,
            recipe.learning_rate,
        )

    def grown(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        return update_of(batch["inputs"].shape[0])(state, batch)

    return Run(
        config=config,
        schedule=schedule,
        corpus=corpus,
        layout=layout,
        update=update_of(asked.num_microbatches) if len(config.batch_counts) == 1 else grown,
        evaluate=make_evaluate(
            judged,
            schedule,
            mesh,
            corpus.heldout_batches(config.data.eval_sequences, config.batch_shape),
            layout.storage_specs,
        ),
        recipe=recipe,
    )


def _mesh(config: TrainConfig) -> jax.sharding.Mesh:
    asked = config.step
    try:
        return make_mesh(asked.pp, over_nodes(asked.ep, asked.ep_nodes), dp=asked.dp)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def compiler_options(mesh: jax.sharding.Mesh, step: StepOptions) -> dict[str, str]:
    """The compiler options for the mesh's devices: the recommended ones, and those of --compiler-option.

    Raises:
      ConfigError: the compiler rejects one of --compiler-option.
    """
    device = mesh.devices.flat[0]
    options = recommended_compiler_options(device.platform, tpu_generation(device.device_kind))
    # Each of several processes tries a device of its own.
    there = jax.sharding.SingleDeviceSharding(mesh.local_devices[0])
    for name, value in step.compiler_options.items():
        # Tried on an empty program now, before the data is read.
        try:
            jax.jit(lambda: 0, out_shardings=there, compiler_options={name: value}).lower().compile()
        except jax.errors.JaxRuntimeError as error:
            raise ConfigError(f"--compiler-option {name}={value}: {str(error).splitlines()[0]}") from None
    return options | step.compiler_options


def read_data(config: TrainConfig) -> Corpus:
    """Open the corpus. Raises DataError if it cannot be read or is too short for one sequence."""
    corpus = open_corpus(config.data.paths, config.data.weights, config.data.tokenizer)
    corpus.check(config.sequence)
    return corpus
