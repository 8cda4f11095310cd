"""The engine's contract with a model: three plain functions."""

from collections.abc import Callable
from typing import Any, NamedTuple

Tree = Any
"""A pytree of arrays."""


class PipelineModel(NamedTuple):
    """A model as the engine sees it.

    ``params = {"embed": ..., "stages": ..., "head": ...}``; every leaf of "stages" has a leading stage
    dim, in model order, and a function gets its own part without that dim.

    Attributes:
      embed: ``embed(params["embed"], inputs) -> x``, inputs [microbatch size, ...].
      stage: ``stage(params, x) -> x`` or ``(x, aux)``; x keeps its shape and dtype.
      head_loss: ``head_loss(params["head"], x, targets) -> scalar``, the mean over its examples.

    Inside, collectives over the axis "ep" may be used (but no ppermute): each device holds an equal part of
    the microbatch. What a stage needs recomputed in the backward it says with ``jax.checkpoint``, under any
    policy. Integer leaves of params get gradients of dtype float0, as from ``jax.grad(allow_int=True)``.
    """

    embed: Callable[[Tree, Tree], Tree]
    stage: Callable[[Tree, Tree], Any]
    head_loss: Callable[[Tree, Tree, Tree], Any]
