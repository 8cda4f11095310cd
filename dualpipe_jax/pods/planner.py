"""Which plan makes a step shortest? All that are wanted, by unit costs that were compiled once; loads no JAX.

Units are compiled for each *case*: everything that decides what a stage's functions become. Schedules that place stages
alike, numbers of microbatches and limits of stashes are told apart by simulation alone. What is shared out changes
units little, but the update and what stands beside the ticks, such as gathers of parameters: so a case is compiled with
the least that any of its plans needs, and again with more where that could make a step shorter; see ``worth``.
Layers stand where the program puts them, and then where the costs of its stages would have them; see ``moved``.
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
from dualpipe_jax.pods.kept import Kept, set_aside
from dualpipe_jax.pods.layers import moved_layers
from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.pods.results import Answer, Memory
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
"""The simplest first."""
_MOST_RANKS = 32
"""Pipeline ranks that are tried where nobody says how many."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What plans are looked for.

    Attributes:
      base: whatever is not chosen.
      tokens: of a step; None: four microbatches for each rank, of one sequence a device.
      pp: numbers of pipeline ranks; empty: all that divide the devices, up to 32.
      dp: numbers of replicas.
      per_device: sequences of a microbatch that a device has.
      schedules, remats, dispatches, stashes, shards: to choose from.
      stages_per_rank: numbers to choose from for interleaved schedules; empty: the one that they have.
      moves: how many cases with layers moved between stages may be compiled besides; see ``moved``.
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
      plan: the one whose units are compiled; its schedule runs as many kinds of units as any of them.
      plans: all of them, with nothing shared out.
    """

    plan: Plan
    plans: tuple[Plan, ...]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A plan that was considered.

    Attributes:
      plan: all that `dryrun` needs to know.
      mfu, seconds: predicted; None where nothing was compiled, for it cannot be had.
      memory: bytes of the fullest device; None where that is not known.
      refused: why it cannot be had; empty if it can.
    """

    plan: Plan
    mfu: float | None = None
    seconds: float | None = None
    memory: float | None = None
    refused: str = ""


def cases(wanted: Wanted, num_devices: int) -> tuple[list[Case], list[Choice]]:
    """Everything to be compiled, and what cannot be had whatever it takes."""
    found: list[Case] = []
    refused: list[Choice] = []
    for (dp, pp), per_device, remat, dispatch in itertools.product(
        _ranks(wanted, num_devices), wanted.per_device, wanted.remats, wanted.dispatches
    ):
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
        for name, stages in _cuts(wanted):
            own = dataclasses.replace(plan, schedule=name, stages_per_rank=stages)
            try:
                placed.setdefault(schedule_of(own).placement, []).append(own)
            except ValueError as error:
                refused.append(Choice(own, refused=str(error).removeprefix(f"{name}: ")))
        found += [_case(plans, wanted.stashes) for plans in placed.values()]
    return found, refused


def _cuts(wanted: Wanted) -> list[tuple[str, int | None]]:
    """Schedules, and the stages of each rank where a schedule leaves that choice."""
    return [
        (recipe.__name__, stages)
        for recipe in map(find, wanted.schedules)
        for stages in (takes(recipe, "num_stages_per_rank") and wanted.stages_per_rank) or (None,)
    ]


def _ranks(wanted: Wanted, num_devices: int) -> list[tuple[int, int]]:
    """Replicas and their pipeline ranks, of which a device is one of as many experts' devices as are left."""
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


def _case(plans: list[Plan], stashes: Iterable[int | None]) -> Case:
    """Plans of one placement, with all limits that change their order."""
    all_plans = []
    for plan in plans:
        seen = set()
        for stash in stashes:
            limited = dataclasses.replace(plan, max_stash=stash)
            orders = schedule_of(limited).orders
            if orders not in seen:
                seen.add(orders)
                all_plans.append(limited)
    return Case(standing_for(all_plans), tuple(all_plans))


def cut_in_vain(case: Case, cases: Iterable[Case], layers: int) -> list[Choice]:
    """The plans of a case, as refused, if others cut its ranks into fewer stages of which none has two layers.

    Args:
      case: of one schedule whose number of stages is free.
      cases: all.
      layers: of the model; 0: nobody knows.
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
    """Of the model, whatever the number of its copies."""
    return schedule_of(plan).placement.num_model_stages


def standing_for(plans: Iterable[Plan]) -> Plan:
    """The one that runs most kinds of units; of several the one with the fewest stashes.

    What does not fit is compiled to slower units that compute again, or not at all.
    """
    fewest = sorted(plans, key=lambda plan: math.inf if plan.max_stash is None else plan.max_stash)
    return max(fewest, key=lambda plan: len(units_of(schedule_of(plan))))


def schedule_of(plan: Plan) -> Schedule:
    return _schedule(_order(plan))


def _order(plan: Plan) -> StepOptions:
    """What of a plan its schedule follows from."""
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
    """Ranks and experts' devices, and replicas before them where there are some."""
    return ("" if plan.dp == 1 else f"{plan.dp} x ") + f"{plan.pp} x {plan.ep}"


def shared(plan: Plan, shard: Shard) -> Plan:
    return dataclasses.replace(plan, shard=shard)


def counted(case: Case, counts: Mapping[Shard, Answer]) -> tuple[list[Plan], list[Choice]]:
    """Plans of a case that may fit by what is counted alone, and those that cannot; nothing is compiled for it.

    Args:
      case: the plans.
      counts: what was counted of the case's plan, by what is shared out.
    """
    fit, refused = [], []
    for plan, shard in itertools.product(case.plans, counts):
        own, memory = shared(plan, shard), counts[shard].memory
        assert memory is not None and memory.limit is not None
        size = needed(own, memory)
        if at_most(size, memory.limit):
            fit.append(own)
        else:
            refused.append(Choice(own, memory=size, refused=too_much(size, memory.limit, "counted")))
    return fit, refused


class Prices:
    """What was compiled of a case, as prices of all of its plans that share out as much.

    Args:
      case: the plans.
      shard: what is shared out.
      found: the answer; whose units were compiled, or not, see ``known``.
    """

    def __init__(self, case: Case, shard: Shard, found: Answer):
        assert found.compiled is not None and found.target is not None and found.memory is not None
        self.case, self.shard, self.layers = case, shard, found.stage_layers
        self.compiled, self.step, self.target = found.compiled, found.step, found.target
        self.beyond = _beyond(found)
        self.products = found.products
        self.ticks = functools.cache(self._ticks)

    @property
    def known(self) -> bool:
        """Whether there are times; else the compiler refused the units."""
        return self.step is not None

    @functools.cached_property
    def _costs(self) -> tuple[CostModel, CostModel]:
        """Costs for schedules that never split a backward, and for those that do."""
        units, send = self.compiled.units, self.compiled.sends.each
        return unit_costs(units, send, split=False), unit_costs(units, send, split=True)

    def costs(self, schedule: Schedule) -> CostModel:
        """The costs of its units for a schedule, in cycles."""
        return self._costs[splits(schedule)]

    def _ticks(self, plan: Plan) -> float:
        assert self.step is not None
        schedule, tick, at_once = schedule_of(plan), self.compiled.beside.tick, self.compiled.at_once
        placed = CostModel(**self.step.placed)  # type: ignore[arg-type]  # none of them is a flag
        cycles, _ = predict.step_cycles(schedule, self.costs(schedule), tick, at_once, placed)
        return cycles / self.target.clock

    def choices(self, plans: Iterable[Plan], count: Answer) -> list[Choice]:
        """Time and memory of plans that share out as much as was compiled.

        Args:
          plans: see ``counted``.
          count: what was counted of the case's plan, with as much shared out.
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
            refused = "" if at_most(size, limit) else too_much(size, limit, "compiled")
            seconds = self.ticks(plan) + rest
            found.append(Choice(plan, least / seconds, seconds, size, refused))
        return found


def _beyond(found: Answer) -> float:
    """Bytes that a program takes beyond what was counted of it; at least, if the compiler had no memory for it."""
    memory, compiled = found.memory, found.compiled
    assert memory is not None and compiled is not None
    if compiled.out_of_memory is not None and memory.limit is not None:
        return max(0.0, memory.limit - memory.total)
    return max(0.0, memory.beyond or 0)


_ENDS = {UnitKey("F", (kind,)) for kind in ("first", "last")}
GAIN = 0.99
"""Steps that are estimated to take more of the best one are not worth a compilation."""


def moved(compiled: Sequence[Prices], choices: Iterable[Choice], tried: Iterable[Case]) -> Case | None:
    """The case that promises most, by what its stages' units took, if its layers are moved between them.

    Estimated is the best plan of each case, with the busiest rank as ``moved_layers`` makes it. None where none is
    shorter than the best of all, or programs do not tell their layers, or have no kinds "first" and "last".

    Args:
      compiled: whose prices are known.
      choices: all so far.
      tried: cases that were considered.
    """
    able = {c.plan: c.seconds for c in choices if not c.refused and c.seconds is not None}
    shortest, known, promised = min(able.values(), default=0.0), set(tried), []
    for prices in compiled:
        known.add(_with_layers(prices.case, prices.layers))
        mine = [plan for own in prices.case.plans if (plan := shared(own, prices.shard)) in able]
        if not mine or not prices.layers or not prices.compiled.units.keys() >= _ENDS:
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


def worth(plans: Sequence[Plan], done: Iterable[Choice], prices: Prices | None) -> bool:
    """Whether to compile units with as much shared out as some plans of a case share, after those that share out less.

    It is, if one of them does not fit with less and could be the shortest: its ticks alone are shorter than the
    shortest step so far.

    Args:
      plans: that may fit, see ``counted``.
      done: those of the case that are priced, and others that cannot be had.
      prices: the latest of the case; None: there are none.
    """
    able = [choice for choice in done if not choice.refused]
    if prices is None or not able:
        return bool(plans)
    there = {shared(choice.plan, "nothing") for choice in able}
    shortest = min(choice.seconds or 0.0 for choice in able)
    return any(shared(plan, "nothing") not in there and prices.ticks(plan) < shortest for plan in plans)


def needed(plan: Plan, counted: Memory, tokens: float = 1.0) -> float:
    """Bytes of a device that are counted of a plan, from those of another that shares out as much.

    It is exact for plans of the same case. Plans of another cut have ``tokens`` times as many tokens of a microbatch on
    a device, and parameters are taken to be as many there: DeepSeek-V3 on half and a quarter as many ranks needs 5 and
    14 % more than is told of it, where parameters are shared out.
    """
    assert counted.kept is not None
    return _set_aside(_order(plan), counted.kept.scaled(tokens), MemoryModel(**counted.share))


@functools.cache
def _set_aside(order: StepOptions, kept: Kept, share: MemoryModel) -> float:
    return set_aside(_schedule(order), kept, share)


def too_much(size: float, limit: float, how: str) -> str:
    return f"needs {size / 2**30:.1f} GiB of {limit / 2**30:.1f}, {how}"


def ranked(choices: Iterable[Choice]) -> list[Choice]:
    """Those that can be had, the best first: the highest MFU, of equal ones the simplest.

    What shares more out than need be, and is no shorter for it, is left out.
    """
    able = [choice for choice in choices if not choice.refused and choice.seconds is not None]
    seconds = {choice.plan: choice.seconds for choice in able}

    def better(choice: Choice) -> bool:
        """Than the same with less shared out."""
        less = [shared(choice.plan, shard) for shard in SHARDS[: SHARDS.index(choice.plan.shard)]]
        return all(seconds[choice.plan] < seconds[plan] for plan in less if plan in seconds)  # type: ignore[operator]

    return sorted(filter(better, able), key=lambda c: (-(c.mfu or 0.0), c.plan.max_stash is not None))


def nearest(choices: Iterable[Choice]) -> list[Choice]:
    """Those that cannot be had, of each schedule and remat policy the one that needs least."""
    groups: dict[tuple[object, ...], list[Choice]] = {}
    for choice in choices:
        if choice.refused:
            plan = choice.plan
            key = plan.schedule_in_words, plan.dp, plan.pp, plan.remat, plan.dispatch
            groups.setdefault(key, []).append(choice)
    return [min(alike, key=lambda choice: choice.memory or 0) for alike in groups.values()]
