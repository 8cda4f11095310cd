"""``python -m train``: options in, a trained model's figures out."""

import sys
from collections.abc import Sequence

from train.config import ConfigError, check, make_schedule, set_devices
from train.data import DataError
from train.errors import DivergedError
from train.options import Command, parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line. Returns the exit code: 2 for options or data that will not do, 1 for trouble."""
    try:
        command = parse(arguments)
        if command.compare or command.report:
            return look_back(command)
        config = command.options
        check(config)
        make_schedule(config)
        set_devices(config)
        from rich.console import Console

        from train.loop import run  # only now: JAX reads the environment when it is imported

        run(config, Console())
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except DivergedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; metrics.jsonl keeps the steps done so far", file=sys.stderr)
        return 130
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


if __name__ == "__main__":
    sys.exit(main())
