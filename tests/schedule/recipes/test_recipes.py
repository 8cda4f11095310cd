"""Recipes against recorded orders and grids (tests/golden), over grids of counts, and their bubbles."""

import dataclasses
import functools
import itertools
import pathlib
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpipe_jax.schedule import ALL_SCHEDULES, CostModel, Op, Placement, simulate, validate
from dualpipe_jax.schedule.formats.text import format_grid, parse_grid
from dualpipe_jax.schedule.recipes import chimera, dualpipe, dualpipe_v, hanayo, looped_bfs, one_f_one_b
from dualpipe_jax.schedule.recipes.classic import gpipe, interleaved_1f1b, interleaved_1f1b_overlap
from dualpipe_jax.schedule.recipes.v_shaped import v_half, v_min, zb_v
from dualpipe_jax.schedule.recipes.zero_bubble import interleaved_zero_bubble, zb_h1, zb_h2

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
RECORDED = {
    "dualpipe": dualpipe,
    "dualpipev": dualpipe_v,
    "torch_gpipe": gpipe,
    "torch_interleaved1f1b": interleaved_1f1b,
    "torch_interleavedzerobubble": interleaved_zero_bubble,
    "torch_zbvzerobubble": zb_v,
    "vhalf": v_half,
    "vmin": v_min,
    "zbh1": zb_h1,
    "zbh2": zb_h2,
    "zbv": zb_v,
}
EQUAL, DIFFERENT, V_SHAPED = (
    sorted(path for path in folder.glob("*.txt") if path.stem.rpartition("_pp")[0] in RECORDED)
    for folder in (GOLDEN, GOLDEN / "differs", GOLDEN / "v")
)
TWO_PIPES = (dualpipe, chimera)
OTHER_SIZES = (
    *(functools.partial(interleaved_1f1b, num_stages_per_rank=v) for v in (1, 3)),
    *(functools.partial(interleaved_1f1b_overlap, num_stages_per_rank=v) for v in (1, 4)),
    *(functools.partial(looped_bfs, num_stages_per_rank=v) for v in (1, 3)),
    *(functools.partial(interleaved_zero_bubble, num_stages_per_rank=v) for v in (1, 4)),
    *(functools.partial(hanayo, num_waves=w) for w in (1, 3)),
)
EVEN, MEASURED = CostModel(), CostModel(1, 1.64, 0.97)


def name_of(recipe):
    if isinstance(recipe, functools.partial):
        return f"{recipe.func.__name__}-{next(iter(recipe.keywords.values()))}"
    return recipe.__name__


def bubble(recipe, *counts_and_costs):
    """What the function beside a recipe says of its bubble."""
    return getattr(sys.modules[recipe.__module__], f"{recipe.__name__}_bubble")(*counts_and_costs)


def lines(schedule):
    return [" ".join("+".join(map(str, slot)) for slot in order) for order in schedule.orders]


def counts_of(recipe):
    """Counts that a recipe takes: few and many ranks, fewer microbatches than ranks and many more."""
    pipes = 2 if recipe in TWO_PIPES else 1
    for ranks in (1, 2, 3, 4, 5, 6, 9):
        for microbatches in (1, ranks - 1, ranks, 2 * ranks - 2, 2 * ranks + 3):
            if microbatches and not ranks % pipes:
                yield ranks, microbatches + microbatches % pipes


def read(path):
    """A recorded order as a schedule, and what the recipe of that name makes of the same counts."""
    header, *recorded = path.read_text().splitlines()
    ours = RECORDED[path.stem.rpartition("_pp")[0]](*map(int, re.findall(r"\d+", header)))
    orders = "\n".join(re.sub(r" \d+REDUCE_GRAD", "", line) for line in recorded)
    return parse_grid(orders, ours.placement), ours


def test_there_are_recordings():
    assert (len(EQUAL), len(DIFFERENT), len(V_SHAPED)) == (13, 2, 7)


def test_orders_equal_the_recorded_ones():
    for path in EQUAL:
        recorded, ours = read(path)
        assert lines(ours) == lines(recorded), path.stem


def test_where_an_order_differs_from_the_recorded_one_it_is_no_worse():
    for path in DIFFERENT + V_SHAPED:
        recorded, ours = read(path)
        assert lines(ours) != lines(recorded), path.stem
        for costs in (EVEN, MEASURED):
            theirs, played = simulate(validate(recorded), costs), simulate(ours, costs)
            assert played.makespan <= theirs.makespan + 1e-9, path.stem
            assert max(played.peak_activations) <= max(theirs.peak_activations), path.stem
            assert max(played.peak_inputs) <= max(theirs.peak_inputs), path.stem


@pytest.mark.parametrize(
    ("name", "even", "measured"),
    [("zbv_pp8_c20", 0, 0), ("vhalf_pp8_c20", 0, 2.7), ("vmin_pp4_c8", 0, 0), ("vmin_pp8_c20", 4, 8.5)],
)
def test_time_saved_against_the_recorded_orders(name, even, measured):
    recorded, ours = read(GOLDEN / "v" / f"{name}.txt")
    for costs, saved in ((EVEN, even), (MEASURED, measured)):
        gain = simulate(recorded, costs).makespan - simulate(ours, costs).makespan
        assert gain == pytest.approx(saved, abs=0.1)


@pytest.mark.parametrize("recipe", ALL_SCHEDULES, ids=name_of)
def test_grids_are_the_ones_kept(recipe):
    """On purpose? Then write ``format_grid(recipe(4, 8))`` to the file and look at the difference."""
    kept = (GOLDEN / "grids" / f"{recipe.__name__}.txt").read_text()
    assert format_grid(recipe(4, 8)) + "\n" == kept


def test_one_f_one_b_and_dualpipe_v_on_an_odd_number_of_ranks_by_hand():
    assert lines(one_f_one_b(3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    assert lines(dualpipe_v(3, 5)) == [
        "0F0 0F1 0F2 0F3 0F4 5F0 5I0 5W0 5F1 5I1 5W1 5F2 5B2 5F3+0B0 5B3 5F4+0B1 5B4 0I2 0W2 0I3 0W3 0I4 0W4",
        "1F0 1F1 1F2 4F0 1F3 4F1 4I0 4W0 4F2 1F4+4B1 4F3+1B0 4B2 4F4+1B1 4B3 1B2 4I4 1I3 4W4 1I4 1W3 1W4",
        "2F0 3F0 2F1 3F1 2F2 3F2 2F3 3B0 3F3+2B0 2F4+3B1 3F4+2B1 3B2 2B2 3B3 2I3 3I4 2I4 2W3 3W4 2W4",
    ]


def test_dualpipe_starts_in_series_at_the_fold_and_nowhere_else():
    for schedule, fold in ((dualpipe(8, 24), (3, 4)), (dualpipe_v(4, 12), (3,))):
        for rank, order in enumerate(schedule.orders):
            first_pair = next(i for i, slot in enumerate(order) if len(slot) == 2)
            backward_before = any(a.op is Op.B for slot in order[:first_pair] for a in slot)
            assert backward_before == (rank in fold)


@pytest.mark.parametrize("recipe", ALL_SCHEDULES + OTHER_SIZES, ids=name_of)
def test_all_counts_that_are_taken_give_valid_schedules(recipe):
    for ranks, microbatches in counts_of(recipe):
        schedule = validate(recipe(ranks, microbatches))
        assert schedule.name == name_of(recipe).partition("-")[0]
        assert (schedule.num_ranks, schedule.num_microbatches) == (ranks, microbatches)
        assert simulate(schedule).makespan >= 3 * microbatches, (ranks, microbatches)


def test_dualpipe_ranks_mirror_each_other():
    ranks = 6
    schedule = dualpipe(ranks, 16)
    for rank, order in enumerate(schedule.orders):
        swapped = [tuple(a._replace(stage=(a.stage + ranks) % (2 * ranks)) for a in slot) for slot in order]
        assert list(schedule.orders[ranks - 1 - rank]) == swapped


def test_weights_fall_due_first_in_first_out():
    for recipe in (zb_h1, zb_h2, interleaved_zero_bubble, zb_v, v_half, v_min, dualpipe, dualpipe_v):
        for order in recipe(8, 20).orders:
            actions = [action for slot in order for action in slot]
            due = [a._replace(op=Op.W) for a in actions if a.op is Op.I]
            assert [a for a in actions if a.op is Op.W] == due


def test_placements():
    assert dualpipe(4, 8).placement == Placement.bidirectional(4)
    assert {recipe(3, 8).placement for recipe in (dualpipe_v, zb_v, v_half, v_min)} == {Placement.v(3)}
    assert {recipe(3, 8).placement for recipe in (gpipe, one_f_one_b, zb_h1, zb_h2)} == {Placement.linear(3)}
    assert chimera(4, 8).placement == Placement.bidirectional(4)
    assert hanayo(3, 6, num_waves=1).placement == Placement.v(3)
    assert hanayo(3, 6).placement == Placement.wave(3, 2)
    for recipe in (interleaved_1f1b, interleaved_1f1b_overlap, looped_bfs, interleaved_zero_bubble):
        assert recipe(3, 6, 1).placement == Placement.linear(3)
        assert recipe(3, 6, 4).placement == Placement.interleaved(3, 4)


def test_one_stage_a_rank_is_the_schedule_without_rounds():
    for counts in ((4, 8), (3, 7), (5, 2)):
        assert looped_bfs(*counts, 1).orders == gpipe(*counts).orders
        assert interleaved_zero_bubble(*counts, 1).orders == zb_h1(*counts).orders


def test_chimera_and_hanayo_by_hand():
    assert lines(chimera(4, 4)) == [
        "0F0 0F1 7F0 7B0 7F1 7B1 0B0 0B1",
        "1F0 6F0 1F1 6F1 6B0 1B0 6B1 1B1",
        "5F0 2F0 5F1 2F1 2B0 5B0 2B1 5B1",
        "4F0 4F1 3F0 3B0 3F1 3B1 4B0 4B1",
    ]
    assert lines(hanayo(2, 2, num_waves=1)) == [
        "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1",
        "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1",
    ]


@pytest.mark.parametrize(("ranks", "microbatches", "v"), [(2, 4, 2), (4, 16, 3), (3, 3, 4)])
def test_interleaved_pairs_as_megatron_orders_them(ranks, microbatches, v):
    """Written from its description alone: virtual microbatches, a warm-up, pairs, a cool-down."""
    total = microbatches * v

    def virtual(number, forward):  # group after group, each through all chunks of the rank
        group, within = divmod(number, ranks * v)
        chunk, microbatch = divmod(within, ranks)
        return chunk if forward else v - 1 - chunk, group * ranks + microbatch

    for rank, order in enumerate(interleaved_1f1b_overlap(ranks, microbatches, v).orders):
        warmup = min(total, (ranks - rank - 1) * 2 + (v - 1) * ranks + 1)
        expected = []
        for step in range(warmup + total):
            slot = []
            if step < total:
                chunk, microbatch = virtual(step, True)
                slot.append((chunk * ranks + rank, "F", microbatch))
            if step >= warmup:
                chunk, microbatch = virtual(step - warmup, False)
                slot.append((chunk * ranks + rank, "B", microbatch))
            expected.append(tuple(slot))
        assert list(order) == expected


def test_interleaved_pairs_against_dualpipe_with_free_sends_and_dear_ones():
    """Figures of another simulator for 16 ranks and 64 microbatches, F = I = W and pairs that gain a quarter."""
    deep, folded = interleaved_1f1b_overlap(16, 64, 4), dualpipe(16, 64)
    for send, cut, whole in ((0, 164.44, 165.5), (0.02, 171.1, 167.1)):
        costs = CostModel(FB=2.25, send=send)
        played = simulate(deep, costs.for_schedule(deep))
        assert played.makespan == pytest.approx(cut, abs=0.05)
        assert max(played.peak_activations) == 4 * 20
        assert simulate(folded, costs).makespan == pytest.approx(whole, abs=0.05)


def test_any_number_of_microbatches_is_divided_into_groups_as_equal_as_can_be():
    for recipe in (interleaved_1f1b, interleaved_zero_bubble):
        forwards = [slot[0] for slot in recipe(3, 8).orders[0] if slot[0].op is Op.F]
        assert [action.stage for action in forwards] == [0] * 4 + [3] * 4 + [0] * 4 + [3] * 4
        assert [action.microbatch for action in forwards if action.stage == 3] == list(range(8))


def test_dualpipe_with_few_microbatches_is_the_order_for_more_without_the_rest():
    ranks, per_pipe = 4, 2
    for few, many in (
        (dualpipe(ranks, 2 * per_pipe), dualpipe(ranks, 2 * ranks - 2)),
        (dualpipe_v(ranks, per_pipe), dualpipe_v(ranks, 2 * ranks - 1)),
    ):
        for short, long in zip(few.orders, many.orders, strict=True):
            there = [tuple(a for a in slot if a.microbatch < per_pipe) for slot in long]
            assert list(short) == [slot for slot in there if slot]


def test_dualpipe_with_few_microbatches_is_worth_having():
    for ranks, counts in ((2, [2]), (4, [2, 4]), (8, [2, 8, 12]), (16, [2, 28])):
        for microbatches, costs in itertools.product(counts, (EVEN, MEASURED)):
            best = simulate(one_f_one_b(ranks, microbatches), costs).makespan
            assert simulate(dualpipe(ranks, microbatches), costs).makespan < best
            assert simulate(dualpipe_v(ranks, microbatches), costs.divided(2)).makespan < best


def test_activations():
    for ranks in (2, 4, 8):
        for units in (1, 2, 5):
            m = ranks * units
            first = ranks - 1 if units > 1 else 0  # a step of one unit has no more to run ahead to
            assert max(simulate(interleaved_1f1b(ranks, m, 3)).peak_activations) == 3 * ranks + first
            overlapped = max(simulate(interleaved_1f1b_overlap(ranks, m, 3)).peak_activations)
            assert overlapped == 3 * ranks + (ranks if units > 1 else 0)
            assert max(simulate(interleaved_zero_bubble(ranks, m, 3)).peak_activations) == 3 * ranks
            assert simulate(looped_bfs(ranks, m, 3)).peak_activations == (3 * m,) * ranks
            assert max(simulate(hanayo(ranks, m, 2)).peak_activations) == 4 * ranks
            chimeras = simulate(chimera(ranks, m)).peak_activations
            assert (min(chimeras), max(chimeras)) == (ranks // 2 + 1, ranks)
        played = simulate(zb_h2(ranks, 3 * ranks))
        assert played.peak_activations == tuple(2 * (ranks - r) - 1 for r in range(ranks))
        assert set(played.peak_inputs) == {2 * ranks - 1}
        assert max(simulate(dualpipe(ranks, ranks)).peak_activations) == ranks


@pytest.mark.parametrize(
    ("recipe", "counts", "message"),
    [
        (dualpipe, (3, 8), r"3 ranks and 8 micro.*even.*try 2 or 4 ranks, or dualpipe_v"),
        (dualpipe, (0, 8), r"0 ranks.*try 2 ranks"),
        (dualpipe, (4, 7), r"4 ranks and 7 microbatches.*two pipes.*must be even.*try 6 or 8"),
        (dualpipe, (2, 0), r"2 ranks and 0 microbatches.*at least 2; try 2$"),
        (dualpipe, (4, 1), r"4 ranks and 1 microbatches.*at least 2; try 2$"),
        (dualpipe_v, (4, 0), r"4 ranks and 0 microbatches.*try 4 ranks and 1 microbatches"),
        (dualpipe_v, (0, 6), r"0 ranks.*try 1"),
        (chimera, (5, 8), r"5 ranks and 8 micro.*even.*try 4 or 6 ranks, or hanayo"),
        (chimera, (4, 9), r"4 ranks and 9 microbatches.*two pipes.*try 8 or 10"),
        (gpipe, (0, 4), r"0 ranks and 4 microbatches.*try 1 ranks and 4 microbatches"),
        (one_f_one_b, (4, 0), r"4 ranks and 0 microbatches.*try 4 ranks and 1"),
        (zb_h2, (4, 0), r"4 ranks and 0 microbatches.*try 4 ranks and 1"),
        (interleaved_1f1b, (4, 8, 0), r".* 8 microbatches, num_stages_per_rank=0;.*num_stages_per_rank=1$"),
        (looped_bfs, (4, 8, -1), r".*, num_stages_per_rank=-1;.*, num_stages_per_rank=1$"),
        (interleaved_zero_bubble, (4, 0, 2), r".*try 4 ranks and 1 microbatches$"),
        (hanayo, (4, 8, 0), r"4 ranks and 8 microbatches, num_waves=0;.*try .*, num_waves=1$"),
        (zb_h1, (-1, 0), r"-1 ranks and 0 microbatches.*try 1 ranks and 1 microbatches"),
        (zb_v, (0, 4), r"0 ranks and 4 microbatches.*try 1 ranks and 4 microbatches"),
        (v_half, (4, 0), r"4 ranks and 0 microbatches.*try 4 ranks and 1 microbatches"),
        (v_min, (-1, 0), r"-1 ranks and 0 microbatches.*try 1 ranks and 1 microbatches"),
    ],
)
def test_counts_that_cannot_work_are_refused_with_the_nearest_that_can(recipe, counts, message):
    with pytest.raises(ValueError, match=f"^{recipe.__name__}: got {message}"):
        recipe(*counts)


times = st.floats(0.1, 4.0)
any_costs = st.builds(CostModel, times, times, times)
ranks_of = st.integers(1, 8)


def largest_idle(schedule, costs):
    return pytest.approx(max(simulate(schedule, costs).idle), abs=1e-6)


@st.composite
def gentle_costs(draw):
    """Costs with W <= min(F, I)."""
    f, i = draw(times), draw(times)
    return CostModel(f, i, draw(st.floats(0, 1)) * min(f, i))


@settings(max_examples=40)
@given(ranks_of, st.integers(1, 20), st.integers(1, 4), any_costs, st.floats(0, 1))
def test_bubbles_that_are_always_exact(ranks, m, v, c, gain):
    every, few = simulate(gpipe(ranks, m), c), simulate(one_f_one_b(ranks, m), c)
    for recipe, played in ((gpipe, every), (one_f_one_b, few)):
        assert bubble(recipe, ranks, m, c) == pytest.approx((ranks - 1) * (c.F + c.B))
        assert played.idle == pytest.approx([(ranks - 1) * (c.F + c.B)] * ranks, abs=1e-6)
    assert every.peak_activations == (m,) * ranks
    assert few.peak_activations == tuple(min(m, ranks - r) for r in range(ranks))
    for recipe in (interleaved_1f1b, looped_bfs):
        assert bubble(recipe, ranks, m, c, v) == largest_idle(recipe(ranks, m, v), c)
    c = dataclasses.replace(c, FB=c.F + c.B - gain * min(c.F, c.B))
    idle = largest_idle(interleaved_1f1b_overlap(ranks, m, v), c)
    assert bubble(interleaved_1f1b_overlap, ranks, m, c, v) == idle


@settings(max_examples=40)
@given(ranks_of, st.integers(0, 12), st.integers(1, 3), gentle_costs())
def test_bubbles_of_split_backwards(ranks, more, v, c):
    m, played = ranks + more, simulate(zb_h1(ranks, ranks + more), c)
    assert bubble(zb_h1, ranks, m, c) == pytest.approx((ranks - 1) * (c.F + c.B - 2 * c.W))
    assert max(played.idle) == pytest.approx((ranks - 1) * (c.F + c.B - 2 * c.W), abs=1e-6)
    assert max(played.peak_activations) == ranks
    assert played.peak_weight_stashes == tuple(min(r + 1, m) for r in range(ranks))
    assert bubble(interleaved_zero_bubble, ranks, m, c) == largest_idle(
        interleaved_zero_bubble(ranks, m, v), c
    )


@settings(max_examples=40)
@given(ranks_of, st.integers(1, 20), any_costs)
def test_published_bubbles_that_the_idle_is_never_below(ranks, m, c):
    for recipe in (zb_h1, interleaved_zero_bubble, zb_h2, hanayo, chimera):
        counts = (2 * ranks, 2 * m) if recipe is chimera else (ranks, m)
        assert max(simulate(recipe(*counts), c).idle) >= (1 - 1e-9) * bubble(recipe, *counts, c) - 1e-6


def test_published_bubbles_are_below_the_idle_beyond_their_range():
    """Where all costs are equal, and where W or F is dear."""
    dear_w, dear_f = CostModel(1, 1, 2), CostModel(2, 1, 1)
    for recipe, even, uneven, costs in (
        (zb_h1, (4, 3), (4, 8), dear_w),
        (interleaved_zero_bubble, (4, 3), (4, 8), dear_w),
        (chimera, (4, 8), (4, 6), dear_f),
        (hanayo, (4, 8), (4, 6), dear_f),
        (dualpipe, (8, 8), (8, 16), dear_w),
        (dualpipe_v, (4, 4), (4, 8), dear_w),
    ):
        assert max(simulate(recipe(*even), EVEN).idle) >= bubble(recipe, *even, EVEN) + 0.5, recipe
        assert max(simulate(recipe(*uneven), costs).idle) >= bubble(recipe, *uneven, costs) + 0.5, recipe


def test_published_bubble_of_dualpipe_may_be_above_or_below_the_idle_or_nothing():
    longer, shorter = CostModel(1, 2, 0.5), CostModel(2, 0.5, 0.5, FB=2.9)
    assert bubble(dualpipe, 8, 16, longer) > max(simulate(dualpipe(8, 16), longer).idle) + 0.5
    assert bubble(dualpipe, 8, 16, shorter) < max(simulate(dualpipe(8, 16), shorter).idle) - 0.5
    assert bubble(dualpipe, 8, 16, CostModel(1, 1, 4)) < 0


@settings(max_examples=40)
@given(ranks_of, st.integers(0, 12), gentle_costs())
def test_zb_h2_idles_less_in_its_own_span_than_till_the_end_of_all(ranks, more, c):
    m = 2 * ranks - 1 + more
    whole = (ranks - 1) * max(c.F, c.F + c.B - 3 * c.W)
    assert whole == largest_idle(zb_h2(ranks, m), c)
    assert bubble(zb_h2, ranks, m, c) <= whole
    played = simulate(zb_h2(ranks, m), CostModel(c.F, c.F, c.F))
    spans = [ends[-1] - starts[0] for starts, ends in zip(played.starts, played.ends, strict=True)]
    assert spans == pytest.approx(list(played.busy))  # none, as published, where F = I = W


@settings(max_examples=40)
@given(ranks_of, st.integers(1, 4), st.integers(1, 3), times, times, st.floats(0, 1))
def test_bubbles_of_chimera_and_hanayo(ranks, units, waves, f, b, share):
    c, m = CostModel(f, share * b, (1 - share) * b), units * ranks
    same = CostModel(f, share * f, (1 - share) * f)
    more = max(c.F, c.B) + (units - 1) * abs(c.B - c.F)
    assert bubble(hanayo, ranks, m, same) == largest_idle(hanayo(ranks, m, waves), same)
    assert 2 * (ranks - 1) * more == largest_idle(hanayo(ranks, m, waves), c)
    assert bubble(chimera, 2 * ranks, 2 * m, same) == largest_idle(chimera(2 * ranks, 2 * m), same)
    assert (2 * ranks - 2) * more == largest_idle(chimera(2 * ranks, 2 * m), c)


@settings(max_examples=40)
@given(ranks_of, st.integers(0, 8), times, st.floats(0, 1), st.floats(0, 1))
def test_published_bubble_of_dualpipe(half, more, f, w_share, gain):
    w = w_share * f
    least = max(f, f + w)
    c = CostModel(f, f, w, FB=least + gain * (f + f + w - least))
    m = 2 * half - 1 + more
    assert bubble(dualpipe, 2 * half, 2 * m, c) == largest_idle(dualpipe(2 * half, 2 * m), c)
    assert bubble(dualpipe_v, half, m, c) == largest_idle(dualpipe_v(half, m), c)
