"""The options of a run: frozen values in sections, checked before anything is compiled.

On the command line every option is one short flag, whatever its section: see ``FLAGS``. ``train.options`` reads
them from there, from files and from presets.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from dualpipe_jax.command.line import options_of
from dualpipe_jax.ranges import AboveZero, AtLeastOne, NotBelowZero, NotNegative, Share
from dualpipe_jax.schedule import Schedule
from dualpipe_jax.schedule.names import find
from dualpipe_jax.step_options import StepOptions, numbers_by_name


class ConfigError(ValueError):
    """Options that do not fit together. The message says which, why, and what would fit."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The model: its name, its size and the weights of its losses."""

    name: Annotated[str, arg(name="model", metavar="NAME")] = "byte"
    """The model: byte, which is made for the default run, tiny, small, v2-lite, 67b-a2b, v2 or v3."""
    numbers: Annotated[tuple[str, ...], arg(name="set", metavar="NAME=NUMBER ...")] = ()
    """Numbers that replace the model's own, by their names in models.Config, such as dim=512
    num_experts=16."""
    layers: int | None = None
    """Number of layers with experts, instead of the model's own. They are distributed over the stages by
    their time."""
    mtp: NotNegative | None = None
    """Number of modules of multi-token prediction, instead of the model's own."""
    mtp_weight: NotBelowZero | None = None
    """Weight of the losses of multi-token prediction: the paper's lambda. If left out, the recipe's."""
    final_mtp_weight: NotBelowZero | None = None
    """Weight of the losses of multi-token prediction after the learning rate begins to fall. If left out, the
    recipe's, or --mtp-weight if that differs from the recipe's."""
    balance_factor: NotBelowZero | None = None
    """Weight of the sequence-wise balance loss: the paper's alpha. If left out, the recipe's."""

    @property
    def changes(self) -> dict[str, int | float]:
        """``numbers`` as a dict from name to number. Raises ValueError if an entry is not NAME=NUMBER."""
        return numbers_by_name(self.numbers)


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The placement of experts on the devices of ep. By default experts are placed in order and never move."""

    rebalance_every: AtLeastOne | None = None
    """Number of steps after which experts move to other devices of ep, if that evens out the loads of the
    devices. If left out, they never move."""
    redundant_experts: NotNegative = 0
    """Number of additional copies of experts in a layer, over all ep devices. The most loaded experts get
    them."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The data that a run reads."""

    paths: Annotated[tuple[str, ...], arg(name="data", metavar="PATH ...")] = ()
    """What to train on, instead of the standard library: folders that scripts/prepare made (here or at a
    URL), text files or folders of text, ArrayRecord files, or Hugging Face data sets on disk. A tenth of a
    text is held out."""
    weights: Annotated[tuple[float, ...], arg(name="data-weights", metavar="WEIGHT ...")] = ()
    """The share of all sequences that each path of --data has, in any unit. If left out, in proportion to its
    number of tokens."""
    tokenizer: Annotated[str | None, arg(metavar="FILE")] = None
    """A tokenizer.json for text that is not prepared. If left out, tokens are bytes."""
    eval_sequences: AtLeastOne = 512
    """Number of held-out sequences that the loss is measured on. They are the same for every run."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer: AdamW with a learning rate that warms up and falls, and the update of routing biases.

    An option that is left out takes its value from the recipe of the named model; see models/recipes.py.
    """

    steps: AtLeastOne = 250
    """Number of optimizer steps."""
    learning_rate: AboveZero | None = None
    """Peak of the learning rate, after warm-up. If left out, the recipe's."""
    constant_until: Share | None = None
    """Share of the run after which the learning rate begins to fall, along half a cosine to --final-rate at
    the last step. If both are left out, the recipe's phases."""
    final_rate: NotBelowZero | None = None
    """Learning rate of the last step, as a share of the peak. If only --constant-until is given, 0.1; if only
    this one is, --constant-until is 0."""
    warmup: NotNegative | None = None
    """Number of steps of warm-up. If left out, the recipe's, but at most a tenth of the run."""
    b1: Share | None = None
    """AdamW's decay of the average gradient. If left out, the recipe's."""
    b2: Share | None = None
    """AdamW's decay of the average squared gradient. If left out, the recipe's."""
    weight_decay: NotBelowZero | None = None
    """AdamW's weight decay. Norms and biases do not decay. If left out, the recipe's."""
    clip: AboveZero | None = None
    """Largest global norm of the gradient. If left out, the recipe's."""
    bias_rate: NotBelowZero | None = None
    """How far a step moves the routing bias of an expert with too much or too little load. If left out, the
    recipe's."""
    first_microbatches: AtLeastOne | None = None
    """Number of microbatches of the first steps. It grows in increments of this number, up to --microbatches
    after --ramp-tokens. The step is compiled once for each number."""
    ramp_tokens: AtLeastOne | None = None
    """Number of tokens after which a step has all --microbatches. See --first-microbatches."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved, apart from its end and from a request to stop, and which checkpoints are kept."""

    every: Annotated[AtLeastOne | None, arg(name="checkpoint-every")] = None
    """Number of steps between checkpoints."""
    minutes: Annotated[AboveZero | None, arg(name="checkpoint-minutes")] = 10.0
    """Minutes between checkpoints, in addition to those of --checkpoint-every."""
    keep: AtLeastOne = 3
    """Number of the latest checkpoints that are kept."""
    keep_every: AtLeastOne | None = None
    """Keep for good each checkpoint whose step is a multiple of this."""
    export: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder to write the weights to at the end, in Hugging Face's layout. With --resume also those of a
    finished run."""


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """What is printed and written while a run trains."""

    every: Annotated[AtLeastOne, arg(name="log-every")] = 10
    """Number of steps between printed lines where the output is not a terminal."""
    eval_every: AtLeastOne | None = None
    """Number of steps between measurements of the held-out loss. If left out, only before and after the
    run."""
    load_every: AtLeastOne = 10
    """Number of steps between records of each expert's load in metrics.jsonl. The balance and the drops are
    recorded for every step."""
    track: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Trackers that receive the metrics, in addition to metrics.jsonl. Weights & Biases is kept offline."""
    peak_tflops: AboveZero | None = None
    """Peak TFLOP/s of one device, to which MFU refers. If left out, that of the data sheet, for known
    devices."""
    measure_peak: bool = False
    """On CPU, whose peak is not known, measure the rate of a matrix product and use it as the peak."""
    on_trouble: Literal["stop", "skip"] = "stop"
    """What to do at a spike of the loss, or at a loss or gradient that is not finite. stop: end the run. skip:
    go back to the latest checkpoint and skip the batches from there to the trouble."""
    spike: AboveZero | None = None
    """Number of spreads above the median of the latest losses from which a loss counts as a spike. If left
    out, no loss does."""
    profile: Annotated[NotNegative, arg(metavar="STEPS")] = 0
    """Number of steps to profile: a trace for Perfetto and XProf, and the measured timeline next to the
    schedule's theory."""


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """Processes and where their devices come from."""

    devices: Literal["cpu", "accelerator"] = "cpu"
    """cpu: make dp x pp x ep virtual devices. accelerator: take the devices that JAX finds."""
    deterministic: bool = False
    """On GPUs, the same bits whenever a step is run again: sums are taken in a fixed order, by XLA's
    deterministic operations. That costs some time. CPUs and TPUs do so anyway."""
    processes: AtLeastOne | None = None
    """Number of processes to start on this machine and to watch. All are started again when one fails. Each
    has one GPU, or on CPU its share of the virtual devices."""
    one_gpu: bool = False
    """Let all processes of --processes share one GPU: for a test of what is computed, not of speed. NCCL allows
    it from version 2.30 on."""
    restarts: NotNegative = 3
    """How often at most the processes of --processes are started again, from the last good checkpoint."""
    shrink: bool = False
    """Start again without the processes that failed, and with fewer pipeline ranks."""
    coordinator: Annotated[str | None, arg(metavar="HOST:PORT")] = None
    """Address of process 0 of several. Needed where no launcher tells it; SLURM, Kubernetes, TPU pods and
    Open MPI do."""
    num_processes: AtLeastOne | None = None
    """Number of processes. Needed where no launcher tells it."""
    process_id: NotNegative | None = None
    """Number of this process, counted from 0. Needed where no launcher tells it."""
    coordinator_bind: Annotated[str | None, arg(metavar="HOST:PORT")] = None
    """Address at which process 0 listens, if not at the coordinator's own. It trusts everyone who reaches it."""
    patience: AboveZero | None = None
    """Seconds without a finished step after which a process counts as stuck and ends. If left out, ten median
    steps, but at least 20 seconds. Compiling is not counted."""
    straggler_every: NotNegative = 50
    """Number of steps between reports of the slowest of several processes. 0 for none."""


STEP = StepOptions(ep=2, microbatches=16, microbatch_size=4)
"""The default options of a training step."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """All options of a run. Without any: DualPipe, pp 4 x ep 2 on 8 virtual CPU devices, on the standard library."""

    name: str | None = None
    """Name of the run. If left out, the schedule and the time."""
    runs: Path = Path("runs")
    """Folder of all runs."""
    seed: NotNegative = 0
    """Seed of initial parameters and batches, below 2^32. A batch depends on seed and step alone."""
    model: ModelConfig = ModelConfig()
    step: StepOptions = STEP
    experts: ExpertsConfig = ExpertsConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def batch_shape(self) -> tuple[int, int, int]:
        """(microbatches, microbatch size, sequence), of the largest batch where batches grow."""
        return self.step.num_microbatches, self.step.batch, self.sequence

    @property
    def sequence(self) -> int:
        """The number of tokens of a sequence. Raises TypeError before ``train.recipe.follow`` has filled it in."""
        if self.step.sequence is None:
            raise TypeError(
                "TrainConfig: step.sequence is None: train.recipe.follow(config) takes the recipe's"
            )
        return self.step.sequence

    @property
    def batch_counts(self) -> tuple[int, ...]:
        """All numbers of microbatches that steps of the run have, in ascending order."""
        last, first = self.step.num_microbatches, self.optimizer.first_microbatches
        return (last,) if first is None else tuple(range(first, last + 1, first))


FLAGS: Mapping[str, tuple[str, ...]] = {f"--{option.flag}": option.path for option in options_of(TrainConfig)}
"""Flag -> where its option lies in a ``TrainConfig``: ``FLAGS["--pp"] == ("step", "pp")``."""


def configure(base: TrainConfig | None = None, /, **changes: Any) -> TrainConfig:
    """Options by their flags' names: ``configure(pp=2, steps=10)``; the others are those of ``base``.

    Raises:
      TypeError: there is no such option.
    """
    config = TrainConfig() if base is None else base
    for name, value in changes.items():
        flag = "--" + name.replace("_", "-")
        if flag not in FLAGS:
            raise TypeError(f"configure: no option {name}; there are {', '.join(FLAGS)}")
        config = replaced(config, FLAGS[flag], value)
    return config


def replaced(config: Any, path: tuple[str, ...], value: Any) -> Any:
    """A copy of a dataclass in which the field at ``path``, which may be nested, has the value ``value``."""
    first, *rest = path
    if rest:
        value = replaced(getattr(config, first), tuple(rest), value)
    return dataclasses.replace(config, **{first: value})


def option(config: TrainConfig, flag: str) -> Any:
    value: Any = config
    for name in FLAGS[flag]:
        value = getattr(value, name)
    return value


def make_schedule(config: TrainConfig, num_microbatches: int | None = None) -> Schedule:
    """The schedule that the options name, for ``num_microbatches`` microbatches, or for all of a step if that is None.

    Raises:
      ConfigError: there is no schedule of that name, or it does not support these numbers of ranks and microbatches.
    """
    step = config.step
    count = step.num_microbatches if num_microbatches is None else num_microbatches
    try:
        find(step.schedule)
    except ValueError as error:
        raise ConfigError(f"--schedule {step.schedule}: {error}") from None
    try:
        return step.make_schedule(count)
    except ValueError as error:
        flag = "--microbatches" if count == step.num_microbatches else "--first-microbatches: a step with"
        raise ConfigError(f"--pp {step.pp} {flag} {count}: {error}") from None
