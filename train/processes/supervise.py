"""Several processes on this machine: start them, watch them, end them all when one fails, start them again.

One process of a JAX program cannot go on without the others, and does not always notice that one is gone. So all are
ended and started together, and only what a checkpoint holds is kept. This module imports no JAX.
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from dualpipe_jax.present.numbers import how_many
from dualpipe_jax.processes import free_port, gpu_environment, too_few_gpus
from train.config import ConfigError, LaunchConfig, TrainConfig, configure, make_schedule
from train.figures.folder import LOCK, locked_folder, make_folder, reporting_write_errors
from train.options import options_as_dict
from train.processes.devices import device_flags, set_devices
from train.processes.watcher import StopRequests, run_once


class EventLog:
    """A log of events, line by line, in a file and on stderr."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def write(self, text: str) -> None:
        # A full disk must not end the run.
        with contextlib.suppress(OSError), self._path.open("a") as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}\n")
        print(f"supervisor: {text}", file=sys.stderr, flush=True)


def supervise(config: TrainConfig, *, resume: bool) -> int:
    """Train in ``--processes`` processes of this machine, and return the exit code.

    Events are logged in ``runs/NAME/processes/story.log``; the output of the processes is in the same folder.

    Raises:
      ConfigError: the devices cannot be divided among the processes, another run has that name, another supervisor is
        at work on it, or its folder cannot be written.
    """
    count, needed = config.launch.processes or 1, config.step.num_devices
    set_devices(config, {}, num_processes=count)
    if config.launch.devices == "accelerator" and count != needed:
        raise ConfigError(
            f"--processes {count}: with --devices accelerator each process has one GPU, and {device_flags(config)} "
            f"needs {needed}: give --processes {needed}"
        )
    if config.launch.devices == "accelerator" and not config.launch.one_gpu and (why := too_few_gpus(count)):
        raise ConfigError(why)
    run_folder = make_folder(config, resume=resume)
    config, folder = dataclasses.replace(config, name=run_folder.name), run_folder / "processes"
    with reporting_write_errors(run_folder):
        folder.mkdir(exist_ok=True)

    def commands(config: TrainConfig, attempt: int) -> list[list[str]]:
        with reporting_write_errors(run_folder):
            return command_lines(config, folder / f"{attempt}", resume=resume or attempt > 0)

    # Not the run's own lock: process 0 holds that one, and it is free while processes are started again.
    with locked_folder(run_folder, folder / LOCK), StopRequests() as requests:
        return run_with_restarts(config, commands, folder, requests)


def command_lines(config: TrainConfig, where: Path, *, resume: bool) -> list[list[str]]:
    """The command of each process, with all options in one file, a free port and the number of the process."""
    options, count = Path(f"{where}.options.json"), config.launch.processes or 1
    alone = configure(config, processes=None, one_gpu=False, restarts=LaunchConfig.restarts, shrink=False)
    options.write_text(json.dumps(options_as_dict(alone), indent=2) + "\n")
    line = [sys.executable, "-P", "-m", "train", "--config", str(options), "--name", str(config.name)]
    line += ["--runs", str(config.runs), "--coordinator", f"127.0.0.1:{free_port()}"]
    line += ["--num-processes", str(count), *(["--resume"] if resume else [])]
    return [[*line, "--process-id", str(number)] for number in range(count)]


def run_with_restarts(
    config: TrainConfig,
    commands: Callable[[TrainConfig, int], Sequence[Sequence[str]]],
    folder: Path,
    requests: StopRequests,
) -> int:
    """Start all processes, and again when one fails, at most ``--restarts`` times. Returns the exit code.

    Args:
      config: the options.
      commands: ``commands(config, attempt)``, a command for each process; attempts count from 0.
      folder: the folder for the log of events and for the output of the processes.
      requests: the requests to stop that the supervisor received.
    """
    log, most = EventLog(folder / "story.log"), config.launch.restarts
    for attempt in range(most + 1):
        lines = commands(config, attempt)
        log.write(
            f"start {attempt}: {how_many(len(lines), 'process', 'es')}, logs in {folder}/{attempt}.*.log"
        )
        outcome = run_once(lines, folder / str(attempt), requests, os.environ, own_environment(config))
        log.write(outcome.why)
        if outcome.code is not None:
            return outcome.code
        if attempt == most:
            break
        if config.launch.shrink:
            fewer = without_failed(config, len(outcome.failed))
            log.write(
                f"going on with {how_many(fewer.launch.processes or 1, 'process', 'es')}, {fewer.step.layout}"
            )
            config = fewer
        log.write(f"restart {attempt + 1} of {most}, from the last good checkpoint")
    log.write(f"given up after {how_many(most, 'restart')}")
    return 1


def own_environment(config: TrainConfig) -> Callable[[int], Mapping[str, str]]:
    """A function from a process's number to the environment variables of this process alone. On GPUs they let it use
    the GPU of its number, or let all processes share one."""
    count = config.launch.processes or 1
    if config.launch.devices != "accelerator":
        return lambda number: {}
    return lambda number: gpu_environment(number, count, one_gpu=config.launch.one_gpu)


def without_failed(config: TrainConfig, num_lost: int) -> TrainConfig:
    """The options without ``num_lost`` of the processes, at least one, and with fewer pipeline ranks.

    Each process keeps its number of devices; dp and ep stay, and layers are distributed anew. The largest number of
    remaining processes that the schedule and the mesh allow is taken; if there is none, the options stay the same.
    """
    count, step = config.launch.processes or 1, config.step
    devices = step.num_devices // count
    for left in range(count - max(num_lost, 1), 0, -1):
        pp, rest = divmod(left * devices, step.devices_per_microbatch)
        launch = dataclasses.replace(config.launch, processes=left)
        fewer = dataclasses.replace(
            config, step=dataclasses.replace(step, pp=pp, stage_layers=()), launch=launch
        )
        if rest == 0 and pp > 0:
            with contextlib.suppress(ConfigError):
                make_schedule(fewer)
                return fewer
    return config
