"""``python -m models.weights IN OUT``: convert a published checkpoint to our own files, or back."""

import sys
from collections.abc import Sequence

import tyro

from models.weights.converting import Options, convert
from models.weights.errors import WeightsError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line. Returns the exit code: 2 for a folder that cannot be read or written."""
    options = tyro.cli(Options, prog="scripts/convert", args=arguments)
    try:
        print(convert(options))
    except (WeightsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
