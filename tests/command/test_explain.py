"""What is said of anybody's program: what costs most, what is left out, and which hint goes with what."""

import pytest

from dualpipe_jax.command.explain import counted_totals, program_report
from dualpipe_jax.pods.results import CollectiveTotals, Compiled, Exposed, Order


def exposed(cost, cause="order", kind="all-to-all", context="main", times=1, elsewhere=9.0):
    words = f"a that costs {cost}"
    return Exposed("a", kind, "async", 8, context, times, 100.0, cost, cause, elsewhere, 1.0, words)


def said(*found, target="v5p:2x2x2", kinds=None, **more):
    kinds = kinds or {one.kind: CollectiveTotals(1, cycles=100.0, exposed=50.0, hidden=0.5) for one in found}
    compiled = Compiled("text", file="dump/step.txt", by_kind=kinds, exposed=found, **more)
    return "\n".join(map(str, program_report(compiled, target, 97.0, False)))


def test_what_costs_little_is_counted_together():
    told = said(*(exposed(cost) for cost in (900.0, 80.0, 11.0, 5.0, 4.0)))
    assert [f"a that costs {cost}" in told for cost in (900.0, 80.0, 11.0, 5.0)] == [True, True, True, False]
    assert "and 2 more, 9 cycles in all; --json has them" in told
    assert "and 5 more, 500 cycles in all" in said(*[exposed(100.0)] * 15), "ten are explained"
    assert "more," not in said(exposed(1.0))


def test_where_most_could_be_had_stands_first():
    orders = Order("a", "main/while.1 body", 100.0, 90.0), Order("b", "main", 500.0, 200.0)
    rows = [row.split() for row in said(exposed(50.0), orders=orders).splitlines() if row.startswith("main")]
    assert rows == [["main", "500", "200"], ["main/while.1", "body", "100", "90"]]


@pytest.mark.parametrize(
    ("words", "found", "target"),
    [
        ("a TPU's all-to-alls are synchronous unless", exposed(9.0, "synchronous"), "v5p:2x2x2"),
        ("a TPU's gathers run beside work under", exposed(9.0, "synchronous", "all-gather"), "v5p:2x2x2"),
        ("of a loop's body one round is seen", exposed(9.0, context="main/while.1 body"), "h100:1x8"),
        ("two halves of the batch do not depend", exposed(9.0, "dependence"), "h100:1x8"),
        ("two halves of the batch do not depend", exposed(9.0, "synchronous", elsewhere=0.0), "h100:1x8"),
    ],
)
def test_hints(words, found, target):
    all_sync = {found.kind: CollectiveTotals(1, sync=1, cycles=100.0, exposed=9.0, hidden=0.91)}
    told = said(found, target=target, kinds=all_sync)
    (hint,) = (line for line in told.splitlines() if line.startswith("hint: "))
    assert words in hint
    if "TPU" in words:
        assert words not in said(found, target="h100:1x8", kinds=all_sync)
    if "all-to-alls" in words:  # some are asynchronous: the options are there
        assert words not in said(
            found, kinds={found.kind: CollectiveTotals(2, sync=1, cycles=100.0, exposed=9.0)}
        )


def test_all_kinds_count_where_there_is_no_all_to_all():
    kinds = {
        "all-gather": CollectiveTotals(2, cycles=300.0, exposed=60.0),
        "all-reduce": CollectiveTotals(1, cycles=100.0, exposed=40.0),
    }
    assert counted_totals(Compiled("text", by_kind=kinds)).hidden == pytest.approx(1 - 100 / 400)
    assert "hidden: 75.0 % of 400 cycles of its collectives (too little: 97 % asked for)" in said(kinds=kinds)
    unknown = kinds | {"all-reduce": CollectiveTotals(1)}
    assert counted_totals(Compiled("text", by_kind=unknown)).hidden is None
    told = said(kinds=unknown)
    assert "hidden: an unknown share" in told and "the text does not tell how long some take" in told
    assert said(kinds=None) == "dump/step.txt on v5p:2x2x2\n\nno collectives"
