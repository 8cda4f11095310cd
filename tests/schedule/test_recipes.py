"""Recipes against orders recorded from the published code (tests/golden), and over grids of counts."""

import pathlib
import re

import pytest

from dualpipe_jax.schedule import (
    ALL_SCHEDULES,
    Op,
    Placement,
    dualpipe,
    dualpipe_v,
    gpipe,
    one_f_one_b,
    validate,
    zb_h1,
)

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
RECORDED = {"dualpipe": dualpipe, "dualpipev": dualpipe_v, "zbh1": zb_h1, "torch_gpipe": gpipe}
FILES = sorted(GOLDEN.glob("*.txt"))


def lines(schedule):
    return [" ".join("+".join(map(str, slot)) for slot in order) for order in schedule.orders]


def grid(recipe):
    """Counts that a recipe takes: few and many ranks, the fewest microbatches and more."""
    for ranks in (1, 2, 3, 4, 5, 6, 8, 11):
        if recipe is dualpipe:
            fewest, step = 2 * ranks - 2, 2
        else:
            fewest, step = 2 * ranks - 1 if recipe is dualpipe_v else 1, 1
        if recipe is not dualpipe or ranks % 2 == 0:
            yield from ((ranks, fewest + step * more) for more in (0, 1, 2, 3, 7, 18))


def test_there_are_recordings():
    assert len(FILES) == 11


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_orders_equal_the_recorded_ones(path):
    recipe = RECORDED[path.stem.rpartition("_pp")[0]]
    header, *recorded = path.read_text().splitlines()
    schedule = recipe(*map(int, re.findall(r"\d+", header)))
    assert lines(schedule) == [re.sub(r" \d+REDUCE_GRAD", "", line) for line in recorded]


def test_one_f_one_b_by_hand():
    assert lines(one_f_one_b(3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_dualpipe_v_on_an_odd_number_of_ranks_by_hand():
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


@pytest.mark.parametrize("recipe", ALL_SCHEDULES, ids=lambda recipe: recipe.__name__)
def test_all_counts_that_are_taken_give_valid_schedules(recipe):
    for ranks, microbatches in grid(recipe):
        schedule = validate(recipe(ranks, microbatches))
        assert schedule.name == recipe.__name__
        assert (schedule.num_ranks, schedule.num_microbatches) == (ranks, microbatches)


def test_dualpipe_ranks_mirror_each_other():
    ranks = 6
    schedule = dualpipe(ranks, 16)
    for rank, order in enumerate(schedule.orders):
        swapped = [tuple(a._replace(stage=(a.stage + ranks) % (2 * ranks)) for a in slot) for slot in order]
        assert list(schedule.orders[ranks - 1 - rank]) == swapped


def test_weights_fall_due_first_in_first_out():
    for recipe in (zb_h1, dualpipe, dualpipe_v):
        for order in recipe(8, 20).orders:
            actions = [action for slot in order for action in slot]
            due = [a._replace(op=Op.W) for a in actions if a.op is Op.I]
            assert [a for a in actions if a.op is Op.W] == due


def test_placements():
    assert dualpipe(4, 8).placement == Placement.bidirectional(4)
    assert dualpipe_v(3, 8).placement == Placement.v(3)
    assert {recipe(3, 8).placement for recipe in (gpipe, one_f_one_b, zb_h1)} == {Placement.linear(3)}


@pytest.mark.parametrize(
    ("recipe", "counts", "message"),
    [
        (dualpipe, (3, 8), r"dualpipe: got 3 ranks and 8 micro.*even.*try 2 or 4 ranks, or dualpipe_v"),
        (dualpipe, (0, 8), r"got 0 ranks.*try 2 ranks"),
        (dualpipe, (4, 7), r"got 4 ranks and 7 microbatches.*two pipes.*must be even; try 6 or 8"),
        (dualpipe, (4, 4), r"got 4 ranks and 4 microbatches.*2 \* num_ranks - 2 = 6 microbatches.*try 6"),
        (dualpipe, (4, 5), r"got 4 ranks and 5 microbatches.*try 6"),
        (dualpipe, (2, 0), r"got 2 ranks and 0 microbatches.*try 2"),
        (dualpipe_v, (4, 6), r"dualpipe_v: got 4 ranks and 6 microbatches.*2 \* num_ranks - 1 = 7.*try 7"),
        (dualpipe_v, (0, 6), r"got 0 ranks.*try 1"),
        (gpipe, (0, 4), r"gpipe: got 0 ranks and 4 microbatches.*try 1 ranks and 4 microbatches"),
        (one_f_one_b, (4, 0), r"one_f_one_b: got 4 ranks and 0 microbatches.*try 4 ranks and 1"),
        (zb_h1, (-1, 0), r"zb_h1: got -1 ranks and 0 microbatches.*try 1 ranks and 1 microbatches"),
    ],
)
def test_counts_that_cannot_work_are_refused_with_the_nearest_that_can(recipe, counts, message):
    with pytest.raises(ValueError, match=message):
        recipe(*counts)
