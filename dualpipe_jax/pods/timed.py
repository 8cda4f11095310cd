"""Run and time units on CPU devices of this machine. The times take the place of the compiler's cycles elsewhere.

Virtual devices share the machine's cores, so the time of a unit is counted in core seconds: the work of all
ranks adds up, and all cores do it without a pause. The CPU time of other processes is not counted. A cycle is
a nanosecond.
"""

import dataclasses
import functools
import math
import mmap
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError

from dualpipe_jax.parallel import PP
from dualpipe_jax.pods import ahead
from dualpipe_jax.pods.program import Blueprint, Tree
from dualpipe_jax.pods.results import Compiled, Overheads, Unit
from dualpipe_jax.pods.units import with_usual
from dualpipe_jax.processes import num_cores
from dualpipe_jax.schedule.lowering.alone import opening, unit_everywhere
from dualpipe_jax.schedule.lowering.table import TickTable
from dualpipe_jax.schedule.lowering.unit_key import UnitKey

CLOCK = 1e9
MIN_TICKS, MAX_TICKS = 4, 40
"""The least and the most ticks of a run."""
RUN_SECONDS = 0.25
"""Core seconds that a run should take: less is hard to tell from the time of a run outside its ticks."""
ROUNDS = 5
_PRODUCT = 1024
"""Width of the square matrices whose product measures the cores' peak."""


@dataclasses.dataclass(frozen=True)
class CpuTime:
    """The CPU seconds of a run, summed over cores, and the number of ticks that it ran."""

    seconds: float
    ticks: int


Round = Mapping[int, CpuTime]
"""The measured runs of one round, by the number of the unit, or by one of the numbers that follow."""
IDLE, IDLE_FEW, FIRST_TOUCH, UPDATE = -1, -2, -3, -4
"""Keys of a round that are no units: many ticks in which no rank works; a few such ticks; the first writes to the
memory that only a whole step allocates anew; and the update."""


class TickRunner:
    """Runs any tick of a step any number of times, with slots that hold what earlier units left there.

    A backward with empty slots, for which all tokens lie in one place, takes a fifth less time.

    Attributes:
      fresh_bytes: bytes of all devices that a step allocates anew each time and that are reused here: an
        estimate, the engine's state less this program's temporaries.
    """

    def __init__(self, blueprint: Blueprint, opening: np.ndarray, options: Mapping[str, str] | None = None):
        """Compile the program with the compiler's ``options``.

        ``opening``, int32 [ticks, ranks, columns], has the ticks that ``fill_slots`` runs.
        """
        pipeline, given = blueprint.pipeline, (blueprint.params, blueprint.batch)
        blank = pipeline.state_everywhere(*given)
        self._opening, self._once = opening, np.ones(len(opening), np.int32)
        program: Any = pipeline.rehearse
        self._program = _compile(program.lower(*given, blank, self._opening, self._once), options)
        self._given = random_arrays(given)
        memory = self._program.memory_analysis()
        kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(blank))
        self.fresh_bytes = max(0, kept - memory.temp_size_in_bytes * blueprint.mesh.size)
        self._shardings = jax.tree.map(lambda leaf: leaf.sharding, blank)
        self._state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), blank)

    def fill_slots(self) -> None:
        """Fill the slots."""
        self._run_ticks(self._opening, self._once)

    def run(self, tick: np.ndarray, times: int) -> Tree:
        """Run ``tick``, int32 [ranks, columns], ``times`` times. Returns the arrays to wait for."""
        first = np.arange(len(self._once)) == 0
        return self._run_ticks(
            np.broadcast_to(tick, self._opening.shape), np.where(first, np.int32(times), 0)
        )

    def _run_ticks(self, ticks: np.ndarray, times: np.ndarray) -> Tree:
        state = jax.device_put(self._state, self._shardings)  # JAX loses the sharding of empty arrays
        objective, gradients, self._state = self._program(*self._given, state, ticks, times)
        return objective, gradients, self._state


def measure(blueprint: Blueprint, say: Callable[[str], None], options: Mapping[str, str]) -> Compiled:
    """Time every unit of the schedule, idle ticks, and the update.

    A unit is timed in ticks in which all ranks run it that ever run it. Parameters and batches are random:
    their values do not change the time of a unit, except by how evenly tokens reach experts where nothing is
    dropped. The values that units leave for each other are computed by the units themselves; see
    ``TickRunner``.

    Raises:
      ValueError: the compiler refuses the program or one of its ``options``.
    """
    say("tracing and compiling the step")
    started = time.perf_counter()
    table = blueprint.pipeline.table(blueprint.params, blueprint.batch)
    runner = TickRunner(blueprint, opening(table), options)
    update = None if blueprint.update is None else _compile(ahead.lower_update(blueprint), options)
    seconds = {"compiling": time.perf_counter() - started}
    units = table_units(table)
    ticks = {number: unit_everywhere(table, number) for number in (IDLE, *units)}
    ticks[IDLE_FEW] = ticks[IDLE]
    times = dict.fromkeys(ticks, MIN_TICKS)

    def once() -> Round:
        found = {
            number: cpu_time(functools.partial(runner.run, tick, times[number]), times[number])
            for number, tick in ticks.items()
        }
        found[FIRST_TOUCH] = first_touch(runner.fresh_bytes)
        if update is not None:
            state = random_arrays(_inputs(update))  # anew each time: the update donates it
            found[UPDATE] = cpu_time(lambda: update(*state))
        return found

    say(f"running {len(units)} units")
    runner.fill_slots()
    once()  # warms up
    first = once()
    for number in units:
        each = max(first[number].seconds - first[IDLE_FEW].seconds, 0.0) / MIN_TICKS
        times[number] = min(MAX_TICKS, max(MIN_TICKS, math.ceil(RUN_SECONDS / each))) if each else MAX_TICKS
    times[IDLE] = MAX_TICKS
    rounds = []
    for number in range(ROUNDS):
        say(f"timing {len(units)} units, round {number + 1} of {ROUNDS}")
        rounds.append(once())
    return dataclasses.replace(read(table, blueprint, rounds, seconds), options=options)


def _compile(lowered: Any, options: Mapping[str, str] | None) -> Any:
    try:
        return lowered.compile(dict(options or {}))
    except JaxRuntimeError as error:
        raise ValueError(f"the compiler refuses this program: {str(error)[:2000]}") from None


def read(
    table: TickTable, blueprint: Blueprint, rounds: Sequence[Round], seconds: Mapping[str, float]
) -> Compiled:
    """The measured times in the form of a compiled program's figures, in cycles of ``CLOCK``."""
    model, placement = blueprint.program.model, blueprint.schedule.placement
    ranks = {number: int((table.column("unit") == number).any(axis=0).sum()) for number in table_units(table)}
    cores = float(num_cores())
    # The number of cores that one rank keeps busy.
    cores_per_rank = min(blueprint.mesh.size / blueprint.mesh.shape[PP], cores)
    name_of = {
        table.keeps.kind_of[stage]: model.kind_of[stage] for stage in range(placement.num_model_stages)
    }
    tick, beside = (statistics.median(each) for each in zip(*map(_idle, rounds), strict=True))
    taken: dict[UnitKey, list[float]] = {}
    for number, count in ranks.items():
        op, forward, backward = table.units[number]
        kinds = tuple(name_of[stand.kind] for stand in (forward, backward) if stand is not None)
        each = statistics.median(_unit_alone(found, number) for found in rounds) / count / cores_per_rank
        taken.setdefault(UnitKey(op, kinds), []).append(each * CLOCK)
    units = {key: _unit(statistics.fmean(each)) for key, each in taken.items()}
    update = [found[UPDATE].seconds for found in rounds if UPDATE in found]
    fresh = statistics.median(found[FIRST_TOUCH].seconds for found in rounds)
    return Compiled(
        "timed",
        seconds=seconds,
        units=with_usual(units, model.kind_of),
        overheads=Overheads(tick / cores * CLOCK, (beside + fresh) / cores * CLOCK),
        update=_unit(statistics.median(update) / cores * CLOCK) if update else None,
        cores=cores,
        at_once=cores / cores_per_rank,
    )


def _idle(found: Round) -> tuple[float, float]:
    """Core seconds of a tick in which no rank works, and of a run outside its ticks."""
    many, few = found[IDLE], found[IDLE_FEW]
    tick = max(0.0, (many.seconds - few.seconds) / (many.ticks - few.ticks))
    return tick, max(0.0, few.seconds - few.ticks * tick)


def _unit_alone(found: Round, number: int) -> float:
    """Core seconds of a unit, summed over all ranks that run it."""
    tick, beside = _idle(found)
    spent = found[number]
    return max(0.0, (spent.seconds - beside) / spent.ticks - tick)


def table_units(table: TickTable) -> list[int]:
    """The numbers of the units that some rank runs, sorted."""
    return sorted(set(table.column("unit").ravel().tolist()) - {-1})


def _unit(cycles: float) -> Unit:
    return Unit(cycles, cycles, None, 0.0, 0)


def cpu_time(call: Callable[[], Any], ticks: int = 0) -> CpuTime:
    """The CPU time of this process in a call, whose result is waited for."""
    before = time.process_time()
    jax.block_until_ready(call())
    return CpuTime(time.process_time() - before, ticks)


def first_touch(nbytes: int) -> CpuTime:
    """The CPU time by which the first write to ``nbytes`` of memory exceeds the second."""
    with mmap.mmap(-1, max(1, nbytes)) as memory:  # NumPy's own memory comes in huge pages, XLA's does not
        write = functools.partial(np.frombuffer(memory, np.uint8).fill, 1)
        first, again = cpu_time(write), cpu_time(write)
        del write  # holds the memory
    return CpuTime(max(0.0, first.seconds - again.seconds), 0)


def peak() -> float:
    """Operations per second of all cores together, in a product of square float32 matrices."""
    matrix = jnp.full((_PRODUCT, _PRODUCT), 1 / _PRODUCT, jnp.float32)
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(matrix, matrix))
    least = min(cpu_time(lambda: product(matrix, matrix)).seconds for _ in range(ROUNDS))
    return 2 * _PRODUCT**3 / least * num_cores()


def _inputs(compiled: Any) -> Tree:
    """The arguments of a compiled function as ShapeDtypeStructs with shardings."""
    (avals, _), (shardings, _) = compiled.in_avals, compiled.input_shardings
    return jax.tree.map(
        lambda aval, sharding: jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding),
        avals,
        shardings,
    )


def random_arrays(tree: Tree) -> Tree:
    """Random arrays of the shapes, dtypes and shardings of a tree: floats of N(0, 0.02), integers from 0 to 15."""
    rng = np.random.default_rng(0)

    def array(leaf: Any) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            values = rng.standard_normal(leaf.shape, np.float32) * np.float32(0.02)
        else:
            values = rng.integers(0, 16 if math.prod(leaf.shape) else 1, leaf.shape)
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(array, tree)
