"""What lockstep costs is counted as by hand."""

from benchmarks import lockstep
from dualpipe_jax.schedule import gpipe


def test_gpipe_on_two_ranks():
    """Every rank runs F, and B of twice its work, for each kind at every tick: first and last, a stage each."""
    name, ticks, tick, step, halves_tick, halves = lockstep.row(gpipe(2, 2)).strip("| ").split(" | ")
    assert name == "gpipe"
    assert int(tick) == int(halves_tick) == 3 * 2  # F and B, of a first and of a last stage
    share = 3 * 2  # F and B of two microbatches
    assert float(step) == float(halves) == round(int(ticks) * int(tick) / share, 1)
