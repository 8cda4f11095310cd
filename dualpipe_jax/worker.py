"""The child process of ``command.child.ask``: it answers one request, and ends when its parent is gone."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

PARTIAL = ".partial"
"""The ending of the name of the file that holds an answer which is not complete yet."""


def serve(answers: Callable[[dict[str, Any]], Iterable[dict[str, Any]]]) -> int:
    """Read a request from standard input, and write the answer to the file that the only argument names.

    Arguments:
      answers: yields what is known so far, dicts for JSON. The last one is the answer. Each is written to the
        file with the ending ``PARTIAL``, which remains if the process dies. It raises OSError, ValueError or
        ModuleNotFoundError, with the reason, if there is no answer.

    Returns the exit status: 0, or 1 if there is no answer; the file then holds {"error": the reason}.
    """
    (name,) = sys.argv[1:]
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
    """End this process, with status 130, when the parent's end closes standard input.

    Without it, a killed parent would leave a process behind for which nobody waits.
    """
    while sys.stdin.readline():
        time.sleep(0)
    os._exit(130)


def _replace(file: Path, found: dict[str, Any]) -> None:
    """Write the file in one step (write another file, then rename it), so that nobody reads a half of it."""
    new = file.with_name(file.name + ".new")
    new.write_text(json.dumps(found))
    new.replace(file)
