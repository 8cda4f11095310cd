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
    config = command.options
    check(config)
    make_schedule(config)
    set_devices(config)
    from rich.console import Console

    from train.loop import run

    run(config, Console(), resume=command.resume)
    return 0


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
