"""Lower bounds on the time of steps whose units were not compiled, from their matrix products. Loads no JAX.

A *cut* is all that decides how much work a rank has: the numbers of ranks and replicas, the microbatch size,
remat and dispatch. One case of a cut is counted; the others follow from it, with layers spread evenly over
their stages. Until a cut is counted, its work is estimated from another cut of the same remat and dispatch,
in proportion to layers and tokens.
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
    memory_message,
    needed,
    num_stages,
    schedule_of,
)
from dualpipe_jax.pods.results import Answer
from dualpipe_jax.schedule import Action, CostModel, Op, Placement, Slot, simulate
from dualpipe_jax.schedule.costs import stages_a_share
from dualpipe_jax.schedule.lowering.unit_key import UnitKey

MARGIN = 0.95
"""The factor by which units that were not compiled may come nearer to their products' time than any compiled unit."""


class Cut(NamedTuple):
    """The options that decide how much work a rank has. Several cases may share a cut."""

    dp: int
    pp: int
    microbatch_size: int
    dispatch: str
    remat: str

    @classmethod
    def of(cls, plan: Plan) -> "Cut":
        return cls(plan.dp, plan.pp, plan.batch, plan.dispatch, plan.remat)

    def needs_no_less(self, other: "Cut") -> bool:
        """Whether a device needs at least as much memory as with another cut, as far as the options alone show."""
        alike = (self.dp, self.pp, self.dispatch) == (other.dp, other.pp, other.dispatch)
        keeps = REMATS.index(self.remat) <= REMATS.index(other.remat)  # sorted from most memory to least
        return alike and self.microbatch_size >= other.microbatch_size and keeps


class StepBound:
    """Lower bounds on the time of steps of a cut.

    Args:
      plan: the plan that was counted.
      counted: the answer with its counts, for a target whose clock is known.
    """

    def __init__(self, plan: Plan, counted: Answer):
        self.clock, self.plan = counted.target.clock, plan
        self._counted, self._schedule, self._products = counted, schedule_of(plan), counted.products
        self._costs = functools.cache(self._costs_by)

    def seconds(self, plan: Plan, factors: Mapping[str, float]) -> float:
        """Seconds from the first forward to the last backward, if units take ``factors`` times their products' time."""
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
        """The estimated bytes that a plan of this cut or another needs on a device, and the bytes that a device has.

        What a stage keeps grows with its layers and a device's tokens. A device's parameters are assumed not
        to change.
        """
        memory = self._counted.memory
        assert memory is not None
        return needed(plan, memory, _sequences(plan) / _sequences(self.plan)), memory.limit

    def _costs_by(self, split: bool, factors: tuple[tuple[str, float], ...]) -> "_BoundCosts":
        by_op, products = dict(factors), self._products
        units = {
            key: dataclasses.replace(unit, cycles=by_op.get(key.op, 1.0) * unit.cycles)
            for key, unit in products.items()
        }
        costs, bare = (unit_costs(each, 0.0, split=split) for each in (units, products))
        return _BoundCosts(**vars(costs), bare=bare, pair=by_op.get("FB", 1.0))

    def _spread(self, costs: "_BoundCosts", split: bool) -> CostModel:
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
class _BoundCosts(UnitCosts):
    """Costs of units that take a multiple of their products' time, and of pairs of units.

    In a pair each action takes ``pair`` times its products' time, up to that of a usual stage. What the first
    or last stage takes beyond a usual stage counts as its products alone, for a pair may hide the rest.
    Factors of single units say nothing about pairs: much of some of them is an exchange, which a pair hides.

    Attributes:
      bare: the costs by products alone.
      pair: the factor of pairs.
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
    """The number of sequences of a microbatch on one device."""
    return plan.batch / (plan.dp * plan.ep)


@functools.cache  # all open cases ask for it again and again, and a large schedule takes 0.05 s to make
def _size(plan: Plan) -> float:
    """The relative size of units: proportional to the layers of a stage, and to a device's sequences."""
    return _sequences(plan) / num_stages(plan)


def _work(plan: Plan) -> float:
    """The relative work of a rank for a microbatch: proportional to its layers, and to a device's sequences."""
    return _sequences(plan) / plan.pp


def _factors(prices: Prices) -> dict[str, float]:
    """For each op, the ratio of its compiled unit's cycles to the cycles of its products at the peak."""
    least = {key.op: unit.cycles for key, unit in prices.products.items() if not key.kinds}
    least["FB"] = least["F"] + least["B"]
    usual = {key.op: unit.cycles for key, unit in prices.compiled.units.items() if not key.kinds}
    return {op: cycles / least[op] for op, cycles in usual.items() if least.get(op)}


@dataclasses.dataclass(frozen=True)
class Excluded:
    """A case that was not compiled.

    Attributes:
      plan: the case's plan with the smallest bound, with ``shard`` "nothing".
      seconds: the smallest bound on its step; None where units are timed, for which there are no bounds.
      why: the reason why it was not compiled.
    """

    plan: Plan
    seconds: float | None
    why: str


class Bounds:
    """Lower bounds on the steps of cases, which improve as cuts are counted and cases compiled.

    A bound is the time of a schedule whose units take their products' time multiplied by a factor. The factor
    of an op is the smallest among compiled units as large or larger, less a margin: large units come nearer
    to their products' time. A unit also takes at least as long as any smaller compiled unit, less the margin.
    Only units of the same remat and dispatch count: what is computed again is nothing but products, and what
    is kept instead is written and read. The factor of an op of which no unit was compiled is 1.
    """

    def __init__(self, cases: Sequence[Case]):
        self.cases: dict[Cut, list[Case]] = {}
        for case in cases:
            self.cases.setdefault(Cut.of(case.plan), []).append(case)
        # By dispatch, remat and size, then by op.
        self._factors: dict[tuple[str, str, float], dict[str, float]] = {}
        self._by_cut: dict[Cut, StepBound] = {}
        self._by_policy: dict[tuple[str, str], StepBound] = {}  # by dispatch and remat
        self._why_none_fits: dict[Cut, str] = {}
        self._may_fit: dict[Case, list[Plan]] = {}
        self._beyond: dict[tuple[str, str], float] = {}  # by dispatch and remat
        self._cached_bound = functools.cache(self._bound)

    def cuts(self) -> list[Cut]:
        """The cuts in the order in which to count them: by least kept memory, fewest sequences, then most ranks."""
        return sorted(self.cases, key=lambda cut: (-REMATS.index(cut.remat), cut.microbatch_size, -cut.pp))

    def representative(self, cut: Cut) -> Plan:
        """The plan that is counted for a cut: one with the fewest stages."""
        plans = (case.plan for case in self.cases[cut])
        return min(plans, key=num_stages)

    def is_known(self, cut: Cut) -> bool:
        """Whether the work of a cut is known, from its own count or from another cut's."""
        return self._counted_for(cut) is not None

    def is_counted(self, cut: Cut) -> bool:
        return cut in self._by_cut

    def add_counts(self, cut: Cut, counted: Answer) -> list[Choice]:
        """Store the counts of a cut, and return its plans that cannot fit.

        The memory of plans with as many stages as the counted one is exact, that of others approximate; so
        plans that exceed the limit by less than 3 % may still fit.

        Args:
          cut: the cut.
          counted: the answer with the counts of ``representative(cut)``, with the last ``shard`` that may be
            chosen.
        """
        assert counted.memory is not None
        plan, limit, refused = self.representative(cut), counted.memory.limit, []
        self._by_cut[cut] = StepBound(plan, counted)
        self._by_policy.setdefault((cut.dispatch, cut.remat), self._by_cut[cut])
        for case in self.cases[cut]:
            sizes = {own: needed(own, counted.memory) for own in case.plans}
            self._may_fit[case] = [own for own, size in sizes.items() if size <= _COUNT_TOLERANCE * limit]
            if not self._may_fit[case]:
                why = {own: memory_message(size, limit, "counted") for own, size in sizes.items()}
                refused += [Choice(own, memory=sizes[own], refused=why[own]) for own in case.plans]
        if not any(map(self._may_fit.get, self.cases[cut])):
            self._why_none_fits[cut] = min(refused, key=lambda choice: choice.memory or 0.0).refused
        return refused

    def cannot_fit(self, cut: Cut) -> list[Choice]:
        """The plans of a cut that cannot fit, as counts of other cuts show; empty if some plan may fit."""
        for less, why in self._why_none_fits.items():
            if cut.needs_no_less(less):
                words = f"not counted: remat {less.remat} of {less.microbatch_size} sequences {why}"
                return [Choice(plan, refused=words) for plan in self.refuse(cut)]
        if (alike := self._nearest_counted(cut)) is None:
            return []
        about = {plan: alike.memory(plan) for case in self.cases[cut] for plan in case.plans}
        if any(size <= _ESTIMATE_TOLERANCE * limit for size, limit in about.values()):
            return []
        like = f"by those of {layout_of(alike.plan)} and {alike.plan.batch} sequences"
        if alike.plan.remat != cut.remat:
            like += f" of remat {alike.plan.remat}"
        self.refuse(cut)
        return [
            Choice(plan, memory=size, refused=f"{memory_message(size, limit, 'about')}, {like}")
            for plan, (size, limit) in about.items()
        ]

    def remove(self, case: Case) -> None:
        """Remove a case that is not possible."""
        self.cases[Cut.of(case.plan)].remove(case)

    def refuse(self, cut: Cut) -> list[Plan]:
        """Mark all plans of a cut as ones that cannot fit, and return them."""
        for case in self.cases[cut]:
            self._may_fit[case] = []
        return [plan for case in self.cases[cut] for plan in case.plans]

    def why_none_fits(self, cut: Cut) -> str:
        """What the smallest plan of a counted cut needs, in words, if no plan fits; empty if one may fit."""
        return self._why_none_fits.get(cut, "")

    def summary(self, cut: Cut) -> str:
        """A counted cut in words: how many cases may fit, with the smallest bounds; or, if none fits, what it needs."""
        if needs := self.why_none_fits(cut):
            return needs
        fit = [case for case in self.cases[cut] if self._may_fit[case]]
        size = min(map(self.memory, fit)) / 2**30
        cases = "case" if len(fit) == 1 else "cases"
        return f"{len(fit)} {cases} may fit, at least {min(map(self.seconds, fit)):.4g} s, {size:.1f} GiB"

    def memory(self, case: Case) -> float:
        """The estimated bytes of a device of a counted case: of the plan that needs least among those that may fit."""
        least = self._by_cut[Cut.of(case.plan)]
        return min(least.memory(plan)[0] for plan in self._may_fit[case])

    def open_cases(self) -> list[Case]:
        """The cases whose work is known and that have some plan that may fit."""
        known = [case for cut, cases in self.cases.items() if self.is_known(cut) for case in cases]
        return [case for case in known if self._may_fit.get(case, case.plans)]

    def choose_next(self, cases: Sequence[Case]) -> Case:
        """Choose the next case to compile: the smallest bound among those that probably fit or were not counted.

        If there are none of these, it is chosen from all. Differences below the margin are not significant:
        among such cases the one that keeps least is chosen, then the one with the shortest stages, which
        compile fastest. Before anything was compiled, bounds are by products alone and less reliable: then,
        of all cases within a quarter of the smallest bound, only those with the shortest stages are
        considered.
        """
        cases = list(filter(self._probably_fits, cases)) or cases
        seconds = {case: self.seconds(case) for case in cases}

        def alike(cases: Sequence[Case], margin: float) -> list[Case]:
            least = min(map(seconds.__getitem__, cases))
            return [case for case in cases if margin * seconds[case] <= least]

        def stages(case: Case) -> int:
            return num_stages(case.plan)

        if not self._factors:
            cases = alike(cases, _UNCOMPILED_MARGIN)
            most = max(map(stages, cases))
            cases = [case for case in cases if stages(case) == most]
        return min(
            alike(cases, MARGIN),
            key=lambda case: (-REMATS.index(case.plan.remat), -stages(case), seconds[case]),
        )

    def _probably_fits(self, case: Case) -> bool:
        """Whether there is room for what a program needs beyond the count; True where the cut was not counted.

        An estimate from a cut with more ranks is too low, for with fewer ranks a device has more of the
        parameters outside experts: DeepSeek-V3's best known plan needs 74.1 GiB by the count of twice as many
        ranks, and 81.8 GiB by its own, where there is probably room for 83.3 GiB.
        """
        least = self._by_cut.get(Cut.of(case.plan))
        if least is None:
            return True
        plans = self._may_fit.get(case, case.plans)
        return any(size <= self.room(case, limit) for size, limit in map(least.memory, plans))

    def room(self, case: Case, limit: float) -> float:
        """The largest number of counted bytes of a device with which the program of a case still fits.

        The program is assumed to need as much beyond the count as compiled programs of the same remat and
        dispatch; if there were none, as much as the smallest of all.
        """
        usual = min(self._beyond.values(), default=(1 - _COUNTED_PART) * limit)
        return limit - self._beyond.get((case.plan.dispatch, case.plan.remat), usual)

    def add_prices(self, prices: Prices) -> None:
        """Take what a compiled case shows about others.

        Units of the same size or smaller come no nearer to their products' time than these. Programs of the
        same remat and dispatch need at least about as much memory beyond the count.
        """
        plan = prices.case.plan
        alike = plan.dispatch, plan.remat
        # For a program that the compiler refused, ``beyond`` is a lower bound; for a compiled one it is exact.
        known_beyond = self._beyond.get(alike, prices.beyond)
        self._beyond[alike] = (min if prices.known else max)(prices.beyond, known_beyond)
        known = self._factors.setdefault((plan.dispatch, plan.remat, _size(plan)), {})
        for op, factor in _factors(prices).items():
            known[op] = min(max(1.0, MARGIN * factor), known.get(op, math.inf))

    def factors(self, plan: Plan) -> dict[str, float]:
        """For each op that was compiled, a lower bound on the ratio of a unit's time in a plan to its products'."""
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
        return self._current_bound(case)[0]

    def excluded(self, case: Case, why: str) -> Excluded:
        seconds, plan = self._current_bound(case)
        return Excluded(plan, seconds, why)

    def _current_bound(self, case: Case) -> tuple[float, Plan]:
        counted, factors = self.is_counted(Cut.of(case.plan)), tuple(sorted(self.factors(case.plan).items()))
        return self._cached_bound(case, factors, counted)

    def _counted_for(self, cut: Cut) -> StepBound | None:
        return self._by_cut.get(cut) or self._by_policy.get((cut.dispatch, cut.remat))

    def _nearest_counted(self, cut: Cut) -> StepBound | None:
        """The counts of the cut itself, or of one of its dispatch and of its remat or the next that keeps less."""
        remats = REMATS[REMATS.index(cut.remat) :]
        known = (self._by_policy.get((cut.dispatch, remat)) for remat in remats)
        return next(filter(None, (self._by_cut.get(cut), *known)), None)

    def _bound(self, case: Case, factors: tuple[tuple[str, float], ...], counted: bool) -> tuple[float, Plan]:
        del counted  # part of the cache's key: a cut that has been counted gets a new bound
        least, known = self._counted_for(Cut.of(case.plan)), dict(factors)
        assert least is not None
        found = {plan: least.seconds(plan, known) for plan in self._may_fit.get(case, case.plans)}
        best = min(found, key=found.__getitem__)
        return found[best], best


_UNCOMPILED_MARGIN = 0.8
"""Until a case was compiled, cases count as equal if this times their bound is at most the smallest bound."""

_ESTIMATE_TOLERANCE = 1.25
"""A plan that needs more than this times the limit, as estimated from another cut, is taken not to fit."""

_COUNTED_PART = 0.87
"""The part of the memory that counted bytes may take for the program probably to fit, until a program was compiled.
DeepSeek-V3's units on v5p need 9 to 15 GiB of 96 beyond the count."""

_COUNT_TOLERANCE = 1.03
"""A plan that needs more than this times the limit, by the count of its cut, does not fit by its own count either."""
