"""Model how much of its communication a compiled program hides behind computation."""

import bisect
import dataclasses
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dualpipe_jax.inspect.collectives import Pair, collectives, matmuls
from dualpipe_jax.inspect.cycles import Collective, ComputationTime, Event, Work
from dualpipe_jax.inspect.exposure import Dependence, Exposure, explain
from dualpipe_jax.inspect.hlo import Computation, Instruction, Module, read
from dualpipe_jax.inspect.rates import Rates
from dualpipe_jax.inspect.report import OverlapReport
from dualpipe_jax.inspect.scheduler import SchedulerStatistics

FORWARD = (r"\bjvp\(",)
"""Patterns of the names that JAX gives to operations of a differentiated forward."""

BACKWARD = (r"\btranspose\(", r"\brematted_computation\b")
"""Patterns of the names of its backward, with the operations that it recomputes. They are searched first."""

MATMUL_CALLS = (
    r"gemm",
    r"cublas",
    r"matmul",
    r"triton",
    r"mosaic",
    r"tpu_custom_call",
    r"cudnn\$fmha",
    r"cutlass",
)
"""Patterns of the targets of custom calls that count as matrix products: calls of libraries, and Pallas kernels."""

_MIN_UNPRICED_BYTES = 1 << 16
"""The least bytes of an instruction's result with which it is listed as unpriced."""

_ZERO_TIME_OPCODES = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "domain"),
    *("opt-barrier", "add-dependency", "partition-id", "replica-id"),
)
"""Opcodes that take the core no time."""

_ZERO_TIME_CALLS = (
    "ConcatBitcast",
    "PrepareAsyncCallStart",
    "PrepareAsyncCallDone",
    "Sharding",
    "AllocateBuffer",
)
"""Targets of custom calls that take the core no time."""


def overlap(
    program: Any,
    rates: Rates | None = None,
    *,
    forward: Iterable[str] = FORWARD,
    backward: Iterable[str] = BACKWARD,
    matmul_calls: Iterable[str] = MATMUL_CALLS,
    trips: Mapping[str, int] | None = None,
    statistics: Iterable[SchedulerStatistics] = (),
) -> OverlapReport:
    """Report from a compiled program which work runs while each of its collectives is in flight.

    >>> import jax, jax.numpy as jnp
    >>> from dualpipe_jax import inspect, make_mesh
    >>> step = jax.shard_map(
    ...     lambda x: jax.lax.psum(x @ x.T, "ep"), mesh=make_mesh(1, 2), in_specs=jax.P("ep"), out_specs=jax.P()
    ... )
    >>> compiled = jax.jit(step).lower(jax.ShapeDtypeStruct((256, 128), jnp.float32)).compile()
    >>> report = inspect.overlap(compiled)  # print(report) shows tables
    >>> [(collective.kind, collective.form, collective.payload) for collective in report.collectives]
    [('all-reduce', 'sync', 65536)]

    The schedule is simulated in the compiler's order. An instruction takes the cycles that the compiler
    estimated for it (TPU), or those of ``rates``. A collective begins at its start, or when the previous
    collective of the same kind has ended, and runs as long as ``rates`` says; if it has not ended at its done,
    the core *waits*. *Hidden* is the part of its time during which the core works; the
    rest is *exposed*, whether the core then waits for this collective or for another. A synchronous collective is
    completely exposed. Without durations only synchronous collectives have a hidden share, 0; for the others the report
    lists the work between start and done.

    Every computation is simulated by itself and listed once. Inside another computation, a loop costs its body times
    its trips, a conditional its longest branch.

    Args:
      program: ``jax.jit(f).lower(...).compile()``, its text, or a ``Module``; for TPU, GPU or CPU.
      rates: durations that the text leaves out.
      forward, backward: regular expressions. An operation belongs to the backward if one of ``backward`` matches its
        op_name, else to the forward if one of ``forward`` does, else to neither (``unknown``). A fusion has the
        direction of its matrix products. Named scopes work: ``backward=("my_backward_scope",)``.
      matmul_calls: regular expressions for targets of custom calls that are matrix products.
      trips: numbers of trips of loops that data end (the text tells those of others), by a regular expression that is
        searched in the name of the body and the loop's op_name; the first match counts, and a loop without one has 1
        trip. For a guard of zero or one trips this chooses the tick: ``{"pair": 1, ".": 0}``.
      statistics: results of ``parse_statistics`` from the TPU compiler's log of this compilation; the report shows
        them next to its own figures, which they do not change.

    Raises:
      TypeError: if ``forward``, ``backward`` or ``matmul_calls`` is one text, whose letters would be the patterns.
      ValueError: if the program is not compiled, or its text is not that of a scheduled module.
    """
    for name, patterns in (("forward", forward), ("backward", backward), ("matmul_calls", matmul_calls)):
        if isinstance(patterns, str):
            raise TypeError(
                f"overlap: {name} is the text {patterns!r}; give regular expressions, such as [{patterns!r}]"
            )
    module = read(program)
    if not module.is_scheduled:
        raise ValueError(
            f"overlap: module {module.name} is not scheduled, so the order of its lines says nothing; pass what "
            "jax.jit(f).lower(...).compile() returns, not the text of a pass before scheduling"
        )
    simulator = _Simulator(
        module,
        rates or Rates(),
        re.compile("|".join(forward) or "(?!)"),
        re.compile("|".join(backward) or "(?!)"),
        re.compile("|".join(matmul_calls) or "(?!)", re.IGNORECASE),
        dict(trips or {}),
    )
    walks = {name: simulator.walk(name) for name in module.executed}
    exposures = sorted((e for walk in walks.values() for e in walk.exposures), key=lambda e: -e.lost)
    return OverlapReport(
        module=module.name,
        collectives=tuple(c for walk in walks.values() for c in walk.collectives),
        computations={name: walk.time for name, walk in walks.items()},
        statistics={s.computation: s for s in statistics if s.module == module.name},
        timelines={name: walk.events for name, walk in walks.items()},
        exposures=tuple(exposures),
    )


class _Walk(NamedTuple):
    time: ComputationTime
    collectives: tuple[Collective, ...]
    events: tuple[Event, ...]
    exposures: tuple[Exposure, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _Simulator:
    """The options of a simulation, and the finished walks by computation, which the callers of these need."""

    module: Module
    rates: Rates
    forward: re.Pattern[str]
    backward: re.Pattern[str]
    matmul_calls: re.Pattern[str]
    trips: dict[str, int]
    walks: dict[str, _Walk] = dataclasses.field(default_factory=dict)

    def walk(self, name: str) -> _Walk:
        """Simulate a computation in the order of its instructions; the result is cached."""
        if name not in self.walks:
            self.walks[name] = self._walk(self.module.computations[name])
        return self.walks[name]

    def _walk(self, computation: Computation) -> _Walk:
        pairs = collectives(self.module, computation)
        starts, dones = {p.start: p for p in pairs}, {p.done: p for p in pairs}
        communicates = starts.keys() | dones.keys() | {computation.position[p.issued.name] for p in pairs}
        works = [None if k in communicates else self.work(computation, i) for k, i in enumerate(computation)]
        timeline = _Timeline()
        for k, (instruction, work) in enumerate(zip(computation, works, strict=True)):
            if k in starts:
                timeline.issue(starts[k], self.duration(starts[k]), self.direction(starts[k].issued))
            if k in dones:
                timeline.wait(dones[k])
            if work is not None:
                timeline.run(work, instruction.op_name)
        found = tuple(self._collective(computation, pair, works, timeline) for pair in pairs)
        unpriced = tuple(
            i.name
            for i, work in zip(computation, works, strict=True)
            if work is not None and work.cycles is None and i.nbytes >= _MIN_UNPRICED_BYTES
        )
        context, dependence = self.module.executed[computation.name], Dependence(computation)
        least = self._least(dependence, pairs, works, timeline)
        time = ComputationTime(computation.name, context, timeline.clock, timeline.waited, unpriced, least)
        exposures = tuple(
            explain(dependence, works, pair, c, timeline.flights[c.name].queued, self.times[computation.name])
            for pair, c in zip(pairs, found, strict=True)
            if c.exposed
        )
        events = sorted(timeline.events, key=lambda event: (event.start, event.end))
        return _Walk(time, found, tuple(events), exposures)

    @functools.cached_property
    def times(self) -> dict[str, int]:
        """How often each computation runs in the program; each branch counts as often as its conditional."""
        found = {self.module.entry: 1}
        for name, (caller, instruction, _) in self.module.callers.items():
            found[name] = found[caller] * (self._trips(instruction) if instruction.opcode == "while" else 1)
        return found

    def _least(
        self, dependence: Dependence, pairs: list[Pair], works: list[Work | None], timeline: "_Timeline"
    ) -> float:
        """Return ``ComputationTime.least``; collectives of unknown duration take no time."""
        cycles = [0.0 if work is None else work.cycles or 0.0 for work in works]
        work = sum(cycles)
        kinds: defaultdict[str, float] = defaultdict(float)
        flights = {}
        for pair in pairs:
            name = pair.issued.name
            start, duration = dependence.computation.position[name], timeline.flights[name].duration or 0.0
            kinds[pair.kind] += duration
            if pair.form == "sync":
                cycles[start] += duration
            elif pair.done < len(cycles):
                flights[pair.done] = start, duration
        return max(dependence.longest(cycles, flights), work, *kinds.values())

    def _collective(
        self, computation: Computation, pair: Pair, works: list[Work | None], timeline: "_Timeline"
    ) -> Collective:
        between = tuple(work for work in works[pair.start + 1 : pair.done] if work is not None)
        flight = timeline.flights[pair.issued.name]
        return Collective(
            pair.kind,
            pair.form,
            pair.issued.name,
            computation.name,
            self.module.executed[computation.name],
            pair.issued.op_name,
            self.direction(pair.issued),
            pair.payload,
            pair.group_size,
            between,
            flight.duration,
            timeline.exposed(flight),
            flight.waits,
        )

    def duration(self, pair: Pair) -> float | None:
        """Return the cycles of a collective: by the rates, else the compiler's price of the instruction, else None."""
        known = self.rates.collective(pair.kind, pair.payload, pair.group_size, pair.groups)
        return float(pair.issued.cycles) if known is None and pair.issued.cycles is not None else known

    def work(self, computation: Computation, instruction: Instruction) -> Work | None:
        """Return the work of an instruction for the core; None if it takes the core no time."""
        if instruction.opcode in _ZERO_TIME_OPCODES or instruction.target in _ZERO_TIME_CALLS:
            return None
        if instruction.opcode.endswith(("-start", "-update", "-done")):
            return None
        cycles, waits = self._cost(computation, instruction)
        products = Counter(
            self._own_direction(i.op_name) for i in matmuls(self.module, instruction, self.matmul_calls)
        )
        direction = self.direction(instruction)
        return Work(instruction.name, instruction.opcode, cycles, waits, direction, dict(products))

    def _cost(self, computation: Computation, instruction: Instruction) -> tuple[float | None, float]:
        """Return the cycles of an instruction, and the part of these that are waits inside it."""
        times = [self.walk(name).time for name in instruction.called() if name in self.module.executed]
        if instruction.opcode == "while":
            trips = self._trips(instruction)
            asked = 0.0
            # The host reads the condition of a loop only if the number of trips is not known.
            if instruction.trips is None:
                # A text of which only a part was kept may lack the condition.
                known = [name for name in instruction.called("condition") if name in self.module.computations]
                inside = [self.walk(name).time for name in known]
                asked = sum(t.cycles for t in inside) + (trips + 1) * self.rates.host
            return trips * sum(t.cycles for t in times) + asked, trips * sum(t.waits for t in times)
        if instruction.opcode == "conditional" and times:
            longest = max(times, key=lambda t: t.cycles)
            return longest.cycles + self.rates.host, longest.waits
        if instruction.opcode == "call":
            return sum(t.cycles for t in times), sum(t.waits for t in times)
        return self.rates.instruction(self.module, computation, instruction), 0.0

    def _trips(self, loop: Instruction) -> int:
        if loop.trips is not None:
            return loop.trips
        text = f"{' '.join(loop.called('body'))} {loop.op_name}"
        return next((n for pattern, n in self.trips.items() if re.search(pattern, text)), 1)

    def direction(self, instruction: Instruction) -> str:
        """Return the direction of an instruction's matrix products if they agree, else that of its own name."""
        products = {
            self._own_direction(i.op_name) for i in matmuls(self.module, instruction, self.matmul_calls)
        }
        if len(products) == 1:
            return products.pop()
        own = self._own_direction(instruction.op_name)
        if own == "unknown" and instruction.opcode in ("async-start", "call-start"):
            names = {i.op_name for name in instruction.called() for i in self.module.inside(name)}
            inner = {self._own_direction(name) for name in names} - {"unknown"}
            return inner.pop() if len(inner) == 1 else "unknown"
        return own

    def _own_direction(self, op_name: str) -> str:
        if self.backward.search(op_name):
            return "backward"
        return "forward" if self.forward.search(op_name) else "unknown"


@dataclasses.dataclass
class _Flight:
    begin: float
    duration: float | None
    direction: str
    queued: float
    waits: float | None = None


class _Timeline:
    """The clock and the events of a simulated schedule."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.waited = 0.0
        self.work_spans: list[
            tuple[float, float, float]
        ] = []  # Work in order: its start, its end, and the share of waits in its time.
        self.free: dict[str, float] = {}  # The cycle at which the last collective of each kind ends.
        self.flights: dict[str, _Flight] = {}
        self.events: list[Event] = []

    def issue(self, pair: Pair, duration: float | None, direction: str) -> None:
        """Start a collective after those of its kind that are still running."""
        begin = max(self.clock, self.free.get(pair.kind, 0.0))
        self.free[pair.kind] = begin + (duration or 0.0)
        self.flights[pair.issued.name] = _Flight(begin, duration, direction, begin - self.clock)

    def wait(self, pair: Pair) -> None:
        """Wait until a collective has ended."""
        name, flight = pair.issued.name, self.flights[pair.issued.name]
        end = self.clock if flight.duration is None else flight.begin + flight.duration
        op_name = pair.issued.op_name
        self.events.append(Event(flight.begin, end, name, pair.kind, flight.direction, pair.kind, op_name))
        if flight.duration is None:
            return
        flight.waits = max(0.0, end - self.clock)
        if flight.waits:
            self.events.append(Event(self.clock, end, name, "wait", flight.direction, "compute", op_name))
        self.waited += flight.waits
        self.clock += flight.waits

    def run(self, work: Work, op_name: str) -> None:
        if work.cycles:
            end = self.clock + work.cycles
            about = work.name, work.opcode, work.direction, "compute", op_name, work.matmuls
            self.events.append(Event(self.clock, end, *about))
            self.work_spans.append((self.clock, end, work.waits / work.cycles))
            self.waited += work.waits
            self.clock = end

    def exposed(self, flight: _Flight) -> float | None:
        """Return the cycles of a flight without work; waits inside a loop count as spread evenly over its time."""
        if flight.duration is None or flight.waits is None:
            return None
        at, end, exposed = flight.begin, flight.begin + flight.duration, 0.0
        first = bisect.bisect_right(self.work_spans, at, key=lambda span: span[0]) - 1
        for start, stop, waiting in self.work_spans[max(0, first) :]:
            if start >= end:
                break
            exposed += max(0.0, start - at) + waiting * max(0.0, min(stop, end) - max(start, at))
            at = max(at, min(stop, end))
        return exposed + max(0.0, end - at)
