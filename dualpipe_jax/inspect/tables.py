"""What ``overlap`` found as tables that a person reads."""

from collections.abc import Mapping, Sequence

from dualpipe_jax.inspect.cycles import Collective, ComputationTime, Total
from dualpipe_jax.inspect.scheduler import SchedulerStatistics
from dualpipe_jax.present.numbers import format_bytes, format_cycles, percent
from dualpipe_jax.present.table import Table

_SHORT = {"forward": "F", "backward": "B", "unknown": "?"}


def tables(
    collectives: Sequence[Collective],
    totals: Sequence[Total],
    computations: Mapping[str, ComputationTime],
    statistics: Mapping[str, SchedulerStatistics],
) -> tuple[Table, ...]:
    """Collectives, totals by kind, computations, and the scheduler's own account if it was given."""
    found = _collectives_table(collectives), _totals_table(totals), _times_table(computations)
    return (*found, _statistics_table(statistics)) if statistics else found


def _collectives_table(collectives: Sequence[Collective]) -> Table:
    head = ("collective", "form", "of", "payload", "takes", "between", "matmuls", "hidden", "where")
    rows = tuple(
        (
            c.name,
            c.form,
            _SHORT[c.direction],
            format_bytes(c.payload),
            format_cycles(c.duration),
            format_cycles(c.cycles_between),
            "/".join(str(n) for n in c.matmuls.values()),
            percent(c.hidden),
            c.computation,
        )
        for c in collectives
    )
    at_once = [at for at, c in enumerate(collectives) if c.form == "sync"]
    return _table(head, rows, left=(0, 1, 2, 8), bad=at_once)


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
    """Names at both ends may break; figures must not."""
    return Table(head, rows, bad=bad, left=left, foldable=(0, len(head) - 1), ruled=True)
