"""How short can a step be whose units nobody compiled? From below, by their matrix products; loads no JAX.

A *cut* is all that decides how much work a rank has: the numbers of ranks and replicas, microbatches, remat, dispatch.
One case of a cut is counted, the rest follow from it, with layers spread evenly over their stages.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dualpipe_jax.pods.costs import splits, unit_costs
from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.pods.planner import REMATS, Case, Choice, Prices, needed, schedule_of, too_much
from dualpipe_jax.pods.results import Answer, Unit
from dualpipe_jax.schedule import CostModel, Schedule, simulate
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
    """The least time of steps of one cut.

    Args:
      schedule: of the case that was counted.
      counted: what was, on a target whose clock is known.
    """

    def __init__(self, schedule: Schedule, counted: Answer):
        assert counted.target is not None
        self.counted, self.clock = counted, counted.target.clock
        self._schedule = schedule
        self._costs = functools.cache(self._costs_by)

    def seconds(self, schedule: Schedule, factors: Mapping[str, float]) -> float:
        """Seconds from the first forward to the last backward, each unit ``factors`` times as long as its products."""
        costs = self._costs(splits(schedule), tuple(sorted(factors.items())))
        if schedule.placement.num_model_stages != self._schedule.placement.num_model_stages:
            costs = _spread(costs, self._schedule).for_schedule(schedule)
        return simulate(schedule, costs).makespan / self.clock

    def _costs_by(self, split: bool, factors: tuple[tuple[str, float], ...]) -> CostModel:
        by_op = dict(factors)
        products = self.counted.products
        units = {key: _times(unit, by_op.get(key.op, 1.0)) for key, unit in products.items()}
        pair = by_op.get("FB", 1.0) * _pair(products)
        return dataclasses.replace(unit_costs(units, 0.0, split=split), FB=pair)


def _times(unit: Unit, factor: float) -> Unit:
    return dataclasses.replace(unit, cycles=factor * unit.cycles)


def _pair(products: Mapping[UnitKey, Unit]) -> float:
    return products[UnitKey("F")].cycles + products[UnitKey("B")].cycles


def _spread(costs: CostModel, schedule: Schedule) -> CostModel:
    """Costs of a rank's even share of the model, from those of a schedule's stages."""
    placement = schedule.placement
    stages = placement.num_model_stages
    more = [costs.more(placement, stage) for stage in range(stages)]
    f, i, w = (sum(each) / stages for each in zip(*more, strict=True))
    parts = stages_a_share(placement)
    pair = parts * (costs.FB + f + i + w)
    return CostModel(parts * (costs.F + f), parts * (costs.I + i), parts * (costs.W + w), FB=pair)


def _factors(prices: Prices) -> dict[str, float]:
    """How many times as long as its products each op's unit takes."""
    least = {key.op: unit.cycles for key, unit in prices.products.items() if not key.kinds}
    least["FB"] = _pair(prices.products)
    usual = {key.op: unit.cycles for key, unit in prices.compiled.units.items() if not key.kinds}
    return {op: cycles / least[op] for op, cycles in usual.items() if least.get(op)}


@dataclasses.dataclass(frozen=True)
class Excluded:
    """A case that was not compiled.

    Attributes:
      plan: its plan with the least bound, with nothing shared out.
      seconds: that its step takes at least.
      why: it was not compiled.
    """

    plan: Plan
    seconds: float
    why: str


class Bounds:
    """How long the steps of cases take at least, as it becomes known.

    A bound is the time of a schedule whose units take as many times as long as their products as the nearest of any
    that was compiled, less a margin. Where none was compiled of an op, its units take their products' time.
    """

    def __init__(self, cases: Sequence[Case]):
        self.cases: dict[Cut, list[Case]] = {}
        for case in cases:
            self.cases.setdefault(Cut.of(case.plan), []).append(case)
        self.factors: dict[str, float] = {}
        self._least: dict[Cut, Least] = {}
        self._too_much: dict[Cut, str] = {}
        self._may_fit: dict[Case, list[Plan]] = {}
        self._of = functools.cache(self._bound)

    def cuts(self) -> list[Cut]:
        """In the order in which to count them: before each all that keep no more than it does."""
        return sorted(self.cases, key=lambda cut: (cut.microbatch_size, -REMATS.index(cut.remat)))

    def standing_for(self, cut: Cut) -> Plan:
        """The plan of a cut to count: one of the fewest stages."""
        plans = (case.plan for case in self.cases[cut])
        return min(plans, key=lambda plan: schedule_of(plan).placement.num_model_stages)

    def take(self, cut: Cut, counted: Answer) -> list[Choice]:
        """What was counted of a cut's plan, with as much shared out as may be. Returns what cannot fit.

        Another placement's memory differs from the one that was counted by little; so what passes the limit by less
        than a tenth may still fit.
        """
        assert counted.memory is not None and counted.memory.limit is not None
        plan, limit, refused = self.standing_for(cut), counted.memory.limit, []
        self._least[cut] = Least(schedule_of(plan), counted)
        for case in self.cases[cut]:
            sizes = {own: needed(own, counted.memory.share) for own in case.plans}
            if fit := [own for own, size in sizes.items() if size <= _SURELY * limit]:
                self._may_fit[case] = fit
                continue
            why = {own: too_much(size, limit, "counted") for own, size in sizes.items()}
            refused += [Choice(own, memory=sizes[own], refused=why[own]) for own in case.plans]
        if not any(case in self._may_fit for case in self.cases[cut]):
            self._too_much[cut] = min(refused, key=lambda choice: choice.memory or 0.0).refused
        return refused

    def cannot_fit(self, cut: Cut) -> list[Choice]:
        """The plans of a cut that keeps no less than one of which none fits; empty if there is no such."""
        for less, why in self._too_much.items():
            if cut.needs_no_less(less):
                self._too_much[cut] = why
                words = f"not counted: remat {less.remat} of {less.microbatch_size} sequences {why}"
                return [Choice(plan, refused=words) for case in self.cases[cut] for plan in case.plans]
        return []

    def open(self) -> list[Case]:
        """The cases of which some plan may fit."""
        return list(self._may_fit)

    def learn(self, prices: Prices) -> None:
        """Units come as near to their products' time as these, or farther."""
        for op, factor in _factors(prices).items():
            self.factors[op] = min(max(1.0, MARGIN * factor), self.factors.get(op, math.inf))

    def seconds(self, case: Case) -> float:
        return self._of(case, tuple(sorted(self.factors.items())))[0]

    def excluded(self, case: Case, why: str) -> Excluded:
        seconds, plan = self._of(case, tuple(sorted(self.factors.items())))
        return Excluded(plan, seconds, why)

    def _bound(self, case: Case, factors: tuple[tuple[str, float], ...]) -> tuple[float, Plan]:
        least, known = self._least[Cut.of(case.plan)], dict(factors)
        found = {plan: least.seconds(schedule_of(plan), known) for plan in self._may_fit[case]}
        best = min(found, key=found.__getitem__)
        return found[best], best


_SURELY = 1.1
"""What needs this many times as much memory as there is does not fit, whatever is told apart later."""
