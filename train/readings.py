"""What a compiled program says, as a dry run answers it: plain numbers by name."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from dualpipe_jax import inspect
from train import ahead, predict

_COPY_BYTES = 1 << 20
"""Copies in loops of fewer bytes are not worth a mention."""


def read(
    module: inspect.Module,
    report: inspect.OverlapReport,
    memory: inspect.Memory | None,
    held: Collection[str] = (),
) -> dict[str, Any]:
    """Overlap, units, sends, copies and memory of a compiled program.

    ``held`` names the arrays that no loop should copy; see ``ahead.array_name``.
    """
    pairs = predict.bodies(module, "FB")
    exchange = [c for c in report.select("collective-permute") if c.computation == predict.walk(module)]
    inside = [c for c in report.select("all-to-all") if not pairs or c.computation in pairs]
    beside = predict.overheads(report, module)
    return {
        "all_to_all": shares(inside),
        "all_to_alls": [_row(c) for c in inside],
        "sends": shares(exchange) | {"each": max((c.duration or 0.0 for c in exchange), default=0.0)},
        "units": {name: unit_figures(unit) for name, unit in predict.measure(report, module).items()},
        "overheads": None if beside is None else {"tick": beside[0], "step": beside[1]},
        "copies": [
            _copy(copy, held) for copy in inspect.copies(module, _COPY_BYTES) if not copy.changes_memory
        ],
        "memory": None if memory is None else dataclasses.asdict(memory) | {"peak": memory.peak},
        "scheduler": {name: dataclasses.asdict(s) for name, s in report.statistics.items() if name in pairs},
    }


def unit_figures(unit: predict.Unit) -> dict[str, Any]:
    """A unit's cycles, and what they are over the least that it could take."""
    return dataclasses.asdict(unit) | {"over_limit": unit.over_limit, "over_sum": unit.over_sum}


def shares(chosen: Sequence[inspect.Collective]) -> dict[str, Any]:
    """Collectives together: how many, what they take, how much of it is hidden."""
    durations = [c.duration for c in chosen]
    exposed = [c.exposed for c in chosen]
    known = None not in durations and None not in exposed
    total = sum(d for d in durations if d is not None)
    waits = sum(e for e in exposed if e is not None)
    return {
        "count": len(chosen),
        "sync": sum(c.form == "sync" for c in chosen),
        "payload": sum(c.payload for c in chosen),
        "cycles": total if known else None,
        "exposed": waits if known else None,
        "hidden": max(0.0, 1 - waits / total) if known and total else None,
    }


def _copy(copy: inspect.Copy, held: Collection[str]) -> dict[str, Any]:
    """A copy; whether it is of a pool, a sum or a parameter is told by its shape."""
    array = ahead.array_name(*copy.array)
    own = {"array": array, "of_state": array in held}
    return {name: getattr(copy, name) for name in ("name", "nbytes", "context", "op_name")} | own


def _row(c: inspect.Collective) -> dict[str, Any]:
    names = (
        "name",
        "form",
        "direction",
        "payload",
        "duration",
        "exposed",
        "hidden",
        "cycles_between",
        "matmuls",
    )
    return {name: getattr(c, name) for name in (*names, "opposite_matmuls")}
