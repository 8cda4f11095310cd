"""What a training step would take on devices that are not here: ``dualpipe overlap`` and ``dualpipe dryrun``.

``python -m train.dryrun FILE`` is the process that those commands start, for compilers take long, may end the
process that they run in, and can be stopped no other way. It reads a request from standard input (JSON), prints
what it is about to do, a line a stage, writes its answer to FILE, and ends when standard input is closed.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dualpipe_jax.command.program import Program
from dualpipe_jax.inspect import STATISTICS_ENVIRONMENT, Target
from train.request import Request


def answer(request: Request) -> dict[str, Any]:
    """Find it out; values for JSON.

    Raises:
      ValueError: the options do not fit together.
    """
    target = None if request.target is None else Target.parse(request.target)
    if target is not None and request.compile != "nothing":
        say(f"loading the compiler for {target}")
        os.environ.update(STATISTICS_ENVIRONMENT)
        devices = target.devices()
    else:
        devices = None
    say("loading JAX")
    from train import study  # only now: JAX reads the environment when it is imported

    return study.study(request, target, devices, say)


def say(stage: str) -> None:
    """Tell the parent what comes next."""
    print(stage, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Answer one request; 1 if it cannot be answered, the reason then stands in the answer."""
    (file,) = sys.argv[1:] if arguments is None else arguments
    asked = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_parent, daemon=True).start()
    request = Request(Program(**_tuples(asked.pop("program"))), **_tuples(asked))
    try:
        result, status = answer(request), 0
    except (ValueError, ModuleNotFoundError, OSError) as error:
        result, status = {"error": str(error)}, 1
    Path(file).write_text(json.dumps(result))
    return status


def end_with_parent() -> None:
    """Whoever kills the parent leaves a compiler behind that nobody waits for; its end closes our input."""
    while sys.stdin.readline():
        time.sleep(0)
    os._exit(130)


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


if __name__ == "__main__":
    sys.exit(main())
