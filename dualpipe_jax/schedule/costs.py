"""What work costs in time, and what it keeps in memory."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Self

from dualpipe_jax.schedule.ir import Action, Op, Placement, Schedule, Slot

_NO_TIME = (0.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class CostModel:
    """How long each kind of work takes on one stage, in any unit of time.

    Attributes:
      F: a forward.
      I: a backward for the input.
      W: a backward for the weights.
      FB: an overlapped pair of a forward and a full backward; F + I + W, no gain, unless given.
      send: a transfer to another rank; a handover on the same rank is free.
      extra: more (F, I, W) at some stages of the model, such as the embedding and the head:
        ``{0: (0.1, 0, 0.1), -1: (0.3, 0.3, 0.3)}``. Negative stages count from the last. In a pair it adds
        to FB: what stands beside the layers has nobody to overlap with.
      blocking: whether a transfer keeps its sender too from its next work (as where sends are waited for),
        or delays only the receiver.

    ``dataclasses.replace`` hands on the FB that was worked out; give it anew when F, I or W changes.

    Raises:
      ValueError: if a cost is negative or not finite, or an entry of ``extra`` is not three costs.
    """

    F: float = 1.0
    I: float = 1.0
    W: float = 1.0
    FB: float = None  # type: ignore[assignment]  # a float once constructed
    send: float = 0.0
    extra: Mapping[int, tuple[float, float, float]] = dataclasses.field(default_factory=dict, hash=False)
    blocking: bool = False

    def __post_init__(self):
        if self.FB is None:
            object.__setattr__(self, "FB", self.F + self.I + self.W)
        object.__setattr__(self, "extra", {stage: tuple(more) for stage, more in self.extra.items()})
        _refuse_below_zero(self, ("F", "I", "W", "FB", "send"))
        for stage, more in self.extra.items():
            if len(more) != 3 or not all(math.isfinite(cost) and cost >= 0 for cost in more):
                raise ValueError(
                    f"CostModel: extra[{stage}]={more}; a stage's extra is (F, I, W), all finite and at least 0"
                )

    @property
    def B(self) -> float:
        """A full backward: I + W."""
        return self.I + self.W

    def more(self, placement: Placement, stage: int) -> tuple[float, float, float]:
        """The extra (F, I, W) of a stage."""
        if not self.extra:
            return _NO_TIME
        model_stage, stages = placement.model_stage(stage), placement.num_model_stages
        found = [self.extra[key] for key in {model_stage, model_stage - stages} if key in self.extra]
        return tuple(map(sum, zip(*found, strict=True))) if found else _NO_TIME  # type: ignore[return-value]

    def of(self, slot: Slot, placement: Placement) -> float:
        """Duration of a slot: FB for a pair, else that of its one action; and what its stages cost more."""
        cost = self.FB if len(slot) == 2 else self._alone[slot[0].op]
        return cost + sum(self._more_of(placement, action) for action in slot) if self.extra else cost

    @functools.cached_property
    def _alone(self) -> Mapping[Op, float]:
        return {Op.F: self.F, Op.B: self.B, Op.I: self.I, Op.W: self.W}

    def _more_of(self, placement: Placement, action: Action) -> float:
        f, i, w = self.more(placement, action.stage)
        return {Op.F: f, Op.B: i + w, Op.I: i, Op.W: w}[action.op]

    def divided(self, parts: float) -> Self:
        """Costs of a stage that holds 1/parts of the layers. Sends and extras stay: their size is the same."""
        f, i, w, fb = (cost / parts for cost in (self.F, self.I, self.W, self.FB))
        return dataclasses.replace(self, F=f, I=i, W=w, FB=fb)

    def for_schedule(self, schedule: Schedule) -> Self:
        """Costs of the schedule's stages where these are the costs of a rank's equal share of the model."""
        return self.divided(stages_a_share(schedule.placement))


@dataclasses.dataclass(frozen=True)
class MemoryModel:
    """What a rank keeps for one stage, and for one microbatch at one stage, in bytes or any other unit.

    Left as it is, it counts live activations.

    Attributes:
      residual_i: what only the backward for the input reads, from the start of F to the end of I or B.
      residual_w: what the backward for the weights reads, from the start of F to the end of W or B.
      stash: what I hands to W, from the start of I to the end of W; a full backward keeps none.
      boundary: the stage's input, from the start of F to the end of W or B.
      parameters: of one stage, whether a microbatch is there or not: weights, gradient sums, optimizer
        state. Counted for each stage that a rank holds, a second copy too.

    Raises:
      ValueError: if a size is negative or not finite.
    """

    residual_i: float = 1.0
    residual_w: float = 0.0
    stash: float = 0.0
    boundary: float = 0.0
    parameters: float = 0.0

    def __post_init__(self):
        _refuse_below_zero(self, [field.name for field in dataclasses.fields(self)])

    def divided(self, parts: float) -> Self:
        """Sizes of a stage that holds 1/parts of the layers. A stage's input stays as large."""
        sizes = {name: size / parts for name, size in dataclasses.asdict(self).items() if name != "boundary"}
        return dataclasses.replace(self, **sizes)

    def for_schedule(self, schedule: Schedule) -> Self:
        """Sizes of the schedule's stages where these are those of a rank's equal share of the model."""
        return self.divided(stages_a_share(schedule.placement))

    @functools.cached_property
    def before_and_after(self) -> Mapping[Op, tuple[float, float]]:
        """What an action takes when it starts, and what it gives back when it ends."""
        kept = self.residual_w + self.boundary
        return {
            Op.F: (self.residual_i + kept, 0.0),
            Op.B: (0.0, self.residual_i + kept),
            Op.I: (self.stash, self.residual_i),
            Op.W: (0.0, kept + self.stash),
        }


def stages_a_share(placement: Placement) -> float:
    """Into how many stages a pipe cuts a rank's share of the model: 1 on a line, 2 on a V."""
    return placement.num_model_stages / placement.num_ranks


def _refuse_below_zero(model: CostModel | MemoryModel, names) -> None:
    given = {name: getattr(model, name) for name in names}
    wrong = [f"{name}={value}" for name, value in given.items() if not (math.isfinite(value) and value >= 0)]
    if wrong:
        what = "costs" if isinstance(model, CostModel) else "sizes"
        raise ValueError(
            f"{type(model).__name__}: {what} must be finite and at least 0, got {', '.join(wrong)}"
        )
