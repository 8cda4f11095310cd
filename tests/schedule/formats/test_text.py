"""Grids as text: there and back, to slots and to time, and what cannot be read."""

import itertools
import pathlib

import pytest

from dualpipe_jax.schedule import ALL_SCHEDULES, CostModel, Placement, format_grid, parse_grid
from dualpipe_jax.schedule.recipes import dualpipe, dualpipe_v, gpipe, one_f_one_b, zb_h1

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"


def test_grids_parse_back():
    costs = CostModel(0.7, 1.3, 1, FB=2.21, send=0.4)
    for recipe, counts in itertools.product(ALL_SCHEDULES, ((2, 4), (4, 8), (6, 14), (12, 16))):
        schedule = recipe(*counts)
        assert parse_grid(format_grid(schedule)) == schedule
        assert parse_grid(format_grid(schedule, costs)) == schedule


def test_recorded_files_parse_given_a_placement():
    for name, expected in (("dualpipe_pp8_c20", dualpipe(8, 20)), ("dualpipev_pp1_c4", dualpipe_v(1, 4))):
        text = (GOLDEN / f"{name}.txt").read_text()
        assert parse_grid(text, expected.placement, expected.name) == expected
        without_header = text.partition("\n")[2]
        assert parse_grid(without_header, expected.placement, expected.name) == expected


def test_columns_are_slots():
    assert format_grid(dualpipe_v(2, 3)) == "\n".join(
        [
            "# dualpipe_v, ranks 2, microbatches 3, pipes (0 1 1 0)",
            "rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1     3B1 3F2+0B0 3B2 0I1 0W1 0I2 0W2",
            "rank 1: 1F0 2F0 1F1 2F1 1F2 2B0 2F2+1B0 2B1 1B1     2I2 1I2 2W2 1W2",
        ]
    )


def test_columns_are_time_when_costs_are_given():
    assert format_grid(zb_h1(3, 3), CostModel()) == "\n".join(
        [
            "# zb_h1, ranks 3, microbatches 3, pipes (0 1 2)",
            "rank 0: 0F0 0F1 0F2 ....... 0I0 0W0 0I1 0W1 0I2 0W2",
            "rank 1: ... 1F0 1F1 ... 1I0 1F2 1I1 1W0 1I2 1W1 1W2",
            "rank 2: ....... 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2",
        ]
    )


def test_a_slot_is_as_wide_as_it_is_long():
    assert format_grid(dualpipe(2, 4), CostModel(F=1, I=1, W=1, FB=2)).splitlines()[1:] == [
        "rank 0: 0F0 3F0 0F1 3B0     3F1+0B0 3B1     0I1 0W1",
        "rank 1: 2F0 1F0 2F1 1B0     1F1+2B0 1B1     2I1 2W1",
    ]


def test_ranks_line_up():
    lines = format_grid(gpipe(11, 2)).splitlines()[1:]
    assert lines[0].startswith("rank 0 : 0F0  0F1  0B0")
    assert lines[10].startswith("rank 10: 10F0 10F1 10B0")


def test_time_cannot_be_drawn_for_slots_that_take_none():
    with pytest.raises(ValueError, match=r"0W0 takes no time .* all costs must be above 0"):
        format_grid(zb_h1(1, 2), CostModel(W=0))


def test_what_the_header_leaves_out_comes_from_arguments_or_actions():
    parsed = parse_grid("\n 0F0 0F1 . 0B0 ... 0B1\n\n1F0 1B0 1F1 1B1\n", Placement.linear(2), "mine")
    assert (parsed.name, parsed.num_microbatches, parsed.orders) == ("mine", 2, one_f_one_b(2, 2).orders)
    assert parse_grid("0F0 3F0\n2F0 1F0", Placement.bidirectional(2)).num_microbatches == 2


@pytest.mark.parametrize(
    ("text", "placement", "message"),
    [
        ("0F0 0B0", None, r"where do the stages live\? Pass placement="),
        ("", None, "where do the stages live"),
        ("0F0\n0F0 0X0", Placement.linear(2), "parse_grid: line 2: not an action: '0X0'"),
        ("# ranks 1, microbatches 1\n\n0F0 0REDUCE_GRAD", Placement.linear(1), "line 3: not an action"),
        ("0F0", Placement.linear(2), "1 lines of slots, 2 ranks in the placement; they must be the same"),
        ("# ranks 2, microbatches 1\n0F0", Placement.linear(1), "1 lines of slots, 1 ranks .* 2 in the"),
        ("# a, ranks 1, microbatches 1, pipes (0)\n0F0", Placement.v(1), "the header says .* the argument"),
    ],
)
def test_text_that_cannot_be_read(text, placement, message):
    with pytest.raises(ValueError, match=message):
        parse_grid(text, placement)
