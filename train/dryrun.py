"""What a step would take on devices that are not here: ``dualpipe overlap`` and ``dualpipe dryrun``.

``python -m train.dryrun FILE`` is the process that those commands start, for compilers take long, may end the
process that they run in, and can be stopped no other way. It reads a request from standard input (JSON), prints
what it is about to do, a line a stage, writes its answer to FILE, and ends when standard input is closed.
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

from dualpipe_jax.command.program import Program
from dualpipe_jax.inspect import STATISTICS_ENVIRONMENT, Target
from dualpipe_jax.worker import say, serve
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
    from train import serving, study  # only now: JAX reads the environment when it is imported

    asked = serving if request.compile in serving.WHAT else study
    return asked.study(request, target, devices, say)


def answers(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The same of a request as JSON has it."""
    yield answer(Request(Program(**_tuples(asked.pop("program"))), **_tuples(asked)))


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


if __name__ == "__main__":
    sys.exit(serve(answers))
