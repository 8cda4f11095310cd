"""The SPMD engine, which runs a lowered schedule, and the plain model with which its results are compared."""

from dualpipe_jax.contract import At, Out, PipelineModel, Report, StagedModel, staged
from dualpipe_jax.engine.pipeline import Applied, Pipeline
from dualpipe_jax.engine.reference import reference_loss, reference_value_and_grad
from dualpipe_jax.engine.short_api import (
    pipeline_apply,
    pipeline_loss,
    pipeline_value_and_grad,
    sequential_loss,
    sequential_value_and_grad,
)
from dualpipe_jax.engine.stages import PlacedStages, place_stages, unplace_stages

__all__ = [
    "Applied",
    "At",
    "Out",
    "Pipeline",
    "PipelineModel",
    "PlacedStages",
    "Report",
    "StagedModel",
    "pipeline_apply",
    "pipeline_loss",
    "pipeline_value_and_grad",
    "place_stages",
    "reference_loss",
    "reference_value_and_grad",
    "sequential_loss",
    "sequential_value_and_grad",
    "staged",
    "unplace_stages",
]
