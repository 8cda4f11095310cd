"""One tick of one rank: the exchange, and the unit of the rank's row.

``Tick`` is the body of the engine's scan. It carries a ``State``; every unit names the entries that it
changes, which are updated in place, and also reads parameters, its row and the batch.
"""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dualpipe_jax.contract import Tree
from dualpipe_jax.engine import nans
from dualpipe_jax.engine.guard import Divergence, run_if, run_in_lockstep, run_one
from dualpipe_jax.engine.slots import write_slot
from dualpipe_jax.engine.state import State
from dualpipe_jax.engine.trees import Vary
from dualpipe_jax.engine.units import Row, Task
from dualpipe_jax.parallel.mesh import PP
from dualpipe_jax.parallel.p2p import send
from dualpipe_jax.schedule.lowering.table import TickTable
from dualpipe_jax.split.leaves import is_floating


@dataclasses.dataclass(frozen=True, eq=False)
class Tick:
    """What stays the same through all ticks.

    Attributes:
      table: the lowered schedule.
      tasks: the table's units, as work to do.
      boundary: types of the value that one stage hands to the next.
      divergence: how ranks run different units in one tick.
      vary: casts values to vary over the mesh's axes.
      debug_nans: whether to look for values that are not finite.
      idle_sends: whether a channel's permute also runs at ticks at which no rank awaits anything from it.
    """

    table: TickTable
    tasks: Sequence[Task]
    boundary: Tree
    divergence: Divergence
    vary: Vary
    debug_nans: bool
    idle_sends: bool

    def __call__(self, state: State, row: tuple[jax.Array, jax.Array, tuple, tuple]) -> tuple[State, None]:
        """One tick; ``row`` is (the tick's number, int32 [columns], ``TickTable.brings``, ``TickTable.runs``)."""
        number, here = row[0], Row(self.table.columns, row[1])
        # The results of the previous tick are sent now, and stored only after this tick's work: so both overlap.
        arrived = self._exchange(
            [state.under_way[channel.payload] for channel in self.table.channels], row[2]
        )
        state = self._work(state, here, row[3])
        if self.debug_nans:
            state = nans.record_first_bad(state, here, self.vary(number))
        for c, (channel, payload) in enumerate(zip(self.table.channels, arrived, strict=True)):
            state = state.put(
                pools={channel.pool: write_slot(state.pools[channel.pool], here[f"arrive{c}"], payload)}
            )
        return state, None

    def _exchange(self, payloads: list[Tree], brings: tuple[jax.Array, ...]) -> list[Tree]:
        """The payloads that the channels bring to this rank.

        ``brings`` is equal on all ranks, so that all of them take part in a permute, or none. There is one
        branch for each set of channels that some tick needs, not one conditional for each channel: in a
        program that XLA for CPU has read back from JAX's compilation cache, only the collectives of one
        branch stay in order, and ranks that start two collectives in different orders wait for ever.
        """

        def exchange(wanted: Iterable[bool], payloads: list[Tree]) -> list[Tree]:
            return [
                send(payload, channel.pairs, concurrent=True) if sent else payload
                for channel, payload, sent in zip(self.table.channels, payloads, wanted, strict=True)
            ]

        *_, every = sets = self.table.together
        if self.idle_sends or not payloads:
            return exchange(every, payloads)
        same = (jnp.asarray(sets) == jnp.stack(brings)[None]).all(axis=1)
        # The last set, all channels, serves any tick.
        number = jnp.where(same.any(), jnp.argmax(same), len(sets) - 1)
        return lax.switch(number, [functools.partial(exchange, wanted) for wanted in sets], payloads)

    def _nothing_to_send(self, state: State, payloads: Collection[str]) -> State:
        nothing = empty_payloads(self.boundary, payloads, zeroed=self.debug_nans)
        return state.put(under_way=self.vary(nothing))

    def _work(self, state: State, row: Row, runs: tuple[jax.Array, ...]) -> State:
        if self.divergence == "switch":
            return self._switch(state, row)
        state = self._nothing_to_send(state, state.under_way.keys())
        for task in self.tasks:
            wanted = functools.reduce(jnp.logical_or, [row["unit"] == number for number in task.numbers])
            if self.divergence == "loop":
                guard = functools.partial(run_if, wanted, sums=task.sums)
            else:
                anywhere = functools.reduce(jnp.logical_or, [runs[number] for number in task.numbers])
                guard = functools.partial(run_in_lockstep, anywhere, wanted)
            with jax.named_scope(task.key.scope):
                part = state.pick(task.changes)
                state = state.merge(guard(self._trip(task, row), part, row.values, *task.reads))
        return state

    def _switch(self, state: State, row: Row) -> State:
        numbers = sorted({number for task in self.tasks for number in task.numbers})
        reads = tuple(task.reads for task in self.tasks)

        def branch(number: int):
            def work(part: State, values: jax.Array, *reads: Any) -> State:
                for task, read in zip(self.tasks, reads, strict=True):
                    if number in task.numbers:
                        with jax.named_scope(task.key.scope):
                            part = part.merge(self._trip(task, row)(part, values, *read))
                return part

            return work

        position = jnp.asarray(
            [numbers.index(n) if n in numbers else -1 for n in range(len(self.table.units))] + [-1]
        )
        chosen = position.astype(jnp.int32)[row["unit"]]
        changes = dict.fromkeys(entry for task in self.tasks for entry in task.changes)
        payloads = [entry.key for entry in changes if entry.field == "under_way"]
        return state.merge(
            run_one(
                chosen,
                [branch(n) for n in numbers],
                state.pick(entry for entry in changes if entry.field != "under_way"),
                row.values,
                *reads,
                sums={entry for task in self.tasks for entry in task.sums},
                begin=functools.partial(self._nothing_to_send, payloads=payloads),
            )
        )

    def _trip(self, task: Task, row: Row):
        def trip(part: State, values: jax.Array, *reads: Tree) -> State:
            made = task.work(part, Row(row.columns, values), *reads)
            return part.merge(self.vary(made))

        return trip


def empty_payloads(boundary: Tree, payloads: Collection[str], *, zeroed: bool = False) -> dict[str, Tree]:
    """A payload for each of "y" and "dx" that is asked for, when nothing is to be sent.

    It holds whatever was in memory, or zeros if ``zeroed``, as ``nans`` needs them.
    """
    make = jnp.zeros if zeroed else lax.empty
    made_before = itertools.count()

    def nothing(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        # XLA would merge two equal arrays into one, and copy it at every tick: so each has another shape at first.
        alone = (1,) * next(made_before) + leaf.shape
        return make(alone, leaf.dtype).reshape(leaf.shape)

    leaves = jax.tree.leaves(boundary)
    made = {
        "y": jax.tree.map(nothing, boundary),
        "dx": [nothing(leaf) for leaf in leaves if is_floating(leaf)],
    }
    return {payload: made[payload] for payload in payloads}


def run(tick: Tick, state: State) -> State:
    """Run all ticks of a rank, one after another; called inside shard_map."""
    table = tick.table
    rows = lax.dynamic_index_in_dim(jnp.asarray(table.array), lax.axis_index(PP), axis=1, keepdims=False)
    ticks = (jnp.arange(table.num_ticks, dtype=jnp.int32), rows)
    every = jnp.asarray(table.array)
    return lax.scan(tick, state, (*tick.vary(ticks), table.brings(every), table.runs(every)))[0]


def repeat(tick: Tick, state: State, rows: jax.Array, times: jax.Array) -> State:
    """Run the ticks of ``rows``, int32 [ticks, ranks, columns], each ``times`` (int32 [ticks]) times.

    Called inside shard_map.
    """
    own = lax.dynamic_index_in_dim(rows, lax.axis_index(PP), axis=1, keepdims=False)
    alike = tick.table.brings(rows), tick.table.runs(rows)  # equal on all ranks

    def again(state: State, one: tuple[jax.Array, tuple, tuple, jax.Array]) -> tuple[State, None]:
        *row, times = one
        return lax.fori_loop(0, times, lambda number, state: tick(state, (number, *row))[0], state), None

    return lax.scan(again, state, (own, *alike, times))[0]
