"""What cycles of a program go to: work, collectives, computations, and stretches of a timeline."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

DIRECTIONS = ("forward", "backward", "unknown")


class Work(NamedTuple):
    """An instruction that keeps the core busy.

    Attributes:
      name, opcode: the instruction's; a loop, a conditional or a call is one piece of work.
      cycles: how long it takes, with what it runs inside; None where it has no price.
      waits: cycles of those in which the core only waits (for collectives inside a loop).
      direction: forward, backward or unknown.
      matmuls: matrix products in it by direction, those inside loops counted once.
    """

    name: str
    opcode: str
    cycles: float | None
    waits: float
    direction: str
    matmuls: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: such as ``all-to-all``.
      form: ``async``, ``sparsecore`` (asynchronous, on the TPU's SparseCore) or ``sync``.
      name: of the instruction that starts it.
      computation, context: where it stands; the context is the path of loops and branches from the entry.
      op_name, direction: JAX's name of the operation, and whether it belongs to forward or backward.
      payload: bytes that a device gives or gets, whichever is more, its own share included.
      group_size: devices that take part together; None for permutes, or where the text does not say.
      between: work that stands between its start and its done.
      duration: cycles that it takes by the rates given; None if they do not say.
      exposed: cycles of those beside which there is no work; None if that cannot be known.
      waits: cycles that the core waits for it; less than exposed where another one is waited for meanwhile.
    """

    kind: str
    form: str
    name: str
    computation: str
    context: str
    op_name: str
    direction: str
    payload: int
    group_size: int | None
    between: tuple[Work, ...]
    duration: float | None
    exposed: float | None
    waits: float | None

    @property
    def cycles_between(self) -> float:
        """Cycles of the work between start and done, as far as they are known."""
        return sum(work.cycles - work.waits for work in self.between if work.cycles is not None)

    @property
    def matmuls(self) -> dict[str, int]:
        """Matrix products between start and done, by direction."""
        return {d: sum(work.matmuls.get(d, 0) for work in self.between) for d in DIRECTIONS}

    @property
    def matmul_cycles(self) -> dict[str, float]:
        """Cycles of the instructions between that contain matrix products, by their direction."""
        found = dict.fromkeys(DIRECTIONS, 0.0)
        for work in self.between:
            if work.matmuls and work.cycles is not None:
                found[work.direction] += work.cycles - work.waits
        return found

    @property
    def opposite_matmuls(self) -> int:
        """Matrix products between of the other direction: what a pair of forward and backward hides it with."""
        other = {"forward": "backward", "backward": "forward"}.get(self.direction)
        return self.matmuls[other] if other else 0

    @property
    def hidden(self) -> float | None:
        """Share of its time in which the core works: 1 - exposed / duration, not below 0.

        0 for a synchronous one, whatever it takes; None for another one of unknown duration.
        """
        if self.form == "sync":
            return 0.0
        if self.duration is None or self.exposed is None:
            return None
        return max(0.0, 1 - self.exposed / self.duration) if self.duration else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "between"}
        between = [work._asdict() | {"matmuls": dict(work.matmuls)} for work in self.between]
        names = ("hidden", "cycles_between", "matmuls", "matmul_cycles", "opposite_matmuls")
        return own | {name: getattr(self, name) for name in names} | {"between": between}


@dataclasses.dataclass(frozen=True)
class ComputationTime:
    """Cycles of one computation, run once.

    Attributes:
      name, context: which, and where it is run from.
      cycles: from its first instruction to its last, waits and loops inside included.
      waits: cycles in which the core only waits for collectives, its own and those of loops inside.
      unpriced: names of the instructions that make 64 KiB or more and that neither the compiler nor the rates
        price: they count 0, so that cycles is a lower bound.
      least: cycles below which no order of its instructions comes, were all collectives asynchronous: its longest chain
        of instructions that need each other, all of its work, or all collectives of one kind one after the other,
        whichever is longest.
    """

    name: str
    context: str
    cycles: float
    waits: float
    unpriced: tuple[str, ...]
    least: float = 0.0

    @property
    def work(self) -> float:
        """Cycles in which the core works."""
        return self.cycles - self.waits


class Event(NamedTuple):
    """A stretch of a timeline; times in cycles.

    Attributes:
      start, end: when.
      name: of the instruction; of a wait, that of the collective waited for.
      kind: its opcode, ``wait``, or the kind of collective.
      direction: forward, backward or unknown.
      lane: ``compute`` or the kind of collective.
      op_name: JAX's name of the operation; of a wait, that of the collective.
      matmuls: matrix products in it by direction, those inside loops counted once.
    """

    start: float
    end: float
    name: str
    kind: str
    direction: str
    lane: str
    op_name: str = ""
    matmuls: Mapping[str, int] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Total:
    """Collectives of one kind together.

    Attributes:
      kind: such as ``all-to-all``.
      count, num_sync: how many there are, and how many of them are synchronous.
      payload: bytes of all.
      duration, exposed, waits: cycles of all; None if one of them is not known.
      hidden: 1 - exposed / duration, not below 0; without durations 0 if all are synchronous, else None.
    """

    kind: str
    count: int
    num_sync: int
    payload: int
    duration: float | None
    exposed: float | None
    waits: float | None
    hidden: float | None


def sum_up(kind: str, chosen: tuple[Collective, ...]) -> Total:
    """The total of some collectives of one kind; times are None where one of them has none."""
    num_sync = sum(c.form == "sync" for c in chosen)
    duration, exposed, waits = (
        None if None in of_each else sum(of_each)
        for of_each in ([getattr(c, name) for c in chosen] for name in ("duration", "exposed", "waits"))
    )
    hidden = 0.0 if num_sync == len(chosen) else None
    if duration and exposed is not None:
        hidden = max(0.0, 1 - exposed / duration)
    payload = sum(c.payload for c in chosen)
    return Total(kind, len(chosen), num_sync, payload, duration, exposed, waits, hidden)
