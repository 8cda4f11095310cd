"""Pipeline and expert parallelism for mixture-of-experts training in JAX.

Public names are imported on first use, so that ``import dualpipe_jax.schedule`` never loads JAX.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_PACKAGE_OF = {
    name: "dualpipe_jax.engine"
    for name in (
        "At",
        "Out",
        "Pipeline",
        "PipelineModel",
        "PlacedStages",
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
    )
} | {
    "gpu_process_environment": "dualpipe_jax.inspect",
    "make_mesh": "dualpipe_jax.parallel",
    "recommended_compiler_options": "dualpipe_jax.inspect",
    "split_backward": "dualpipe_jax.split",
    "split_vjp": "dualpipe_jax.split",
}

__all__ = sorted(_PACKAGE_OF)


def __getattr__(name: str) -> Any:
    if name not in _PACKAGE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PACKAGE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
