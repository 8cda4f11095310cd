"""Tables and numbers as people read them."""

import io

import pytest
from rich.console import Console

from dualpipe_jax.present import numbers
from dualpipe_jax.present.figure import new_figure, save
from dualpipe_jax.present.numbers import Units
from dualpipe_jax.present.table import Table

ROWS = (("a", "1.5", "x"), ("bb", "20", "sync"))


def on_terminal(table, width=80):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="standard")
    console.print(table)
    return console.file.getvalue()


def test_columns_line_up_and_figures_stand_to_the_right():
    assert str(Table(("name", "n", "why"), ROWS)) == "name    n   why\na     1.5     x\nbb     20  sync"


def test_of_one_there_are_no_several():
    found = [numbers.how_many(number, "rank") for number in (0, 1, 2)]
    assert found == ["0 ranks", "1 rank", "2 ranks"] and numbers.how_many(1, "batch", "es") == "1 batch"
    assert numbers.how_many(3, "batch", "es") == "3 batches"


def test_a_ruled_table_with_names_at_both_ends():
    table = Table(("name", "n", "why"), ROWS, left=(0, 2), ruled=True)
    assert str(table) == "name    n  why\n----  ---  ----\na     1.5  x\nbb     20  sync"


def test_a_table_for_markdown():
    table = Table(("name", "n", "why"), ROWS, left=(0, 2))
    lines = "| name | n | why |", "| --- | ---: | --- |", "| a | 1.5 | x |", "| bb | 20 | sync |"
    assert table.markdown().splitlines() == [*lines]


def test_a_terminal_shows_the_best_row_in_green_and_bad_ones_in_red():
    lines = on_terminal(Table(("name", "n", "why"), ROWS, best=0, bad=[1])).splitlines()
    best, bad = (next(line for line in lines if cell in line) for cell in ("1.5", "sync"))
    assert "\x1b[1;32m" in best and "\x1b[31m" not in best
    assert "\x1b[31m" in bad and "\x1b[1;32m" not in bad


def test_only_what_may_be_broken_is():
    row = ("a_schedule_of_a_long_name", "1234567", "a_reason_that_is_long")
    narrow = on_terminal(Table(("name", "n", "why"), (row,)), width=40)
    assert row[0] in narrow and row[2] not in narrow
    narrow = on_terminal(Table(("name", "n", "why"), (row,), foldable=(0, 2)), width=30)
    assert row[1] in narrow and row[0] not in narrow


def test_cycles():
    texts = {None: "?", 0: "0", 640.4: "640", 3520: "3.52 k", 1.1e6: "1.10 M", -2e9: "-2.00 G"}
    assert {cycles: numbers.format_cycles(cycles) for cycles in texts} == texts


def test_numbers_in_a_row():
    texts = {(3, *[4] * 14, 2): "3, 14 x 4, 2", (2, 2): "2 x 2", (): ""}
    assert {row: numbers.in_runs(row) for row in texts} == texts


def test_numbers_of_any_size():
    """Three decimals, or three digits below 1; what is left of numbers that should be equal is nothing."""
    texts = {165.5: "165.5", 33.0: "33", 1 / 3: "0.333", 2.0004: "2", 1234567.8917: "1234567.892", 0.1: "0.1"}
    texts |= {-0.0: "0", 0.02: "0.02", -0.0625: "-0.0625", 3.3e-4: "0.00033", 1.2345e-5: "1.23e-05"}
    assert {value: numbers.number(value) for value in texts} == texts
    assert (numbers.number(0.99996), numbers.number(-1e-5, 1), numbers.number(12.34, 1)) == (
        "1",
        "-1e-05",
        "12.3",
    )
    assert numbers.number(0.1 + 0.2 - 0.3, of=0.3) == numbers.number(0.3 - 0.2 - 0.1, of=0.3) == "0"
    assert numbers.number(1e-5, of=3e-4) == "1e-05"


def test_other_numbers():
    assert numbers.scale(3.5e6) == ("M", 1e6) and numbers.scale(12) == ("", 1.0)
    sizes = {512: "512 B", 1536: "1.5 KiB", 4 * 2**20: "4 MiB", 40.5 * 2**30: "40.5 GiB"}
    assert {count: numbers.format_bytes(count) for count in sizes} == sizes
    assert numbers.gib(14 * 2**30) == "14.00"
    shares = {None: "?", -1e-9: "0.0 %", 0.4894: "48.9 %", 1: "100.0 %"}
    assert {share: numbers.percent(share) for share in shares} == shares
    assert numbers.as_ranges([0, 1, 2, 3, 8, 12, 13]) == "0-3 8 12-13"
    assert Units("ms", "B").size(2**30) == "1 GiB" and Units("ms").of_time("makespan") == "makespan, ms"


def test_a_figure_is_the_same_file_each_time(tmp_path):
    written = []
    for name in ("a.svg", "b.SVG"):
        figure = new_figure(2, 1, tmp_path / name)
        figure.text(0.5, 0.5, "text")
        assert save(figure, tmp_path / name) is figure
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1] and b"<svg" in written[0]
    with pytest.raises(ValueError, match="cannot tell a format from 'a.pdf'"):
        new_figure(2, 1, "a.pdf")
