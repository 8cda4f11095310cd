"""ZB-V, V-Half and V-Min against published figures and their own closed forms; recorded orders: test_recipes.py."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpipe_jax.schedule import CostModel, Op, lower, one_f_one_b, simulate
from dualpipe_jax.schedule.recipes import v_half, v_min, zb_v
from dualpipe_jax.schedule.recipes.v_shaped import v_half_bubble, v_min_bubble, zb_v_bubble

RECIPES = zb_v, v_half, v_min
EVEN, MEASURED = CostModel(), CostModel(1, 1.64, 0.97)
RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)  # one, and every remainder of what the memory is counted in

each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)


def shares(recipe, ranks):
    """Activations that the papers allow, in shares of the model that a rank holds."""
    return {zb_v: ranks, v_half: (ranks + 2) // 2, v_min: (ranks + 4) // 3}[recipe]


def steady_idle(recipe, ranks):
    """Idle of each rank for F = I = W = 1 on a stage, given at least as many microbatches as ranks."""
    least = ranks - 1
    if recipe is zb_v:
        return least
    if recipe is v_half:
        return max(least, 3 * ranks - (4 if ranks % 2 else 7))
    return max(least, 4 * ranks - (7, 5, 9)[ranks % 3])


@each_recipe
def test_activations_and_inputs_stay_within_the_memory(recipe):
    for ranks in RANKS:
        places = 2 * shares(recipe, ranks)
        for microbatches in (1, ranks // 2 + 1, ranks, 2 * ranks + 1):
            played = simulate(recipe(ranks, microbatches))
            assert max(played.peak_inputs) <= places
        assert max(played.peak_activations) == max(played.peak_inputs) == places


@each_recipe
def test_idle_for_even_costs(recipe):
    for ranks in RANKS:
        for microbatches in (ranks, 2 * ranks + 3):
            idle = simulate(recipe(ranks, microbatches)).idle
            assert idle == (steady_idle(recipe, ranks),) * ranks, (ranks, microbatches)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "idle"),
    [(4, 20, (1.5, 2.5, 5.5)), (8, 20, (3.5, 8.5, 13.5)), (16, 64, (7.5, 20.5, 29.5))],
)
def test_idle_is_no_more_than_the_papers_schedules_have(ranks, microbatches, idle):
    for recipe, known in zip(RECIPES, idle, strict=True):
        schedule = recipe(ranks, microbatches)
        assert max(simulate(schedule, EVEN.for_schedule(schedule)).idle) <= known


@each_recipe
def test_one_microbatch_walks_without_a_pause(recipe):
    for ranks in (1, 2, 5, 8):
        assert simulate(recipe(ranks, 1)).makespan == max(6, 4 * ranks + 1)
        idle = [max(simulate(recipe(ranks, m)).idle) for m in range(1, ranks + 1)]
        assert max(idle) == idle[0] and min(idle) == idle[-1]


def test_zb_v_never_idles_between_its_first_slot_and_its_last():
    for ranks, microbatches in ((1, 1), (2, 3), (5, 9), (8, 20)):
        played = simulate(zb_v(ranks, microbatches))
        spans = [ends[-1] - starts[0] for starts, ends in zip(played.starts, played.ends, strict=True)]
        assert spans == [6 * microbatches] * ranks


def test_less_memory_costs_time():
    for ranks in (4, 8, 11, 16):
        for costs in (EVEN, MEASURED):
            spans = [simulate(recipe(ranks, 2 * ranks), costs).makespan for recipe in RECIPES]
            assert spans == sorted(spans)


def test_v_min_is_fragile():
    schedule, unit = v_min(16, 64), MEASURED.F + MEASURED.B
    idle = max(simulate(schedule, MEASURED.for_schedule(schedule)).idle)
    assert idle / unit == pytest.approx(33.7, abs=0.05)
    assert max(simulate(one_f_one_b(16, 64), MEASURED).idle) / unit == pytest.approx(15)


@each_recipe
def test_microbatches_come_in_sequence(recipe):
    for order in recipe(6, 15).orders:
        actions = [action for slot in order for action in slot]
        for op in (Op.F, Op.I):
            for stage in {action.stage for action in actions}:
                passed = [a.microbatch for a in actions if (a.stage, a.op) == (stage, op)]
                assert passed == list(range(15))


@each_recipe
def test_tables_hold_what_the_schedule_says(recipe):
    for ranks, microbatches in ((1, 2), (3, 2), (4, 8)):
        table = lower(recipe(ranks, microbatches))
        for op in "FIW":
            numbers = [number for number, unit in enumerate(table.units) if unit.op == op]
            assert table.counts()[numbers].sum() == 2 * ranks * microbatches


times = st.floats(0.1, 4.0)
ranks_of = st.integers(1, 6)


@settings(max_examples=30)
@given(ranks_of, st.integers(0, 8), times)
def test_bubbles_for_even_costs(ranks, more, time):
    c, m = CostModel(time, time, time), ranks + more
    zb_v_idle, v_half_idle, v_min_idle = (max(simulate(recipe(ranks, m), c).idle) for recipe in RECIPES)
    assert zb_v_bubble(ranks, m, c) == pytest.approx(zb_v_idle, abs=1e-6)
    if ranks > 2:
        below = (v_half_bubble(ranks, m, c) - v_half_idle) / time
        assert below == pytest.approx(4 if ranks % 2 else 7)
        assert 5 - 1e-6 <= (v_min_bubble(ranks, m, c) - v_min_idle) / time <= 9 + 1e-6


@settings(max_examples=30)
@given(ranks_of, st.integers(1, 14), st.builds(CostModel, times, times, times))
def test_bubble_of_zb_v_is_never_above_the_idle(ranks, m, c):
    assert zb_v_bubble(ranks, m, c) <= max(simulate(zb_v(ranks, m), c).idle) + 1e-6


@settings(max_examples=30)
@given(ranks_of, st.integers(0, 8), times, st.floats(0, 1), st.floats(0.5, 1))
def test_idle_of_zb_v_where_backwards_take_longer_than_forwards(ranks, more, i, f_share, w_share):
    c = CostModel(f_share * i, i, w_share * i)
    idle = max(simulate(zb_v(ranks, 2 * ranks + more), c).idle)
    assert idle == pytest.approx((ranks - 1) * i, abs=1e-6)


def test_bubbles_beyond_their_range():
    assert max(simulate(zb_v(4, 3)).idle) > zb_v_bubble(4, 3, EVEN) + 1
    for recipe, bubble in ((v_half, v_half_bubble), (v_min, v_min_bubble)):
        c = CostModel(1, 2, 0.5)
        assert max(simulate(recipe(8, 24), c).idle) > bubble(8, 24, c)
