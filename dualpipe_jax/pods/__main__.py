"""The process that ``dualpipe overlap``, ``dryrun`` and ``plan`` start; see ``dualpipe_jax.worker``.

Compilers take long, may end the process that they run in, and can only be stopped by ending that process.
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

from dualpipe_jax.inspect.scheduler import STATISTICS_ENVIRONMENT
from dualpipe_jax.inspect.target import Target
from dualpipe_jax.pods.plain import filled, plain
from dualpipe_jax.pods.request import Request
from dualpipe_jax.worker import say, serve


def answers(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the answer to a request. Both are in the form that JSON has.

    Raises:
      ValueError: the options do not fit together.
    """
    request = filled(Request, asked)
    target, devices = Target.parse(request.target), None
    if request.compile not in ("nothing", "draw"):
        say(f"loading the compiler for {target}")
        os.environ.update(STATISTICS_ENVIRONMENT)
        devices = target.devices()
    say("loading JAX")
    # Only now: JAX reads the environment when it is imported.
    from dualpipe_jax.pods.dryrun import answer
    from dualpipe_jax.pods.loading import registered

    is_serving = request.compile in ("prefill", "decode")
    ask = registered("--what prefill and decode: serving is").study if is_serving else answer
    yield plain(ask(request, target, devices, say))


if __name__ == "__main__":
    sys.exit(serve(answers))
