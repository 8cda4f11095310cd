"""Counts that nobody can wait for are refused at once, and long work says that it goes on."""

import dataclasses
import re
import sys
import threading

import pytest

from dualpipe_jax.__main__ import main
from dualpipe_jax.command import output, show
from dualpipe_jax.command.formats import summary
from dualpipe_jax.command.share_files import RankShare
from dualpipe_jax.present.numbers import Units
from dualpipe_jax.schedule import CostModel, MemoryModel, format_grid, simulate
from dualpipe_jax.schedule.names import SCHEDULES
from dualpipe_jax.schedule.simulate import clock

simulated = sys.modules["dualpipe_jax.schedule.simulate"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            "show gpipe --ranks 1000000 --microbatches 8",
            "1,000,000 ranks x 8 microbatches are 16,000,000 forwards",
        ),
        (
            "show zb_v --ranks 4 --microbatches 1000000000",
            "4 ranks x 1,000,000,000 microbatches are 8,000,000,000",
        ),
        (
            "compare --ranks 1000 --microbatches 1000",
            "1,000 ranks x 1,000 microbatches x 1[0-9] schedules are",
        ),
        (
            "choose --ranks 1000 --microbatches 1000",
            "1,000 ranks x 1,000 microbatches x 1[0-9] schedules are",
        ),
        (
            "search --ranks 4 --microbatches 1000000000",
            "4 ranks x 1,000,000,000 microbatches x 1[0-9] schedules are",
        ),
        (
            "show interleaved_1f1b --ranks 4 --microbatches 8 --stages-per-rank 1000000",
            "4 ranks x 8 microbatches x 1,000,000 stages of a rank are 64,000,000 forwards",
        ),
        (
            "show hanayo --ranks 4 --microbatches 8 --waves 1000000",
            "4 ranks x 8 microbatches x 2,000,000 stages of a rank are 128,000,000",
        ),
    ],
)
def test_counts_without_end(capsys, options, words):
    assert main(options.split()) == 2
    err = capsys.readouterr().err
    assert re.match(
        f"error: {words}.* at most 10,000,000 can be handled.*look at fewer microbatches.\n$", err
    )


@pytest.mark.parametrize(
    ("ranks", "microbatches", "least", "most"),
    [(1_000_000, 1, "8,000,000", "100"), (2, 1_000_000, "8,000,000", "1,000,000")],
)
def test_lines_that_have_no_room_are_refused_before_there_is_a_schedule(
    capsys, monkeypatch, ranks, microbatches, least, most
):
    monkeypatch.setattr(show, "schedule_of", lambda *_: pytest.fail("made a schedule"))
    options = f"--ranks {ranks} --microbatches {microbatches}".split()
    assert main(["show", "1f1b", *options]) == 2
    assert capsys.readouterr().err == (
        f"error: {ranks:,} ranks x {microbatches:,} microbatches drawn to time are lines of at least {least} "
        f"characters, and of {ranks:,} ranks at most {most} can be drawn; take fewer ranks or microbatches, or "
        "write it in another format, such as JSON\n"
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_is_drawn_in_shorter_lines_than_that_refusal_counts_on(name):
    for ranks, microbatches in ((2, 8), (8, 8)):
        text = format_grid(SCHEDULES[name](ranks, microbatches), CostModel())
        width = max(map(len, text.splitlines()[1:])) + 1 - len("rank 0: ")
        assert width >= 8 * max(ranks, microbatches)


class Counted(tuple):
    """Counts how often it is walked through."""

    walks = 0

    def __iter__(self):
        type(self).walks += 1
        return super().__iter__()


def test_a_summary_of_many_ranks_looks_for_the_end_of_the_step_once():
    timeline = simulate(SCHEDULES["one_f_one_b"](40, 4))
    timeline = dataclasses.replace(timeline, ends=Counted(timeline.ends))
    line, _ = summary(timeline, RankShare(timeline.costs, MemoryModel(), Units()))
    assert line.startswith("makespan 129, ") and Counted.walks == 1, (
        "43 slots of F and B, which take 3 together"
    )


def test_text_is_drawn_from_the_step_that_was_simulated(monkeypatch, capsysbinary):
    played = []
    monkeypatch.setattr(simulated, "clock", lambda *a, **k: played.append(a) or clock(*a, **k))
    assert main(["show", "1f1b", "--ranks", "2", "--microbatches", "2"]) == 0
    assert len(played) == 1 and b"rank 1: ... 1F0" in capsysbinary.readouterr().out


def test_what_takes_long_says_so(capsys, monkeypatch):
    """Waits for the line, not for a time: the work ends when it has come."""
    told = []
    monkeypatch.setattr(output, "_QUIET_SECONDS", 0.0)
    came = threading.Event()
    monkeypatch.setattr(output, "print", lambda *words, **_: (told.append(words), came.set()), raising=False)
    with output.print_if_long("dualpipe show: at work"):
        assert came.wait(60)
    assert told == [("dualpipe show: at work ...",)]


def test_choosing_simulates_each_schedule_once_for_each_send(monkeypatch, capsys):
    """A schedule is played at its own costs, and at those of the other send that its row tells."""
    played = []

    def noted(placement, orders, ran, costs, *args, **kwargs):
        played.append((orders, costs))
        return clock(placement, orders, ran, costs, *args, **kwargs)

    monkeypatch.setattr(simulated, "clock", noted)
    assert main(["choose", "--ranks", "4", "--microbatches", "8", "--json"]) == 0
    assert len(played) == len(set(played)) > len(SCHEDULES)
