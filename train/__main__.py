"""``python -m train``: options in, a trained model's figures out."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from train.config import ConfigError, check, make_schedule, set_devices
from train.data import DataError
from train.errors import CheckpointError, DivergedError, Stopped
from train.options import Command, parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line.

    Returns the exit code: 2 for options or data that will not do, 1 for a loss that is no number and for checkpoints
    that cannot be used or written, 130 and 143 for a run that was told to stop.
    """
    try:
        return start(parse(arguments))
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (CheckpointError, DivergedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.code
    except KeyboardInterrupt:
        print("interrupted; what was saved before stays, and metrics.jsonl keeps the steps", file=sys.stderr)
        return 130


def start(command: Command) -> int:
    """Do what is asked. JAX is loaded here and not before: it reads the environment when it is imported."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells there what is no news
    if command.check is not None:
        return check_run(command.check)
    if command.compare or command.report:
        return look_back(command)
    config = command.options
    check(config)
    make_schedule(config)
    set_devices(config)
    from rich.console import Console

    from train.loop import run

    run(config, Console(), resume=command.resume)
    return 0


def look_back(command: Command) -> int:
    """Compare finished runs, or write the report of one. Returns the exit code: 1 where runs differ.

    Raises:
      ConfigError: what is named is no run.
    """
    from train.report import RunFolder, compare, write_comparison, write_report

    if command.report:
        print(write_report(command.report))
        return 0
    runs = [RunFolder.read(path) for path in command.compare]
    found = compare(runs)
    for one in found:
        print(one)
    page = command.compare[0].parent / f"compare-{'-'.join(run.path.name for run in runs)}.html"
    write_comparison(runs, found, page)
    print(f"curves side by side: {page}")
    return 0 if all(one.equal for one in found) else 1


def check_run(folder: Path) -> int:
    """Say of every checkpoint of a run whether it is whole; 1 if one is not."""
    from train.checkpoint import verify

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
