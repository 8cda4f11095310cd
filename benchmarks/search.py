"""How much shorter the automatic scheduler's schedules are than the named ones, and how long the search takes.

For each setting of a grid (ranks, microbatches, costs F:I:W:FB, and a memory limit in activations of a whole
rank's share, with one copy of the parameters) it prints the makespan of the best named schedule that fits,
that of the search, their ratio, the ratio of the search's makespan to the proven lower bound on its
placement, and the CPU seconds of the search. Named schedules that allow more stages per rank take part both
with two stages a rank and with four.

    python benchmarks/search.py [--send 0.02] [--placement v] [--effort 0.25] [--large]
"""

import argparse
import functools
import math
import statistics
import time

from dualpipe_jax.schedule import (
    ALL_SCHEDULES,
    CostModel,
    MemoryModel,
    Placement,
    interleaved_1f1b,
    interleaved_1f1b_overlap,
    interleaved_zero_bubble,
    looped_bfs,
    simulate,
    validate,
)
from dualpipe_jax.schedule.optimize.bounds import lower_bound
from dualpipe_jax.schedule.optimize.choose import choose
from dualpipe_jax.schedule.optimize.search import search

RANKS, TIMES = (2, 3, 4, 6, 8, 12, 16), (1, 2, 4, 8)

RATIOS = ((1, 1, 1), (1, 1.64, 0.97), (1, 1, 1.5), (1, 2, 1), (1, 0.8, 1.2))
"""The costs F:I:W; W > I and I > F both occur."""

GAINS = (0, 0.5, 1, 0.75)
"""The share of min(F, B) that an overlapped pair saves; at most it can save all of it."""

LIMITS = (1.0, 0.6, 1.05, 2.0, math.inf)
"""Memory limits in activations of a whole rank's share, divided by the number of ranks. ``grid`` raises a
limit to at least one activation more than half the ranks."""


FINER = [
    functools.update_wrapper(functools.partial(recipe, num_stages_per_rank=4), recipe)
    for recipe in (interleaved_1f1b, interleaved_1f1b_overlap, interleaved_zero_bubble, looped_bfs)
]


def grid(send=0.0):
    """Settings (ranks, microbatches, costs, memory limit): three for each pair of counts, costs and limits in turn."""
    turn = 0
    for ranks in RANKS:
        for times in TIMES:
            for _ in range(3):
                f, i, w = RATIOS[turn % len(RATIOS)]
                gain = GAINS[turn % len(GAINS)]
                limit = LIMITS[turn // 3 % len(LIMITS)]
                limit = max(limit * ranks, ranks // 2 + 1) + (0.5 if limit == 1.05 else 0)
                fb = f + i + w - gain * min(f, i + w)
                yield ranks, ranks * times, CostModel(f, i, w, fb, send), limit
                turn += 1


def best_named(ranks, microbatches, costs, limit, placement):
    """The shortest named schedule that fits and has one copy of the parameters, on the placement if one is given."""
    candidates = choose(ranks, microbatches, costs, limit, schedules=[*ALL_SCHEDULES, *FINER])
    one_copy = [c for c in candidates if c.fits and c.num_copies == 1]
    for candidate in one_copy:
        # A candidate with a copy has a schedule.
        assert candidate.schedule is not None
        if placement is None or candidate.schedule.placement == placement:
            return candidate
    return None


def report(setting, placement, effort):
    """Search one setting and print its line; return the ratio to the best named schedule, or None if none fits."""
    ranks, microbatches, costs, limit = setting
    where = None if placement == "any" else placement
    on = {"any": None, "linear": Placement.linear(ranks), "v": Placement.v(ranks)}[placement]
    named = best_named(ranks, microbatches, costs, limit, on)
    began = time.process_time()
    found = search(ranks, microbatches, costs, limit, where, effort=effort)
    seconds = time.process_time() - began
    timeline = simulate(validate(found), costs.for_schedule(found))
    kept = max(timeline.memory(MemoryModel().for_schedule(found)))
    assert kept <= limit * (1 + 1e-9)
    bound = lower_bound(ranks, microbatches, costs, limit, placement=found.placement)
    ratio = timeline.makespan / named.makespan if named else None
    assert ratio is None or ratio <= 1 + 1e-9, "no worse than any named schedule is what the search promises"
    print(
        f"{ranks:5} {microbatches:5}  {costs.F:g}:{costs.I:g}:{costs.W:g}:{costs.FB:<6.4g} {limit:6.4g} "
        f"{named.name if named else '-':24} {named.makespan if named else math.inf:9.2f} "
        f"{timeline.makespan:9.2f} {f'{ratio:.4f}' if ratio else '-':>7} {timeline.makespan / bound:7.4f} "
        f"{len(found.placement.stages_on[0]):6} {kept:6.4g} {seconds:7.1f}",
        flush=True,
    )
    return ratio


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--placement", default="any", choices=("any", "linear", "v"))
    parser.add_argument("--effort", type=float, default=0.25)
    parser.add_argument(
        "--send", type=float, default=0.0, help="time of a transfer to another rank, in the unit of F"
    )
    parser.add_argument("--most-ranks", type=int, default=max(RANKS), help="leave out settings of more ranks")
    parser.add_argument(
        "--large", action="store_true", help="only 16 ranks by 64 microbatches, at full effort"
    )
    args = parser.parse_args()
    settings = [setting for setting in grid(args.send) if setting[0] <= args.most_ranks]
    effort = args.effort
    if args.large:
        settings, effort = list(large(args.send)), 1.0
    print(
        "ranks     M  F:I:W:FB          limit best named                 makespan    search   ratio "
        "/ bound stages memory seconds"
    )
    ratios = [report(setting, args.placement, effort) for setting in settings]
    known = [ratio for ratio in ratios if ratio]
    better = sum(ratio < 1 - 1e-9 for ratio in known)
    print(
        f"\n{len(settings)} settings, {len(known)} with a named schedule that fits: search / best named "
        f"{min(known):.3f} min, {statistics.median(known):.3f} median, {max(known):.3f} max; "
        f"strictly shorter in {better}"
    )


def large(send):
    """Settings of 16 ranks by 64 microbatches: pairs save nothing, or a quarter of F + B; three memory limits."""
    for f, i, w in RATIOS[:2]:
        for fb in (1, 0.75):
            for limit in (9, 16, 16.5):
                yield 16, 64, CostModel(f, i, w, fb * (f + i + w), send), limit


if __name__ == "__main__":
    main()
