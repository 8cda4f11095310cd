"""Schedules whose weight gradients may not wait for long."""

import itertools

import pytest

from dualpipe_jax.schedule import ALL_SCHEDULES, Op, dualpipe, limit_stash, lower, simulate, validate


def peak(order):
    """Stashes that lie there at once."""
    live = most = 0
    for action in (slot[0] for slot in order if len(slot) == 1):
        live += (action.op is Op.I) - (action.op is Op.W)
        most = max(most, live)
    return most


def test_it_is_a_schedule_with_no_more_stashes():
    for recipe, counts in itertools.product(ALL_SCHEDULES, ((2, 4), (4, 12))):
        whole = recipe(*counts)
        needed = max(map(peak, whole.orders))
        assert limit_stash(whole, needed) is whole
        for most in range(needed):
            limited = validate(limit_stash(whole, most))
            assert max(map(peak, limited.orders)) == most, whole.name
            assert limited.placement == whole.placement
            for before, after in zip(whole.orders, limited.orders, strict=True):
                others = [slot for slot in before if len(slot) > 1 or slot[0].op not in (Op.I, Op.W)]
                assert [slot for slot in after if slot in others] == others, "nothing else moves"
            assert lower(limited).num_slots["stash"] <= most + 1, "one more, for those that stash nothing"


def test_none_at_all_is_a_schedule_of_whole_backwards():
    schedule = limit_stash(dualpipe(4, 8), 0)
    ops = {action.op for order in schedule.orders for slot in order for action in slot}
    assert ops == {Op.F, Op.B}
    assert simulate(schedule).makespan > simulate(dualpipe(4, 8)).makespan


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match="most must be 0 or more, got -1"):
        limit_stash(dualpipe(4, 8), -1)
