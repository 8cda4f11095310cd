"""What lockstep costs is counted as by hand."""

from benchmarks import lockstep
from dualpipe_jax.schedule import gpipe


def test_gpipe_on_two_ranks():
    """Two kinds of stage, first and last, each of F and of B, which is twice its work: as each is of one rank alone,
    it runs in the two ticks of its microbatches, on both ranks."""
    name, ticks, tick, step, halves_tick, halves = lockstep.row(gpipe(2, 2)).strip("| ").split(" | ")
    assert name == "gpipe"
    work = 2 * (1 + 2) * 2  # two kinds' F and B, of two microbatches
    share = 3 * 2  # F and B of two microbatches
    assert float(tick) == float(halves_tick) == round(work / int(ticks), 1)
    assert float(step) == float(halves) == work / share
