"""Check that a run's options fit together, before any data is read or any program compiled."""

import re
from pathlib import Path

from dualpipe_jax.ranges import out_of_range
from train.config import FLAGS, ConfigError, TrainConfig, make_schedule, option


def check(config: TrainConfig) -> None:
    """Raise ConfigError for the first option that is out of range or does not fit the others."""
    flag_of = {path: flag for flag, path in FLAGS.items()}
    for path, value, why in out_of_range(config):
        raise ConfigError(f"{flag_of[path]} {value}: {why}")
    try:
        config.step.check()
        _ = config.model.changes
    except ValueError as error:
        raise ConfigError(str(error)) from None
    check_ramp(config)
    check_numbers(config)
    if config.seed >= 2**32:
        raise ConfigError(f"--seed {config.seed}: must be below 2^32 = {2**32}; more bits would be cut off")
    if config.name is not None and (not config.name.strip(".") or Path(config.name).name != config.name):
        raise ConfigError(f"--name {config.name}: must be a plain name; --runs says in which folder")
    if config.log.profile >= config.optimizer.steps:
        raise ConfigError(
            f"--profile {config.log.profile}: --steps {config.optimizer.steps} leaves none that is not compiled in; "
            f"try --steps {config.log.profile + 3}"
        )
    for flag in ("--rebalance-every", "--redundant-experts"):
        if option(config, flag) and config.step.ep == 1:
            raise ConfigError(
                f"{flag} {option(config, flag)}: with --ep 1 one device has all experts of a layer; give --ep 2 or "
                f"more, or {flag} {option(TrainConfig(), flag)}"
            )
    launch = config.launch
    if launch.processes is not None and (
        launch.coordinator or launch.num_processes or launch.process_id is not None
    ):
        raise ConfigError(
            f"--processes {launch.processes} starts processes on this machine and connects them; --coordinator, "
            "--num-processes and --process-id are for a process that something else starts. Give one or the other"
        )
    if launch.one_gpu and (launch.processes is None or launch.devices == "cpu"):
        raise ConfigError(
            "--one-gpu: is for several processes on a GPU; give --processes and --devices accelerator"
        )
    for flag in ("--restarts", "--shrink"):
        if launch.processes is None and _is_set(config, flag):
            raise ConfigError(
                f"{flag}: is for processes that --processes starts and watches over; give --processes, or take it out"
            )
    for flag in ("--coordinator", "--coordinator-bind"):
        address = option(config, flag)
        if address is not None and not re.fullmatch(r".+:\d{1,5}", address):
            raise ConfigError(f"{flag} {address}: must be HOST:PORT, such as 10.0.0.1:8476")


def check_alone(config: TrainConfig) -> None:
    """Raise ConfigError for an option that is only for several processes; called if there is only one process."""
    for flag in ("--patience", "--straggler-every", "--coordinator-bind"):
        if _is_set(config, flag):
            raise ConfigError(
                f"{flag} {option(config, flag)}: is for one of several processes, and this one is alone; give "
                "--processes, or take it out"
            )


def _is_set(config: TrainConfig, flag: str) -> bool:
    """Whether an option's value is neither its default nor 0, which turns it off."""
    return option(config, flag) not in (option(TrainConfig(), flag), 0)


def check_numbers(config: TrainConfig) -> None:
    """Raise ConfigError if --set gives a number of the model that the data or another option determines."""
    given = config.model.changes
    if "vocab" in given:
        raise ConfigError(
            "--set vocab: the text's tokens say it: a tokenizer's number of them, or 256 bytes. Take it out; another "
            "--tokenizer, or scripts/prepare --train-tokenizer SIZE, gives another"
        )
    for name, flag, what in (
        ("num_layers", "--layers", "layers with experts, besides num_dense_layers"),
        ("num_mtp_layers", "--mtp", "modules of multi-token prediction"),
    ):
        if name in given and (number := option(config, flag)) is not None:
            raise ConfigError(
                f"--set {name}: {flag} {number}, given here, in a file or by the preset, says how many {what}; take "
                f"{name} out and give another {flag}"
            )


def check_ramp(config: TrainConfig) -> None:
    """Raise ConfigError if batches cannot grow as --first-microbatches and --ramp-tokens ask."""
    first, last = config.optimizer.first_microbatches, config.step.num_microbatches
    ramp = config.optimizer.ramp_tokens
    if (first is None) != (ramp is None):
        raise ConfigError(
            "--first-microbatches and --ramp-tokens: one says from what, one how long; give both or neither"
        )
    if first is None or ramp is None:
        return
    if last % first:
        raise ConfigError(
            f"--first-microbatches {first}: steps grow by as many, which must divide the "
            f"{last} of --microbatches"
        )
    if ramp >= 2**62:
        raise ConfigError(f"--ramp-tokens {ramp}: must be below 2^62; no text is so long")
    if config.log.profile:
        raise ConfigError(
            "--profile: with --first-microbatches steps are of several kinds; profile a run without it"
        )
    for count in config.batch_counts:
        make_schedule(config, count)
