"""The far end of ``command.child.ask``: a process that answers one request, and ends when nobody waits for it."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

PARTIAL = ".partial"
"""What the name of an answer's file ends in as long as it is not complete."""


def serve(
    answers: Callable[[dict[str, Any]], Iterable[dict[str, Any]]], arguments: Sequence[str] | None = None
) -> int:
    """Read a request from standard input, write the answer to the file that the only argument names.

    Arguments:
      answers: gives what is known so far, for JSON; the last is the answer, those before it are what is left if the
        process dies. OSError, ValueError and ModuleNotFoundError say why there is none.

    Returns the exit status, 1 where there is no answer; the reason then stands in its place.
    """
    (name,) = sys.argv[1:] if arguments is None else arguments
    file, partial = Path(name), Path(name + PARTIAL)
    asked = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_parent, daemon=True).start()
    status, found = 0, {}
    try:
        for found in answers(asked):
            _replace(partial, found)
    except (ValueError, ModuleNotFoundError, OSError) as error:
        status, found = 1, {"error": str(error)}
    _replace(file, found)
    return status


def say(stage: str) -> None:
    print(stage, flush=True)


def end_with_parent() -> None:
    """Whoever kills the parent leaves a process behind that nobody waits for; its end closes our input."""
    while sys.stdin.readline():
        time.sleep(0)
    os._exit(130)


def _replace(file: Path, found: dict[str, Any]) -> None:
    """Write the file at once, so that nobody reads the half of it."""
    new = file.with_name(file.name + ".new")
    new.write_text(json.dumps(found))
    new.replace(file)
