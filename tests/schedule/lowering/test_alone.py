"""Tables with only some units left."""

import numpy as np
import pytest

from dualpipe_jax.schedule import dualpipe, dualpipe_v, lower, one_f_one_b, zb_h1
from dualpipe_jax.schedule.lowering.alone import units_alone
from dualpipe_jax.schedule.lowering.table import OPS, Keeps

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


@PAIRED
def test_all_units_stand_there_once(make):
    assert sorted(unit.op for unit in running(units_alone(lower(make(4, 12)), OPS))) == sorted(OPS)


def test_the_most_frequent_one_is_taken():
    table = lower(dualpipe(4, 12), keeps=FIRST_MIDDLE_LAST)
    (unit,) = running(units_alone(table, ("F",)))
    assert unit.forward.kind == 1
    (pair,) = running(units_alone(table))
    assert (pair.forward.kind, pair.backward.kind) == (1, 1)


def test_every_kind_once():
    table = lower(dualpipe(4, 12), keeps=FIRST_MIDDLE_LAST)
    alone = units_alone(table, ("F", "B", "FB"), every=True)
    kinds = {(u.op, *(s.kind for s in (u.forward, u.backward) if s)) for u in running(alone)}
    there = {(u.op, *(s.kind for s in (u.forward, u.backward) if s)) for u in table.units}
    assert kinds == {kind for kind in there if kind[0] in ("F", "B", "FB")}
    assert len(running(alone)) == len(kinds) > 3


def test_a_schedule_without_pairs_has_its_own_units_alone():
    table = lower(one_f_one_b(4, 8))
    alone = units_alone(table, ("B",))
    assert [unit.op for unit in running(alone)] == ["B"]
    assert np.count_nonzero(alone.column("unit") >= 0) == 4 * 8


def test_what_never_runs_is_named():
    with pytest.raises(
        ValueError,
        match=r"units_alone: zb_h1 with 8 .* never runs FB; it runs F, I, W.*For pairs take dualpipe",
    ):
        units_alone(lower(zb_h1(4, 8)))
    with pytest.raises(ValueError, match=r"one_f_one_b with 8 .*never runs I, W; it runs F, B"):
        units_alone(lower(one_f_one_b(4, 8)), ("F", "I", "W"))
    with pytest.raises(ValueError, match="units_alone: there is no unit BW; there are F, B, I, W, FB"):
        units_alone(lower(one_f_one_b(4, 8)), ("BW",))
