"""The process in which experiments run, because they may hang; see ``dualpipe_jax.worker``."""

import sys
from collections.abc import Iterator
from typing import Any

from dualpipe_jax.worker import serve


def answers(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the experiments that are asked for.

    JAX is imported here, when the parent's time limit holds already: finding devices may take forever.
    """
    from dualpipe_jax.probe.experiments import experiment

    return experiment(asked)


if __name__ == "__main__":
    sys.exit(serve(answers))
