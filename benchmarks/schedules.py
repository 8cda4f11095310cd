"""CPU seconds to make, validate and simulate every schedule at 64 ranks x 1024 microbatches.

scripts/bench schedules [--ranks 64] [--microbatches 1024]
"""

import argparse
import itertools
import sys
import time

from dualpipe_jax.schedule import ALL_SCHEDULES, simulate, validate


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=1024)
    options = parser.parse_args()
    print(f"{'':24} {'slots':>8} {'make':>6} {'validate':>8} {'simulate':>8}   CPU seconds")
    for make in ALL_SCHEDULES:
        moments = [time.process_time()]
        try:
            schedule = make(options.ranks, options.microbatches)
        except ValueError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        moments.append(time.process_time())
        validate(schedule)
        moments.append(time.process_time())
        simulate(schedule)
        moments.append(time.process_time())
        made, checked, played = (after - before for before, after in itertools.pairwise(moments))
        slots = sum(map(len, schedule.orders))
        print(f"{make.__name__:24} {slots:8} {made:6.2f} {checked:8.2f} {played:8.2f}", flush=True)


if __name__ == "__main__":
    main()
