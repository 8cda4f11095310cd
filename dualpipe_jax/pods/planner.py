"""Find the plan with the shortest step. Plans are priced by unit costs that were compiled once. Loads no JAX.

Units are compiled for each *case*: everything that decides what a stage's functions become. Schedules with
the same placement of stages, numbers of microbatches and limits of stashes differ in simulation alone. What
``Plan.shard`` divides hardly changes units; it changes the update and the work outside ticks, such as gathers
of parameters. So a case is compiled with the least sharding that any of its plans needs, and again with more
where that could make a step shorter; see ``is_worth_compiling``. Layers are first where the program puts them,
then where the costs of its stages suggest; see ``move_layers``.
"""

import dataclasses
import functools
import itertools
import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from dualpipe_jax.pods import predict
from dualpipe_jax.pods.costs import splits, unit_costs, units_of
from dualpipe_jax.pods.layers import moved_layers
from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.pods.results import Answer, Memory
from dualpipe_jax.pods.stage_memory import StageMemory, reserved_bytes
from dualpipe_jax.schedule import CostModel, MemoryModel, Schedule
from dualpipe_jax.schedule.costs import at_most
from dualpipe_jax.schedule.lowering.unit_key import UnitKey
from dualpipe_jax.schedule.names import find, takes
from dualpipe_jax.step_options import Remat, Shard, StepOptions

SCHEDULES = "dualpipe", "dualpipe_v", "one_f_one_b", "zb_h1", "zb_v", "interleaved_1f1b_overlap"
REMATS: tuple[Remat, ...] = typing.get_args(Remat)
DISPATCHES: tuple[Literal["dropless", "capacity"], ...] = ("dropless", "capacity")
STASHES: tuple[int | None, ...] = (None, 8, 2, 1)
SHARDS: tuple[Shard, ...] = typing.get_args(Shard)
"""The values of each option that are tried, the simplest first."""
_MOST_RANKS = 32
"""The largest number of pipeline ranks that is tried where the user gives none."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The plans to search.

    Attributes:
      base: a plan with the options that are not searched.
      tokens: the number of tokens of a step; None: four microbatches for each rank, of one sequence per
        device.
      pp: the numbers of pipeline ranks to try; empty: all from 2 to 32 that divide the devices of a replica.
      dp: the numbers of replicas to try.
      per_device: the numbers of sequences of a microbatch per device to try.
      schedules, remats, dispatches, stashes, shards: the values to choose from.
      stages_per_rank: the numbers of stages to try for interleaved schedules; empty: their default.
      moves: the number of further cases, with layers moved between stages, that may be compiled; see
        ``move_layers``.
    """

    base: Plan
    tokens: int | None = None
    pp: tuple[int, ...] = ()
    dp: tuple[int, ...] = (1,)
    per_device: tuple[int, ...] = (1, 2)
    schedules: tuple[str, ...] = SCHEDULES
    remats: tuple[Remat, ...] = REMATS
    dispatches: tuple[Literal["dropless", "capacity"], ...] = DISPATCHES
    stashes: tuple[int | None, ...] = STASHES
    shards: tuple[Shard, ...] = SHARDS
    stages_per_rank: tuple[int, ...] = ()
    moves: int = 0


@dataclasses.dataclass(frozen=True)
class Case:
    """Plans whose units are the same.

    Attributes:
      plan: the plan whose units are compiled. Its schedule runs as many kinds of units as that of any of
        ``plans``.
      plans: all plans of the case, with ``shard`` "nothing".
    """

    plan: Plan
    plans: tuple[Plan, ...]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A plan that was considered.

    Attributes:
      plan: the plan, with all that `dryrun` needs.
      mfu, seconds: the predicted MFU and seconds of its step; None where it was refused before it was priced.
      memory: bytes of the fullest device; None where they are not known.
      refused: why the plan is not possible; empty if it is.
    """

    plan: Plan
    mfu: float | None = None
    seconds: float | None = None
    memory: float | None = None
    refused: str = ""


def cases(wanted: Wanted, num_devices: int) -> tuple[list[Case], list[Choice]]:
    """The cases to compile, and the plans that are not possible whatever their memory.

    Raises:
      ValueError: a number of replicas or ranks does not divide the devices.
    """
    found: list[Case] = []
    refused: list[Choice] = []
    every = itertools.product(
        _ranks(wanted, num_devices), wanted.per_device, wanted.remats, wanted.dispatches
    )
    for (dp, pp), per_device, remat, dispatch in dict.fromkeys(every):  # what is named twice is one case
        ep = num_devices // (dp * pp)
        size, tokens = per_device * dp * ep, wanted.tokens or 4 * num_devices * wanted.base.sequence
        plan = dataclasses.replace(
            wanted.base, dp=dp, pp=pp, ep=ep, microbatch_size=size, remat=remat, dispatch=dispatch
        )
        microbatches, left = divmod(tokens, size * plan.sequence)
        if left or not microbatches:
            why = f"{tokens} tokens are no whole number of microbatches of {size} x {plan.sequence}"
            refused.append(Choice(dataclasses.replace(plan, schedule="any"), refused=why))
            continue
        plan = dataclasses.replace(plan, microbatches=microbatches)
        placed: dict[object, list[Plan]] = {}
        for name, stages in _schedule_choices(wanted):
            own = dataclasses.replace(plan, schedule=name, stages_per_rank=stages)
            try:
                placed.setdefault(schedule_of(own).placement, []).append(own)
            except ValueError as error:
                refused.append(Choice(own, refused=str(error).removeprefix(f"{name}: ")))
        found += [_make_case(plans, wanted.stashes) for plans in placed.values()]
    return found, refused


def _schedule_choices(wanted: Wanted) -> list[tuple[str, int | None]]:
    """Pairs of a schedule and a number of stages per rank, which is None where it is not chosen."""
    choices = (
        (recipe.__name__, stages)
        for recipe in map(find, wanted.schedules)
        for stages in (takes(recipe, "num_stages_per_rank") and wanted.stages_per_rank) or (None,)
    )
    return list(dict.fromkeys(choices))


def _ranks(wanted: Wanted, num_devices: int) -> list[tuple[int, int]]:
    """Pairs (dp, pp) to try. The remaining devices, ``num_devices // (dp * pp)``, are expert-parallel.

    Raises:
      ValueError: a number does not divide the devices.
    """
    found = []
    for dp in wanted.dp:
        of_each, left = divmod(num_devices, dp)
        if left:
            raise ValueError(f"--dp {dp}: must divide the target's {num_devices} devices")
        if wrong := [pp for pp in wanted.pp if pp < 1 or of_each % pp]:
            whose = (
                f"the target's {num_devices} devices" if dp == 1 else f"the {of_each} devices of a replica"
            )
            raise ValueError(f"--pp {wrong[0]}: must divide {whose}")
        all_that_divide = [pp for pp in range(2, _MOST_RANKS + 1) if of_each % pp == 0]
        found += [(dp, pp) for pp in wanted.pp or all_that_divide]
    return found


def _make_case(plans: list[Plan], stashes: Iterable[int | None]) -> Case:
    """The case of plans of one placement, each with every limit of stashes that changes its schedule's order."""
    all_plans = []
    for plan in plans:
        seen = set()
        for stash in stashes:
            limited = dataclasses.replace(plan, max_stash=stash)
            orders = schedule_of(limited).orders
            if orders not in seen:
                seen.add(orders)
                all_plans.append(limited)
    return Case(representative(all_plans), tuple(all_plans))


def refuse_surplus_stages(case: Case, cases: Iterable[Case], layers: int) -> list[Choice]:
    """The plans of a case, as refused, if it cuts ranks into more stages than layers where fewer stages are enough.

    Args:
      case: the case. Only one with a chosen number of stages per rank can be refused.
      cases: all cases. The case is refused if another one, equal but for its number of stages, has fewer
        stages, and not fewer than layers.
      layers: the number of layers of the model; 0: not known.
    """

    def kept(plan: Plan) -> Plan:
        return dataclasses.replace(plan, stages_per_rank=None, max_stash=None)

    if not layers or case.plan.stages_per_rank is None:
        return []
    same = (other.plan for other in cases if other.plan.schedule == case.plan.schedule)
    alike = (plan for plan in same if kept(plan) == kept(case.plan))
    fewer = [plan for plan in alike if layers <= num_stages(plan) < num_stages(case.plan)]
    if not fewer:
        return []
    has = "has" if num_stages(fewer[0]) == layers else "has at most"
    why = f"of {num_stages(case.plan)} stages some have no layer: of {num_stages(fewer[0])} each {has} one"
    return [Choice(plan, refused=why) for plan in case.plans]


def num_stages(plan: Plan) -> int:
    """The number of stages of the model. A second copy of the model does not count."""
    return schedule_of(plan).placement.num_model_stages


def representative(plans: Iterable[Plan]) -> Plan:
    """The plan whose schedule runs most kinds of units; among several, the one with the fewest stashes.

    Few stashes, because units that do not fit in memory are compiled to slower ones that compute again, or
    not at all.
    """
    fewest = sorted(plans, key=lambda plan: math.inf if plan.max_stash is None else plan.max_stash)
    return max(fewest, key=lambda plan: len(units_of(schedule_of(plan))))


def schedule_of(plan: Plan) -> Schedule:
    return _schedule(_schedule_options(plan))


def _schedule_options(plan: Plan) -> StepOptions:
    """The options of a plan that decide its schedule."""
    return StepOptions(
        schedule=plan.schedule,
        stages_per_rank=plan.stages_per_rank,
        max_stash=plan.max_stash,
        pp=plan.pp,
        microbatches=plan.num_microbatches,
    )


@functools.lru_cache(maxsize=256)
def _schedule(order: StepOptions) -> Schedule:
    return order.make_schedule()


def layout_of(plan: Plan) -> str:
    """The layout in words, "pp x ep" or "dp x pp x ep", such as ``16 x 64``."""
    return ("" if plan.dp == 1 else f"{plan.dp} x ") + f"{plan.pp} x {plan.ep}"


def with_shard(plan: Plan, shard: Shard) -> Plan:
    return dataclasses.replace(plan, shard=shard)


def split_by_count(case: Case, counts: Mapping[Shard, Answer]) -> tuple[list[Plan], list[Choice]]:
    """Separate the plans of a case that may fit by counts alone from those that cannot. Nothing is compiled.

    Args:
      case: the case.
      counts: for each value of ``shard``, the answer with the counts of the case's plan.
    """
    fit, refused = [], []
    for plan, shard in itertools.product(case.plans, counts):
        own, memory = with_shard(plan, shard), counts[shard].memory
        assert memory is not None
        size = needed(own, memory)
        if at_most(size, memory.limit):
            fit.append(own)
        else:
            refused.append(Choice(own, memory=size, refused=memory_message(size, memory.limit, "counted")))
    return fit, refused


class Prices:
    """The compiled units of a case, by which all of its plans with the same ``shard`` are priced.

    Args:
      case: the case.
      shard: the value of ``Plan.shard`` with which it was compiled.
      found: the answer. Where the compiler refused its units, ``known`` is False.
    """

    def __init__(self, case: Case, shard: Shard, found: Answer):
        assert found.compiled is not None and found.memory is not None
        self.case, self.shard, self.layers = case, shard, found.stage_layers
        self.compiled, self.step, self.target = found.compiled, found.step, found.target
        self.beyond = _beyond(found)
        self.products = found.products
        self.ticks = functools.cache(self._ticks)

    @property
    def known(self) -> bool:
        """Whether the step has a predicted time. If not, the compiler refused the units."""
        return self.step is not None

    @functools.cached_property
    def _costs(self) -> tuple[CostModel, CostModel]:
        """Costs for schedules that never split a backward, and for those that do."""
        units, send = self.compiled.units, self.compiled.sends.each
        return unit_costs(units, send, split=False), unit_costs(units, send, split=True)

    def costs(self, schedule: Schedule) -> CostModel:
        """The costs of the case's units for a schedule, in cycles."""
        return self._costs[splits(schedule)]

    def _ticks(self, plan: Plan) -> float:
        assert self.step is not None
        schedule, tick, at_once = schedule_of(plan), self.compiled.beside.tick, self.compiled.at_once
        placed = CostModel(**self.step.placed)  # type: ignore[arg-type]  # none of them is a flag
        cycles = predict.step_cycles(schedule, self.costs(schedule), tick, at_once, placed)
        return cycles / self.target.clock

    def choices(self, plans: Iterable[Plan], count: Answer) -> list[Choice]:
        """Predict time and memory of plans with the same ``shard`` as the compiled units.

        Args:
          plans: plans that may fit; see ``split_by_count``.
          count: the answer with the counts of the case's plan, with the same ``shard``.
        """
        assert count.memory is not None
        if self.step is None:
            why = self.compiled.out_of_memory or "its units have no forward to be priced by"
            return [Choice(plan, refused=f"the compiler refuses its units: {why[:200]}") for plan in plans]
        least = self.step.mfu * self.step.seconds
        rest = (self.compiled.beside.step + self.compiled.update_cycles) / self.target.clock
        found, limit = [], self.target.memory
        for plan in plans:
            size = needed(plan, count.memory) + self.beyond
            refused = "" if at_most(size, limit) else memory_message(size, limit, "compiled")
            seconds = self.ticks(plan) + rest
            found.append(Choice(plan, least / seconds, seconds, size, refused))
        return found


def _beyond(found: Answer) -> float:
    """Bytes that a program takes beyond its count; a lower bound if the compiler refused it for memory."""
    memory, compiled = found.memory, found.compiled
    assert memory is not None and compiled is not None
    if compiled.out_of_memory is not None:
        return max(0.0, memory.limit - memory.total)
    return max(0.0, memory.beyond or 0)


_END_FORWARDS = {UnitKey("F", (kind,)) for kind in ("first", "last")}
GAIN = 0.99
"""The ratio to the best step's time: a case whose estimated step is not below it is not worth a compilation."""


def move_layers(compiled: Sequence[Prices], choices: Iterable[Choice], tried: Iterable[Case]) -> Case | None:
    """The case with the shortest estimated step after layers are moved between its stages.

    The estimate scales the best plan of each compiled case by the ratio that ``moved_layers`` returns. None
    where no estimate is below ``GAIN`` times the best step, where programs do not give ``stage_layers``, or
    where their stages have no kinds "first" and "last".

    Args:
      compiled: the prices of all compiled cases.
      choices: all choices so far.
      tried: the cases that were considered before.
    """
    able = {c.plan: c.seconds for c in choices if not c.refused and c.seconds is not None}
    shortest, known, promised = min(able.values(), default=0.0), set(tried), []
    for prices in compiled:
        known.add(_with_layers(prices.case, prices.layers))
        mine = [plan for own in prices.case.plans if (plan := with_shard(own, prices.shard)) in able]
        if not mine or not prices.layers or not prices.compiled.units.keys() >= _END_FORWARDS:
            continue
        best = min(mine, key=able.__getitem__)
        schedule, at_once = schedule_of(best), prices.compiled.at_once
        layers, ratio = moved_layers(prices.layers, schedule, prices.costs(schedule), at_once)
        promised.append((able[best] * ratio, _with_layers(prices.case, layers)))
    worthy = [(s, case) for s, case in promised if s < GAIN * shortest and case not in known]
    return min(worthy, key=lambda found: found[0])[1] if worthy else None


def _with_layers(case: Case, layers: tuple[int, ...]) -> Case:
    plan, *plans = (dataclasses.replace(plan, stage_layers=layers) for plan in (case.plan, *case.plans))
    return Case(plan, tuple(plans))


def is_worth_compiling(plans: Sequence[Plan], done: Iterable[Choice], prices: Prices | None) -> bool:
    """Whether to compile a case's units again, with more sharding.

    They are, if one of the plans does not fit with less sharding and could be the shortest: its ticks alone
    are shorter than the shortest step of the case so far.

    Args:
      plans: the plans with more sharding that may fit; see ``split_by_count``.
      done: the choices of the case so far, priced or refused.
      prices: the latest prices of the case; None if there are none.
    """
    able = [choice for choice in done if not choice.refused]
    if prices is None or not able:
        return bool(plans)
    there = {with_shard(choice.plan, "nothing") for choice in able}
    shortest = min(choice.seconds or 0.0 for choice in able)
    return any(with_shard(plan, "nothing") not in there and prices.ticks(plan) < shortest for plan in plans)


def needed(plan: Plan, counted: Memory, tokens: float = 1.0) -> float:
    """Bytes of a device that a plan needs by count, from the counts of another plan with the same ``shard``.

    The result is exact for plans of the same case. Plans of another cut have ``tokens`` times as many tokens
    of a microbatch on a device, and their parameters on a device are assumed to be as many: DeepSeek-V3 on
    half and a quarter as many ranks needs 5 and 14 % more than this estimate, where parameters are sharded.
    """
    assert counted.kept is not None
    return _reserved_bytes(_schedule_options(plan), counted.kept.scaled(tokens), MemoryModel(**counted.share))


@functools.cache
def _reserved_bytes(order: StepOptions, kept: StageMemory, share: MemoryModel) -> float:
    return reserved_bytes(_schedule(order), kept, share)


def memory_message(size: float, limit: float, how: str) -> str:
    return f"needs {size / 2**30:.1f} GiB of {limit / 2**30:.1f}, {how}"


def ranked(choices: Iterable[Choice]) -> list[Choice]:
    """The choices that are possible, the best first: the highest MFU, among equal ones those without a stash limit.

    A choice is left out if the same plan with less sharding is possible and not slower.
    """
    able = [choice for choice in choices if not choice.refused and choice.seconds is not None]
    seconds = {choice.plan: choice.seconds for choice in able}

    def better(choice: Choice) -> bool:
        """Whether it is shorter than the same plan with less sharding."""
        less = [with_shard(choice.plan, shard) for shard in SHARDS[: SHARDS.index(choice.plan.shard)]]
        return all(seconds[choice.plan] < seconds[plan] for plan in less if plan in seconds)  # type: ignore[operator]

    return sorted(filter(better, able), key=lambda c: (-(c.mfu or 0.0), c.plan.max_stash is not None))


def nearest(choices: Iterable[Choice]) -> list[Choice]:
    """The refused choice that needs least memory, for each schedule, dp, pp, remat and dispatch.

    Choices of unknown memory stand beside it, one for each reason: they may need less or more.
    """
    groups: dict[tuple[object, ...], list[Choice]] = {}
    for choice in choices:
        if choice.refused:
            plan = choice.plan
            why = choice.refused if choice.memory is None else ""
            key = plan.schedule_in_words, plan.dp, plan.pp, plan.remat, plan.dispatch, why
            groups.setdefault(key, []).append(choice)
    return [min(alike, key=lambda choice: choice.memory or 0) for alike in groups.values()]
