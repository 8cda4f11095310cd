"""What the trainer registers with ``dualpipe_jax.pods``: its steps of training and of serving, by a model's name."""

import functools
from typing import Any

from dualpipe_jax.pods import Answer
from train.pods import training


def named(name: str) -> Any:
    """The maker of a model's programs; ``dualpipe dryrun --program v3`` asks for it."""
    return functools.partial(training.make, name)


def study(*asked: Any) -> Answer:
    """What is asked of a step of serving, see ``train.pods.serving.study``."""
    from train.pods import serving

    return serving.study(*asked)
