"""The command line ``python -m train``: train a model, check checkpoints, compare runs or write a report."""

import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from dualpipe_jax.arguments import UnfitError
from train.checks import check, check_alone
from train.config import ConfigError, TrainConfig, make_schedule
from train.data import DataError
from train.errors import DIVERGED, FAILED, PEER_LOST, CheckpointError, DivergedError, Stopped, is_peer_lost
from train.options import Command, parse
from train.processes.devices import set_devices
from train.processes.heartbeat import WATCHER, Heartbeat
from train.processes.launch import Launch, detect_launch, initialize


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line.

    Returns the exit code: 0 for success; 2 for invalid options or data; 1 for a run that diverged, for checkpoints that
    cannot be used or written or are damaged, and for compared runs that differ; 130 or 143 for a run that was stopped
    by Ctrl-C or SIGTERM; with ``--processes`` see also ``train.errors``.
    """
    try:
        return start(parse(arguments))
    except Exception as error:
        return report_error(error)
    except KeyboardInterrupt:
        print("interrupted; what was saved before stays, and metrics.jsonl keeps the steps", file=sys.stderr)
        return 130


def report_error(error: Exception) -> int:
    """Print on stderr how a run ended, and return the exit code. Unexpected errors are raised again."""
    match error:
        case Stopped():
            print(error, file=sys.stderr)
            return error.code
        case ConfigError() | DataError() | UnfitError():
            print(f"error: {error}", file=sys.stderr)
            return 2
        case CheckpointError() | DivergedError():
            print(f"error: {error}", file=sys.stderr)
            return 1
    raise error


def start(command: Command) -> int:
    """Run a command and return the exit code.

    JAX is imported here and not before, because it reads the environment when it is imported.
    """
    # Orbax logs unimportant messages there.
    logging.getLogger("absl").setLevel(logging.ERROR)
    if command.check is not None:
        # Nothing is computed, and the run itself may be at work on the accelerator.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        return check_run(command.check)
    if command.compare or command.report:
        return compare_or_report(command)
    config = command.options
    check(config)
    make_schedule(config)
    if config.launch.processes is not None:
        from train.processes.supervise import supervise

        return supervise(config, resume=command.resume)
    launch = detect_launch(config.launch)
    if launch is None:
        check_alone(config)
    set_devices(config, num_processes=launch.num_processes or 1 if launch else 1)
    try:
        train(config, launch, resume=command.resume)
    except BaseException as error:
        if launch is None:
            raise
        end_at_once(error, launch)
    return 0


def train(config: TrainConfig, launch: Launch | None, *, resume: bool) -> None:
    """Train in this process, which is one of several if ``launch`` is given."""
    watcher = os.environ.get(WATCHER)
    heartbeat = Heartbeat(
        int(watcher) if watcher else None, config.launch.patience, watched=launch is not None
    )
    if launch is not None:
        initialize(launch, config.launch)
    from rich.console import Console

    from train.processes.group import Processes, connected_processes
    from train.run import run

    processes = Processes(heartbeat=heartbeat) if launch is None else connected_processes(heartbeat)
    run(config, processes.console_if_leader(Console()), processes, resume=resume)
    processes.leave()


def end_at_once(error: BaseException, launch: Launch) -> None:
    """End this process at once. It does not wait for the other processes, which may wait for it and notice its end."""
    try:
        code = report_error(error) if isinstance(error, Exception) else 130
    except Exception:
        code = PEER_LOST if is_peer_lost(error) else FAILED
        traceback.print_exc()
    if isinstance(error, DivergedError):
        code = DIVERGED
    sys.stdout.flush()
    sys.stderr.flush()
    if launch.process_id in (0, None):
        # The coordinator ends with this process. Without it the others are aborted before they report their own error.
        time.sleep(1)
    os._exit(code)


def compare_or_report(command: Command) -> int:
    """Compare finished runs, or write the report of one run. Returns the exit code: 1 if compared runs differ, else 0.

    Raises:
      ConfigError: a path is not a run's folder, only one run is to be compared, or a report cannot be written.
    """
    from train.report import RunFolder, compare, write_comparison, write_report

    if command.report:
        try:
            print(write_report(command.report))
        except OSError as error:
            raise ConfigError(
                f"--report {command.report}: cannot write it: {error.strerror or error}"
            ) from None
        return 0
    runs = [RunFolder.read(path) for path in command.compare]
    found = compare(runs)
    for one in found:
        print(one)
    page = command.compare[0].parent / f"compare-{'-'.join(run.path.name for run in runs)}.html"
    try:
        write_comparison(runs, found, page)
        print(f"curves side by side: {page}")
    except OSError as error:
        # The exit code says whether the runs are equal.
        print(f"warning: no page with the curves: {page}: {error.strerror or error}", file=sys.stderr)
    return 0 if all(one.equal for one in found) else 1


def check_run(folder: Path) -> int:
    """Print for every checkpoint of a run whether it is whole. Returns the exit code: 1 if any is damaged, else 0."""
    from train.state.checkpoint import verify

    problems = 0
    for step, problem, facts in verify(folder):
        if problem is None:
            loss = facts["metrics"].get("loss")
            print(
                f"step {step}: whole, {len(facts['fingerprints'])} arrays, saved {facts['time']}, loss {loss}"
            )
        else:
            problems += 1
            print(f"step {step}: damaged: {problem}")
    return min(problems, 1)


if __name__ == "__main__":
    sys.exit(main())
