"""How much longer than a schedule's ideal makespan is its table of ticks, and how long does lowering take?

Prints, for each setting, the makespan of the table divided by the event-driven ideal, with each slot at its
earliest tick and with slots as ``lower`` places them; the ticks of both; the slots that store W's residuals;
and the seconds that lowering took.

    python benchmarks/lowering.py [dualpipe dualpipe_v zb_h1 one_f_one_b gpipe] [--large]
"""

import argparse
import time

from dualpipe_jax.schedule import ALL_SCHEDULES, CostModel, Schedule, dualpipe, simulate
from dualpipe_jax.schedule.lowering.flat import flatten, topological
from dualpipe_jax.schedule.lowering.lower import lower, tabulate
from dualpipe_jax.schedule.lowering.table import Keeps
from dualpipe_jax.schedule.lowering.ticks import earliest
from dualpipe_jax.schedule.validate import validate

COSTS = (
    CostModel(F=1, I=1, W=1, FB=3),
    CostModel(F=1, I=1, W=1, FB=2),
    CostModel(F=1, I=1.64, W=0.97, FB=2.65),
    CostModel(F=1, I=1, W=1, FB=2, send=0.1),
    CostModel(F=1, I=1.64, W=0.97, FB=2.65, send=0.3),
)


def report(schedule: Schedule, costs: CostModel) -> None:
    began = time.perf_counter()
    table = lower(schedule, costs)
    seconds = time.perf_counter() - began
    flat = flatten(schedule)
    keeps = Keeps.alike(schedule.placement.num_model_stages)
    first = tabulate(flat, earliest(flat, topological(flat)), keeps)
    ideal = simulate(schedule, costs).makespan
    print(
        f"{schedule.name:12} {schedule.num_ranks:5} {schedule.num_microbatches:5}  "
        f"{costs.F:g}:{costs.I:g}:{costs.W:g}:{costs.FB:g} send {costs.send:<4g} "
        f"{first.makespan(costs) / ideal:9.4f} {table.makespan(costs) / ideal:9.4f} "
        f"{first.num_ticks:6} {table.num_ticks:6} {table.num_slots['residual_w']:6} {seconds:8.3f}",
        flush=True,
    )


def large() -> None:
    began = time.perf_counter()
    schedule = dualpipe(64, 1024)
    made = time.perf_counter()
    validate(schedule)
    valid = time.perf_counter()
    table = lower(schedule)
    done = time.perf_counter()
    print(
        f"\ndualpipe(64, 1024): made in {made - began:.2f} s, validated in {valid - made:.2f} s, "
        f"lowered in {done - valid:.2f} s, {done - began:.2f} s in all; {table.num_ticks} ticks, "
        f"makespan / ideal {table.makespan(CostModel()) / simulate(schedule).makespan:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("schedules", nargs="*", default=["dualpipe"])
    parser.add_argument("--large", action="store_true", help="also 64 ranks by 1024 microbatches")
    args = parser.parse_args()
    known = {make.__name__ for make in ALL_SCHEDULES}
    if unknown := [name for name in args.schedules if name not in known]:
        parser.error(f"no schedule is called {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    print("schedule     ranks     M  F:I:W:FB               earliest    placed  ticks placed  slots  seconds")
    for make in ALL_SCHEDULES:
        if make.__name__ in args.schedules:
            for num_ranks in (4, 6, 8, 12, 16):
                for num_microbatches in (2 * num_ranks, 3 * num_ranks, 4 * num_ranks):
                    for costs in COSTS:
                        report(make(num_ranks, num_microbatches), costs)
    if args.large:
        large()


if __name__ == "__main__":
    main()
