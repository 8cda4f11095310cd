"""The search of `dualpipe plan`: it counts, bounds, compiles and prices plans, the most promising case first."""

import heapq
import math
import sys
from collections.abc import Mapping, Sequence

from dualpipe_jax.command.answers import Answers
from dualpipe_jax.command.cpu_budget import CpuBudget
from dualpipe_jax.command.options import ChildDied, CommandError
from dualpipe_jax.command.room import with_room
from dualpipe_jax.inspect.target import Target
from dualpipe_jax.pods import planner
from dualpipe_jax.pods.bounds import Bounds, Cut, Excluded
from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.pods.planner import Case, Choice, Prices, Wanted, layout_of
from dualpipe_jax.pods.results import Answer, Memory
from dualpipe_jax.present.numbers import gib, how_many, in_runs, percent
from dualpipe_jax.step_options import Shard


class Search:
    """A search for plans; its attributes hold what was found so far.

    Args:
      answers: the source of answers about plans for the devices.
      minutes: the CPU minutes after which nothing more is compiled; None: no limit.
    """

    def __init__(self, answers: Answers, minutes: float | None = None):
        self.answers = answers
        self.choices: list[Choice] = []
        self.excluded: list[Excluded] = []
        self.prices: list[Prices] = []
        # The capacity factor of all plans.
        self.capacity_factor: float | None = None
        # Why dropless plans have no room for all tokens, where no capacity factor was given.
        self.unbounded = ""
        self.left = 0
        self._printed: Choice | None = None
        self._budget = CpuBudget(minutes)

    def explore(self, wanted: Wanted, *, whole: bool = False) -> None:
        """Count, compile and price plans; ``choices`` grows meanwhile.

        Without a capacity factor dropless plans have the room that ``with_room`` finds.

        Args:
          wanted: the plans to choose from.
          whole: whether every case of which a plan may fit is compiled, however long it takes. Else the case with the
            least bound comes first, and none is compiled whose bound is not below the shortest step so far. Cases that
            are timed on this machine have no bounds, and are timed in their order.

        Raises:
          CommandError: the first case and the most different one have the same error, word for word: then every case
            has it, for example that there is no such program.
        """
        shards = sorted(wanted.shards, key=planner.SHARDS.index)
        wanted, self.unbounded = with_room(self.answers, wanted)
        self.capacity_factor = wanted.base.capacity_factor
        cases, self.choices = planner.cases(wanted, Target.parse(self.answers.target).num_devices)
        if whole:
            self._budget = CpuBudget(None)
        if whole or self.answers.is_timed:
            self._price_in_order(cases, wanted, shards)
        else:
            self._price_by_bounds(cases, wanted, shards)
        self.left = wanted.moves
        while self.left and (better := planner.move_layers(self.prices, self.choices, cases)) is not None:
            if not self._budget.allows(better):
                print("no layers are moved between stages: no CPU minutes left", file=sys.stderr)
                break
            cases.append(better)
            self.price_case(better, shards, f"layers {in_runs(better.plan.stage_layers)}")
            self.left -= 1
        self.left = 0

    def _price_in_order(self, cases: Sequence[Case], wanted: Wanted, shards: Sequence[Shard]) -> None:
        for number, case in enumerate(cases, start=1):
            self.left = len(cases) - number + 1
            if vain := planner.refuse_surplus_stages(case, cases, self.answers.layers):
                self.choices += vain
            elif self._differs(case.plan, wanted):
                if number > 1 and not self._budget.allows(case):
                    self.excluded.append(Excluded(case.plan, None, _OUT_OF_MINUTES))
                    continue
                error = self.price_case(case, shards, f"case {number} of {len(cases)}")
                if number == 1:
                    self.answers.raise_if_shared(error, planner.with_shard(cases[-1].plan, shards[0]))
                self._print_best()

    def _price_by_bounds(self, cases: Sequence[Case], wanted: Wanted, shards: Sequence[Shard]) -> None:
        self.left = len(cases)
        bounds = Bounds(cases)
        self._count_one_of_each(bounds, wanted, shards)
        for case in cases:
            if vain := planner.refuse_surplus_stages(case, cases, self.answers.layers):
                self.choices += vain
                bounds.remove(case)
        for cut in dict.fromkeys(Cut.of(case.plan) for case in bounds.open_cases()):
            if not bounds.is_counted(cut):
                self.choices += bounds.cannot_fit(cut)
        self._print_bounds(bounds)
        tried: set[Case] = set()
        while open_cases := [case for case in bounds.open_cases() if case not in tried]:
            self.left = len(open_cases)
            shorter = [case for case in open_cases if bounds.seconds(case) < self.shortest]
            # The first is compiled in any event: counting may have taken all minutes.
            able = list(filter(self._budget.allows, shorter)) if tried else shorter
            if not able:
                break
            case = bounds.choose_next(able)
            if not bounds.is_counted(Cut.of(case.plan)):
                self._count(bounds, [Cut.of(case.plan)], shards)
                continue
            tried.add(case)
            known = len(self.prices)
            title = f"at least {bounds.seconds(case):.4g} s, {how_many(len(shorter) - 1, 'case')} left"
            self.price_case(case, shards, title, bounds)
            for prices in self.prices[known:]:
                bounds.add_prices(prices)
            self._print_best()
        for case in open_cases:
            longer = bounds.seconds(case) >= self.shortest
            why = "longer than the best" if longer else _OUT_OF_MINUTES
            why += "" if bounds.is_counted(Cut.of(case.plan)) else _NOT_COUNTED
            self.excluded.append(bounds.excluded(case, why))
        self.excluded.sort(key=lambda found: found.seconds or 0.0)

    def _count_one_of_each(self, bounds: Bounds, wanted: Wanted, shards: Sequence[Shard]) -> None:
        """Count one cut for each remat and dispatch, so that the work of all cuts is known.

        Where a cut has the same error, word for word, as the most different cut of its layout, all cuts of the layout
        are refused.
        """
        tried: list[Cut] = []
        while True:
            # One cut of each dispatch at a time: a cut that does not fit may rule out others.
            left: dict[str, Cut] = {}
            for cut in bounds.cuts():
                known = cut in tried or bounds.is_known(cut)
                if not known and self._differs(bounds.representative(cut), wanted):
                    left.setdefault(cut.dispatch, cut)
            # The first cut is counted alone: it tells whether dispatches differ, and errors that all cuts share.
            cuts = list(left.values())[: None if tried else 1]
            if not cuts:
                return
            errors = self._count(bounds, cuts, shards)
            if not tried:
                self.answers.raise_if_shared(
                    errors[0], planner.with_shard(bounds.representative(bounds.cuts()[-1]), shards[0])
                )
            tried += cuts
            for cut, error in zip(cuts, errors, strict=True):
                alike = [other for other in bounds.cuts() if (other.dp, other.pp) == (cut.dp, cut.pp)]
                if self.answers.is_shared(
                    error, planner.with_shard(bounds.representative(alike[-1]), shards[0])
                ):
                    gone = [
                        other
                        for other in alike
                        if other not in tried and self._differs(bounds.representative(other), wanted)
                    ]
                    self.choices += [
                        Choice(own, refused=str(error)) for each in gone for own in bounds.refuse(each)
                    ]
                    tried += gone

    def _count(self, bounds: Bounds, cuts: Sequence[Cut], shards: Sequence[Shard]) -> list[Exception | None]:
        """Count cuts, several at once, with the most sharding that is allowed; cuts that cannot fit are left out.

        Returns for each cut the error, or None.
        """
        plans: dict[Cut, Plan] = {}
        for cut in cuts:
            known = bounds.cannot_fit(cut)
            self.choices += known
            if not known:
                plans[cut] = bounds.representative(cut)
        errors: dict[Cut, Exception] = {}
        shared = (planner.with_shard(plan, shards[-1]) for plan in plans.values())
        for (cut, plan), counted in zip(plans.items(), self.answers.count_at_once(shared), strict=True):
            if isinstance(counted, Exception):
                self.choices += [Choice(own, refused=_reason(counted)) for own in bounds.refuse(cut)]
                errors[cut] = counted
                continue
            self.choices += bounds.add_counts(cut, counted)
            name = f"{layout_of(plan)}, {plan.batch} sequences, remat {plan.remat}, {plan.dispatch}"
            print(f"{name}: {bounds.summary(cut)}", file=sys.stderr)
        return list(map(errors.get, cuts))

    def _differs(self, plan: Plan, wanted: Wanted) -> bool:
        """Whether a plan differs from others: without tokens sent to experts, only the first dispatch is tried."""
        return self.answers.dispatches or plan.dispatch == wanted.dispatches[0]

    @property
    def shortest(self) -> float:
        """Seconds of the best plan so far; infinite if there is none."""
        known = (choice.seconds for choice in self.choices if not choice.refused)
        return min((seconds for seconds in known if seconds is not None), default=math.inf)

    def _print_bounds(self, bounds: Bounds) -> None:
        """Print the least bounds before anything is compiled, which takes long."""
        cases = bounds.open_cases()
        if not cases:
            print("no case fits", file=sys.stderr)
            return
        lines = [f"{how_many(len(cases), 'case')} left; by products and bubbles alone a step takes at least"]
        counted = [case for case in cases if bounds.is_counted(Cut.of(case.plan))]
        others = [bounds.seconds(case) for case in cases if not bounds.is_counted(Cut.of(case.plan))]
        for case in heapq.nsmallest(_NUM_PRINTED_BOUNDS, counted, key=bounds.seconds):
            plan = bounds.excluded(case, "").plan
            how = f"{plan.num_microbatches} microbatches of {plan.batch}, remat {plan.remat}, {plan.dispatch}"
            takes = f"{bounds.seconds(case):.4g} s, {bounds.memory(case) / 2**30:.1f} GiB"
            lines.append(f"  {takes}: {plan.schedule_in_words}, {layout_of(plan)}, {how}")
        if others:
            lines.append(f"  {min(others):.4g} s: the least of {len(others)} not counted, which may not fit")
        print("\n".join(lines), file=sys.stderr)

    def _print_estimate(self, plan: Plan, title: str) -> None:
        """Print a step's time if all stages were like most: their units compile soon, all kinds take minutes."""
        try:
            step = self.answers.ask(plan, "usual", title).step
        except (ChildDied, CommandError):
            # Reported and handled when all units are compiled.
            return
        if step is not None:
            words = f"were all stages like most of them, a step took {step.seconds:.4g} s, {percent(step.mfu)} MFU"
            print(f"{words}: {_plan_words(plan)}; compiling the others", file=sys.stderr)

    def _print_best(self) -> None:
        """Print the best plan so far, unless it was printed before."""
        for best in planner.ranked(self.choices)[:1]:
            if best == self._printed:
                return
            self._printed = best
            words = f"the best so far takes {best.seconds:.4g} s, {percent(best.mfu)} MFU: {_plan_words(best.plan)}"
            print(words, file=sys.stderr)

    def price_case(
        self, case: Case, shards: Sequence[Shard], title: str, bounds: Bounds | None = None
    ) -> Exception | None:
        """Price all plans of a case; ``shards`` has the least sharding first. Returns the error if asking failed.

        Units of plans with too little sharding to fit, probably, are compiled last. Once a plan is priced, more units
        are compiled only if they will end in time.
        """
        done: list[Choice] = []
        plans: Sequence[Plan] = case.plans
        try:
            most = shards[-1]
            counts = {most: self.answers.ask(planner.with_shard(case.plan, most), "nothing", title)}
            fit, done = planner.split_by_count(case, counts)
            if fit and len(shards) > 1:
                less = {
                    s: self.answers.ask(planner.with_shard(case.plan, s), "nothing", title)
                    for s in shards[:-1]
                }
                counts = less | counts
                fit, done = planner.split_by_count(case, counts)
            prices = None
            for shard in self._roomy_first(case, fit, counts, bounds):
                count = counts[shard]
                plans = [plan for plan in fit if plan.shard == shard]
                if not planner.is_worth_compiling(plans, done, prices):
                    continue
                priced = any(not choice.refused for choice in done)
                if prices and priced and not self._budget.allows(case):
                    least = min(plans, key=prices.ticks)
                    self.excluded.append(Excluded(least, prices.ticks(least), _OUT_OF_MINUTES))
                    break
                standing = planner.representative(plans)
                if bounds and not self.prices:
                    self._print_estimate(standing, title)
                if self.answers.is_timed and count.memory is not None:
                    _print_memory(
                        standing, count.memory, Target.parse(self.answers.target).num_devices, title
                    )
                with self._budget.recording(case):
                    found = self.answers.ask(standing, "units", title)
                new = Prices(case, shard, found)
                done += new.choices(plans, count)
                self.prices.append(new)
                prices = new if new.known else prices
        except (ChildDied, CommandError) as error:
            done += [Choice(plan, refused=_reason(error)) for plan in plans]
            return error
        finally:
            self.choices += done
        return None

    def _roomy_first(
        self, case: Case, fit: Sequence[Plan], counts: Mapping[Shard, Answer], bounds: Bounds | None
    ) -> list[Shard]:
        """The shardings with which a plan probably fits, the least first; then the others, the most first."""

        def is_roomy(shard: Shard) -> bool:
            memory = counts[shard].memory
            assert memory is not None
            room = math.inf if bounds is None else bounds.room(case, memory.limit)
            return any(planner.needed(plan, memory) <= room for plan in fit if plan.shard == shard)

        roomy = list(filter(is_roomy, counts))
        return [*roomy, *(shard for shard in reversed([*counts]) if shard not in roomy)]

    def nearest(self) -> Answer | None:
        """Of the plans that were counted and do not fit, the one that needs least, with options that make it fit.

        None where nothing was counted, the plan is impossible for another reason, or cases were left untried. Compiled
        cases do not count: they are known to need more than their count, from which the options are found.
        """
        if self.excluded:
            return None
        known = self.answers.counted - {Cut.of(prices.case.plan) for prices in self.prices}
        counted = [c for c in self.choices if c.memory is not None and Cut.of(c.plan) in known]
        if not counted:
            return None
        least = min(counted, key=lambda choice: choice.memory or 0.0)
        try:
            return self.answers.ask(least.plan, "nothing", "options that make it fit", hints=True)
        except (ChildDied, CommandError):
            return None


_NUM_PRINTED_BOUNDS = 5
"""Number of bounds that are printed before anything is compiled."""

_OUT_OF_MINUTES = "no CPU minutes left"
_NOT_COUNTED = ", not counted: it may not fit"
"""Said of cuts whose turn has not come: counting all cuts takes minutes, so until then others bound them."""


def _print_memory(plan: Plan, counted: Memory, num_devices: int, title: str) -> None:
    """Print how much of this machine's memory a plan's units need, before they run here: others may have taken it."""
    needs, room = (gib(num_devices * each) for each in (planner.needed(plan, counted), counted.limit))
    words = f"{title}: its units run here, in about {needs} GiB of this machine's {room}, and what they compute with"
    print(
        f"{words}: {_plan_words(plan)}; less with a smaller --sequence or --per-device, or --remat all",
        file=sys.stderr,
    )


def _plan_words(plan: Plan) -> str:
    return f"{plan.schedule_in_words}, {layout_of(plan)}, remat {plan.remat}, {plan.dispatch}"


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if isinstance(error, ChildDied) else str(error)
