"""Cost models: the time that work takes and the memory that it keeps."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.schedule.ir import Op, Placement, Schedule, Slot

REL_TOLERANCE = 1e-9
"""The relative difference up to which two times or sizes count as equal: sums in another order round differently."""


def at_most(value: float, limit: float) -> bool:
    """Whether a time, or a size, is at most a limit, within a relative error of 1e-9."""
    return value <= limit * (1 + REL_TOLERANCE)


_NO_EXTRA = (0.0, 0.0, 0.0)

_PER_LAYER_SIZES = "residual_i", "residual_w", "stash", "parameters"
"""The sizes that are proportional to a stage's number of layers."""


@typechecked
@dataclasses.dataclass(frozen=True)
class CostModel:
    """How long each kind of work takes on one stage, in any unit of time.

    >>> from dualpipe_jax.schedule import CostModel, dualpipe, simulate
    >>> simulate(dualpipe(4, 8), CostModel(F=1, I=1, W=1, FB=2)).makespan
    22.0

    Attributes:
      F: a forward.
      I: a backward for the input.
      W: a backward for the weights.
      FB: an overlapped pair of a forward and a full backward; F + I + W, no gain, unless given.
      send: a transfer to another rank; a handover on the same rank is free.
      extra: more (F, I, W) at some stages of the model, such as the embedding and the head:
        ``{0: (0.1, 0, 0.1), -1: (0.3, 0.3, 0.3)}``. Negative stages count from the last. In a pair it adds
        to FB: work outside the layers has nothing to overlap with. Negative costs make a stage cheaper, such
        as one with fewer layers.
      blocking: whether a transfer also keeps its sender from its next work (as where the sender waits for the
        send to end), or delays only the receiver.
      send_inside: a transfer to a rank of the same node, whose links are faster; ``send`` unless given.
      ranks_per_node: the number of ranks of a node; the ranks of a node have consecutive numbers.

    ``dataclasses.replace`` keeps the FB that was computed at first; pass FB again when F, I or W changes.

    Raises:
      ValueError: if a cost is negative or not finite, an entry of ``extra`` is not three finite costs or subtracts
        more than a stage costs, or ``ranks_per_node`` is below 1.
    """

    F: float = 1.0
    I: float = 1.0
    W: float = 1.0
    FB: float = None  # type: ignore[assignment]  # a float once constructed
    send: float = 0.0
    extra: Mapping[int, Sequence[float]] = dataclasses.field(default_factory=dict, hash=False)
    blocking: bool = False
    send_inside: float | None = None
    ranks_per_node: int = 1

    def __post_init__(self):
        _make_plain(self)
        if self.FB is None:
            object.__setattr__(self, "FB", self.F + self.I + self.W)
        extra = {int(stage): tuple(map(_plain, more)) for stage, more in self.extra.items()}
        object.__setattr__(self, "extra", extra)
        inside = ("send_inside",) if self.send_inside is not None else ()
        _check_not_negative(self, ("F", "I", "W", "FB", "send", *inside))
        if self.ranks_per_node < 1:
            raise ValueError(f"CostModel: ranks_per_node={self.ranks_per_node}; a node has at least one rank")
        for stage, more in self.extra.items():
            self._check_extra(stage, more)

    def _check_extra(self, stage: int, more: Sequence[float]) -> None:
        if len(more) != 3 or not all(map(math.isfinite, more)):
            raise ValueError(
                f"CostModel: extra[{stage}]={more}; a stage's extra is (F, I, W), all of them finite"
            )
        usual = self.F, self.I, self.W
        left = [cost + extra for cost, extra in zip(usual, more, strict=True)]
        if min(*left, self.FB + sum(more)) < 0:
            raise ValueError(
                f"CostModel: extra[{stage}]={more} takes more away than a stage has, F, I, W = {usual} and FB = "
                f"{self.FB:g}; cut the model into fewer stages, or take away less"
            )

    @property
    def B(self) -> float:
        """A full backward: I + W."""
        return self.I + self.W

    def more(self, placement: Placement, stage: int) -> tuple[float, float, float]:
        """The extra (F, I, W) of a stage."""
        if not self.extra:
            return _NO_EXTRA
        model_stage, stages = placement.model_stage(stage), placement.num_model_stages
        found = [self.extra[key] for key in {model_stage, model_stage - stages} if key in self.extra]
        return tuple(map(sum, zip(*found, strict=True))) if found else _NO_EXTRA  # type: ignore[return-value]

    def transfer(self, here: int, there: int) -> float:
        """The time of a transfer from rank ``here`` to rank ``there``; 0 if they are the same."""
        if here == there:
            return 0.0
        inside = self.send_inside is not None and here // self.ranks_per_node == there // self.ranks_per_node
        return self.send_inside if inside else self.send  # type: ignore[return-value]  # checked in the line before

    @property
    def dearest_send(self) -> float:
        """The time of the slowest transfer."""
        return max(self.send, self.send_inside or 0.0)

    def of(self, slot: Slot, placement: Placement) -> float:
        """Duration of a slot: FB for a pair, else the cost of its one action, plus the extra costs of its stages."""
        cost = self.FB if len(slot) == 2 else self._alone[slot[0].op]
        if not self.extra:
            return cost
        return cost + sum(_by_op(*self.more(placement, stage))[op] for stage, op, _ in slot)

    @functools.cached_property
    def _alone(self) -> Mapping[Op, float]:
        return _by_op(self.F, self.I, self.W)

    def divided(self, parts: float) -> Self:
        """Costs of a stage that holds 1/parts of the layers. Sends and extras do not depend on the layers and stay."""
        f, i, w, fb = (cost / parts for cost in (self.F, self.I, self.W, self.FB))
        return dataclasses.replace(self, F=f, I=i, W=w, FB=fb)

    def for_schedule(self, schedule: Schedule) -> Self:
        """Costs of one stage of the schedule, if these are the costs of a rank's equal share of the model."""
        return self.of_stages(schedule.placement)

    def of_stages(self, placement: Placement) -> Self:
        """Costs of one stage of a placement, if these are the costs of a rank's equal share of the model.

        Raises:
          ValueError: the extras of a stage, which has two if it is both first and last, subtract more than it costs.
        """
        own, depth = self.divided(stages_a_share(placement)), placement.num_model_stages
        for stage in own.extra:
            if -depth <= stage < depth:
                own._check_extra(stage, own.more(placement, stage % depth))
        return own


@typechecked
@dataclasses.dataclass(frozen=True)
class MemoryModel:
    """Memory that a rank keeps for one stage, and for one microbatch at one stage, in bytes or any other unit.

    With the default sizes, it counts live activations.

    >>> from dualpipe_jax.schedule import MemoryModel, one_f_one_b, simulate
    >>> simulate(one_f_one_b(4, 8)).memory(MemoryModel(residual_i=2.0, parameters=10.0))
    (18.0, 16.0, 14.0, 12.0)

    Attributes:
      residual_i: values that only the backward for the input reads, kept from the start of F to the end of I or B.
      residual_w: values that the backward for the weights reads, kept from the start of F to the end of W or B.
      stash: values that I passes to W, kept from the start of I to the end of W; a full backward keeps none.
      boundary: the stage's input, kept from the start of F to the end of W or B.
      parameters: size of one stage's weights, gradient sums and optimizer state, which a rank always keeps.
        They count for each stage that a rank holds, also where two stages hold copies of the same slice.
      extra: more (negative: fewer) parameters at some stages of the model, such as the embedding's and the head's:
        ``{0: 3e9, -1: 3e9}``. Negative stages count from the last.
      fixed: memory that a rank keeps with every schedule.

    Raises:
      ValueError: if a size is negative or not finite, or an entry of ``extra`` is not finite.
    """

    residual_i: float = 1.0
    residual_w: float = 0.0
    stash: float = 0.0
    boundary: float = 0.0
    parameters: float = 0.0
    extra: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    fixed: float = 0.0

    def __post_init__(self):
        _make_plain(self)
        object.__setattr__(self, "extra", {int(stage): _plain(more) for stage, more in self.extra.items()})
        _check_not_negative(self, (*_PER_LAYER_SIZES, "boundary", "fixed"))
        for stage, more in self.extra.items():
            if not math.isfinite(more):
                raise ValueError(f"MemoryModel: extra[{stage}]={more}; it must be finite")

    def divided(self, parts: float) -> Self:
        """Sizes of a stage that holds 1/parts of the layers. ``boundary``, ``extra`` and ``fixed`` stay as they are."""
        return dataclasses.replace(self, **{name: getattr(self, name) / parts for name in _PER_LAYER_SIZES})

    def for_schedule(self, schedule: Schedule) -> Self:
        """Sizes of one stage of the schedule, if these are the sizes of a rank's equal share of the model."""
        return self.divided(stages_a_share(schedule.placement))

    @property
    def live(self) -> float:
        """The memory that a microbatch keeps at a stage from the start of F to the end of B."""
        return self.residual_i + self.residual_w + self.boundary

    @property
    def owed(self) -> float:
        """The part of ``live`` that remains after I until the end of W."""
        return self.residual_w + self.boundary

    def at_rest(self, placement: Placement, rank: int) -> float:
        """The memory that a rank keeps when it holds no microbatch."""
        stages, depth = placement.stages_on[rank], placement.num_model_stages
        slices = [placement.model_stage(stage) for stage in stages] if self.extra else []
        more = sum(self.extra.get(at, 0.0) + self.extra.get(at - depth, 0.0) for at in slices)
        return self.parameters * len(stages) + more + self.fixed

    @functools.cached_property
    def before_and_after(self) -> Mapping[Op, tuple[float, float]]:
        """For each op, the memory that an action takes when it starts, and the memory that it frees when it ends."""
        return {
            Op.F: (self.live, 0.0),
            Op.B: (0.0, self.live),
            Op.I: (self.stash, self.residual_i),
            Op.W: (0.0, self.owed + self.stash),
        }


def _by_op(f: float, i: float, w: float) -> Mapping[Op, float]:
    return {Op.F: f, Op.B: i + w, Op.I: i, Op.W: w}


def stages_a_share(placement: Placement) -> float:
    """The number of stages into which a pipe cuts a rank's share of the model: 1 on a line, 2 on a V."""
    return placement.num_model_stages / placement.num_ranks


def _plain(value: Any) -> Any:
    """NumPy's number as Python's: sums of NumPy's would overflow int32 or be float32, and JSON has no form for them."""
    return value.item() if hasattr(value, "item") else value


def _make_plain(model: "CostModel | MemoryModel") -> None:
    for field in dataclasses.fields(model):
        object.__setattr__(model, field.name, _plain(getattr(model, field.name)))


def _check_not_negative(model: CostModel | MemoryModel, names) -> None:
    given = {name: getattr(model, name) for name in names}
    wrong = [f"{name}={value}" for name, value in given.items() if not (math.isfinite(value) and value >= 0)]
    if wrong:
        what = "costs" if isinstance(model, CostModel) else "sizes"
        raise ValueError(
            f"{type(model).__name__}: {what} must be finite and at least 0, got {', '.join(wrong)}"
        )
