"""How the commands end: with a line that says what went wrong, and an exit code."""

import logging
import sys
from collections.abc import Callable

from models.decode import RequestError
from models.weights import WeightsError
from train.config import ConfigError
from train.data import DataError
from train.errors import CheckpointError


def run_command(start: Callable[[], int]) -> int:
    """Return what ``start()`` returns; if it raises one of these errors, print it and return the error's exit code."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax logs there what users need not know
    try:
        return start()
    except (ConfigError, DataError, WeightsError, RequestError, CheckpointError) as error:
        say(f"error: {error}")
        return 1 if isinstance(error, CheckpointError) else 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
