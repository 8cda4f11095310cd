"""The trainer's programs for ``dualpipe_jax.pods``: steps of training and of serving, by the name of a model."""

import functools
from typing import Any

from dualpipe_jax.pods import Answer
from train.pods import training


def named(name: str) -> Any:
    """The function that makes a model's programs; ``dualpipe dryrun --program v3`` asks for it."""
    return functools.partial(training.make_training_step, name)


def study(*arguments: Any) -> Answer:
    """The answer about a step of serving, see ``train.pods.serving.study``."""
    from train.pods import serving

    return serving.study(*arguments)
