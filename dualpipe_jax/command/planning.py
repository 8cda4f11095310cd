"""What `dualpipe plan` does before it prints: counts, bounds, compiles and prices, the most promising case first."""

import contextlib
import dataclasses
import heapq
import math
import os
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dualpipe_jax.command.options import CommandError, Died
from dualpipe_jax.command.overlap import study
from dualpipe_jax.pods import planner
from dualpipe_jax.pods.bounds import Bounds, Cut, Excluded
from dualpipe_jax.pods.cache import Cache
from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.pods.planner import Case, Choice, Prices, Wanted, layout_of
from dualpipe_jax.pods.request import Request
from dualpipe_jax.pods.results import Answer
from dualpipe_jax.present.numbers import in_runs, percent
from dualpipe_jax.step_options import BOUNDED, Shard


class Search:
    """Plans as they are found.

    Args:
      target: the devices.
      cache: of answers.
      rates: file of measured rates.
      minutes: CPU minutes after which nothing more is compiled; None: no such limit.
    """

    def __init__(self, target: str, cache: Cache, rates: Path | None, minutes: float | None = None):
        self.target, self.cache, self.rates = target, cache, rates
        self.choices: list[Choice] = []
        self.excluded: list[Excluded] = []
        self.prices: list[Prices] = []
        self.sizes: set[int] = set()
        self.layers = 0  # of the model, where the program tells
        self.dispatches = False  # whether the program sends tokens to experts at all
        self.capacity_factor: float | None = None  # of all plans
        self.unbounded = ""  # why dropless plans have no room for all tokens, if nobody asked for less
        self.left = 0
        self._counted: set[Cut] = set()
        self._said: Choice | None = None
        self._clock = _Clock(minutes)

    def explore(self, wanted: Wanted, *, whole: bool = False) -> None:
        """Count, compile and price; ``choices`` grow meanwhile.

        Without a capacity factor dropless plans have room for all tokens, or where that is out of reach ``BOUNDED``.

        Args:
          wanted: what plans.
          whole: compile every case of which a plan may fit; else the one with the least bound first, and none whose
            bound is not below the shortest step so far. Cases that are timed on this machine have no bounds.

        Raises:
          CommandError: what the first case cannot have, and the most different one neither, for the same reason word
            for word: no case can, such as a program that there is not.
        """
        shards = sorted(wanted.shards, key=planner.SHARDS.index)
        wanted = self._with_room(wanted, shards[-1])
        self.capacity_factor = wanted.base.capacity_factor
        cases, self.choices = planner.cases(wanted, planner.num_devices(self.target))
        if by_bounds := not whole and not self.target.lower().startswith("cpu:"):
            self._consider_by_bounds(cases, wanted, shards)
        else:
            self._consider_all(cases, wanted, shards)
        self.left = wanted.moves
        while self.left and (better := planner.moved(self.prices, self.choices, cases)) is not None:
            if by_bounds and not self._clock.lasts(better):
                print("no layers are moved between stages: no CPU minutes left", file=sys.stderr)
                break
            cases.append(better)
            with self._clock.runs(better):
                self.consider(better, shards, f"layers {in_runs(better.plan.stage_layers)}")
            self.left -= 1
        self.left = 0

    def _with_room(self, wanted: Wanted, most: Shard) -> Wanted:
        """What is wanted, or the same bounded: where nobody said a bound, and room for all tokens is out of reach."""
        if wanted.base.capacity_factor is not None or "dropless" not in wanted.dispatches:
            return wanted
        bounded = dataclasses.replace(wanted, base=dataclasses.replace(wanted.base, capacity_factor=BOUNDED))
        self.unbounded, seconds = self._least_dropless(wanted, most)
        if seconds and 0.0 < _FAR * (less := self._least_dropless(bounded, most)[1]) < seconds:
            self.unbounded = f"takes at least {seconds:.4g} s, bounded {less:.4g} s"
        if not self.unbounded:
            return wanted
        print(
            f"dropless with room for all tokens {self.unbounded}: bounded to {BOUNDED} even loads",
            file=sys.stderr,
        )
        return bounded

    def _least_dropless(self, wanted: Wanted, most: Shard) -> tuple[str, float]:
        """Why no dropless plan fits, and the least seconds of a step; empty and 0 if nobody knows.

        It is counted for the plan that needs least: of what keeps least, the one with the fewest devices that exchange
        tokens, which is the one with the most ranks.
        """
        dropless = dataclasses.replace(wanted, dispatches=("dropless",))
        cases, _ = planner.cases(dropless, planner.num_devices(self.target))
        if not cases:
            return "", 0.0
        bounds = Bounds(cases)
        cuts = bounds.cuts()
        cut, last = cuts[0], cuts[-1]
        try:
            counted = self.ask(
                planner.shared(bounds.standing_for(cut), most), "nothing", "room at the experts"
            )
        except (Died, CommandError) as error:
            self._ends_if_shared(error, bounds.standing_for(last), [most])
            return "", 0.0  # told of the case whose turn it is
        if counted.memory is None or counted.memory.limit is None or not self.dispatches:
            return "", 0.0
        bounds.take(cut, counted)
        if needs := bounds.too_much(cut):
            return needs, 0.0
        return "", min(bounds.seconds(case) for case in bounds.cases[cut] if case in bounds.open())

    def _consider_all(self, cases: Sequence[Case], wanted: Wanted, shards: Sequence[Shard]) -> None:
        for number, case in enumerate(cases, start=1):
            self.left = len(cases) - number + 1
            if vain := planner.cut_in_vain(case, cases, self.layers):
                self.choices += vain
            elif self._is_told_apart(case.plan, wanted):
                error = self.consider(case, shards, f"case {number} of {len(cases)}")
                if number == 1:
                    self._ends_if_shared(error, cases[-1].plan, shards)

    def _consider_by_bounds(self, cases: Sequence[Case], wanted: Wanted, shards: Sequence[Shard]) -> None:
        self.left = len(cases)
        bounds = Bounds(cases)
        self._count_one_of_each(bounds, wanted, shards)
        for case in cases:
            if vain := planner.cut_in_vain(case, cases, self.layers):
                self.choices += vain
                bounds.leave_out(case)
        while cuts := self._not_counted(bounds):
            self._count(bounds, cuts, shards)
        self._say_bounds(bounds)
        tried: set[Case] = set()
        while open_cases := [case for case in bounds.open() if case not in tried]:
            self.left = len(open_cases)
            shorter = [case for case in open_cases if bounds.seconds(case) < self.shortest]
            # The first is compiled in any event: counting may have taken all minutes.
            able = list(filter(self._clock.lasts, shorter)) if tried else shorter
            if not able:
                break
            case = bounds.next(able)
            if not bounds.is_counted(Cut.of(case.plan)):
                self._count(bounds, [Cut.of(case.plan)], shards)
                continue
            tried.add(case)
            known = len(self.prices)
            with self._clock.runs(case):
                title = f"at least {bounds.seconds(case):.4g} s, {len(shorter) - 1} cases left"
                self.consider(case, shards, title, bounds)
            for prices in self.prices[known:]:
                bounds.learn(prices)
            self._say_best()
        for case in sorted(open_cases, key=bounds.seconds):
            longer = bounds.seconds(case) >= self.shortest
            why = "longer than the best" if longer else "no CPU minutes left"
            self.excluded.append(bounds.excluded(case, why))

    def _count_one_of_each(self, bounds: Bounds, wanted: Wanted, shards: Sequence[Shard]) -> None:
        """Count one cut of each way to compute again and to reach experts, so that the work of all is known."""
        tried: list[Cut] = []
        while True:
            left: dict[str, Cut] = {}  # one of a dispatch at once: of one that does not fit others follow
            for cut in bounds.cuts():
                known = cut in tried or bounds.knows(cut)
                if not known and self._is_told_apart(bounds.standing_for(cut), wanted):
                    left.setdefault(cut.dispatch, cut)
            # The first alone, for it tells whether ways to the experts differ, and what all cuts have wrong.
            cuts = list(left.values())[: None if tried else 1]
            if not cuts:
                return
            error, *_ = self._count(bounds, cuts, shards)
            if not tried:
                self._ends_if_shared(error, bounds.standing_for(bounds.cuts()[-1]), shards)
            tried += cuts

    def _count(self, bounds: Bounds, cuts: Sequence[Cut], shards: Sequence[Shard]) -> list[Exception | None]:
        """Count cuts, several at once, with as much shared out as may be; but none that cannot fit.

        Returns why each could not be counted.
        """
        plans: dict[Cut, Plan] = {}
        for cut in cuts:
            known = bounds.cannot_fit(cut)
            self.choices += known
            if not known:
                plans[cut] = bounds.standing_for(cut)
        errors: dict[Cut, Exception] = {}
        shared = (planner.shared(plan, shards[-1]) for plan in plans.values())
        for (cut, plan), counted in zip(plans.items(), self._ask_at_once(shared), strict=True):
            if isinstance(counted, Exception):
                self.choices += [Choice(own, refused=_why(counted)) for own in bounds.refuse(cut)]
                errors[cut] = counted
                continue
            self.choices += bounds.take(cut, counted)
            name = f"{layout_of(plan)}, {plan.batch} sequences, remat {plan.remat}, {plan.dispatch}"
            print(f"{name}: {bounds.words(cut)}", file=sys.stderr)
        return list(map(errors.get, cuts))

    def _ask_at_once(self, plans: Iterable[Plan]) -> list[Answer | Exception]:
        """What is counted of plans, or why it cannot be. Interrupted, those that have begun end first, and are kept."""

        def ask(plan: Plan) -> Answer | Exception:
            try:
                return self.ask(plan, "nothing", "counting")
            except (Died, CommandError) as error:
                return error

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            asked = [pool.submit(ask, plan) for plan in plans]
            try:
                return [each.result() for each in asked]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _is_told_apart(self, plan: Plan, wanted: Wanted) -> bool:
        """Whether a plan's way to the experts makes a difference: the first that is wanted does."""
        return self.dispatches or plan.dispatch == wanted.dispatches[0]

    def _ends_if_shared(self, error: Exception | None, other: Plan, shards: Sequence[Shard]) -> None:
        """Raise the error of the first case if it is that of the last one, too."""
        if not isinstance(error, CommandError):
            return
        try:
            self.ask(planner.shared(other, shards[0]), "nothing", "the last case")
        except CommandError as its:
            if str(its) == str(error):
                raise
        except Died:
            pass  # told when its turn comes

    @property
    def shortest(self) -> float:
        """Seconds of the best plan so far; infinite if there is none."""
        known = (choice.seconds for choice in self.choices if not choice.refused)
        return min((seconds for seconds in known if seconds is not None), default=math.inf)

    def _not_counted(self, bounds: Bounds) -> list[Cut]:
        """Of the cases that will be told, the cuts that nobody counted: they may not fit, or not be at all."""
        cuts = dict.fromkeys(Cut.of(found.plan) for found in self._least(bounds))
        return [cut for cut in cuts if not bounds.is_counted(cut)]

    def _least(self, bounds: Bounds) -> list[Excluded]:
        found = (bounds.excluded(case, "") for case in bounds.open())
        return heapq.nsmallest(_FIRST, found, key=lambda one: one.seconds)

    def _say_bounds(self, bounds: Bounds) -> None:
        """What is known before anything is compiled, which takes long."""
        cases = bounds.open()
        if not cases:
            print("no case fits", file=sys.stderr)
            return
        lines = [f"{len(cases)} cases are left; by their products and bubbles alone a step takes at least"]
        for found in self._least(bounds):
            plan = found.plan
            how = f"{plan.num_microbatches} microbatches of {plan.batch}, remat {plan.remat}, {plan.dispatch}"
            lines.append(f"  {found.seconds:.4g} s: {plan.schedule_in_words}, {layout_of(plan)}, {how}")
        print("\n".join(lines), file=sys.stderr)

    def _say_best(self) -> None:
        """Name the best plan so far, once."""
        for best in planner.ranked(self.choices)[:1]:
            if best == self._said:
                return
            self._said, plan = best, best.plan
            how = f"{plan.schedule_in_words}, {layout_of(plan)}, remat {plan.remat}, {plan.dispatch}"
            words = f"the best so far takes {best.seconds:.4g} s, {percent(best.mfu)} MFU: {how}"
            print(words, file=sys.stderr)

    def consider(
        self, case: Case, shards: Sequence[Shard], title: str, bounds: Bounds | None = None
    ) -> Exception | None:
        """All plans of a case; ``shards`` from the least on. Returns why there are none, if it could not be asked.

        With less shared out than there is probably room for, units are compiled last.
        """
        done: list[Choice] = []
        plans: Sequence[Plan] = case.plans
        try:
            most = shards[-1]
            counts = {most: self.ask(planner.shared(case.plan, most), "nothing", title)}
            fit, done = planner.counted(case, counts)
            if fit and len(shards) > 1:
                less = {s: self.ask(planner.shared(case.plan, s), "nothing", title) for s in shards[:-1]}
                counts = less | counts
                fit, done = planner.counted(case, counts)
            prices = None
            for shard in self._roomy_first(case, fit, counts, bounds):
                count = counts[shard]
                plans = [plan for plan in fit if plan.shard == shard]
                if not planner.worth(plans, done, prices):
                    continue
                new = Prices(case, shard, self.ask(planner.standing_for(plans), "units", title))
                done += new.choices(plans, count)
                self.prices.append(new)
                prices = new if new.known else prices
        except (Died, CommandError) as error:
            done += [Choice(plan, refused=_why(error)) for plan in plans]
            return error
        finally:
            self.choices += done
        return None

    def _roomy_first(
        self, case: Case, fit: Sequence[Plan], counts: Mapping[Shard, Answer], bounds: Bounds | None
    ) -> list[Shard]:
        """What is shared out where a plan probably fits, from the least on; then the rest, from the most on."""

        def is_roomy(shard: Shard) -> bool:
            memory = counts[shard].memory
            assert memory is not None and memory.limit is not None
            room = math.inf if bounds is None else bounds.room(case, memory.limit)
            return any(planner.bytes_of(plan, counts[shard]) <= room for plan in fit if plan.shard == shard)

        roomy = list(filter(is_roomy, counts))
        return [*roomy, *(shard for shard in reversed([*counts]) if shard not in roomy)]

    def nearest(self) -> Answer | None:
        """Of what was counted and does not fit, the plan that needs least, with options that would make it fit.

        None where nothing was counted, or the plan cannot be had for another reason, or others were not tried. Where a
        case was compiled it is known to need more than what is counted, by which options are found.
        """
        if self.excluded:
            return None
        known = self._counted - {Cut.of(prices.case.plan) for prices in self.prices}
        counted = [c for c in self.choices if c.memory is not None and Cut.of(c.plan) in known]
        if not counted:
            return None
        least = min(counted, key=lambda choice: choice.memory or 0.0)
        try:
            return self.ask(least.plan, "nothing", "options that make it fit", hints=True)
        except (Died, CommandError):
            return None

    def ask(self, plan: Plan, compile: str, title: str, *, hints: bool = False) -> Answer:
        rates = None if self.rates is None else str(self.rates.absolute())
        request = Request(plan, self.target, compile, rates=rates, hints=hints)
        known = self.cache.get(request)
        if known is None:
            words = f"{title}: {plan.schedule_in_words}, {plan.layout}, {plan.batch} sequences, remat {plan.remat}"
            known = study(plan, self.target, compile, rates=self.rates, title=words, hints=hints)
            self.cache.put(request, known)
        self._counted.add(Cut.of(plan))
        self.layers = sum(known.stage_layers)
        self.dispatches |= known.dropped is not None or plan.ep_nodes > 1
        if known.parameters is not None:
            self.sizes.add(known.parameters.total)
        return known


_FAR = 2.0
"""A step with room for all tokens that takes so many times as long as a bounded one is for those who ask for it."""

_FIRST = 5
"""Bounds that are told before anything is compiled."""

_AT_ONCE = min(4, os.cpu_count() or 1)
"""Plans that are counted at once: each takes one core, and a gigabyte for DeepSeek-V3."""


def _why(error: Exception) -> str:
    return str(error).splitlines()[0] if isinstance(error, Died) else str(error)


class _Clock:
    """CPU minutes of this process and of those that it asked: what was used, and what cases took."""

    def __init__(self, minutes: float | None):
        self._limit = math.inf if minutes is None else minutes
        self._started = _minutes()
        self._taken: list[tuple[int, float]] = []  # stages of a case, and its minutes

    def lasts(self, case: Case) -> bool:
        """Whether a case would still end in time, if it takes as long as any so far: longer stages take longer."""
        stages = _stages(case)
        longest = max((minutes * max(1.0, own / stages) for own, minutes in self._taken), default=0.0)
        return _minutes() - self._started + longest <= self._limit

    @contextlib.contextmanager
    def runs(self, case: Case) -> Iterator[None]:
        began = _minutes()
        try:
            yield
        finally:
            self._taken.append((_stages(case), _minutes() - began))


def _stages(case: Case) -> int:
    return planner.num_stages(case.plan)


def _minutes() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)]
    return sum(each.ru_utime + each.ru_stime for each in used) / 60
