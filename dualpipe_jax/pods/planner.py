"""Which plan makes a step shortest? All that are wanted, by unit costs that were compiled once; loads no JAX.

Units are compiled for each *case*: everything that decides what a stage's functions become. Schedules that place stages
alike, numbers of microbatches and limits of stashes are told apart by simulation alone. What is shared out is told
apart by memory alone, and priced as the least that any plan of the case shares out: units differ little by it, the
update and what stands beside the ticks, such as gathers of parameters, do.
"""

import dataclasses
import functools
import itertools
import math
import typing
from collections.abc import Iterable, Mapping
from typing import Literal

from dualpipe_jax.inspect.target import Target
from dualpipe_jax.pods import predict
from dualpipe_jax.pods.plan import Plan, Shard
from dualpipe_jax.pods.results import Answer, Overheads
from dualpipe_jax.schedule import CostModel, MemoryModel, Schedule, limit_stash, simulate
from dualpipe_jax.schedule.costs import at_most
from dualpipe_jax.schedule.names import find

SCHEDULES = "dualpipe", "dualpipe_v", "one_f_one_b", "zb_h1", "zb_v"
REMATS: tuple[Literal["none", "dots", "wide", "all"], ...] = ("none", "dots", "wide", "all")
DISPATCHES: tuple[Literal["dropless", "capacity"], ...] = ("dropless", "capacity")
STASHES: tuple[int | None, ...] = (None, 8, 2, 1)
SHARDS: tuple[Shard, ...] = typing.get_args(Shard)
"""The simplest first."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What plans are looked for.

    Attributes:
      base: whatever is not chosen.
      tokens: of a step; None: four microbatches for each rank, of one sequence a device.
      pp: numbers of pipeline ranks; empty: all that divide the devices, up to ``most_ranks``.
      dp: numbers of replicas.
      per_device: sequences of a microbatch that a device has.
      schedules, remats, dispatches, stashes, shards: to choose from.
    """

    base: Plan
    tokens: int | None = None
    pp: tuple[int, ...] = ()
    dp: tuple[int, ...] = (1,)
    per_device: tuple[int, ...] = (1, 2)
    schedules: tuple[str, ...] = SCHEDULES
    remats: tuple[Literal["none", "dots", "wide", "all"], ...] = REMATS
    dispatches: tuple[Literal["dropless", "capacity"], ...] = DISPATCHES
    stashes: tuple[int | None, ...] = STASHES
    shards: tuple[Shard, ...] = SHARDS
    most_ranks: int = 32


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
        for name in wanted.schedules:
            own = dataclasses.replace(plan, schedule=find(name).__name__)
            try:
                placed.setdefault(schedule_of(own).placement, []).append(own)
            except ValueError as error:
                refused.append(Choice(own, refused=str(error).removeprefix(f"{name}: ")))
        found += [_case(plans, wanted.stashes) for plans in placed.values()]
    return found, refused


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
        all_that_divide = [pp for pp in range(2, wanted.most_ranks + 1) if of_each % pp == 0]
        found += [(dp, pp) for pp in wanted.pp or all_that_divide]
    return found


def _case(plans: list[Plan], stashes: Iterable[int | None]) -> Case:
    """Plans of one placement, with all limits that change their order; the one that runs most units stands for all.

    Of several the one with the fewest stashes: what does not fit is compiled to slower units that compute again.
    """
    all_plans = []
    for plan in plans:
        seen = set()
        for stash in stashes:
            limited = dataclasses.replace(plan, max_stash=stash)
            orders = schedule_of(limited).orders
            if orders not in seen:
                seen.add(orders)
                all_plans.append(limited)
    fewest = sorted(all_plans, key=lambda plan: math.inf if plan.max_stash is None else plan.max_stash)
    whole = max(fewest, key=lambda plan: len(predict.units_of(schedule_of(plan))))
    return Case(whole, tuple(all_plans))


@functools.lru_cache(maxsize=256)
def _schedule(name: str, pp: int, microbatches: int, max_stash: int | None) -> Schedule:
    schedule = find(name)(pp, microbatches)
    return schedule if max_stash is None else limit_stash(schedule, max_stash)


def schedule_of(plan: Plan) -> Schedule:
    """As ``Plan.make_schedule``, made once."""
    return _schedule(plan.schedule, plan.pp, plan.num_microbatches, plan.max_stash)


def shared(plan: Plan, shard: Shard) -> Plan:
    """The plan with that shared out."""
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
        needed = _needed(own, memory.share)
        if at_most(needed, memory.limit):
            fit.append(own)
        else:
            refused.append(Choice(own, memory=needed, refused=_too_much(needed, memory.limit, "counted")))
    return fit, refused


def least_shared(plans: Iterable[Plan]) -> Shard:
    """The least that any of some plans shares out."""
    return min((plan.shard for plan in plans), key=SHARDS.index)


def priced(plans: Iterable[Plan], found: Answer, counts: Mapping[Shard, Answer]) -> list[Choice]:
    """Time and memory of plans, from the units of their case.

    Args:
      plans: see ``counted``.
      found: what was compiled of the case's plan.
      counts: see ``counted``.
    """
    compiled, step, target, memory = found.compiled, found.step, found.target, found.memory
    assert compiled is not None and target is not None and memory is not None
    if step is None:
        why = compiled.out_of_memory or "its units have no forward to be priced by"
        return [Choice(plan, refused=f"the compiler refuses its units: {why[:200]}") for plan in plans]
    least, send = step.mfu * step.seconds, compiled.sends.each
    placed = CostModel(**step.placed)  # type: ignore[arg-type]  # none of them is a flag
    whole, halves = (predict.measured(compiled.units, send, split=split) for split in (False, True))
    beside = compiled.overheads or Overheads(0.0, 0.0)
    rest = beside.step + (0.0 if compiled.update is None else compiled.update.cycles)
    beyond = max(0, memory.beyond or 0)

    @functools.cache
    def seconds_of(plan: Plan) -> float:
        schedule = schedule_of(plan)
        costs = halves if predict.splits(schedule) else whole
        cycles, _ = predict.step_cycles(schedule, costs, beside.tick, compiled.at_once, placed)
        return (cycles + rest) / target.clock

    choices = []
    for plan in plans:
        of = counts[plan.shard].memory
        assert of is not None
        needed = _needed(plan, of.share) + beyond
        refused = "" if at_most(needed, target.memory) else _too_much(needed, target.memory, "compiled")
        seconds = seconds_of(shared(plan, "nothing"))
        choices.append(Choice(plan, least / seconds, seconds, needed, refused))
    return choices


@functools.cache
def _live(name: str, pp: int, microbatches: int, max_stash: int | None, sizes: MemoryModel) -> float:
    schedule = _schedule(name, pp, microbatches, max_stash)
    return max(simulate(schedule).memory(sizes.for_schedule(schedule)))


def _needed(plan: Plan, share: Mapping[str, object]) -> float:
    """Bytes of the fullest rank, by the sizes of a rank's share; an upper bound where stages are of several kinds."""
    sizes = MemoryModel(**share)  # type: ignore[arg-type]  # as ``Memory.share`` has them
    return _live(plan.schedule, plan.pp, plan.num_microbatches, plan.max_stash, sizes)


def _too_much(needed: float, limit: float, how: str) -> str:
    return f"needs {needed / 2**30:.1f} GiB of {limit / 2**30:.1f}, {how}"


def ranked(choices: Iterable[Choice]) -> list[Choice]:
    """Those that can be had, the best first: the highest MFU, of equal ones the simplest.

    What shares more out than need be is left out: all of a case are priced alike.
    """
    able = [choice for choice in choices if not choice.refused and choice.seconds is not None]
    plans = {choice.plan for choice in able}

    def needed(plan: Plan) -> bool:
        return not any(shared(plan, less) in plans for less in SHARDS[: SHARDS.index(plan.shard)])

    able = [choice for choice in able if needed(choice.plan)]
    return sorted(able, key=lambda c: (-(c.mfu or 0.0), c.plan.max_stash is not None))


def nearest(choices: Iterable[Choice]) -> list[Choice]:
    """Those that cannot be had, of each schedule and remat policy the one that needs least."""
    groups: dict[tuple[object, ...], Choice] = {}
    for choice in choices:
        key = choice.plan.schedule, choice.plan.dp, choice.plan.pp, choice.plan.remat, choice.plan.dispatch
        if choice.refused:
            kept = groups.get(key)
            smaller = kept is not None and (choice.memory or 0) < (kept.memory or 0)
            groups[key] = choice if kept is None or smaller else kept
    return list(groups.values())


def num_devices(target: str) -> int:
    """Of a target's name."""
    return Target.parse(target).num_devices
