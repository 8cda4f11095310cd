"""The devices that serve: how many are asked for, whether JAX has them, and how they share requests."""

import jax

from train.config import ConfigError
from train.generate.options import Source
from train.processes.devices import make_virtual


def num_parts(options: Source) -> int:
    """The number of equal parts into which requests are divided."""
    return options.devices * options.microbatches


def check_at_once(options: Source) -> None:
    """Raise a ConfigError if --at-once cannot be divided."""
    parts = num_parts(options)
    if options.at_once % parts:
        near = -(-options.at_once // parts) * parts
        raise ConfigError(
            f"--at-once {options.at_once}: --devices {options.devices} and --microbatches {options.microbatches} "
            f"divide it into {parts} equal parts; give a multiple of {parts}, such as {near}"
        )


def find_devices(options: Source) -> None:
    """Check that JAX has as many devices as are asked for.

    Virtual CPU devices are created where they are needed, if JAX has not looked for its devices yet.

    Raises:
      ConfigError: JAX has fewer devices.
    """
    needed = options.devices
    if needed == 1:
        return
    make_virtual(needed, bfloat16=options.precision != "float32")
    found = jax.devices()
    if len(found) < needed:
        what = found[0].platform
        more = (
            "XLA_FLAGS sets the number with --xla_force_host_platform_device_count: raise it, or leave it out"
            if what == "cpu"
            else "set JAX_PLATFORMS=cpu for virtual ones"
        )
        raise ConfigError(
            f"--devices {needed}: JAX finds {len(found)} ({what}); give at most so many. Or {more}"
        )
