"""What a dry run finds, as values; loads no JAX. ``plain`` makes JSON of them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dualpipe_jax.pods.kept import Kept
from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.schedule.lowering.unit_key import UnitKey


@dataclasses.dataclass(frozen=True)
class Machine:
    """A target: how many devices, and what each can do; see ``inspect.target.Device``, and ``source`` of its peak."""

    name: str
    devices: int
    memory: int
    flops: float
    bandwidth: float
    clock: float
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Numbers that are learnt: of the whole model, those that a token meets, and those that one device stores."""

    total: int
    active: int
    device: int


@dataclasses.dataclass(frozen=True)
class Remedy:
    """An option that makes a step need less: bytes with it and those before it, and its price in words."""

    option: str
    needed: int
    price: str


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
      kinds: counted exactly, by kind; see ``ahead.memory_by_kind``.
      total: of all kinds.
      beyond: what the compiler takes beyond what was counted of its program; None where nobody knows.
      needed: in all.
      limit: what there is; None without a target.
      fits: whether that is enough.
      share: what a whole rank's share of the model keeps: the fields of a ``MemoryModel``; see ``ahead.rank_memory``.
      kept: what stages keep of a microbatch, from which what other schedules need follows; see ``kept.set_aside``.
      remedies: where it does not fit, options that make it fit together, if any do.
    """

    kinds: Mapping[str, int]
    total: int
    beyond: int | None
    needed: int
    limit: int | None
    fits: bool
    share: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kept: Kept | None = None
    remedies: tuple[Remedy, ...] = ()


@dataclasses.dataclass(frozen=True)
class Way:
    """Copies of a token that go across nodes and inside one in a dispatch, and a device's bytes of all its tokens."""

    across: float
    inside: float
    bytes_across: float
    bytes_inside: float


@dataclasses.dataclass(frozen=True)
class Links:
    """A device's dispatch of its tokens in one layer over several nodes, by random routing.

    Attributes:
      nodes: that the experts lie on.
      tokens: of a device.
      used: the way that the step takes.
      ways: all of them.
    """

    nodes: int
    tokens: int
    used: str
    ways: Mapping[str, Way]


@dataclasses.dataclass(frozen=True)
class Unit:
    """One guarded unit, run once.

    Attributes:
      cycles: from its first instruction to its last.
      computation: cycles in which the core works.
      communication: cycles that its collectives take, hidden or not; None if a rate is missing.
      exposed: cycles in which the core waits for them.
      unpriced: instructions that nobody prices, which make cycles a lower bound.
      flops: multiplications and additions of its matrix products; None where nobody counted.
      matmuls: cycles of the instructions that hold these.
      stages: all stages of the model that it works on; empty for a pair, whose two kinds tell, and where nobody knows.
      over_limit: cycles over the larger of computation and communication: 1 is as good as can be.
      over_sum: cycles over computation and communication one after the other: 1 is nothing hidden.
    """

    cycles: float
    computation: float
    communication: float | None
    exposed: float
    unpriced: int
    flops: float | None = None
    matmuls: float = 0.0
    stages: tuple[int, ...] = ()
    over_limit: float | None = dataclasses.field(init=False)
    over_sum: float | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        sent = self.communication or 0.0
        limit, total = max(self.computation, sent), self.computation + sent
        object.__setattr__(self, "over_limit", self.cycles / limit if limit else None)
        object.__setattr__(self, "over_sum", self.cycles / total if total else None)


@dataclasses.dataclass(frozen=True)
class Shares:
    """Collectives of a kind together: cycles, those in which the core waits, and what is hidden of them.

    Attributes:
      count, sync: how many, and how many that wait at once.
      payload: bytes that a device gives to them.
      cycles, exposed, waits, hidden: see ``inspect.Collective``; None where a rate is missing, hidden also where there
        is nothing to hide.
      each: cycles of the longest.
    """

    count: int = 0
    sync: int = 0
    payload: int = 0
    cycles: float | None = None
    exposed: float | None = None
    waits: float | None = None
    hidden: float | None = None
    each: float = 0.0


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """One of them; see ``inspect.Collective``."""

    name: str
    form: str
    direction: str | None
    payload: int
    duration: float | None
    exposed: float | None
    hidden: float | None
    cycles_between: float | None = None
    matmuls: Mapping[str, int] = dataclasses.field(default_factory=dict)
    opposite_matmuls: int | None = None


@dataclasses.dataclass(frozen=True)
class Exposed:
    """A collective that is not hidden whole; see ``inspect.exposure.Exposure``, and what that says in words."""

    name: str
    kind: str
    form: str
    payload: int
    context: str
    times: int
    duration: float | None
    exposed: float
    cause: str
    elsewhere: float
    gain: float
    words: str


@dataclasses.dataclass(frozen=True)
class Order:
    """A computation with collectives: cycles in the compiler's order, and those that no order comes below."""

    name: str
    context: str
    cycles: float
    least: float


@dataclasses.dataclass(frozen=True)
class Overheads:
    """Cycles of a tick beside its units, and of a step beside its ticks; see ``units.overheads``."""

    tick: float
    step: float


@dataclasses.dataclass(frozen=True)
class CopyInLoop:
    """A copy that a loop makes; ``of_state`` where its array looks like a slot pool, a sum or a parameter."""

    name: str
    nbytes: int
    context: str
    op_name: str
    array: str
    of_state: bool


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What was compiled, and read of it.

    Attributes:
      what: see ``Request.compile``; "text" of a program that was compiled before, "timed" where units were run.
      out_of_memory: the compiler's words where it refused; nothing was read then.
      options: that the compiler was given.
      seconds: of "lowering" and of "compiling".
      all_to_all, all_to_alls: of pairs where there are some, else of all.
      followed: of serving, all but the last one, behind which a model goes on.
      file, others: of a text, where it was, and names of other programs' files beside it.
      by_kind: of a text, all collectives.
      exposed, orders: of a text, what is not hidden whole, what costs most first, and where it stands.
      sends: to the neighbours, beside the units of a tick.
      sends_exposed: cycles of a tick's sends that the work of its unit is too short for; "" is no unit.
      units: see ``units.measure``; of serving one, called by what it is.
      overheads: None where there are no ticks.
      update: what the step does with gradients, once; None where the program does nothing, or nobody looked.
      cores: that all devices share; None where each has its own.
      at_once: of how many ranks they do the work at a time.
      copies: of more than a megabyte, in loops.
      memory: the compiler's own account of one device, in bytes; see ``inspect.Memory``, and their "peak".
      scheduler: what the TPU compiler's scheduler says of each pair.
    """

    what: str
    out_of_memory: str | None = None
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    all_to_all: Shares = Shares()
    all_to_alls: tuple[AllToAll, ...] = ()
    followed: Shares | None = None
    file: str = ""
    others: tuple[str, ...] = ()
    by_kind: Mapping[str, Shares] = dataclasses.field(default_factory=dict)
    exposed: tuple[Exposed, ...] = ()
    orders: tuple[Order, ...] = ()
    sends: Shares = Shares()
    sends_exposed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    units: Mapping[UnitKey, Unit] = dataclasses.field(default_factory=dict)
    overheads: Overheads | None = None
    update: Unit | None = None
    cores: float | None = None
    at_once: float | None = None
    copies: tuple[CopyInLoop, ...] = ()
    memory: Mapping[str, int] | None = None
    scheduler: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def beside(self) -> Overheads:
        """``overheads``; no cycles where there are no ticks."""
        return self.overheads or Overheads(0.0, 0.0)

    @property
    def update_cycles(self) -> float:
        """Cycles of ``update``; 0 where nobody knows."""
        return 0.0 if self.update is None else self.update.cycles


@dataclasses.dataclass(frozen=True)
class ScheduleTime:
    """A schedule for the same costs: seconds, MFU and bytes; None where it does not serve the counts."""

    name: str
    seconds: float | None
    mfu: float | None
    memory: float | None
    refused: str


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a step's time, on average over ranks."""

    name: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The time of a step as the compiler's model has it; nothing was measured.

    Attributes:
      cycles, ideal_cycles: from the first forward to the last backward, in the engine's ticks and in the ideal order.
      overhead_cycles: beside all ticks: pools and sums cleared, stages borrowed, gradients reduced.
      update_cycles: of what is done with gradients; None where nobody knows.
      seconds, tokens, tokens_per_second, mfu: of all these cycles; the program's count of operations over the peak.
      account: what the seconds go to, from the operations at the peak on; they add up.
      counted: the program's count in words.
      lower_bound: whether some instructions have no price.
      assumed: costs that this schedule's units do not tell and other schedules need.
      costs: of one stage, in cycles.
      placed: relative costs by which the engine places actions on ticks; empty: all equal.
      share: what `dualpipe ... --costs FILE` reads, of a whole rank's share of the model: milliseconds and bytes.
      schedules: all of them for the same costs, what fits first.
    """

    cycles: float
    ideal_cycles: float
    overhead_cycles: float
    seconds: float
    tokens: int
    tokens_per_second: float
    mfu: float
    lower_bound: bool
    counted: str = ""
    update_cycles: float | None = None
    account: tuple[Part, ...] = ()
    assumed: tuple[str, ...] = ()
    costs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    placed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    share: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    schedules: tuple[ScheduleTime, ...] = ()


@dataclasses.dataclass(frozen=True)
class Answer:
    """All that a dry run finds; None for what was not asked.

    Attributes:
      target: the devices.
      program: the plan that was asked for, with its number of microbatches filled in.
      stage_layers: number of layers of each stage of the model; empty if the program does not say.
      parameters: numbers of parameters.
      memory: bytes on one device.
      links: what dispatch sends between nodes and inside them.
      dropped: share of the assignments of tokens to experts that find no room under uniform routing.
      products: F, I, W and B as if they were their matrix products alone, at the device's peak; empty where nobody
        knows it.
      compiled: what the compiler made of the step or its units.
      step: the predicted time of a step.
    """

    target: Machine | None = None
    program: Plan | None = None
    stage_layers: tuple[int, ...] = ()
    parameters: Parameters | None = None
    memory: Memory | None = None
    links: Links | None = None
    dropped: float | None = None
    products: Mapping[UnitKey, Unit] = dataclasses.field(default_factory=dict)
    compiled: Compiled | None = None
    step: Prediction | None = None


def weigh(
    kinds: Mapping[str, int],
    compiled: Compiled | None,
    limit: int | None,
    share: Mapping[str, Any] | None = None,
    kept: Kept | None = None,
) -> Memory:
    """What is needed in all, of how much, and whether that fits.

    Needed is the compiler's own figure for a whole step; else what was counted, and what a program of the units
    takes beyond what was counted of it (all but the optimizer's state); else what was counted.
    """
    total, beyond = sum(kinds.values()), None
    if compiled is not None and compiled.memory is not None:
        there = total - (kinds["optimizer"] if compiled.what != "step" else 0)
        beyond = compiled.memory["peak"] - there
    needed = total + max(0, beyond or 0)
    refused = compiled is not None and compiled.out_of_memory is not None
    fits = (limit is None or needed <= limit) and not refused
    return Memory(kinds, total, beyond, needed, limit, fits, share or {}, kept)
