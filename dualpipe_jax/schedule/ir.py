"""The parts of a schedule: operations, actions, slots, placements.

A schedule is a value. It says, for each rank, in which order that rank works on which
(stage, microbatch); it holds no clock, no device and no array.
"""

import dataclasses
import enum
import functools
import operator
import re
from typing import NamedTuple

from dualpipe_jax.arguments import typechecked


class Op(enum.StrEnum):
    """A kind of work on one microbatch at one stage (PyTorch's letters; many papers write B for our I)."""

    F = "F"
    """Forward."""
    B = "B"
    """Full backward: I, then W."""
    I = "I"
    """Backward for the input."""
    W = "W"
    """Backward for the weights."""

    __hash__ = str.__hash__  # the same value as Enum's, which is Python code and slow in large schedules


_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One operation on one microbatch at one stage; prints as ``3F0`` and parses back.

    Stages are numbered through all pipes, microbatches within their pipe.

    >>> print(Action(3, Op.F, 0))
    3F0
    >>> Action.parse("12W7")
    Action(stage=12, op=<Op.W: 'W'>, microbatch=7)
    """

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read what ``str`` printed. Raises ValueError on anything else."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"not an action: {text!r}; expected stage, one of F B I W, microbatch, such as '3F0'"
            )
        return cls(int(match[1]), Op(match[2]), int(match[3]))


Slot = tuple[Action, ...]
"""One action, or an overlapped pair ``(forward, backward)`` of independent microbatches."""


def spelt(slot: Slot) -> str:
    """A slot as text, 3F0 or 7F2+0B0; a value that is not a tuple is printed as Python prints it."""
    return "+".join(map(str, slot)) if type(slot) is tuple else str(slot)


def parse_slot(text: str) -> Slot:
    """Read what ``spelt`` printed. Raises ValueError on anything else."""
    return tuple(map(Action.parse, text.split("+")))


@typechecked
@dataclasses.dataclass(frozen=True)
class Placement:
    """Which rank holds which stage: ``pipes[p][depth]`` is the rank of pipe p's stage at that depth.

    Every pipe walks the whole model, so all pipes are equally deep and the stage of pipe p at
    depth d, numbered ``p * depth_of_a_pipe + d``, holds the model's slice d.

    >>> from dualpipe_jax.schedule import Placement
    >>> v = Placement(pipes=((0, 1, 1, 0),))
    >>> v.stages_on
    ((0, 3), (1, 2))
    """

    pipes: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        if not self.pipes or not self.pipes[0]:
            raise ValueError("Placement needs at least one pipe with at least one stage")
        if len({len(pipe) for pipe in self.pipes}) > 1:
            raise ValueError(f"Placement: pipes differ in depth: {[len(pipe) for pipe in self.pipes]}")
        used = {rank for pipe in self.pipes for rank in pipe}
        if used != set(range(len(used))):
            raise ValueError(
                f"Placement: ranks must be 0..{len(used) - 1} with none left out, got {sorted(used)}"
            )
        # JSON has no form for NumPy's integers.
        object.__setattr__(self, "pipes", tuple(tuple(map(int, pipe)) for pipe in self.pipes))

    @classmethod
    def linear(cls, num_ranks: int) -> "Placement":
        """One pipe with one stage on each rank: (0, 1, 2, 3)."""
        return cls((tuple(range(num_ranks)),))

    @classmethod
    def interleaved(cls, num_ranks: int, num_stages_per_rank: int) -> "Placement":
        """One pipe that walks the ranks several times, in rounds: (0, 1, 2, 3, 0, 1, 2, 3)."""
        return cls((tuple(range(num_ranks)) * num_stages_per_rank,))

    @classmethod
    def v(cls, num_ranks: int) -> "Placement":
        """One pipe there and back: (0, 1, 2, 3, 3, 2, 1, 0)."""
        there = tuple(range(num_ranks))
        return cls((there + there[::-1],))

    @classmethod
    def wave(cls, num_ranks: int, num_waves: int) -> "Placement":
        """One pipe there and back several times, 2 * num_waves stages per rank: (0, 1, 1, 0, 0, 1, 1, 0)."""
        return cls((cls.v(num_ranks).pipes[0] * num_waves,))

    @classmethod
    def bidirectional(cls, num_ranks: int) -> "Placement":
        """Two pipes in opposite directions: (0, 1, 2, 3), (3, 2, 1, 0)."""
        there = tuple(range(num_ranks))
        return cls((there, there[::-1]))

    @property
    def num_pipes(self) -> int:
        """The number of pipes: chains of stages that microbatches walk."""
        return len(self.pipes)

    @functools.cached_property
    def num_model_stages(self) -> int:
        """The number of stages of one pipe, which is the number of slices into which the model is cut."""
        return len(self.pipes[0])

    @property
    def num_stages(self) -> int:
        """The number of stages of all pipes together."""
        return self.num_pipes * self.num_model_stages

    @functools.cached_property
    def num_ranks(self) -> int:
        """Positions on the mesh's pp axis."""
        return 1 + max(max(pipe) for pipe in self.pipes)

    @functools.cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(rank for pipe in self.pipes for rank in pipe)

    @functools.cached_property
    def stages_on(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in ascending order; their positions are the rank's local stages."""
        held: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.rank_of):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    def pipe_of(self, stage: int) -> int:
        """The pipe that a stage belongs to."""
        return stage // self.num_model_stages

    def model_stage(self, stage: int) -> int:
        """The slice of the model that a stage holds: its depth in its pipe."""
        return stage % self.num_model_stages

    def is_first(self, stage: int) -> bool:
        """Whether microbatches enter their pipe at this stage."""
        return self.model_stage(stage) == 0

    def is_last(self, stage: int) -> bool:
        """Whether this stage is the last of its pipe, where the backward begins."""
        return self.model_stage(stage) == self.num_model_stages - 1


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The order in which each rank does its actions.

    Recipes make schedules; ``parse_grid`` and ``from_json`` read them.

    >>> from dualpipe_jax.schedule import one_f_one_b
    >>> schedule = one_f_one_b(2, 3)
    >>> schedule.num_ranks, schedule.num_microbatches
    (2, 3)
    >>> [str(action) for slot in schedule.orders[0] for action in slot]
    ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']

    Attributes:
      name: the schedule's name, in one line.
      placement: which rank holds which stage.
      num_microbatches: the number of microbatches of the step, over all pipes together.
      orders: ``orders[rank]`` is the sequence of slots that the rank works through.

    Raises:
      ValueError: if the name is not one line of printable characters, on which terminals and files rely.
    """

    name: str
    placement: Placement
    num_microbatches: int
    # Not in the repr: orders are long, and error messages of JAX print the repr of a Pipeline.
    orders: tuple[tuple[Slot, ...], ...] = dataclasses.field(repr=False)

    def __post_init__(self):
        if not self.name.isprintable():
            raise ValueError(
                f"Schedule: name {self.name!r} has line breaks or control characters; "
                "give one line of printable characters"
            )
        object.__setattr__(self, "num_microbatches", operator.index(self.num_microbatches))

    @property
    def num_ranks(self) -> int:
        """Positions on the mesh's pp axis."""
        return self.placement.num_ranks

    @property
    def microbatches_per_pipe(self) -> int:
        """The number of microbatches of each pipe; microbatch m of pipe p is number ``p * this + m`` of the batch."""
        return self.num_microbatches // self.placement.num_pipes
