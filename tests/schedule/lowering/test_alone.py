"""Tables with only some units left."""

import numpy as np
import pytest

from dualpipe_jax.schedule import CostModel, dualpipe, dualpipe_v, gpipe, lower, one_f_one_b, zb_h1
from dualpipe_jax.schedule.lowering.alone import opening, unit_everywhere, units_alone
from dualpipe_jax.schedule.lowering.table import OPS, Keeps
from dualpipe_jax.schedule.recipes import ALL_SCHEDULES

PAIRED = pytest.mark.parametrize("make", [dualpipe, dualpipe_v], ids=lambda make: make.__name__)
FIRST_MIDDLE_LAST = Keeps((0, *(1,) * 2, 2), ("W",) * 3, {})


def running(table):
    """Units that some rank runs at some tick."""
    return [table.units[number] for number in np.unique(table.column("unit")) if number >= 0]


@PAIRED
def test_a_pair_alone_keeps_the_pools_and_one_pair_of_stages(make):
    table = lower(make(4, 12))
    alone = units_alone(table)
    assert alone.num_slots == table.num_slots and alone.channels == table.channels
    assert 0 < alone.num_ticks < table.num_ticks
    (unit,) = running(alone)
    assert unit.op == "FB"
    assert (alone.column("unit") >= 0).any(axis=1).all()
    assert sorted(unit.op for unit in running(units_alone(table, OPS))) == sorted(OPS)


def test_the_most_frequent_one_is_taken():
    table = lower(dualpipe(4, 12), keeps=FIRST_MIDDLE_LAST)
    (unit,) = running(units_alone(table, ("F",)))
    assert unit.forward.kind == 1
    (pair,) = running(units_alone(table))
    assert (pair.forward.kind, pair.backward.kind) == (1, 1)


def test_every_kind_once():
    table = lower(dualpipe(4, 12), keeps=FIRST_MIDDLE_LAST)
    alone = units_alone(table, ("F", "B", "FB"), kinds=range(3))
    kinds = {(u.op, *(s.kind for s in (u.forward, u.backward) if s)) for u in running(alone)}
    there = {(u.op, *(s.kind for s in (u.forward, u.backward) if s)) for u in table.units}
    assert kinds == {kind for kind in there if kind[0] in ("F", "B", "FB")}
    assert len(running(alone)) == len(kinds) > 3


def test_of_kinds_alike_one():
    """Kinds 1 and 2 count as one: of F three kinds become two, and of pairs those that differ in this only are one."""
    keeps = Keeps((0, 1, 1, 2, 2, 3), ("W",) * 4, {})
    table = lower(dualpipe(6, 12), keeps=keeps)
    every, fewer = (running(units_alone(table, OPS, kinds=kinds)) for kinds in (range(4), (0, 1, 1, 3)))

    def of(units):
        return {(u.op, *((0, 1, 1, 3)[s.kind] for s in (u.forward, u.backward) if s)) for u in units}

    assert of(every) == of(fewer) and len(of(fewer)) == len(fewer) < len(every)
    assert [u.forward.kind for u in fewer if u.op == "F"].count(1) <= 1


def test_a_schedule_without_pairs_has_its_own_units_alone():
    table = lower(one_f_one_b(4, 8))
    alone = units_alone(table, ("B",))
    assert [unit.op for unit in running(alone)] == ["B"]
    assert np.count_nonzero(alone.column("unit") >= 0) == 4 * 8


def test_what_never_runs_is_named():
    for make, units, message in (
        (zb_h1, ("FB",), "zb_h1 with 8 .* never runs FB; it runs F, I, W.*For pairs take dualpipe"),
        (one_f_one_b, ("F", "I", "W"), "one_f_one_b with 8 .*never runs I, W; it runs F, B"),
        (one_f_one_b, ("BW",), "there is no unit BW; there are F, B, I, W, FB"),
    ):
        with pytest.raises(ValueError, match=f"units_alone: {message}"):
            units_alone(lower(make(4, 8)), units)


@PAIRED
def test_a_unit_everywhere_is_run_by_all_ranks_that_ever_run_it(make):
    table = lower(make(4, 12), keeps=FIRST_MIDDLE_LAST if make is dualpipe else Keeps.alike(8))
    units = table.column("unit")
    for number in np.unique(units[units >= 0]):
        row = unit_everywhere(table, number)
        runs = row[:, table.columns.index("unit")]
        assert [r == number for r in runs] == [number in units[:, rank] for rank in range(4)]
        assert set(runs) <= {number, -1}
        for rank in np.flatnonzero(runs == number):
            assert any((row[rank] == each).all() for each in table.array[:, rank]), "as the schedule has it"
    assert (unit_everywhere(table, -1)[:, table.columns.index("unit")] == -1).all()
    with pytest.raises(ValueError, match=f"^unit_everywhere: no rank of {make.__name__} runs unit 999$"):
        unit_everywhere(table, 999)


def test_ranks_that_share_processors_by_hand():
    """1F1B on two ranks, one microbatch: F, F, B, B after each other, whoever shares what; with more, ticks fill up."""
    costs = CostModel(2.0, 2.0, 1.0)
    assert lower(one_f_one_b(2, 1), costs).shared_makespan(costs, 1.0) == 2 + 2 + 3 + 3
    table = lower(gpipe(2, 4), costs)
    assert table.shared_makespan(costs, 1.0) == 2 * 4 * (2 + 3), "one at a time: the sum of all work"
    alone = sum(max(work) for work in table.work(costs))
    assert table.shared_makespan(costs, 2.0) == alone < 2 * 4 * (2 + 3)
    assert table.shared_makespan(costs, 1.25) == sum(max(max(w), sum(w) / 1.25) for w in table.work(costs))


@pytest.mark.parametrize("make", ALL_SCHEDULES, ids=lambda make: make.__name__)
def test_after_the_opening_units_read_what_was_written(make):
    """Slots are written by hand here, tick for tick as ``TickTable`` says."""
    table = lower(make(4, 12))
    bins = {pool: table.num_slots[pool] - 1 for pool in ("x", "dy")}

    def done(row, unit, written):
        if unit.forward is not None:
            written |= {
                ("x", row["F_y"]),
                *((pool, row[f"F_{pool}"]) for pool in ("residual_i", "residual_w")),
            }
        if unit.op == "I":
            written.add(("stash", row["G_stash"]))
        if unit.backward is not None and unit.op != "W":
            written.add(("dy", row["G_dx"]))

    def read(rank, row, unit):
        stages = table.schedule.placement
        if unit.forward is not None and not stages.is_first(stages.stages_on[rank][unit.forward.local]):
            yield "x", row["F_x"]
        if unit.backward is not None:
            yield "residual_w", row["G_residual_w"]
            yield ("stash", row["G_stash"]) if unit.op == "W" else ("residual_i", row["G_residual_i"])
            if unit.op != "W" and not stages.is_last(stages.stages_on[rank][unit.backward.local]):
                yield "dy", row["G_dy"]

    for rank in range(4):
        written = set()
        for numbers in opening(table)[:, rank]:
            row = dict(zip(table.columns, numbers.tolist(), strict=True))
            if row["unit"] >= 0:
                done(row, table.units[row["unit"]], written)
            written |= {(c.pool, row[f"arrive{k}"]) for k, c in enumerate(table.channels)}
        written -= set(bins.items())
        for number, unit in enumerate(table.units):
            row = dict(zip(table.columns, unit_everywhere(table, number)[rank].tolist(), strict=True))
            if row["unit"] == number:
                assert written.issuperset(read(rank, row, unit)), (rank, unit)


def test_the_opening_is_short():
    """Of a step with many microbatches it is a small part, but where all forwards come first."""
    assert len(opening(lower(one_f_one_b(4, 64)))) < 0.1 * lower(one_f_one_b(4, 64)).num_ticks
    assert len(opening(lower(gpipe(4, 64)))) > 64
