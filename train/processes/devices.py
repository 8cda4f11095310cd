"""How many devices a run needs, and how virtual ones are made."""

import os
import re

from dualpipe_jax.inspect.compiler import IN_ORDER
from dualpipe_jax.ynnpack import YNNPACK
from train.config import ConfigError, TrainConfig

# Virtual devices share the cores, so on a busy machine a collective waits long for the last device.
_COLLECTIVE_TIMEOUTS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)
_NO_YNNPACK = f"--{YNNPACK}="
"""The flag that turns YNNPACK off. Its products of bfloat16 in float32 wait, for minutes, for threads that the permutes
of other devices hold. And from JAX 0.11 on, XLA leaves gradients of bfloat16 matrices to it that it does not support,
and then sums them in bfloat16."""
_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def set_devices(
    config: TrainConfig, environ: "os._Environ[str] | dict[str, str]" = os.environ, *, num_processes: int = 1
) -> None:
    """Ask for virtual CPU devices, or on accelerators for sums in a fixed order, in the environment, which JAX reads
    when it is imported.

    Each of several processes gets an equal share of the devices. A count that is in XLA_FLAGS already is kept.

    Raises:
      ConfigError: that count is too small, or the devices cannot be divided equally among the processes.
    """
    if config.launch.devices != "cpu":
        if config.launch.deterministic:
            environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {IN_ORDER}".strip()
        return
    needed, rest = divmod(config.step.num_devices, num_processes)
    if rest:
        raise ConfigError(
            f"{device_flags(config)}: {config.step.num_devices} devices cannot be shared out equally over "
            f"{num_processes} processes"
        )
    environ["JAX_PLATFORMS"] = "cpu"
    there = make_virtual(needed, environ, bfloat16=config.step.precision == "bfloat16")
    if there < needed:
        raise ConfigError(too_few_devices(config, there * num_processes, "XLA_FLAGS asks for"))


def make_virtual(
    needed: int, environ: "os._Environ[str] | dict[str, str]" = os.environ, *, bfloat16: bool
) -> int:
    """Ask XLA for virtual CPU devices, unless XLA_FLAGS has a count already. Call it before JAX looks for its devices.

    Args:
      needed: the number of devices.
      environ: the environment, which is changed.
      bfloat16: whether anything is computed in bfloat16.

    Returns:
      The number of devices that JAX will find if it finds no accelerator.
    """
    flags = environ.get("XLA_FLAGS", "")
    counts = _DEVICE_COUNT.findall(flags)
    ours = [] if counts else [f"--xla_force_host_platform_device_count={needed}", *_COLLECTIVE_TIMEOUTS]
    if bfloat16 and _NO_YNNPACK not in flags:
        ours.append(_NO_YNNPACK)
    environ["XLA_FLAGS"] = " ".join([*flags.split(), *ours])
    return int(counts[-1]) if counts else needed


def too_few_devices(config: TrainConfig, num_found: int, source: str = "JAX finds") -> str:
    """The error message if there are too few devices for dp x pp x ep."""
    needed = f"{device_flags(config)}: needs {config.step.num_devices} devices"
    return f"{needed}, but {source} {num_found}; lower --pp or --ep"


def device_flags(config: TrainConfig) -> str:
    step = config.step
    return f"--pp {step.pp} --ep {step.ep}" + (f" --dp {step.dp}" if step.dp > 1 else "")
