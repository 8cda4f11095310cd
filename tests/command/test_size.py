"""Counts that nobody can wait for are refused at once, and long work says that it goes on."""

import re
import threading

import pytest

from dualpipe_jax.__main__ import main
from dualpipe_jax.command import output


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


def test_what_takes_long_says_so(capsys, monkeypatch):
    """Waits for the line, not for a time: the work ends when it has come."""
    told = []
    monkeypatch.setattr(output, "_PATIENCE", 0.0)
    came = threading.Event()
    monkeypatch.setattr(output, "print", lambda *words, **_: (told.append(words), came.set()), raising=False)
    with output.told_if_long("dualpipe show: at work"):
        assert came.wait(60)
    assert told == [("dualpipe show: at work ...",)]
