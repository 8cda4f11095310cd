"""Where two schedules part, against a search for the first moment at which ranks do other things."""

import dataclasses

import pytest

from dualpipe_jax.schedule import CostModel, Placement, limit_stash, parse_grid, simulate
from dualpipe_jax.schedule.difference import partings
from dualpipe_jax.schedule.recipes import dualpipe_v, gpipe, one_f_one_b, zb_h1, zb_v


def doing(timeline, rank, time):
    """What a rank does just after a time, and until when it does it."""
    runs = zip(timeline.schedule.orders[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
    return next((slot for slot, start, end in runs if start <= time < end), None)


@pytest.mark.parametrize(
    ("one", "other", "costs"),
    [
        (gpipe(4, 6), one_f_one_b(4, 6), CostModel(1, 1, 1)),
        (one_f_one_b(3, 7), zb_h1(3, 7), CostModel(1, 2, 1, send=0.5)),
        (zb_v(4, 12), dualpipe_v(4, 12), CostModel(1, 1, 1, FB=2)),
        (zb_v(4, 8), limit_stash(zb_v(4, 8), 1), CostModel(1, 1, 1)),
    ],
)
def test_they_part_where_they_first_do_other_things(one, other, costs):
    lines = simulate(one, costs), simulate(other, costs)
    found = {at.rank: at for at in partings(*lines)}
    moments = sorted({t for line in lines for of in (*line.starts, *line.ends) for t in of})
    for rank, orders in enumerate(zip(one.orders, other.orders, strict=True)):
        index = next((i for i, (a, b) in enumerate(zip(*orders, strict=False)) if a != b), None)
        time = next((t for t in moments if doing(lines[0], rank, t) != doing(lines[1], rank, t)), None)
        if index is None and time is None:
            assert rank not in found
            continue
        at = found[rank]
        assert at.index == index and at.time == time
        if index is not None:
            assert (at.one, at.other) == (orders[0][index], orders[1][index])


def test_the_same_orders_part_in_time_alone():
    """At the second microbatch rank 1 waits for a longer transfer; rank 0 works on."""
    schedule = one_f_one_b(2, 2)
    found = partings(simulate(schedule, CostModel(send=0)), simulate(schedule, CostModel(send=1)))
    assert [(at.rank, at.index, at.time) for at in found] == [(0, None, 4.0), (1, None, 1.0)]
    slower = partings(simulate(schedule, CostModel(F=1)), simulate(schedule, CostModel(F=2)))
    assert (slower[0].rank, slower[0].time) == (0, 1.0)


def test_the_same_twice_parts_nowhere():
    timeline = simulate(dualpipe_v(3, 8))
    renamed = simulate(dataclasses.replace(dualpipe_v(3, 8), name="other"))
    assert partings(timeline, renamed) == []
    rounded = CostModel(1, 1, 1, FB=3 * (1 + 1e-13))  # as sums in another order round
    assert partings(simulate(dualpipe_v(3, 8)), simulate(dualpipe_v(3, 8), rounded)) == []


def test_one_may_end_before_the_other():
    short = simulate(parse_grid("0F0 0B0", Placement.linear(1)))
    (at,) = partings(short, simulate(parse_grid("0F0 0B0 0F1 0B1", Placement.linear(1))))
    assert (at.index, at.one, str(at.other[0]), at.time) == (2, None, "0F1", 3.0)


def test_other_placements_are_refused():
    message = r"gpipe and zb_v place their stages differently, \(\(0, 1\),\) and .*of the same placement"
    with pytest.raises(ValueError, match=message):
        partings(simulate(gpipe(2, 4)), simulate(zb_v(2, 4)))
