"""How short can a step be whose units nobody compiled? From below, by their matrix products; loads no JAX.

A *cut* is all that decides how much work a rank has: the numbers of ranks and replicas, microbatches, remat, dispatch.
One case of a cut is counted, the rest follow from it, with layers spread evenly over their stages. And until a cut is
counted it has the work of another one of the same remat and dispatch, in proportion to layers and tokens.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dualpipe_jax.pods.costs import UnitCosts, splits, unit_costs
from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.pods.planner import (
    REMATS,
    Case,
    Choice,
    Prices,
    layout_of,
    needed,
    num_stages,
    schedule_of,
    too_much,
)
from dualpipe_jax.pods.results import Answer
from dualpipe_jax.schedule import Action, CostModel, Op, Placement, Slot, simulate
from dualpipe_jax.schedule.costs import stages_a_share
from dualpipe_jax.schedule.lowering.unit_key import UnitKey

MARGIN = 0.95
"""Units that nobody compiled may come this much nearer to their products' time than any that were."""


class Cut(NamedTuple):
    """What the plans of several cases have in common."""

    dp: int
    pp: int
    microbatch_size: int
    dispatch: str
    remat: str

    @classmethod
    def of(cls, plan: Plan) -> "Cut":
        return cls(plan.dp, plan.pp, plan.batch, plan.dispatch, plan.remat)

    def needs_no_less(self, other: "Cut") -> bool:
        """Whether a device keeps at least as much as with another cut."""
        alike = (self.dp, self.pp, self.dispatch) == (other.dp, other.pp, other.dispatch)
        keeps = REMATS.index(self.remat) <= REMATS.index(other.remat)  # what keeps most is first
        return alike and self.microbatch_size >= other.microbatch_size and keeps


class Least:
    """The least time of steps of a cut.

    Args:
      plan: that was counted.
      counted: what was, on a target whose clock is known.
    """

    def __init__(self, plan: Plan, counted: Answer):
        assert counted.target is not None
        self.clock, self.plan = counted.target.clock, plan
        self._counted, self._schedule, self._products = counted, schedule_of(plan), counted.products
        self._costs = functools.cache(self._costs_by)

    def seconds(self, plan: Plan, factors: Mapping[str, float]) -> float:
        """Seconds from the first forward to the last backward, each unit ``factors`` times as long as its products."""
        schedule = schedule_of(plan)
        split = splits(schedule)
        units = self._costs(split, tuple(sorted(factors.items())))
        costs: CostModel = units
        counted = Cut.of(plan) == Cut.of(self.plan)
        if not counted or schedule.placement.num_model_stages != self._schedule.placement.num_model_stages:
            work = _work(plan) / _work(self.plan)
            costs = self._spread(units, split).divided(1 / work).for_schedule(schedule)
        return simulate(schedule, costs).makespan / self.clock

    def memory(self, plan: Plan) -> tuple[float, float]:
        """Bytes that a plan of this cut or another needs, about, and those that there are.

        Values of a stage grow with its layers and a device's tokens. Parameters of a device are taken to stay as many.
        """
        memory = self._counted.memory
        assert memory is not None and memory.limit is not None
        return needed(plan, memory, _sequences(plan) / _sequences(self.plan)), memory.limit

    def _costs_by(self, split: bool, factors: tuple[tuple[str, float], ...]) -> "_LeastCosts":
        by_op, products = dict(factors), self._products
        units = {
            key: dataclasses.replace(unit, cycles=by_op.get(key.op, 1.0) * unit.cycles)
            for key, unit in products.items()
        }
        costs, bare = (unit_costs(each, 0.0, split=split) for each in (units, products))
        return _LeastCosts(**vars(costs), bare=bare, pair=by_op.get("FB", 1.0))

    def _spread(self, costs: "_LeastCosts", split: bool) -> CostModel:
        """Costs of a rank's even share of the model, from those of the stages counted."""
        placement = self._schedule.placement
        stages = placement.num_model_stages

        def mean(costs: UnitCosts, op: Op) -> float:
            alone = (costs.of((Action(stage, op, 0),), placement) for stage in range(stages))
            return stages_a_share(placement) * sum(alone) / stages

        whole, pair = mean(costs, Op.B), costs.pair * (mean(costs.bare, Op.F) + mean(costs.bare, Op.B))
        i, w = (mean(costs, Op.I), mean(costs, Op.W)) if split else (2 / 3 * whole, 1 / 3 * whole)
        return CostModel(mean(costs, Op.F), i, w, FB=pair)


@dataclasses.dataclass(frozen=True)
class _LeastCosts(UnitCosts):
    """Costs of units that are so many times as long as their products, and of pairs.

    What an end takes more than other stages counts in pairs as it is, for there it may be hidden; what it takes less is
    as many times as long there as the pair. Units alone say nothing of pairs: of some, most is an exchange.
    """

    bare: UnitCosts = UnitCosts()  # noqa: RUF009  # frozen
    pair: float = 1.0

    def of(self, slot: Slot, placement: Placement) -> float:
        if len(slot) == 1:
            return super().of(slot, placement)
        least = 0.0
        for action in slot:
            own, usual = self.bare.of((action,), placement), self.bare.cycles[UnitKey(action.op)]
            least += self.pair * min(own, usual) + max(0.0, own - usual)
        return least


def _sequences(plan: Plan) -> float:
    """Of a microbatch on a device."""
    return plan.batch / (plan.dp * plan.ep)


@functools.cache  # all open cases are asked for it again and again, and a large schedule takes 0.05 s to make
def _size(plan: Plan) -> float:
    """How large units are: in proportion to the layers of a stage, and to a device's sequences."""
    return _sequences(plan) / num_stages(plan)


def _work(plan: Plan) -> float:
    """What a rank does for a microbatch grows with its layers and a device's sequences."""
    return _sequences(plan) / plan.pp


def _factors(prices: Prices) -> dict[str, float]:
    """How many times as long as its products each op's unit takes."""
    least = {key.op: unit.cycles for key, unit in prices.products.items() if not key.kinds}
    least["FB"] = least["F"] + least["B"]
    usual = {key.op: unit.cycles for key, unit in prices.compiled.units.items() if not key.kinds}
    return {op: cycles / least[op] for op, cycles in usual.items() if least.get(op)}


@dataclasses.dataclass(frozen=True)
class Excluded:
    """A case that was not compiled.

    Attributes:
      plan: its plan with the least bound, with nothing shared out.
      seconds: that its step takes at least; None where nobody knows before its units are timed.
      why: it was not compiled.
    """

    plan: Plan
    seconds: float | None
    why: str


class Bounds:
    """How long the steps of cases take at least, as it becomes known.

    A bound is the time of a schedule whose units take as many times as long as their products as the nearest of any
    as large or larger that was compiled, less a margin: large units come nearer. Of smaller ones, a unit takes as long
    as they do. Only units of the same remat and dispatch tell: what is computed again is nothing but products, and what
    is kept instead is written and read. Where none was compiled of an op, its units take their products' time.
    """

    def __init__(self, cases: Sequence[Case]):
        self.cases: dict[Cut, list[Case]] = {}
        for case in cases:
            self.cases.setdefault(Cut.of(case.plan), []).append(case)
        # By dispatch, remat and size, then by op.
        self._factors: dict[tuple[str, str, float], dict[str, float]] = {}
        self._least: dict[Cut, Least] = {}
        self._work: dict[tuple[str, str], Least] = {}  # by dispatch and remat
        self._too_much: dict[Cut, str] = {}
        self._may_fit: dict[Case, list[Plan]] = {}
        self._beyond: dict[tuple[str, str], float] = {}  # by dispatch and remat
        self._of = functools.cache(self._bound)

    def cuts(self) -> list[Cut]:
        """In the order in which to count them: what keeps least of few sequences first, of short stages."""
        return sorted(self.cases, key=lambda cut: (-REMATS.index(cut.remat), cut.microbatch_size, -cut.pp))

    def standing_for(self, cut: Cut) -> Plan:
        """The plan of a cut to count: one of the fewest stages."""
        plans = (case.plan for case in self.cases[cut])
        return min(plans, key=num_stages)

    def knows(self, cut: Cut) -> bool:
        """Whether its work is known, from itself or from another."""
        return self._least_of(cut) is not None

    def is_counted(self, cut: Cut) -> bool:
        return cut in self._least

    def take(self, cut: Cut, counted: Answer) -> list[Choice]:
        """What was counted of a cut's plan, with as much shared out as may be. Returns what cannot fit.

        Memory of as many stages is told exactly, that of others nearly; so what passes the limit by less than 3 % may
        still fit.
        """
        assert counted.memory is not None and counted.memory.limit is not None
        plan, limit, refused = self.standing_for(cut), counted.memory.limit, []
        self._least[cut] = Least(plan, counted)
        self._work.setdefault((cut.dispatch, cut.remat), self._least[cut])
        for case in self.cases[cut]:
            sizes = {own: needed(own, counted.memory) for own in case.plans}
            self._may_fit[case] = [own for own, size in sizes.items() if size <= _SURELY * limit]
            if not self._may_fit[case]:
                why = {own: too_much(size, limit, "counted") for own, size in sizes.items()}
                refused += [Choice(own, memory=sizes[own], refused=why[own]) for own in case.plans]
        if not any(map(self._may_fit.get, self.cases[cut])):
            self._too_much[cut] = min(refused, key=lambda choice: choice.memory or 0.0).refused
        return refused

    def cannot_fit(self, cut: Cut) -> list[Choice]:
        """The plans of a cut that keeps no less than one of which none fits; empty if there is no such."""
        for less, why in self._too_much.items():
            if cut.needs_no_less(less):
                words = f"not counted: remat {less.remat} of {less.microbatch_size} sequences {why}"
                return [Choice(plan, refused=words) for plan in self.refuse(cut)]
        if (alike := self._keeping_no_more(cut)) is None:
            return []
        about = {plan: alike.memory(plan) for case in self.cases[cut] for plan in case.plans}
        if any(size <= _PROBABLY * limit for size, limit in about.values()):
            return []
        like = f"by those of {layout_of(alike.plan)} and {alike.plan.batch} sequences"
        if alike.plan.remat != cut.remat:
            like += f" of remat {alike.plan.remat}"
        self.refuse(cut)
        return [
            Choice(plan, memory=size, refused=f"{too_much(size, limit, 'about')}, {like}")
            for plan, (size, limit) in about.items()
        ]

    def leave_out(self, case: Case) -> None:
        """Bound it no longer: it cannot be had."""
        self.cases[Cut.of(case.plan)].remove(case)

    def refuse(self, cut: Cut) -> list[Plan]:
        """Its plans, none of which can be had."""
        for case in self.cases[cut]:
            self._may_fit[case] = []
        return [plan for case in self.cases[cut] for plan in case.plans]

    def too_much(self, cut: Cut) -> str:
        """What the plan that needs least of a cut that was counted needs, if none fits; empty if one may."""
        return self._too_much.get(cut, "")

    def words(self, cut: Cut) -> str:
        """What is known of a cut that was counted: how many cases may fit, with the least bounds; or what it needs."""
        if needs := self.too_much(cut):
            return needs
        fit = [case for case in self.cases[cut] if self._may_fit[case]]
        size = min(map(self.memory, fit)) / 2**30
        cases = "case" if len(fit) == 1 else "cases"
        return f"{len(fit)} {cases} may fit, at least {min(map(self.seconds, fit)):.4g} s, {size:.1f} GiB"

    def memory(self, case: Case) -> float:
        """Bytes that a device needs, about, in the plan of a counted case that needs least of those that may fit."""
        least = self._least[Cut.of(case.plan)]
        return min(least.memory(plan)[0] for plan in self._may_fit[case])

    def open(self) -> list[Case]:
        """The cases whose work is known and of which some plan may fit."""
        known = [case for cut, cases in self.cases.items() if self.knows(cut) for case in cases]
        return [case for case in known if self._may_fit.get(case, case.plans)]

    def next(self, cases: Sequence[Case]) -> Case:
        """The one with the least bound, of those that probably fit, or that were not counted, if there are any.

        Of those that differ by less than the margin, which tells nothing, it is the one that keeps least, and then the
        one with the shortest stages, which are compiled soonest. Before anything was compiled, bounds are of products
        alone and tell less: only the shortest stages of all that differ by less than a quarter are looked at.
        """
        cases = list(filter(self._probably_fits, cases)) or cases
        seconds = {case: self.seconds(case) for case in cases}

        def alike(cases: Sequence[Case], margin: float) -> list[Case]:
            least = min(map(seconds.__getitem__, cases))
            return [case for case in cases if margin * seconds[case] <= least]

        def stages(case: Case) -> int:
            return num_stages(case.plan)

        if not self._factors:
            cases = alike(cases, _AT_FIRST)
            most = max(map(stages, cases))
            cases = [case for case in cases if stages(case) == most]
        return min(
            alike(cases, MARGIN),
            key=lambda case: (-REMATS.index(case.plan.remat), -stages(case), seconds[case]),
        )

    def _probably_fits(self, case: Case) -> bool:
        """Whether there is room for what a program needs beyond what is counted; yes, where nothing was counted.

        The count of more ranks tells too little, for a device then has more of the parameters that are not experts:
        DeepSeek-V3's best plan known needs 74.1 GiB by that of twice as many ranks, and 81.8 by its own, where there is
        probably room for 83.3.
        """
        least = self._least.get(Cut.of(case.plan))
        if least is None:
            return True
        plans = self._may_fit.get(case, case.plans)
        return any(size <= self.room(case, limit) for size, limit in map(least.memory, plans))

    def room(self, case: Case, limit: float) -> float:
        """Bytes of a device that may be counted of a plan if its program, too, is to fit.

        A program needs as much beyond what is counted as those of the same remat and dispatch did, or if there were
        none, as the least of all.
        """
        usual = min(self._beyond.values(), default=(1 - _ROOMY) * limit)
        return limit - self._beyond.get((case.plan.dispatch, case.plan.remat), usual)

    def learn(self, prices: Prices) -> None:
        """Units as large or smaller come as near to their products' time as these, or less near.

        And programs alike need at least about as much memory beyond what is counted.
        """
        plan = prices.case.plan
        alike = plan.dispatch, plan.remat
        # A program that the compiler refused needs at least as much, one that it made just as much.
        known_beyond = self._beyond.get(alike, prices.beyond)
        self._beyond[alike] = (min if prices.known else max)(prices.beyond, known_beyond)
        known = self._factors.setdefault((plan.dispatch, plan.remat, _size(plan)), {})
        for op, factor in _factors(prices).items():
            known[op] = min(max(1.0, MARGIN * factor), known.get(op, math.inf))

    def factors(self, plan: Plan) -> dict[str, float]:
        """Of each op that was compiled, how many times as long as its products a unit of a plan takes at least."""
        large: dict[str, float] = {}
        small: dict[str, float] = {}
        for (dispatch, remat, size), factors in self._factors.items():
            if (dispatch, remat) != (plan.dispatch, plan.remat):
                continue
            for op, factor in factors.items():
                if size >= _size(plan):
                    large[op] = min(factor, large.get(op, math.inf))
                else:
                    small[op] = max(factor * size / _size(plan), small.get(op, 1.0))
        return {op: max(large.get(op, 1.0), small.get(op, 1.0)) for op in {*large, *small}}

    def seconds(self, case: Case) -> float:
        return self._now(case)[0]

    def excluded(self, case: Case, why: str) -> Excluded:
        seconds, plan = self._now(case)
        return Excluded(plan, seconds, why)

    def _now(self, case: Case) -> tuple[float, Plan]:
        counted, factors = self.is_counted(Cut.of(case.plan)), tuple(sorted(self.factors(case.plan).items()))
        return self._of(case, factors, counted)

    def _least_of(self, cut: Cut) -> Least | None:
        return self._least.get(cut) or self._work.get((cut.dispatch, cut.remat))

    def _keeping_no_more(self, cut: Cut) -> Least | None:
        """What was counted of the same dispatch and of the same remat, or else of the next that keeps less."""
        remats = REMATS[REMATS.index(cut.remat) :]
        known = (self._work.get((cut.dispatch, remat)) for remat in remats)
        return next(filter(None, (self._least.get(cut), *known)), None)

    def _bound(self, case: Case, factors: tuple[tuple[str, float], ...], counted: bool) -> tuple[float, Plan]:
        del counted  # or a cut that is counted now would keep the bound that it had
        least, known = self._least_of(Cut.of(case.plan)), dict(factors)
        assert least is not None
        found = {plan: least.seconds(plan, known) for plan in self._may_fit.get(case, case.plans)}
        best = min(found, key=found.__getitem__)
        return found[best], best


_AT_FIRST = 0.8
"""Bounds of products alone tell nothing of cases whose bounds are no farther apart."""

_PROBABLY = 1.25
"""What needs this many times as much memory as there is, by the sizes of another cut, does not fit by its own."""

_ROOMY = 0.87
"""Of the memory, so much counted probably fits when compiled, as long as nothing was. DeepSeek-V3's units on v5p need 9
to 15 GiB of 96 beyond what is counted."""

_SURELY = 1.03
"""What needs this many times as much memory as there is does not fit, whatever is told apart later."""
