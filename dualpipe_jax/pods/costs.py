"""Costs for the simulator and the engine's ticks, from the units of a compiled program."""

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

from dualpipe_jax.pods.results import Unit
from dualpipe_jax.pods.units import key_of, kinds_of
from dualpipe_jax.schedule import CostModel, Op, Placement, Schedule, Slot
from dualpipe_jax.schedule.costs import stages_a_share
from dualpipe_jax.schedule.lowering.unit_key import SCOPES, UnitKey

T = TypeVar("T")


def stage_costs(units: Mapping[UnitKey, Unit], send: float, *, split: bool = True) -> CostModel:
    """Costs of one stage in cycles, from measured units.

    A full backward takes less than its two halves, which pass a stash between them, and a cost model has no
    place for both. So schedules that never split get costs of their own.

    Arguments:
      units: the measured units: F and either B or I and W, at least those of most stages.
      send: cycles of a transfer.
      split: whether to take I and W for the backward if they were measured. Otherwise B is taken, two thirds
        of it for the input, which makes no difference to schedules that never split.

    Raises:
      ValueError: one of these units is missing.
    """
    cycles = {key: unit.cycles for key, unit in units.items()}
    usual = {key.op: each for key, each in cycles.items() if not key.kinds}
    halves = {"I", "W"} <= usual.keys()
    if "F" not in usual or not (halves or "B" in usual):
        raise ValueError(
            f"costs: needs F and either B or I and W; measured were {', '.join(map(str, cycles)) or 'none'}"
        )
    whole = "B" in usual and not (split and halves)
    backward = (usual["B"] * 2 / 3, usual["B"] / 3) if whole else (usual["I"], usual["W"])
    extra = {}
    between = {stage: kind for stage, kind in kinds_of(units).items() if kind not in ("first", "last")}
    for stage, kind in ({0: "first", -1: "last"} | between).items():
        if UnitKey("F", (kind,)) in cycles:
            more = _beyond_usual(cycles, kind, whole, backward)
            # Differences of single units do not add up in a pair, which hides the exchange that takes much of F and B
            # alone. So where there are pairs, a stage that takes less counts as a usual one, which is an upper bound.
            extra[stage] = tuple(max(0.0, cost) for cost in more) if "FB" in usual else more
    return CostModel(usual["F"], *backward, FB=usual.get("FB"), send=send, extra=extra)  # type: ignore[arg-type]


def find_unit(units: Mapping[UnitKey, T], key: UnitKey) -> T | None:
    """The entry of a unit, or None. If no entry of its op names kinds, the entry of most stages serves all kinds."""
    alike = not any(other.op == key.op and other.kinds for other in units)
    return units.get(UnitKey(key.op) if alike else key)


@dataclasses.dataclass(frozen=True)
class UnitCosts(CostModel):
    """Costs of one stage, with the measured cycles of whole units, each for the kinds of stages on which it works.

    A measured unit costs its own cycles: a pair of the first stage's forward and the last stage's backward,
    or a full backward besides I and W. All others, such as a pair of kinds that was never measured, cost as
    in a ``CostModel``.

    Attributes:
      cycles: the cycles of each unit.
      kinds: the kinds of stages; see ``kinds_of``.
    """

    cycles: Mapping[UnitKey, float] = dataclasses.field(default_factory=dict, hash=False)
    kinds: Mapping[int, str] = dataclasses.field(default_factory=dict, hash=False)

    def of(self, slot: Slot, placement: Placement) -> float:
        own = find_unit(self.cycles, key_of(slot, placement, self.kinds))
        return super().of(slot, placement) if own is None else own


def unit_costs(units: Mapping[UnitKey, Unit], send: float, *, split: bool = True) -> UnitCosts:
    """``stage_costs`` of the same units, and the cycles of each unit, for which a ``CostModel`` has no place."""
    cycles = {key: unit.cycles for key, unit in units.items()}
    return UnitCosts(**vars(stage_costs(units, send, split=split)), cycles=cycles, kinds=kinds_of(units))


@dataclasses.dataclass(frozen=True)
class _RankCosts(CostModel):
    """Costs of a rank's whole share of the model: ``parts`` times those of a ``stage``."""

    stage: CostModel = CostModel()  # noqa: RUF009  # frozen
    parts: float = 1.0

    def for_schedule(self, schedule: Schedule) -> CostModel:  # type: ignore[override]  # not of its own type
        """Costs of the schedule's stages: the measured ones, where its stages are as deep as the measured stages."""
        return (
            self.stage if stages_a_share(schedule.placement) == self.parts else super().for_schedule(schedule)
        )


def _beyond_usual(
    cycles: Mapping[UnitKey, float], kind: str, whole: bool, usual: tuple[float, float]
) -> tuple[float, float, float]:
    """Cycles of a kind's F, I and W beyond the usual stage's; an unmeasured backward counts as twice the forward."""
    own = {key.op: each for key, each in cycles.items() if key.kinds == (kind,)}
    ahead = own["F"] - cycles[UnitKey("F")]
    if "B" in own and (whole or "I" not in own):
        more = own["B"] - sum(usual)
        return ahead, more * 2 / 3, more / 3
    if {"I", "W"} <= own.keys():
        return ahead, own["I"] - usual[0], own["W"] - usual[1]
    return ahead, ahead, ahead


def splits(schedule: Schedule) -> bool:
    """Whether the schedule splits any backward into I and W."""
    return any(action.op is Op.I for order in schedule.orders for slot in order for action in slot)


def units_of(schedule: Schedule) -> tuple[str, ...]:
    """The ops of the units that the schedule runs, in the order of ``SCOPES``."""
    slots = [slot for order in schedule.orders for slot in order]
    alone = {slot[0].op for slot in slots if len(slot) == 1}
    there = {op.name for op in alone} | ({"FB"} if any(len(slot) > 1 for slot in slots) else set())
    return tuple(op for op in SCOPES if op in there)


def rank_costs(costs: CostModel, schedule: Schedule) -> CostModel:
    """Costs of a rank's whole share of the model, which ``choose`` takes, from the costs of a schedule's stage."""
    parts = stages_a_share(schedule.placement)
    more = {name: parts * getattr(costs, name) for name in ("F", "I", "W", "FB")}
    # Only the ends are there at any depth. The last stage goes by its number where its kind is not called "last".
    places = {0: 0, -1: -1, schedule.placement.num_model_stages - 1: -1}
    ends = {places[stage]: extra for stage, extra in costs.extra.items() if stage in places}
    usual = {field.name: getattr(costs, field.name) for field in dataclasses.fields(CostModel)}
    return _RankCosts(**(usual | more | {"extra": ends}), stage=costs, parts=parts)
