"""Explain why a collective is exposed: which work could have hidden it, and what prevented that.

Only the collective's own computation is searched: a loop in it is one instruction, and for a loop's body the next
iteration is not considered. Work can hide a collective if the collective does not depend on it, and it does not depend
on the collective, directly or through other instructions. Each collective is explained alone; the same work may be
named for several.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from dualpipe_jax.inspect.collectives import Pair
from dualpipe_jax.inspect.cycles import Collective, Work
from dualpipe_jax.inspect.hlo import Computation
from dualpipe_jax.present.numbers import format_bytes, format_cycles, percent

Cause = Literal["synchronous", "order", "link", "dependence"]

_CONTROL = re.compile(r"control-predecessors=\{([^}]*)\}")
_MAX_NAMED_PIECES = 3
"""The largest number of pieces of work that a sentence names."""

_MIN_NAMED_SHARE = 0.05
"""The least share of the exposed cycles that a piece of work must have to be named; the largest is named, too, if all
pieces together have it."""


class Piece(NamedTuple):
    """Work that could run beside a collective: the instruction's name, JAX's name of the operation, and cycles."""

    name: str
    op_name: str
    cycles: float

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(filter(None, (format_cycles(self.cycles), shorten(self.op_name))))})"


@dataclasses.dataclass(frozen=True)
class Exposure:
    """A collective that is not completely hidden, and why.

    Attributes:
      collective: the collective, with its exposed cycles.
      times: how often it runs in the program.
      cause: ``synchronous``: the core waits as long as it runs. ``order``: work that could hide at least half of
        the exposed cycles stands before its start or after its done. ``link``: another collective of its kind was still
        running after its start, for at least half of the exposed cycles. ``dependence``: none of these.
      elsewhere: cycles of the work that could hide it but does not stand between its start and its done.
      could: the largest pieces of this work, the largest first.
      queued: cycles from its start until the previous collective of its kind ended.
    """

    collective: Collective
    times: int
    cause: Cause
    elsewhere: float
    could: tuple[Piece, ...]
    queued: float

    @property
    def lost(self) -> float:
        """Exposed cycles of all its runs in the program."""
        return self.times * (self.collective.exposed or 0.0)

    @property
    def gain(self) -> float:
        """Exposed cycles of one run that the work elsewhere could hide, if no other collective used that work."""
        return min(self.collective.exposed or 0.0, self.elsewhere)

    def __str__(self) -> str:
        own, times = self.collective, "" if self.times == 1 else f"{self.times} times "
        about = ", ".join(filter(None, (own.kind, format_bytes(own.payload), shorten(own.op_name))))
        lost = f"{times}{format_cycles(own.exposed)} of {format_cycles(own.duration)} cycles exposed"
        return f"{own.name} ({about}): {lost}. {self.why}"

    @property
    def why(self) -> str:
        """The cause in words."""
        own, could = self.collective, ", ".join(map(str, self.could))
        body = " of the loop's body" if own.context.endswith(" body") else ""
        there = f"{format_cycles(self.elsewhere)} cycles of work{body} that neither feeds it nor reads it"
        if self.cause == "synchronous" and not self.could:
            return f"It is synchronous, and all work{body} feeds it or reads it: nothing could run beside it."
        if self.cause == "synchronous":
            return f"It is synchronous: the compiler lets the core wait, although there are {there}: {could}."
        if self.cause == "order":
            between = format_cycles(own.cycles_between)
            return (
                f"The scheduler's order: {there} stand before its start or behind its done ({could}), "
                f"and {between} of work between."
            )
        if self.cause == "link":
            return (
                f"The link: another {own.kind} was running for {format_cycles(self.queued)} cycles after its start, "
                "and the work that stands between was done by then."
            )
        if not self.could:
            return f"Dependence: all other work{body} feeds it or reads it, or stands between already."
        return (
            f"Dependence: most work{body} feeds it or reads it. What else there is could hide "
            f"{percent(self.gain / (own.exposed or 1.0))} of what is exposed: {could}."
        )


def shorten(op_name: str) -> str:
    """Return the last three parts of JAX's name of an operation, which are the nearest to the user's code."""
    return "/".join(op_name.split("/")[-3:])


class Dependence:
    """Which instructions of a computation depend on which others; instructions are given by their positions."""

    def __init__(self, computation: Computation):
        self.computation, position = computation, computation.position
        self._needs = [
            tuple(
                position[name]
                for name in (*i.operands, *_control_predecessors(i.attributes))
                if name in position
            )
            for i in computation
        ]

    @functools.cached_property
    def _readers(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self._needs]
        for reader, needed in enumerate(self._needs):
            for one in needed:
                found[one].append(reader)
        return found

    def related(self, at: int) -> set[int]:
        """Return the instruction, all that it depends on and all that depend on it, directly or through others."""
        return _reachable(at, self._needs) | _reachable(at, self._readers)

    def longest(self, cycles: Sequence[float], flights: Mapping[int, tuple[int, float]]) -> float:
        """Return the cycles of the longest chain of instructions in which each depends on the previous one.

        Args:
          cycles: the cycles of each instruction.
          flights: by the position of each collective's done, the position of its start and the cycles between the two.
        """
        ends = [0.0] * len(self._needs)
        for at, needed in enumerate(self._needs):
            begin = max((ends[one] for one in needed), default=0.0)
            if at in flights:
                start, duration = flights[at]
                begin = max(begin, ends[start] + duration)
            ends[at] = begin + cycles[at]
        return max(ends, default=0.0)


def _control_predecessors(attributes: str) -> list[str]:
    found = _CONTROL.search(attributes) if "control-predecessors" in attributes else None
    return re.findall(r"[\w.\-$]+", found[1]) if found else []


def _reachable(at: int, edges: Sequence[Iterable[int]]) -> set[int]:
    found, pending = {at}, [at]
    while pending:
        new = [other for other in edges[pending.pop()] if other not in found]
        found.update(new)
        pending += new
    return found


def explain(
    dependence: Dependence,
    works: Sequence[Work | None],
    pair: Pair,
    collective: Collective,
    queued: float,
    times: int,
) -> Exposure:
    """Return why a collective is exposed.

    Args:
      dependence: the dependences of the computation that issues it.
      works: the work of each instruction of this computation, None for those without.
      pair: the collective's start and done.
      collective: the collective with its cycles.
      queued, times: see ``Exposure``.
    """
    computation = dependence.computation
    related = dependence.related(computation.position[pair.issued.name])
    elsewhere = sorted(
        (
            Piece(work.name, computation.by_name[work.name].op_name, work.cycles - work.waits)
            for at, work in enumerate(works)
            if work is not None and work.cycles and at not in related and not pair.start < at < pair.done
        ),
        key=lambda piece: -piece.cycles,
    )
    cycles, exposed = sum(piece.cycles for piece in elsewhere), collective.exposed or 0.0
    cause: Cause = "dependence"
    if collective.form == "sync":
        cause = "synchronous"
    elif cycles >= exposed / 2:
        cause = "order"
    elif queued >= exposed / 2:
        cause = "link"
    least = _MIN_NAMED_SHARE * exposed
    could = [piece for piece in elsewhere[:_MAX_NAMED_PIECES] if piece.cycles >= least]
    if cycles >= least:
        could = could or elsewhere[:1]
    return Exposure(collective, times, cause, cycles, tuple(could), queued)
