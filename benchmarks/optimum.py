"""Which schedules are optimal? Every named schedule against the optimum and the lower bound, for small sizes.

Prints a table for each cost model: a row for each size, a column for each placement, and in each cell the
optimum, the lower bound where it is below the optimum, and how far each named schedule is above the optimum.
Then it compares each named schedule with the optimum within the schedule's own memory. docs/results.md shows
the output.

    python benchmarks/optimum.py [--time-limit 60]
"""

import argparse
import time
from collections.abc import Iterator

from dualpipe_jax.schedule import ALL_SCHEDULES, CostModel, MemoryModel, Placement, Schedule, simulate
from dualpipe_jax.schedule.optimize.bounds import lower_bound
from dualpipe_jax.schedule.optimize.optimum import Optimum, optimum

COSTS = (CostModel(), CostModel(FB=2), CostModel(F=1, I=2, W=1, FB=3), CostModel(F=1, I=1, W=2))
PLACEMENTS = {"linear": Placement.linear, "v": Placement.v, "bidirectional": Placement.bidirectional}
SIZES = [(num_ranks, num_microbatches) for num_ranks in (2, 3, 4) for num_microbatches in (2, 4, 6)]


def named(placement: Placement, num_microbatches: int) -> Iterator[Schedule]:
    """The named schedules of this size on this placement."""
    for recipe in ALL_SCHEDULES:
        try:
            schedule = recipe(placement.num_ranks, num_microbatches)
        except ValueError:  # not for these counts
            continue
        if schedule.placement == placement:
            yield schedule


def makespan(schedule: Schedule, costs: CostModel) -> float:
    return simulate(schedule, costs.for_schedule(schedule)).makespan


def peak(schedule: Schedule) -> float:
    return max(simulate(schedule).memory(MemoryModel().for_schedule(schedule)))


def number(best: Optimum, low: float) -> str:
    if not best.proven:
        return f"{best.lower_bound:g} to {best.makespan:g}"
    return f"{best.makespan:g}" + (f" (bound {low:g})" if low < best.makespan - 1e-9 else "")


def cell(placement: Placement, num_microbatches: int, costs: CostModel, time_limit: float) -> str:
    schedules = sorted(named(placement, num_microbatches), key=lambda schedule: makespan(schedule, costs))
    best = optimum(placement, num_microbatches, costs, incumbents=schedules, time_limit=time_limit)
    above = [(schedule.name, makespan(schedule, costs) - best.makespan) for schedule in schedules]
    shown = [f"{name} +{more:g}" if more > 1e-9 else f"**{name}**" for name, more in above]
    low = lower_bound(placement.num_ranks, num_microbatches, costs, placement=placement)
    return f"{number(best, low)}: {', '.join(shown)}" if shown else number(best, low)


def by_costs(costs: CostModel, time_limit: float) -> None:
    print(f"\nF:I:W = {costs.F:g}:{costs.I:g}:{costs.W:g}, FB = {costs.FB:g}\n")
    print(f"| ranks, M | {' | '.join(PLACEMENTS)} |")
    print("| --- " * (1 + len(PLACEMENTS)) + "|")
    for num_ranks, num_microbatches in SIZES:
        cells = [cell(make(num_ranks), num_microbatches, costs, time_limit) for make in PLACEMENTS.values()]
        print(f"| {num_ranks}, {num_microbatches} | {' | '.join(cells)} |", flush=True)


def by_memory(num_ranks: int, num_microbatches: int, time_limit: float) -> None:
    print(f"\nWithin a schedule's own memory: {num_ranks} ranks, {num_microbatches} microbatches\n")
    head = [f"{costs.F:g}:{costs.I:g}:{costs.W:g}, FB {costs.FB:g}" for costs in COSTS]
    print(f"| schedule | activations | {' | '.join(head)} |")
    print("| --- " * (2 + len(COSTS)) + "|")
    for make in PLACEMENTS.values():
        schedules = list(named(make(num_ranks), num_microbatches))
        for schedule in schedules:
            cells = []
            for costs in COSTS:
                arguments = num_microbatches, costs, peak(schedule)
                best = optimum(make(num_ranks), *arguments, incumbents=schedules, time_limit=time_limit)
                low = lower_bound(num_ranks, *arguments, placement=make(num_ranks))
                own = f"{makespan(schedule, costs):g}"
                is_best = makespan(schedule, costs) <= best.lower_bound + 1e-9
                cells.append(f"**{own}**" if is_best else f"{own}; {number(best, low)}")
            print(f"| {schedule.name} | {peak(schedule):g} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each optimum")
    args = parser.parse_args()
    began = time.perf_counter()
    for costs in COSTS:
        by_costs(costs, args.time_limit)
    for num_ranks in (3, 4):
        by_memory(num_ranks, 4, args.time_limit)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
