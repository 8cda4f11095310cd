"""The report of `dualpipe overlap --compiled` on any program: its collectives, and why they are exposed."""

from collections.abc import Sequence

from dualpipe_jax.pods.results import CollectiveTotals, Compiled, Exposed
from dualpipe_jax.present.numbers import format_bytes, format_cycles, percent
from dualpipe_jax.present.table import Table

MOST = 10
"""The most exposed collectives that are explained in words, and the most contexts in the table of orders."""


def counted_totals(compiled: Compiled) -> CollectiveTotals:
    """The collectives whose hidden share counts: all-to-alls, or in a program without any, all collectives."""
    if compiled.followed is not None or compiled.all_to_all.count or not compiled.by_kind:
        return compiled.followed or compiled.all_to_all
    cycles, exposed = (
        None if None in parts else sum(parts)
        for parts in (
            [getattr(one, name) for one in compiled.by_kind.values()] for name in ("cycles", "exposed")
        )
    )
    hidden = 1 - exposed / cycles if cycles and exposed is not None else None
    return CollectiveTotals(
        sum(one.count for one in compiled.by_kind.values()), cycles=cycles, exposed=exposed, hidden=hidden
    )


def program_report(compiled: Compiled, target: str, at_least: float, enough: bool) -> list[str | Table]:
    """The report on any program: what it sends, and why exposed collectives are exposed."""
    parts: list[str | Table] = [f"{compiled.file} on {target}"]
    if compiled.others:
        parts += [f"other programs there, which --compiled FILE reads: {', '.join(compiled.others)}"]
    if not compiled.by_kind:
        return [*parts, "\nno collectives"]
    head = ("collectives", "count", "sync", "sent", "takes", "exposed", "hidden")
    rows = [
        (
            kind,
            str(of.count),
            str(of.sync),
            format_bytes(of.payload),
            format_cycles(of.cycles),
            format_cycles(of.exposed),
            percent(of.hidden),
        )
        for kind, of in compiled.by_kind.items()
    ]
    total = counted_totals(compiled)
    parts += ["", Table(head, tuple(rows)), "", _verdict(total, compiled, at_least, enough)]
    if None in (of.cycles for of in compiled.by_kind.values()):
        parts += [
            "the text does not tell how long some take, such as gathers inside of fusions: these are not explained"
        ]
    if compiled.exposed:
        parts += [
            "\nexposed, what costs most first; cycles are the compiler's model, or our roofline of a GPU"
        ]
        told, left = _most_costly(compiled.exposed)
        parts += [f"{n:3}. {one.words}" for n, one in enumerate(told, start=1)]
        if left:
            cycles = sum(one.times * one.exposed for one in left)
            parts += [f"     and {len(left)} more, {format_cycles(cycles)} cycles in all; --json has them"]
    if slower := sorted(compiled.orders, key=lambda order: order.least - order.cycles)[:MOST]:
        times = tuple((o.context, format_cycles(o.cycles), format_cycles(o.least)) for o in slower)
        parts += ["", Table(("where they stand", "takes once", "no order takes less"), times)]
    return parts + _hints(compiled, target)


def _most_costly(exposed: Sequence[Exposed]) -> tuple[Sequence[Exposed], Sequence[Exposed]]:
    """The collectives that cost at least 1 % of all exposed cycles, at most ``MOST``; and the rest.

    ``exposed`` is sorted, what costs most first.
    """
    costs = [one.times * one.exposed for one in exposed]
    worth = min(MOST, sum(100 * cost >= sum(costs) for cost in costs))
    return exposed[:worth], exposed[worth:]


def _verdict(total: CollectiveTotals, compiled: Compiled, at_least: float, enough: bool) -> str:
    which = "all-to-all" if compiled.all_to_all.count else "its collectives"
    hidden = "an unknown share" if total.hidden is None else percent(total.hidden)
    word = "enough" if enough else "too little"
    return f"hidden: {hidden} of {format_cycles(total.cycles)} cycles of {which} ({word}: {at_least:g} % asked for)"


def _hints(compiled: Compiled, target: str) -> list[str]:
    """General hints against the causes that were found."""
    from dualpipe_jax.inspect.target import Target

    on_tpu = Target.parse(target).platform == "tpu"
    sync = {one.kind for one in compiled.exposed if one.cause == "synchronous"}
    lines = []
    if (
        on_tpu
        and "all-to-all" in sync
        and compiled.by_kind["all-to-all"].count == compiled.by_kind["all-to-all"].sync
    ):
        lines += [
            "a TPU's all-to-alls are synchronous unless dualpipe_jax.recommended_compiler_options are given"
        ]
    if on_tpu and sync & {"all-gather", "reduce-scatter"}:
        lines += [
            "a TPU's gathers run beside work under xla_enable_async_all_gather=true and "
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather=true, given together as compiler options"
        ]
    if any(one.context.endswith(" body") for one in compiled.exposed):
        lines += [
            "of a loop's body one round is seen, and a loop whose rounds the text does not tell counts once; "
            "jax.lax.scan(..., unroll=2), or sending for the next round in this one, lets two rounds hide each other"
        ]
    if any(one.cause == "dependence" or not one.elsewhere for one in compiled.exposed):
        lines += [
            "where all work depends on a collective, two halves of the batch do not depend on each other: one computes "
            "while the other's data is sent"
        ]
    return ["", *(f"hint: {line}" for line in lines)] if lines else []
