"""What ``overlap`` found of a program, and the tables of it that a person reads."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from dualpipe_jax.inspect.cycles import Collective, ComputationTime, Event, Total, sum_up
from dualpipe_jax.inspect.exposure import Exposure
from dualpipe_jax.inspect.scheduler import SchedulerStatistics
from dualpipe_jax.inspect.tables import tables
from dualpipe_jax.present.table import Table


@dataclasses.dataclass(frozen=True)
class OverlapReport:
    """Overlap of communication and computation in one compiled program.

    ``print(report)`` gives tables (``rich.print`` coloured ones), ``to_json()`` all of it for programs. In the
    tables ``of`` is the direction, and ``matmuls`` are those between start and done: of the forward / of the
    backward / of neither. What is modelled and what is
    counted stands in ``overlap``'s docstring: this is the compiler's order and its model, not a measurement.

    Attributes:
      module: the program's name.
      collectives: in the order of the text; each is listed once however often its loop runs.
      computations: cycles of each computation that runs line by line, by name.
      statistics: what the TPU compiler's scheduler said of the computations, by name; empty if not given.
      timelines: see ``timeline``.
      exposures: why each collective that is not hidden whole is exposed, what costs the program most first.
    """

    module: str
    collectives: tuple[Collective, ...]
    computations: Mapping[str, ComputationTime]
    statistics: Mapping[str, SchedulerStatistics]
    timelines: Mapping[str, tuple[Event, ...]] = dataclasses.field(repr=False)
    exposures: tuple[Exposure, ...] = dataclasses.field(default=(), repr=False)

    def inside(self, computation: str) -> tuple[Collective, ...]:
        """Collectives that a computation issues itself, those of loops inside it left out."""
        return tuple(c for c in self.collectives if c.computation == computation)

    def select(self, kind: str | None = None, within: str | None = None) -> tuple[Collective, ...]:
        """Collectives of a kind and of the computations whose context contains ``within``."""
        return tuple(
            c
            for c in self.collectives
            if (kind is None or c.kind == kind) and (within is None or within in c.context)
        )

    def totals(self, within: str | None = None) -> tuple[Total, ...]:
        """Sums by kind over the computations whose context contains ``within``, or over all."""
        kinds = dict.fromkeys(c.kind for c in self.select(within=within))
        return tuple(sum_up(kind, self.select(kind, within)) for kind in kinds)

    def hidden(self, kind: str = "all-to-all", within: str | None = None) -> float | None:
        """Share of a kind's time that is hidden; None if durations are unknown or there is none of it."""
        chosen = self.select(kind, within)
        return sum_up(kind, chosen).hidden if chosen else None

    def timeline(self, computation: str) -> tuple[Event, ...]:
        """A computation's schedule laid end to end, sorted by start, beginning at 0.

        Lane ``compute`` holds work, one event an instruction (a loop is one), and waits (kind ``wait``);
        every kind of collective has a lane of its own. Collectives of unknown duration last from start to
        done.

        Raises:
          KeyError: if the program runs no such computation line by line.
        """
        if computation not in self.timelines:
            raise KeyError(f"timeline: no computation {computation!r}; there are {', '.join(self.timelines)}")
        return self.timelines[computation]

    def to_dict(self) -> dict[str, Any]:
        """Everything but the timelines, as plain values."""
        return {
            "module": self.module,
            "totals": [dataclasses.asdict(total) for total in self.totals()],
            "computations": [dataclasses.asdict(c) | {"work": c.work} for c in self.computations.values()],
            "collectives": [c.to_dict() for c in self.collectives],
            "statistics": [dataclasses.asdict(s) for s in self.statistics.values()],
        }

    def to_json(self, indent: int | None = None) -> str:
        """``to_dict`` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def tables(self) -> tuple[Table, ...]:
        """Collectives, totals by kind, computations, and the scheduler's own account if it was given."""
        return tables(self.collectives, self.totals(), self.computations, self.statistics)

    def __str__(self) -> str:
        if not self.collectives:
            return f"{self.module}: no collectives"
        return "\n\n".join([self.module, *map(str, self.tables())])

    def __rich__(self) -> Any:
        """What ``rich.print`` shows."""
        import rich.console

        return rich.console.Group(*self.tables()) if self.collectives else str(self)
