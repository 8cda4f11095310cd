"""The TPU compiler's log."""

from pathlib import Path

import pytest

from dualpipe_jax.inspect.scheduler import SchedulerStatistics, WaitStatistics, parse_statistics

LOG = (Path(__file__).parent / "texts/v5e_pair.log").read_text()


def test_statistics_before_and_after():
    assert parse_statistics(LOG) == (
        SchedulerStatistics(
            module="jit_on_device",
            computation="main.0_spmd",
            before=WaitStatistics(
                6646800.0, {"collective-permute": 269729.0, "all-to-all": 1618380.0}, 92274688
            ),
            after=WaitStatistics(5247750.0, {"all-to-all": 489058.0}, 100663808),
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
