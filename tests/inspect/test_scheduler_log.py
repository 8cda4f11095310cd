"""The TPU compiler's log, and catching it."""

import os
import sys
from pathlib import Path

import pytest

from dualpipe_jax.inspect.scheduler import SchedulerStatistics, Waste, capture, parse_statistics

LOG = (Path(__file__).parent / "texts/v5e_pair.log").read_text()


def test_statistics_before_and_after():
    assert parse_statistics(LOG) == (
        SchedulerStatistics(
            module="jit_on_device",
            computation="main.0_spmd",
            before=Waste(6646800.0, {"collective-permute": 269729.0, "all-to-all": 1618380.0}, 92274688),
            after=Waste(5247750.0, {"all-to-all": 489058.0}, 100663808),
        ),
    )


def test_total_is_the_sum_of_kinds():
    (found,) = parse_statistics(LOG)
    assert found.before.total_wasted == pytest.approx(1.8881e06, rel=1e-5), "as the log says itself"


def test_a_log_that_breaks_off_gives_what_is_whole():
    half = LOG[: LOG.index("Statistics after")]
    assert parse_statistics(half) == ()
    assert len(parse_statistics(LOG + half.replace("main.0", "body.1"))) == 1
    both = LOG.replace("main.0", "body.1").replace("(0)", "(17)") + "noise: 5\n" + LOG
    assert [s.computation for s in parse_statistics(both)] == ["body.1_spmd", "main.0_spmd"]
    assert {s.module for s in parse_statistics(both)} == {"jit_on_device"}


def test_capture_sees_what_other_languages_print():
    outside = os.dup(2)
    with capture() as log:
        os.write(2, b"from C\n")
        print("from Python", file=sys.__stderr__)
        assert "from C" in log.text, "also while it is still open"
    assert log.text.splitlines() == ["from C", "from Python"]
    assert os.fstat(2) == os.fstat(outside)
    os.close(outside)


def test_capture_gives_stderr_back_after_an_error():
    before = os.fstat(2)
    with pytest.raises(RuntimeError), capture() as log:
        os.write(2, b"last words\n")
        raise RuntimeError
    assert os.fstat(2) == before and log.text == "last words\n"
