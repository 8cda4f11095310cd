"""The options of a run: a frozen value, read from the command line, checked before anything is compiled."""

import dataclasses
import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dualpipe_jax.schedule import ALL_SCHEDULES, Schedule

SCHEDULES = {recipe.__name__: recipe for recipe in ALL_SCHEDULES}
MODELS = ("byte", "tiny", "small")

_PATIENCE = (  # virtual devices share the cores: on a busy machine a collective waits long for the last of them
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)
_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


class ConfigError(ValueError):
    """Options that do not fit together; says which, why and what would."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Train a DeepSeek-V3-like mixture-of-experts model, pipelined over pp ranks, experts over ep.

    Without options: DualPipe, pp 4 x ep 2 on 8 virtual CPU devices, on the source text of Python's standard
    library, byte by byte. Everything about the run is left in runs/NAME.
    """

    schedule: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(SCHEDULES) + "}")] = "dualpipe"
    """Order of forwards and backwards on the pipeline's ranks."""
    pp: int = 4
    """Pipeline ranks."""
    ep: int = 2
    """Expert-parallel devices of each rank; the run needs pp x ep devices."""
    microbatches: int = 16
    """Microbatches of a step."""
    microbatch_size: int = 4
    """Sequences of a microbatch, shared out over ep."""
    sequence: int = 64
    """Bytes of a sequence."""

    model: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(MODELS) + "}")] = "byte"
    """Model size; byte is the one made for the default run."""
    layers: int | None = None
    """Layers, instead of the model size's own number; quickest where the schedule's stages can share them equally."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What activations are computed in. Parameters and their sums are float32."""

    dispatch: Literal["capacity", "dropless"] = "capacity"
    """How tokens reach experts: capacity gives every expert equal room, dropless as much as it needs."""
    capacity_factor: float = 2.0
    """Room in multiples of an even load, where dispatch is capacity; beyond it tokens are dropped."""

    steps: int = 250
    """Optimizer steps."""
    learning_rate: float = 4e-3
    """Peak of the learning rate, after warm-up; a cosine takes it down to a tenth."""
    warmup: int = 20
    """Steps of warm-up."""
    weight_decay: float = 0.1
    """AdamW's weight decay; norms and biases do not decay."""
    clip: float = 1.0
    """Largest global norm of the gradient."""
    bias_rate: float = 0.01
    """How far a step moves the routing bias of an expert with too much or too little load."""
    seed: int = 0
    """Of initial parameters and batches. A batch depends on seed and step alone."""

    data: tuple[Path, ...] = ()
    """Text files or folders to train on, instead of the standard library. A tenth is held out."""
    eval_batches: int = 8
    """Batches of held-out text that the loss is measured on, before and after."""
    name: str | None = None
    """Name of the run; the schedule and the time if not given."""
    runs: Path = Path("runs")
    """Folder of all runs."""
    log_every: int = 10
    """Steps between lines where the output is not a terminal."""
    devices: Literal["cpu", "accelerator"] = "cpu"
    """cpu makes pp x ep virtual devices; accelerator takes what JAX finds."""

    @property
    def batch_shape(self) -> tuple[int, int, int]:
        """(microbatches, microbatch size, sequence)."""
        return self.microbatches, self.microbatch_size, self.sequence

    @property
    def tokens_per_step(self) -> int:
        """Bytes that a step learns from."""
        return self.microbatches * self.microbatch_size * self.sequence


def parse(arguments: Sequence[str] | None = None) -> TrainConfig:
    """Read the command line (``sys.argv`` if None). Exits with code 2 where it cannot be read."""
    return tyro.cli(TrainConfig, prog="scripts/train", args=arguments, config=(tyro.conf.OmitArgPrefixes,))


def make_schedule(config: TrainConfig) -> Schedule:
    """The schedule that the options name.

    Raises:
      ConfigError: there is none of that name, or it does not take these counts.
    """
    if config.schedule not in SCHEDULES:
        near = difflib.get_close_matches(config.schedule, SCHEDULES, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"--schedule {config.schedule}: {meant}there are {', '.join(SCHEDULES)}")
    try:
        return SCHEDULES[config.schedule](config.pp, config.microbatches)
    except ValueError as error:
        raise ConfigError(f"--pp {config.pp} --microbatches {config.microbatches}: {error}") from None


def check(config: TrainConfig) -> None:
    """Raise ConfigError for the first option that is out of range or does not fit the others."""
    for name in (
        "pp",
        "ep",
        "microbatches",
        "microbatch_size",
        "sequence",
        "steps",
        "log_every",
        "eval_batches",
    ):
        if getattr(config, name) < 1:
            raise ConfigError(f"{_option(name)} {getattr(config, name)}: must be at least 1")
    for name in ("seed", "warmup", "weight_decay", "bias_rate"):
        if getattr(config, name) < 0:
            raise ConfigError(f"{_option(name)} {getattr(config, name)}: must not be negative")
    for name in ("learning_rate", "clip", "capacity_factor"):
        if not getattr(config, name) > 0:
            raise ConfigError(f"{_option(name)} {getattr(config, name)}: must be above 0")
    if config.name is not None and (not config.name.strip(".") or Path(config.name).name != config.name):
        raise ConfigError(f"--name {config.name}: must be a plain name; --runs says in which folder")
    if config.microbatch_size % config.ep:
        raise ConfigError(
            f"--microbatch-size {config.microbatch_size}: --ep {config.ep} devices must share it equally, "
            f"try {config.ep * max(1, config.microbatch_size // config.ep)}"
        )


def set_devices(config: TrainConfig, environ: "os._Environ[str] | dict[str, str]" = os.environ) -> None:
    """For virtual CPU devices: say so in the environment, which JAX reads when it is imported.

    A count that is in XLA_FLAGS already stays.

    Raises:
      ConfigError: that count is too small.
    """
    if config.devices != "cpu":
        return
    needed = config.pp * config.ep
    environ["JAX_PLATFORMS"] = "cpu"
    flags = environ.get("XLA_FLAGS", "")
    counts = _DEVICE_COUNT.findall(flags)
    if not counts:
        ours = f"--xla_force_host_platform_device_count={needed}", *_PATIENCE
        environ["XLA_FLAGS"] = " ".join([*flags.split(), *ours])
    elif int(counts[-1]) < needed:
        raise ConfigError(too_few_devices(config, int(counts[-1]), "XLA_FLAGS asks for"))


def too_few_devices(config: TrainConfig, num_found: int, source: str = "JAX finds") -> str:
    """What to say when pp x ep does not fit."""
    return (
        f"--pp {config.pp} --ep {config.ep}: needs {config.pp * config.ep} devices, "
        f"but {source} {num_found}; lower --pp or --ep"
    )


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")
