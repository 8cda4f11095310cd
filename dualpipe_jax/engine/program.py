"""The program of one rank for one step: parameters in, the scan over ticks, reductions, gradients out."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from dualpipe_jax.contract import At, Report, Tree, key_at, loss_weights
from dualpipe_jax.engine import tick
from dualpipe_jax.engine.nans import NO_TICK
from dualpipe_jax.engine.slots import PoolLayout, lay_out, make_pool, make_saved_pools
from dualpipe_jax.engine.stages import borrow, give_back, stage_ownership
from dualpipe_jax.engine.state import Entry, State
from dualpipe_jax.engine.step import Step
from dualpipe_jax.engine.storage import LeafSharding, leaf_shardings, map_shardings
from dualpipe_jax.engine.tick import Tick
from dualpipe_jax.engine.traced import TracedModel, trace
from dualpipe_jax.engine.trees import raw, sum_dtype, typed, zeros
from dualpipe_jax.engine.units import StepConstants, TaskBuilder
from dualpipe_jax.parallel import PP
from dualpipe_jax.parallel.mesh import slow_links
from dualpipe_jax.schedule.lowering.alone import units_alone
from dualpipe_jax.schedule.lowering.lower import forward_only, lower
from dualpipe_jax.schedule.lowering.table import TickTable
from dualpipe_jax.split.leaves import is_floating

Outputs = Literal["none", "last_rank", "everywhere"]


class Program:
    """The program of one rank, inside shard_map.

    Its arguments on one device: the stages of its rank, leaves [1, ...]; the shared parameters as they are
    stored; the batch, leaves [num_microbatches, part of a microbatch, ...].
    """

    def __init__(
        self, step: Step, params: Tree, batch: Tree, key: Any, *, backward: bool, outputs: bool = False
    ):
        self.step, self.schedule = step, step.schedule
        self.backward, self.with_outputs, self.vary = backward, outputs, step.vary
        local = tuple(jax.tree.map(lambda leaf: leaf[0], stage) for stage in params["stages"].local)
        self.stored = {"stages": local, "shared": params["shared"]}
        types = params["shared"], local[0], jax.tree.map(lambda leaf: leaf[0], batch), key

        local, shared, batch, key = self.vary(raw((local, params["shared"], batch, key)))
        local = tuple(self._gathered(stage, in_parts=False) for stage in local)
        local = local + borrow(local, self.schedule.placement)
        own = tuple(self._gathered(stage, in_parts=True) for stage in local)
        shared = map_shardings(LeafSharding.gather, step.shardings["shared"], shared)
        self.shared, self.batch, self.key = shared, batch, key
        self.part = self.vary(_part_number(step))
        self.kinds, self.prepared, self.boundary, self.result = self._traced(own[0], *types)
        self.own = self.prepared.stages(own, shared)
        self.pool_layout: PoolLayout = lay_out(
            [kind.saved for kind in self.kinds],
            [kind.keep_input for kind in self.kinds],
            self.prepared.kind_of,
        )
        self.table: TickTable = self._table()
        self.constants = StepConstants(
            self.own,
            shared,
            batch,
            None if key is None else typed(key, types[3]),
            self.part,
            self._seeds(types[2]),
            slow_links(step.mesh),
        )
        builder = TaskBuilder(
            self.table,
            self.kinds,
            self.pool_layout,
            self.constants,
            outputs=outputs,
            fuse_pairs=step.fuse_pairs,
        )
        self.tasks = builder.tasks()

    def _gathered(self, stage: Tree, *, in_parts: bool) -> Tree:
        """The stage with all leaves cast, and with those gathered whose ``crosses_in_parts`` equals ``in_parts``."""

        def one(sharding: LeafSharding, leaf: jax.Array) -> jax.Array:
            return sharding.gather(leaf) if sharding.crosses_in_parts is in_parts else sharding.cast(leaf)

        return map_shardings(one, self.step.shardings["stages"], stage)

    def _traced(self, gathered: Tree, shared: Tree, own: Tree, batch: Tree, key: Any) -> TracedModel:
        """The model's kinds, traced.

        ``gathered`` holds one stage's parameters; the other arguments have the types of the caller's arguments.
        """
        step = self.step
        sums = (own, shared, step.accumulate_dtype) if step.wide_gradients else None
        own, shared = jax.eval_shape(lambda: (typed(gathered, own), typed(self.shared, shared)))
        at = jax.eval_shape(
            lambda: At(
                typed(jax.tree.map(lambda leaf: leaf[0], self.batch), batch),
                jnp.int32(0),
                jnp.int32(0),
                key_at(None if key is None else typed(self.key, key), 0, 0, 0),
            )
        )
        trained = jax.tree.map(lambda stop: not stop, (step.frozen["stages"], step.frozen["shared"]))
        of_at: Any = At(step.input_grads, False, False, None if key is None else False)  # type: ignore[arg-type]
        wanted = (trained, of_at) if self.backward else None
        return trace(step.model, (own, shared), at, self.schedule.placement, self.vary, wanted, sums)

    def _table(self) -> TickTable:
        step = self.step
        schedule = self.schedule if self.backward else forward_only(self.schedule)
        table = lower(schedule, step.costs, self.pool_layout.keeps)
        if not step.units:
            return table
        return units_alone(table, step.units, self._representatives() if step.every_kind else None)

    def _representatives(self) -> list[int]:
        """For each kind the number of the first kind alike.

        The kinds of the first and the last stage are alike to no other: one takes no x, the other hands none
        on.
        """
        alike, kind_of = self.step.model.alike, self.prepared.kind_of
        representatives = [
            number if number in (kind_of[0], kind_of[-1]) else alike.get(kind.name, kind.name)
            for number, kind in enumerate(self.kinds)
        ]
        return [representatives.index(each) for each in representatives]

    def _seeds(self, types: Tree) -> dict[str, jax.Array]:
        """The weight of each loss in this device's part of each microbatch, [num_microbatches].

        Their average over all parts of all microbatches is 1.
        """
        step = self.step
        names = sorted({name for kind in self.kinds for name in kind.losses})

        def weights(microbatch: Tree) -> dict[str, jax.Array]:
            return self.vary(loss_weights(step.model, typed(microbatch, types), names))

        given = lax.map(weights, self.batch)
        every = self.schedule.num_microbatches * step.num_parts
        axes = step.batch_axes
        return {name: w * (every / lax.psum(jnp.sum(w), axes)) for name, w in given.items()}

    # ------------------------------------------------------------------- the scan

    def run(self) -> State:
        return tick.run(self.tick, self.initial_state())

    def repeat(self, state: State, rows: jax.Array, times: jax.Array) -> State:
        return tick.repeat(self.tick, self.vary(state), rows, times)

    @property
    def tick(self) -> Tick:
        step = self.step
        return Tick(
            self.table,
            self.tasks,
            self.boundary,
            step.divergence,
            self.vary,
            step.debug_nans,
            step.idle_sends,
        )

    def initial_state(self) -> State:
        """The state before the first tick: uninitialised pools, nothing to send, zero sums."""
        slots = self.table.num_slots
        nothing = tick.empty_payloads(self.boundary, ("y", "dx"))
        state = State(pools={"x": make_pool(slots["x"], self.boundary)}, under_way={"y": nothing["y"]})
        for kind in self.kinds:
            state = state.put(
                losses={name: jnp.zeros((), jnp.float32) for name in kind.losses},
                metrics={name: zeros(metric) for name, metric in kind.metrics.items()},
            )
            state = state if kind.dropped is None else state.put(dropped=zeros(kind.dropped))
        if self.with_outputs:
            last = self.kinds[self.table.keeps.kind_of[-1]]
            every = self.schedule.num_microbatches
            outputs = jax.tree.map(lambda y: jnp.zeros((every, *y.shape), y.dtype), last.y)
            state = state.put(outputs=outputs)
        if self.step.debug_nans:
            state = state.put(first_bad=jnp.full((4,), NO_TICK, jnp.int32))
        if self.backward:
            saved = {
                name: make_saved_pools(slots[name], entries)
                for name, entries in self.pool_layout.types.items()
            }
            state = state.put(
                pools={"dy": make_pool(slots["dy"], nothing["dx"]), **saved}, under_way={"dx": nothing["dx"]}
            )
            sums, used = self._sums(), {entry for task in self.tasks for entry in task.changes}
            state = state.merge(sums.pick(sums.entries & used))
        return self.vary(state)

    def _sums(self) -> State:
        """Zero sums for every gradient that any unit may add to."""
        dtype, source = self.step.accumulate_dtype, self.stored["stages"]
        owners = [*range(len(source))]
        owners += [owner for owner, _ in stage_ownership(self.schedule.placement).borrowed]

        def zero_sums(seen: Tree, stored: Tree) -> dict[int, jax.Array]:
            leaves = zip(jax.tree.leaves(seen), jax.tree.leaves(stored), strict=True)
            return {
                number: jnp.zeros(leaf.shape, sum_dtype(kept.dtype, dtype))
                for number, (leaf, kept) in enumerate(leaves)
                if is_floating(kept)
            }

        return State(
            own={
                (local, number): zero
                for local, owner in enumerate(owners)
                for number, zero in zero_sums(self.own[local], (source[owner], self.own[local][1])).items()
            },
            shared=zero_sums(self.shared, self.stored["shared"]),
            batch={
                number: jnp.zeros(leaf.shape, leaf.dtype)
                for number, leaf in enumerate(jax.tree.leaves(self.batch))
                if is_floating(leaf)
            },
        )

    # ----------------------------------------------------------------- after it

    def sums(self, state: State) -> tuple[jax.Array, Report]:
        """The objective and the report, the same on all devices."""
        every = self.schedule.num_microbatches * self.step.num_parts
        losses = {name: lax.psum(value, self.step.axes) / every for name, value in state.losses.items()}
        metrics = {name: lax.psum(value, self.step.axes) for name, value in state.metrics.items()}
        dropped = lax.psum(jnp.int32(0) if state.dropped is None else state.dropped, self.step.axes)
        return sum(losses.values(), jnp.float32(0)), Report(losses, metrics, dropped)

    def gradients(self, state: State) -> Tree:
        """The gradients: each sum reduced over the axes over which it is still partial, then scaled to a mean."""
        step, all_sums = self.step, self._sums()
        known = state.entries
        scale = 1 / (self.schedule.num_microbatches * step.num_parts)
        over = step.batch_axes

        def listed(field: str, frozen: Tree, local: int | None = None) -> list[jax.Array | None]:
            def one(leaf: int, stop: bool) -> jax.Array | None:
                key = leaf if local is None else (local, leaf)
                zero = getattr(all_sums, field).get(key)
                if zero is None or stop:
                    return None
                return getattr(state, field)[key] if Entry(field, key) in known else self.vary(zero)

            return [one(leaf, stop) for leaf, stop in enumerate(jax.tree.leaves(frozen))]

        def reduced(sums: list[Any], shardings: Tree, *more: str, in_parts: bool | None = None) -> list[Any]:
            """The sums reduced: all if ``in_parts`` is None, else those whose ``crosses_in_parts`` equals it."""

            def one(total: Any, sharding: LeafSharding) -> Any:
                chosen = total is not None and in_parts in (None, sharding.crosses_in_parts)
                return sharding.reduce(total, (*over, *more)) if chosen else total

            return [
                one(total, sharding) for total, sharding in zip(sums, leaf_shardings(shardings), strict=True)
            ]

        def kept(totals: list[Any], stored: Tree) -> list[Any]:
            rows = zip(totals, jax.tree.leaves(stored), strict=True)
            return [None if total is None else returned(scaled(total), leaf) for total, leaf in rows]

        def scaled(total: jax.Array) -> jax.Array:
            return total * jnp.asarray(scale, total.dtype)

        def returned(gradient: jax.Array, leaf: jax.Array) -> jax.Array:
            return gradient.astype(leaf.dtype) if step.accumulate_dtype is None else gradient

        frozen = step.frozen["stages"], jax.tree.map(lambda _: False, self.prepared.types)
        own = [listed("own", frozen, local) for local in range(len(self.own))]
        of_shared = listed("shared", step.frozen["shared"])
        own, of_shared = self.prepared.pull_back(self.own, self.shared, own, of_shared)
        shardings = step.shardings["stages"]
        own = [reduced(stage, shardings, in_parts=True) for stage in own]
        own = give_back(own, self.schedule.placement)
        own = [reduced(stage, shardings, in_parts=False) for stage in own]
        own = [kept(stage, leaves) for stage, leaves in zip(own, self.stored["stages"], strict=True)]
        shared = kept(reduced(of_shared, step.shardings["shared"], PP), self.stored["shared"])
        none_frozen = jax.tree.map(lambda _: False, self.batch)
        by_batch = [None if g is None else scaled(lax.psum(g, PP)) for g in listed("batch", none_frozen)]
        lead = step.placed(tuple([None if g is None else g[None] for g in stage] for stage in own))
        return {"stages": lead, "shared": shared, "batch": by_batch if step.input_grads else []}

    def outputs(self, state: State, where: Outputs) -> Tree:
        """The outputs of the last stages, [num_microbatches, ...]; None for "none".

        "last_rank" adds a leading dim of 1 for the rank; the array is zero where the rank has no last stage.
        """
        if where == "none":
            return None
        made = state.outputs
        if where == "last_rank":
            return typed(jax.tree.map(lambda a: a[None], made), self.result)
        summed = jax.tree.map(lambda a: lax.psum(a, PP).astype(a.dtype), made)  # psum makes integers of bools
        return typed(summed, self.result)

    def first_bad(self, state: State) -> jax.Array | None:
        """``State.first_bad`` with a leading dim of 1 for each axis of ``Step.axes``; None without ``debug_nans``."""
        return state.first_bad[(None,) * len(self.step.axes)] if self.step.debug_nans else None


def _part_number(step: Step) -> jax.Array:
    number = jnp.int32(0)
    for axis in step.batch_axes:
        number = number * step.mesh.shape[axis] + lax.axis_index(axis)
    return number
