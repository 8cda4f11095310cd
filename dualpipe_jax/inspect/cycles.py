"""What a program spends its cycles on: work, collectives, computations, and the events of a timeline."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

DIRECTIONS = ("forward", "backward", "unknown")


class Work(NamedTuple):
    """An instruction that keeps the core busy.

    Attributes:
      name, opcode: those of the instruction; a loop, a conditional or a call is one piece of work.
      cycles: its duration, including the computations that it runs; None if it has no price.
      waits: the part of these cycles in which the core only waits (for collectives inside a loop).
      direction: forward, backward or unknown.
      matmuls: number of matrix products in it by direction, those inside loops counted once.
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
      kind: one of ``collectives.KINDS``, such as ``all-to-all``.
      form: ``async``, ``sparsecore`` (asynchronous, on the TPU's SparseCore) or ``sync``.
      name: name of the instruction that starts it.
      computation, context: the computation that issues it, and the path of loops and branches to it from the entry.
      op_name, direction: JAX's name of the operation, and whether it belongs to forward or backward.
      payload: bytes that a device sends or receives, whichever is more, its own share included.
      group_size: number of devices in a group; None for permutes, or if the text does not say.
      between: the work between its start and its done.
      duration: cycles that it takes by the given rates; None if they do not say.
      exposed: the part of these cycles in which the core does no work; None if that cannot be known.
      waits: cycles that the core waits for it; less than exposed if the core waits for another one meanwhile.
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
        """Cycles of the work between start and done, without its waits; work without a price counts 0."""
        return sum(work.cycles - work.waits for work in self.between if work.cycles is not None)

    @property
    def matmuls(self) -> dict[str, int]:
        """Number of matrix products between start and done, by direction."""
        return {d: sum(work.matmuls.get(d, 0) for work in self.between) for d in DIRECTIONS}

    @property
    def matmul_cycles(self) -> dict[str, float]:
        """Cycles of those instructions between start and done that contain matrix products, by their direction."""
        found = dict.fromkeys(DIRECTIONS, 0.0)
        for work in self.between:
            if work.matmuls and work.cycles is not None:
                found[work.direction] += work.cycles - work.waits
        return found

    @property
    def opposite_matmuls(self) -> int:
        """Number of matrix products of the other direction between start and done; in a pair, they hide it."""
        other = {"forward": "backward", "backward": "forward"}.get(self.direction)
        return self.matmuls[other] if other else 0

    @property
    def hidden(self) -> float | None:
        """Share of its time in which the core works: 1 - exposed / duration, not below 0; 1 for a duration of 0.

        It is 0 for any synchronous collective, and None for other collectives of unknown duration.
        """
        if self.form == "sync":
            return 0.0
        if self.duration is None or self.exposed is None:
            return None
        return max(0.0, 1 - self.exposed / self.duration) if self.duration else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and properties as plain values, for JSON."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "between"}
        between = [work._asdict() | {"matmuls": dict(work.matmuls)} for work in self.between]
        names = ("hidden", "cycles_between", "matmuls", "matmul_cycles", "opposite_matmuls")
        return own | {name: getattr(self, name) for name in names} | {"between": between}


@dataclasses.dataclass(frozen=True)
class ComputationTime:
    """Cycles of one computation, run once.

    Attributes:
      name, context: its name, and the path of loops, branches and calls to it from the entry.
      cycles: cycles from its first instruction to its last, waits and loops inside included.
      waits: cycles in which the core only waits for collectives, its own and those of loops inside.
      unpriced: names of the instructions that make 64 KiB or more and that neither the compiler nor the rates
        price: they count 0, so that cycles is a lower bound.
      least: a lower bound of cycles over all orders of its instructions with all collectives asynchronous: the
        longest chain of dependent instructions, all of its work, or all collectives of one kind one after the other,
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
    """One instruction, wait or collective on a timeline; times in cycles.

    Attributes:
      start, end: cycles from the start of the computation.
      name: name of the instruction; for a wait, of the collective that the core waits for.
      kind: its opcode, ``wait``, or the kind of collective.
      direction: forward, backward or unknown.
      lane: ``compute`` or the kind of collective.
      op_name: JAX's name of the operation; for a wait, of the collective.
      matmuls: number of matrix products in it by direction, those inside loops counted once.
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
    """Sums over collectives of one kind.

    Attributes:
      kind: one of ``collectives.KINDS``, such as ``all-to-all``.
      count, num_sync: number of collectives, and number of synchronous ones.
      payload: bytes of all payloads.
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
    """Return the total of collectives of one kind; a time is None if one of the collectives has none."""
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
