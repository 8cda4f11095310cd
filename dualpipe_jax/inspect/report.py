"""The report of ``overlap`` on a program, and its tables for people."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from dualpipe_jax.inspect.cycles import Collective, ComputationTime, Event, Total, sum_up
from dualpipe_jax.inspect.exposure import Exposure
from dualpipe_jax.inspect.scheduler import SchedulerStatistics
from dualpipe_jax.present.numbers import format_bytes, format_cycles, percent
from dualpipe_jax.present.table import Table

_DIRECTION_LETTERS = {"forward": "F", "backward": "B", "unknown": "?"}


@dataclasses.dataclass(frozen=True)
class OverlapReport:
    """Overlap of communication and computation in one compiled program.

    ``print(report)`` gives tables (``rich.print`` coloured ones), ``to_json()`` the data for programs. In the
    tables ``of`` is the direction, and ``matmuls`` are the numbers of matrix products between start and done: of the
    forward / of the backward / of neither. ``overlap``'s docstring says what is modelled and what is counted: the
    figures are the compiler's order and its model, not a measurement.

    Attributes:
      module: the program's name.
      collectives: the collectives by computation, in the order in which they begin; each is listed once however often
        its loop runs.
      computations: cycles of each computation that runs line by line, by name.
      statistics: the TPU scheduler's statistics of the computations, by name; empty if not given.
      timelines: the events of each computation, by name; see ``timeline``.
      exposures: why each collective that is not completely hidden is exposed; the most exposed cycles in the program
        come first.
    """

    module: str
    collectives: tuple[Collective, ...]
    computations: Mapping[str, ComputationTime]
    statistics: Mapping[str, SchedulerStatistics]
    timelines: Mapping[str, tuple[Event, ...]] = dataclasses.field(repr=False)
    exposures: tuple[Exposure, ...] = dataclasses.field(default=(), repr=False)

    def inside(self, computation: str) -> tuple[Collective, ...]:
        """Return the collectives that a computation issues itself, without those of loops inside it."""
        return tuple(c for c in self.collectives if c.computation == computation)

    def select(self, kind: str | None = None, within: str | None = None) -> tuple[Collective, ...]:
        """Return the collectives of a kind, in computations with ``within`` in their context; None selects all."""
        return tuple(
            c
            for c in self.collectives
            if (kind is None or c.kind == kind) and (within is None or within in c.context)
        )

    def totals(self, within: str | None = None) -> tuple[Total, ...]:
        """Return sums by kind over the computations with ``within`` in their context, or over all."""
        kinds = dict.fromkeys(c.kind for c in self.select(within=within))
        return tuple(sum_up(kind, self.select(kind, within)) for kind in kinds)

    def hidden(self, kind: str = "all-to-all", within: str | None = None) -> float | None:
        """Return the hidden share of a kind's time; None if durations are unknown or there is no such collective."""
        chosen = self.select(kind, within)
        return sum_up(kind, chosen).hidden if chosen else None

    def timeline(self, computation: str) -> tuple[Event, ...]:
        """Return the events of a computation, sorted by start; the computation begins at cycle 0.

        Lane ``compute`` holds work, one event per instruction (a loop is one), and waits (kind ``wait``);
        every kind of collective has a lane of its own. Collectives of unknown duration last from start to
        done.

        Raises:
          KeyError: if the program runs no such computation line by line.
        """
        if computation not in self.timelines:
            raise KeyError(f"timeline: no computation {computation!r}; there are {', '.join(self.timelines)}")
        return self.timelines[computation]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields but the timelines and exposures, with totals, as plain values."""
        return {
            "module": self.module,
            "totals": [dataclasses.asdict(total) for total in self.totals()],
            "computations": [dataclasses.asdict(c) | {"work": c.work} for c in self.computations.values()],
            "collectives": [c.to_dict() for c in self.collectives],
            "statistics": [dataclasses.asdict(s) for s in self.statistics.values()],
        }

    def to_json(self, indent: int | None = None) -> str:
        """Return ``to_dict`` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def tables(self) -> tuple[Table, ...]:
        """Return tables of collectives, totals by kind, computations, and the scheduler's statistics if given."""
        found = (
            _collectives_table(self.collectives),
            _totals_table(self.totals()),
            _times_table(self.computations),
        )
        return (*found, _statistics_table(self.statistics)) if self.statistics else found

    def __str__(self) -> str:
        if not self.collectives:
            return f"{self.module}: no collectives"
        return "\n\n".join([self.module, *map(str, self.tables())])

    def __rich__(self) -> Any:
        """Return the tables for ``rich.print``."""
        import rich.console

        return rich.console.Group(*self.tables()) if self.collectives else str(self)


def _collectives_table(collectives: Sequence[Collective]) -> Table:
    head = ("collective", "form", "of", "payload", "takes", "between", "matmuls", "hidden", "where")
    rows = tuple(
        (
            c.name,
            c.form,
            _DIRECTION_LETTERS[c.direction],
            format_bytes(c.payload),
            format_cycles(c.duration),
            format_cycles(c.cycles_between),
            "/".join(str(n) for n in c.matmuls.values()),
            percent(c.hidden),
            c.computation,
        )
        for c in collectives
    )
    synchronous = [at for at, c in enumerate(collectives) if c.form == "sync"]
    return _table(head, rows, left=(0, 1, 2, 8), bad=synchronous)


def _totals_table(totals: Sequence[Total]) -> Table:
    head = ("kind", "count", "sync", "payload", "takes", "exposed", "waits", "hidden")
    rows = tuple(
        (
            t.kind,
            str(t.count),
            str(t.num_sync),
            format_bytes(t.payload),
            format_cycles(t.duration),
            format_cycles(t.exposed),
            format_cycles(t.waits),
            percent(t.hidden),
        )
        for t in totals
    )
    return _table(head, rows)


def _times_table(computations: Mapping[str, ComputationTime]) -> Table:
    head = ("computation, run once", "cycles", "waits", "unpriced", "run from")
    rows = tuple(
        (c.name, format_cycles(c.cycles), format_cycles(c.waits), str(len(c.unpriced)), c.context)
        for c in computations.values()
        if c.cycles or c.unpriced
    )
    return _table(head, rows, left=(0, 4))


def _statistics_table(statistics: Mapping[str, SchedulerStatistics]) -> Table:
    head = ("the scheduler's own account", "cycles before", "waits", "cycles after", "waits")
    rows = tuple(
        (name, *(format_cycles(n) for w in (s.before, s.after) for n in (w.cycles, w.total_wasted)))
        for name, s in statistics.items()
        if s.before.total_wasted
    )
    return _table(head, rows)


def _table(
    head: tuple[str, ...],
    rows: tuple[tuple[str, ...], ...],
    left: Sequence[int] = (0,),
    bad: Sequence[int] = (),
) -> Table:
    """Make a table; the names in the first and last column may break over lines, figures must not."""
    return Table(head, rows, bad=bad, left=left, foldable=(0, len(head) - 1), ruled=True)
