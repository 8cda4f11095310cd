"""Runs a lowered schedule: the SPMD engine, and the oracle that it answers to."""

from dualpipe_jax.engine.model import PipelineModel
from dualpipe_jax.engine.pipeline import (
    pipeline_apply,
    pipeline_loss,
    pipeline_state,
    pipeline_units,
    pipeline_value_and_grad,
)
from dualpipe_jax.engine.reference import sequential_loss, sequential_value_and_grad
from dualpipe_jax.engine.stages import PlacedStages, place_stages, unplace_stages
from dualpipe_jax.inspect.compiler import recommended_compiler_options, tpu_generation
from dualpipe_jax.split import split_backward

__all__ = [
    "PipelineModel",
    "PlacedStages",
    "pipeline_apply",
    "pipeline_loss",
    "pipeline_state",
    "pipeline_units",
    "pipeline_value_and_grad",
    "place_stages",
    "recommended_compiler_options",
    "sequential_loss",
    "sequential_value_and_grad",
    "split_backward",
    "tpu_generation",
    "unplace_stages",
]
