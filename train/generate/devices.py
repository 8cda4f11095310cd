"""The devices that serve: how many are asked for, whether they are there, and what they share."""

import jax

from train.config import ConfigError
from train.generate.options import Source
from train.processes.devices import make_virtual


def share(options: Source) -> int:
    """Into how many equal parts requests are divided."""
    return options.devices * options.microbatches


def check_share(options: Source) -> None:
    """Raise a ConfigError if --at-once cannot be divided."""
    parts = share(options)
    if options.at_once % parts:
        near = -(-options.at_once // parts) * parts
        raise ConfigError(
            f"--at-once {options.at_once}: --devices {options.devices} and --microbatches {options.microbatches} "
            f"divide it into {parts} equal parts; give a multiple of {parts}, such as {near}"
        )


def find_devices(options: Source) -> None:
    """See that there are as many as are asked for; virtual ones are made, if JAX has not looked for its devices yet.

    Raises:
      ConfigError: there are fewer.
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
