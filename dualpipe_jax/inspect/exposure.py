"""Why a collective is exposed: which work could have hidden it, and what kept that work from doing so.

Only what stands in the same computation is looked at: a loop is one instruction, and what the next iteration does is
not seen. Work can hide a collective if it neither makes what the collective sends nor reads what it brings, directly or
through others. Each collective is looked at alone; several may be after the same work.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from dualpipe_jax.inspect.collectives import Pair
from dualpipe_jax.inspect.cycles import Collective, Work
from dualpipe_jax.inspect.hlo import Computation
from dualpipe_jax.present.numbers import format_bytes, format_cycles, percent

Cause = Literal["synchronous", "order", "link", "dependence"]

_CONTROL = re.compile(r"control-predecessors=\{([^}]*)\}")
_NAMED = 3
"""Pieces of work that are named in a sentence."""


@dataclasses.dataclass(frozen=True)
class Exposure:
    """A collective that is not hidden whole, and why.

    Attributes:
      collective: with the cycles of it that are exposed.
      cause: ``synchronous``: the compiler runs it while the core waits. ``order``: work that could hide at least half of
        what is exposed stands before its start or behind its done. ``link``: it waited for another one of its kind, for
        at least as long as half of what is exposed. ``dependence``: there is no such work.
      independent: cycles of all work that could run beside it, wherever that stands.
      elsewhere: cycles of those that stand before its start or behind its done.
      could: the largest pieces of the latter, the largest first.
      queued: cycles from its start until the one before it of its kind had ended.
    """

    collective: Collective
    cause: Cause
    independent: float
    elsewhere: float
    could: tuple[Work, ...]
    queued: float

    @property
    def gain(self) -> float:
        """Exposed cycles that the work elsewhere could hide, if no other collective took it."""
        return min(self.collective.exposed or 0.0, self.elsewhere)

    def __str__(self) -> str:
        own = self.collective
        what = f"{own.name} ({own.kind}, {format_bytes(own.payload)}{f', {_short(own.op_name)}' if own.op_name else ''})"
        lost = f"{format_cycles(own.exposed)} of {format_cycles(own.duration)} cycles exposed"
        return f"{what}: {lost}. {self._why()}"

    def _why(self) -> str:
        own, work = self.collective, "that neither feeds it nor reads it"
        names = ", ".join(
            f"{one.name} ({format_cycles(one.cycles)})" for one in self.could[:_NAMED]
        )
        there = f"{format_cycles(self.elsewhere)} cycles of work {work}"
        within = " of this loop's body" if " body" in own.context else ""
        if self.cause == "synchronous":
            if not self.elsewhere:
                return f"It is synchronous, and all work{within} either feeds it or reads it."
            return f"It is synchronous: the core waits, though there are {there}: {names}."
        if self.cause == "order":
            return (
                f"The scheduler's order: {there} stand before its start or behind its done, and "
                f"{format_cycles(own.cycles_between)} between: {names}."
            )
        if self.cause == "link":
            return (
                f"The link: for {format_cycles(self.queued)} cycles after its start another {own.kind} was still "
                f"running, and the work between had ended."
            )
        rest = f"; what there is would hide {percent(self.gain / (own.exposed or 1.0))} of it: {names}" if self.gain else ""
        return f"Dependence: almost all work{within} feeds it or reads it{rest}."


def _short(op_name: str) -> str:
    """The end of JAX's name of an operation, which is what a person wrote."""
    return "/".join(op_name.split("/")[-3:])


class Dependence:
    """Which instructions of a computation need which others."""

    def __init__(self, computation: Computation):
        self._position = computation.position
        self._needs = [self._operands(i.operands, i.attributes) for i in computation]

    def _operands(self, operands: Sequence[str], attributes: str) -> tuple[int, ...]:
        control = _CONTROL.search(attributes) if "control-predecessors" in attributes else None
        names = (*operands, *(re.findall(r"[\w.\-$]+", control[1]) if control else ()))
        return tuple(self._position[name] for name in names if name in self._position)

    @functools.cached_property
    def _readers(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self._needs]
        for reader, needed in enumerate(self._needs):
            for one in needed:
                found[one].append(reader)
        return found

    def related(self, at: int) -> set[int]:
        """Positions of all that an instruction needs or that need it, itself among them."""
        return _reached(at, self._needs) | _reached(at, self._readers)

    def longest(self, cycles: Sequence[float], flights: Mapping[int, tuple[int, float]]) -> float:
        """Cycles of the longest chain of instructions each of which needs the one before it.

        Args:
          cycles: of each instruction.
          flights: position of a done -> position of its start, and cycles between them.
        """
        ends = [0.0] * len(self._needs)
        for at, needed in enumerate(self._needs):
            began = max((ends[one] for one in needed), default=0.0)
            if at in flights:
                start, duration = flights[at]
                began = max(began, ends[start] + duration)
            ends[at] = began + cycles[at]
        return max(ends, default=0.0)


def _reached(at: int, edges: Sequence[Sequence[int]]) -> set[int]:
    found, pending = {at}, [at]
    while pending:
        for other in edges[pending.pop()]:
            if other not in found:
                found.add(other)
                pending.append(other)
    return found


def explain(
    pair: Pair, collective: Collective, works: Sequence[Work | None], dependence: Dependence, at: int, queued: float
) -> Exposure:
    """Why a collective is exposed.

    Args:
      pair: where it begins and ends.
      collective: the same with its cycles.
      works: of each instruction of its computation.
      dependence: of its computation.
      at: position of the instruction that issues it.
      queued: see ``Exposure``.
    """
    related = dependence.related(at)
    free = [(k, work) for k, work in enumerate(works) if work is not None and work.cycles and k not in related]
    elsewhere = [work for k, work in free if not pair.start < k < pair.done]
    cycles, exposed = sum(map(_useful, elsewhere)), collective.exposed or 0.0
    cause: Cause = "dependence"
    if collective.form == "sync":
        cause = "synchronous"
    elif cycles >= exposed / 2:
        cause = "order"
    elif queued >= exposed / 2:
        cause = "link"
    largest = tuple(sorted(elsewhere, key=_useful, reverse=True)[:_NAMED])
    return Exposure(collective, cause, sum(_useful(work) for _, work in free), cycles, largest, queued)


def _useful(work: Work) -> float:
    return (work.cycles or 0.0) - work.waits
