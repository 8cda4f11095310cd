"""Tables with only some units left."""

import numpy as np
import pytest

from dualpipe_jax.schedule import dualpipe, dualpipe_v, lower, one_f_one_b, zb_h1
from dualpipe_jax.schedule.lowering.alone import UNITS, units_alone

PAIRED = pytest.mark.parametrize("make", [dualpipe, dualpipe_v], ids=lambda make: make.__name__)


@PAIRED
def test_a_pair_alone_keeps_the_pools_and_one_pair_of_stages(make):
    table = lower(make(4, 12))
    alone = units_alone(table)
    assert alone.num_slots == table.num_slots and alone.channels == table.channels
    assert 0 < alone.num_ticks < table.num_ticks
    pair = alone.column("pair") == 1
    assert pair.any(axis=1).all()
    assert len(set(alone.column("F")[pair])) == len(set(alone.column("B")[pair])) == 1
    for op in ("F", "B"):
        assert ((alone.column(op) >= 0) == pair).all()
    assert (alone.column("I") == -1).all() and (alone.column("W0") == -1).all()
    for end in ("F_first", "F_last", "G_first"):
        assert not alone.column(end).any()


@PAIRED
def test_all_units_stand_there_for_one_stage_each(make):
    table = lower(make(4, 12))
    alone = units_alone(table, UNITS)
    pair = alone.column("pair") == 1
    for op, where in (("F", ~pair), ("B", ~pair), ("I", ~pair), ("W0", ~pair), ("F", pair), ("B", pair)):
        stages = alone.column(op)[where]
        assert len(set(stages[stages >= 0])) == 1, op
    for k in range(1, table.num_w):
        assert (alone.column(f"W{k}") == -1).all()
    for end in ("F_first", "F_last", "G_first"):
        assert alone.column(end).sum() == table.column(end).sum()


def test_a_schedule_without_pairs_has_its_own_units_alone():
    table = lower(one_f_one_b(4, 8))
    alone = units_alone(table, ("B",))
    assert (alone.column("F") == -1).all()
    assert np.count_nonzero(alone.column("B") >= 0) == np.count_nonzero(table.column("B") >= 0)


def test_what_never_runs_is_named():
    with pytest.raises(
        ValueError,
        match=r"units_alone: zb_h1 with 8 .* never runs FB; it runs F, I, W, embed, .*For pairs take dualpipe",
    ):
        units_alone(lower(zb_h1(4, 8)))
    with pytest.raises(
        ValueError, match=r"one_f_one_b with 8 .*never runs I, W; it runs F, B, embed, head, embed_back"
    ):
        units_alone(lower(one_f_one_b(4, 8)), ("F", "I", "W"))
    with pytest.raises(ValueError, match="units_alone: there is no unit BW; there are FB, F, B, I, W, embed"):
        units_alone(lower(one_f_one_b(4, 8)), ("BW",))
