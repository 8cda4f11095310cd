"""How many devices a run needs, and how virtual ones are made."""

import os
import re

from dualpipe_jax.inspect.compiler import IN_ORDER
from train.config import ConfigError, TrainConfig

_PATIENCE = (  # virtual devices share the cores: on a busy machine a collective waits long for the last of them
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)
_BFLOAT16 = "--xla_cpu_experimental_ynn_fusion_type="
"""No YNNPACK: its products of bfloat16 in float32 wait for threads that other devices' permutes hold, for minutes; and
from JAX 0.11 on XLA leaves it gradients of bfloat16 matrices that it does not take, and then sums them in bfloat16."""
_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def set_devices(
    config: TrainConfig, environ: "os._Environ[str] | dict[str, str]" = os.environ, *, num_processes: int = 1
) -> None:
    """For virtual CPU devices, and for sums in a fixed order: say so in the environment, which JAX reads when it is
    imported.

    Several processes share them out equally. A count that is in XLA_FLAGS already stays.

    Raises:
      ConfigError: that count is too small, or they cannot be shared out.
    """
    if config.launch.devices != "cpu":
        if config.launch.deterministic:
            environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {IN_ORDER}".strip()
        return
    needed, rest = divmod(config.step.num_devices, num_processes)
    if rest:
        raise ConfigError(
            f"{asked_devices(config)}: {config.step.num_devices} devices cannot be shared out equally over "
            f"{num_processes} processes"
        )
    environ["JAX_PLATFORMS"] = "cpu"
    there = make_virtual(needed, environ, bfloat16=config.step.precision == "bfloat16")
    if there < needed:
        raise ConfigError(too_few_devices(config, there * num_processes, "XLA_FLAGS asks for"))


def make_virtual(
    needed: int, environ: "os._Environ[str] | dict[str, str]" = os.environ, *, bfloat16: bool
) -> int:
    """Ask XLA for virtual CPU devices, unless XLA_FLAGS says how many already; before JAX looks for its devices.

    Args:
      needed: how many.
      environ: the environment.
      bfloat16: whether anything is computed in it.

    Returns:
      How many JAX will find if it finds no accelerator.
    """
    flags = environ.get("XLA_FLAGS", "")
    counts = _DEVICE_COUNT.findall(flags)
    ours = [] if counts else [f"--xla_force_host_platform_device_count={needed}", *_PATIENCE]
    if bfloat16 and _BFLOAT16 not in flags:
        ours.append(_BFLOAT16)
    environ["XLA_FLAGS"] = " ".join([*flags.split(), *ours])
    return int(counts[-1]) if counts else needed


def too_few_devices(config: TrainConfig, num_found: int, source: str = "JAX finds") -> str:
    """What to say when dp x pp x ep does not fit."""
    needed = f"{asked_devices(config)}: needs {config.step.num_devices} devices"
    return f"{needed}, but {source} {num_found}; lower --pp or --ep"


def asked_devices(config: TrainConfig) -> str:
    step = config.step
    return f"--pp {step.pp} --ep {step.ep}" + (f" --dp {step.dp}" if step.dp > 1 else "")
