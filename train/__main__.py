"""``python -m train``: options in, a trained model's figures out."""

import sys
from collections.abc import Sequence

from train.config import ConfigError, check, make_schedule, set_devices
from train.data import DataError
from train.errors import DivergedError
from train.options import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line. Returns the exit code: 2 for options or data that will not do."""
    try:
        config = parse(arguments).options
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


if __name__ == "__main__":
    sys.exit(main())
