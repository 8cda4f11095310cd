"""Read from a compiled program what a dry run answers."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dualpipe_jax import inspect
from dualpipe_jax.contract import StagedModel
from dualpipe_jax.inspect.copies import Copy
from dualpipe_jax.inspect.cycles import Collective, sum_up
from dualpipe_jax.inspect.exposure import Exposure
from dualpipe_jax.inspect.report import OverlapReport
from dualpipe_jax.pods import ahead
from dualpipe_jax.pods.results import (
    AllToAll,
    CollectiveTotals,
    Compiled,
    CopyInLoop,
    Exposed,
    Order,
    Overheads,
    Unit,
)
from dualpipe_jax.pods.units import bodies_of, overheads, scan_body, units_of_program
from dualpipe_jax.schedule.lowering.unit_key import UnitKey

_COPY_BYTES = 1 << 20
"""The bytes of the smallest copies in loops that are reported."""


def read(
    what: str,
    module: inspect.Module,
    report: OverlapReport,
    memory: inspect.Memory | None,
    held: Collection[str] = (),
    model: StagedModel | None = None,
    **more: Mapping[str, Any],
) -> Compiled:
    """Read overlap, units, sends, copies and memory of a compiled program.

    Args:
      what: ``Compiled.what``.
      module: the program.
      report: its overlap report.
      memory: the compiler's own count of its memory, if there is one.
      held: the names of the arrays that no loop should copy; see ``ahead.array_name``.
      model: the model, which names the kinds of stages; None where it is not known.
      more: further fields of ``Compiled``.
    """
    pairs = bodies_of(module, "FB")
    exchange = [c for c in report.select("collective-permute") if c.computation == scan_body(module)]
    inside = [c for c in report.select("all-to-all") if not pairs or c.computation in pairs]
    beside = overheads(report, module)
    known = () if model is None else (model.kind_of, model.alike)
    sends, units = totals(exchange), units_of_program(report, module, *known)
    return Compiled(
        what,
        all_to_all=totals(inside),
        all_to_alls=tuple(_all_to_all(c) for c in inside),
        sends=sends,
        sends_exposed=exposed_by_tick(sends.cycles, units),
        units=units,
        overheads=None if beside is None else Overheads(*beside),
        copies=tuple(
            _copy(copy, held) for copy in inspect.copies(module, _COPY_BYTES) if not copy.changes_memory
        ),
        memory=None if memory is None else dataclasses.asdict(memory) | {"peak": memory.peak},
        scheduler={name: dataclasses.asdict(s) for name, s in report.statistics.items() if name in pairs},
        **more,  # type: ignore[arg-type]
    )


def read_foreign(module: inspect.Module, report: OverlapReport) -> Compiled:
    """Read any program, also one without units: all of its collectives, and the causes of the exposed ones."""
    kinds = dict.fromkeys(c.kind for c in report.collectives)
    places = {e.collective.computation for e in report.exposures}
    found = read("text", module, report, None)
    return dataclasses.replace(
        found,
        by_kind={kind: totals(report.select(kind)) for kind in kinds},
        exposed=tuple(map(_exposed, report.exposures)),
        orders=tuple(
            Order(c.name, c.context, c.cycles, c.least)
            for c in report.computations.values()
            if c.name in places
        ),
    )


def _exposed(exposure: Exposure) -> Exposed:
    own = exposure.collective
    about = own.name, own.kind, own.form, own.payload, own.context, exposure.times
    cycles = own.duration, own.exposed or 0.0
    return Exposed(*about, *cycles, exposure.cause, exposure.elsewhere, exposure.gain, str(exposure))


def totals(chosen: Sequence[Collective]) -> CollectiveTotals:
    total = sum_up("", tuple(chosen))
    return CollectiveTotals(
        count=total.count,
        sync=total.num_sync,
        payload=total.payload,
        cycles=total.duration,
        exposed=total.exposed,
        waits=total.waits,
        hidden=total.hidden if total.duration else None,
        each=max((c.duration or 0.0 for c in chosen), default=0.0),
    )


def exposed_by_tick(cycles: float | None, units: Mapping[UnitKey, Unit]) -> dict[str, float]:
    """Cycles of a tick's sends, one after the other, beyond the work of its unit: by the op of most stages' units.

    The key "" is a tick without a unit. Empty if ``cycles`` is None.
    """
    if cycles is None:
        return {}
    usual = {key.op: unit.computation for key, unit in units.items() if not key.kinds}
    return {"": cycles} | {name: max(0.0, cycles - work) for name, work in usual.items()}


def _copy(copy: Copy, held: Collection[str]) -> CopyInLoop:
    """A reported copy. By its shape and dtype alone it counts as one of a pool, a sum or a parameter."""
    array = ahead.array_name(*copy.array)
    return CopyInLoop(copy.name, copy.nbytes, copy.context, copy.op_name, array, array in held)


def _all_to_all(c: Collective) -> AllToAll:
    return AllToAll(**{field.name: getattr(c, field.name) for field in dataclasses.fields(AllToAll)})
