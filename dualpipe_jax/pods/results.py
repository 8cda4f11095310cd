"""The results of a dry run, as values. ``plain`` converts them to JSON. Loads no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.pods.stage_memory import StageMemory
from dualpipe_jax.schedule.lowering.unit_key import UnitKey


@dataclasses.dataclass(frozen=True)
class TargetFigures:
    """A target: its name, the number of its devices, and the figures of one device.

    Figures are those of ``inspect.target.Device``. ``source`` says where the peak, ``flops``, comes from.
    """

    name: str
    devices: int
    memory: int
    flops: float
    bandwidth: float
    clock: float
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The number of parameters: of the whole model, those that one token uses, and those that one device stores."""

    total: int
    active: int
    device: int


@dataclasses.dataclass(frozen=True)
class MemorySaving:
    """An option that saves memory: bytes that a device needs with it and those before it, and its price in words."""

    option: str
    needed: int
    price: str


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
      kinds: exact counts by kind; see ``ahead.memory_by_kind``.
      total: the sum of all kinds.
      beyond: bytes that the compiled program takes beyond its count; None where the compiler reported no
        memory.
      needed: all bytes that are needed; see ``weigh``.
      limit: the memory of a device.
      fits: whether the limit is enough.
      share: sizes of a rank's whole share of the model: the fields of a ``MemoryModel``; see
        ``ahead.rank_memory``.
      kept: what stages keep of a microbatch, from which other schedules are counted; see
        ``stage_memory.reserved_bytes``.
      remedies: options that together make the step fit, where it does not; or the one entry with all that
        help.
    """

    kinds: Mapping[str, int]
    total: int
    beyond: int | None
    needed: int
    limit: int
    fits: bool
    share: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kept: StageMemory | None = None
    remedies: tuple[MemorySaving, ...] = ()


@dataclasses.dataclass(frozen=True)
class LinkTraffic:
    """Traffic of one dispatch: copies of a token across and inside nodes, and the bytes of all tokens of a device."""

    across: float
    inside: float
    bytes_across: float
    bytes_inside: float


@dataclasses.dataclass(frozen=True)
class Links:
    """The dispatch of one device's tokens in one layer over several nodes, under random routing.

    Attributes:
      nodes: the number of nodes over which the experts are sharded.
      tokens: the number of tokens of one device.
      used: the way of dispatch that the step uses, a key of ``ways``.
      ways: the traffic of each way of dispatch.
    """

    nodes: int
    tokens: int
    used: str
    ways: Mapping[str, LinkTraffic]


@dataclasses.dataclass(frozen=True)
class Unit:
    """One guarded unit, run once.

    Attributes:
      cycles: cycles from its first instruction to its last.
      computation: cycles in which the core works.
      communication: cycles that its collectives take, hidden or not; None if a rate is missing.
      exposed: cycles in which the core waits for collectives.
      unpriced: the number of instructions without a price, which make ``cycles`` a lower bound.
      flops: multiplications and additions of its matrix products; None where they were not counted.
      matmuls: cycles of the instructions that contain matrix products.
      stages: all stages of the model on which it works; empty where they are not known, and for a pair, which
        its two kinds describe.
      over_limit: ratio of cycles to the larger of computation and communication: 1 is the best possible.
      over_sum: ratio of cycles to the sum of computation and communication: at 1 nothing is hidden.
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
class CollectiveTotals:
    """Sums over several collectives: their cycles, the cycles in which the core waits, and the hidden share.

    Attributes:
      count, sync: the number of collectives, and of the synchronous ones among them.
      payload: bytes that a device gives or gets, whichever is more, in each of them, summed.
      cycles, exposed, waits, hidden: the sums of ``inspect.Collective``'s durations, exposed and waits, and
        the hidden share; None where a rate is missing, ``hidden`` also where there is nothing to hide.
      each: cycles of the longest one.
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
    """One all-to-all; see ``inspect.Collective``."""

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
    """A collective that is not wholly hidden; see ``inspect.exposure.Exposure``. ``words`` is its text."""

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
    """A computation with collectives: cycles in the compiler's order, and a lower bound for any order."""

    name: str
    context: str
    cycles: float
    least: float


@dataclasses.dataclass(frozen=True)
class Overheads:
    """Cycles of a tick outside its units, and of a step outside its ticks; see ``units.overheads``."""

    tick: float
    step: float


@dataclasses.dataclass(frozen=True)
class CopyInLoop:
    """A copy in a loop. ``of_state``: whether its shape and dtype are those of a pool, a sum or a parameter."""

    name: str
    nbytes: int
    context: str
    op_name: str
    array: str
    of_state: bool


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What was compiled, and what its program says.

    Attributes:
      what: see ``Request.compile``; "text" for a program that was compiled before, "timed" where units were
        run.
      out_of_memory: the compiler's message where it refused; nothing was read then.
      options: the options that the compiler was given.
      seconds: the seconds of "lowering" and of "compiling".
      all_to_all, all_to_alls: the all-to-alls of overlapped pairs where there are any, else all of the
        program.
      followed: for serving, the all-to-alls but the last one, after which a whole model would continue.
      file, others: for a text, its file, and the names of the files of other programs in the same folder.
      by_kind: for a text, all collectives by kind.
      exposed, orders: for a text, the collectives that are not wholly hidden, the most expensive first, and
        the computations that contain them.
      sends: the sends of a tick to neighbours, outside its units.
      sends_exposed: cycles of a tick's sends beyond the work of its unit, by op; "" is a tick without a unit.
      units: see ``units.units_of_program`` and ``timed.measure``; for serving one unit, named by ``what``.
      overheads: cycles outside units, measured guards among them; None where there are no ticks.
      update: the program's update, run once; None where there is none, or where it was not compiled.
      cores: the number of cores that all devices share; None where each device has its own.
      at_once: the number of ranks whose work these cores do at the same time.
      copies: the copies of at least 1 MiB in loops.
      memory: the compiler's own count for one device, in bytes: the fields of ``inspect.Memory``, and its
        "peak".
      scheduler: the statistics of the TPU compiler's scheduler, for each pair.
    """

    what: str
    out_of_memory: str | None = None
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    all_to_all: CollectiveTotals = CollectiveTotals()
    all_to_alls: tuple[AllToAll, ...] = ()
    followed: CollectiveTotals | None = None
    file: str = ""
    others: tuple[str, ...] = ()
    by_kind: Mapping[str, CollectiveTotals] = dataclasses.field(default_factory=dict)
    exposed: tuple[Exposed, ...] = ()
    orders: tuple[Order, ...] = ()
    sends: CollectiveTotals = CollectiveTotals()
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
        """``overheads``, or zero cycles where there are no ticks."""
        return self.overheads or Overheads(0.0, 0.0)

    @property
    def update_cycles(self) -> float:
        """Cycles of ``update``; 0 where it is None."""
        return 0.0 if self.update is None else self.update.cycles


@dataclasses.dataclass(frozen=True)
class ScheduleTime:
    """A schedule at the same costs: seconds and MFU of its step, and its bytes on a device.

    They are None where it is not defined for these numbers of ranks and microbatches. ``refused`` says why it
    is not possible, or does not fit; empty if it does.
    """

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
    """The predicted time of a step, from the cycles of its units.

    Attributes:
      cycles, ideal_cycles: cycles from the first forward to the last backward, in the engine's ticks and in
        the ideal order.
      overhead_cycles: cycles outside all ticks: pools and sums cleared, stages borrowed, gradients reduced.
      update_cycles: cycles of the program's update; None where it is not known.
      seconds, tokens, tokens_per_second: of the whole step, overhead and update included.
      mfu: the operations that the program counts, as a share of what the device does at its peak in these
        seconds.
      account: the parts of the seconds, which add up to them; the first is the program's operations at the
        peak.
      counted: what the program counts as operations, in words.
      lower_bound: whether some instructions have no price.
      assumed: the costs that other schedules need and that are assumed, for this schedule has no such units.
      costs: the costs of one stage, in cycles.
      placed: the relative costs by which the engine places actions on ticks; empty: all equal.
      share: the content for `dualpipe ... --costs FILE`: milliseconds and bytes of a rank's whole share of
        the model.
      schedules: all schedules at the same costs, those that fit first.
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
    """All that a dry run finds; None for what was not asked for.

    Attributes:
      target: the devices.
      program: the plan that was asked for, with its number of microbatches filled in.
      stage_layers: number of layers of each stage of the model; empty if the program does not say.
      parameters: numbers of parameters.
      memory: bytes on one device.
      links: what dispatch sends between nodes and inside them.
      dropped: share of the assignments of tokens to experts that find no room under uniform routing.
      products: the units F, I, W and B as if they were their matrix products alone, at the device's peak;
        empty where the peak is not known.
      compiled: what the compiler made of the step or its units.
      step: the predicted time of a step.
    """

    target: TargetFigures
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
    limit: int,
    share: Mapping[str, Any] | None = None,
    kept: StageMemory | None = None,
) -> Memory:
    """Compare the memory that is needed with the limit.

    ``needed`` is the count plus what the compiled program takes beyond the count of what it holds: a whole
    step holds all kinds, a program of the units all but the optimizer's state. It is never less than the
    count. A program that the compiler refused for memory does not fit.

    Args:
      kinds: counted bytes of a device, by kind.
      compiled: the compiled program; None: nothing was compiled.
      limit: bytes of a device.
      share, kept: see ``Memory``.
    """
    total, beyond = sum(kinds.values()), None
    if compiled is not None and compiled.memory is not None:
        there = total - (kinds["optimizer"] if compiled.what != "step" else 0)
        beyond = compiled.memory["peak"] - there
    needed = total + max(0, beyond or 0)
    refused = compiled is not None and compiled.out_of_memory is not None
    fits = needed <= limit and not refused
    return Memory(kinds, total, beyond, needed, limit, fits, share or {}, kept)
