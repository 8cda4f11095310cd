"""A training step on devices that this machine lacks: its memory, its overlap, its time, and the fastest plan.

This package sees a model only as its ``Program``: shapes, specs and plain functions. The commands run it in a
process of its own, ``python -m dualpipe_jax.pods``. Names are imported lazily: plans and results load no JAX.
"""

import importlib
from typing import Any

_MODULE_OF = {
    "Answer": "results",
    "Dispatch": "links",
    "Plan": "plan",
    "Program": "program",
    "Setting": "program",
    "Update": "program",
    "optimized_by": "updates",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
