"""The engine: one SPMD program that runs any lowered schedule."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from dualpipe_jax.contract import At, Report, StagedModel, Tree, key_at, loss_weights
from dualpipe_jax.engine import tick
from dualpipe_jax.engine.guard import Divergence
from dualpipe_jax.engine.nans import NEVER
from dualpipe_jax.engine.slots import Layout, lay_out, make_kept, make_pool
from dualpipe_jax.engine.stages import PlacedStages, borrow, give_back, homes, owned_stages
from dualpipe_jax.engine.storage import Leaf
from dualpipe_jax.engine.tick import State, Tick
from dualpipe_jax.engine.traced import Traced, trace
from dualpipe_jax.engine.trees import Vary, raw, sum_dtype, typed, zeros
from dualpipe_jax.engine.units import Surroundings, Works
from dualpipe_jax.parallel import AXES, BATCH_AXES, PP, slow_links
from dualpipe_jax.schedule import CostModel, Schedule
from dualpipe_jax.schedule.lowering.alone import units_alone
from dualpipe_jax.schedule.lowering.lower import forward_only, lower
from dualpipe_jax.schedule.lowering.table import TickTable
from dualpipe_jax.split.leaves import is_floating
from dualpipe_jax.varying import vary

Repeated = tuple[jax.Array, jax.Array]
"""A tick, int32 [ranks, columns], and how often it is run."""
Outputs = Literal["none", "last_rank", "everywhere"]


@dataclasses.dataclass(frozen=True)
class Results:
    """What a program gives, on the outside of shard_map.

    Attributes:
      objective, report: see ``Report``.
      gradients: {"stages": PlacedStages of lists, "shared": list, "batch": list}, over floating leaves, None for those
        without a gradient; None forward only.
      outputs: what the last stage returned; None unless asked for.
      first_bad: int32 [dp, pp, ep, 4], or with nodes [dp, pp, node, ep, 4], see ``tick``; None unless looked for.
    """

    objective: jax.Array
    report: Report
    gradients: Tree
    outputs: Tree
    first_bad: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model, a schedule and a mesh as a program; ``Pipeline`` documents the fields.

    With ``units`` the program holds these alone, to be compiled and looked at in a fraction of the time; what it
    computes is of no use.

    Further fields:
      layout: a ``Leaf`` for every leaf of params: {"stages": for one local stage, "shared"}.
      frozen: likewise whether it has no gradient.
    """

    model: StagedModel
    schedule: Schedule
    mesh: Mesh | AbstractMesh
    layout: Tree
    frozen: Tree
    costs: CostModel
    accumulate_dtype: Any
    fuse_pairs: bool
    idle_sends: bool
    wide_gradients: bool
    divergence: Divergence
    input_grads: bool
    check_vma: bool
    debug_nans: bool
    units: tuple[str, ...] = ()
    every_kind: bool = False

    # ------------------------------------------------------------- axes and specs

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh's axes that the engine works with; what other axes there are is the compiler's business."""
        return tuple(axis for axis in AXES if axis in self.mesh.shape)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Those over which a microbatch is cut, the first one varying slowest."""
        return tuple(axis for axis in BATCH_AXES if axis in self.mesh.shape)

    @property
    def num_parts(self) -> int:
        """Into how many parts a microbatch is cut."""
        return math.prod(self.mesh.shape[axis] for axis in self.batch_axes)

    @property
    def _vary(self) -> Vary:
        return functools.partial(vary, axes=self.axes if self.check_vma else ())

    def param_specs(self, num_owned: int) -> Tree:
        """A PartitionSpec for every leaf of placed params."""

        def over_ranks(leaf: Leaf) -> PartitionSpec:
            return PartitionSpec(PP, *leaf.stored)

        own = _map_leaf(over_ranks, self.layout["stages"])
        shared = _map_leaf(lambda leaf: leaf.stored, self.layout["shared"])
        return {"stages": self._placed((own,) * num_owned), "shared": shared}

    def _placed(self, local: tuple[Tree, ...]) -> PlacedStages:
        return PlacedStages(local, owned_stages(self.schedule.placement))

    # ------------------------------------------------------------------- programs

    def value_and_grad(
        self, params: Tree, batch: Tree, key: jax.Array | None, instead: Repeated | None = None
    ) -> Results:
        """Objective, report and gradients. ``params["stages"]`` is placed; ``instead`` of the schedule's ticks."""

        def on_rank(params: Tree, batch: Tree, key: jax.Array | None) -> Any:
            program = _Program(self, params, batch, key, backward=True)
            state = program.run(instead)
            return *program.sums(state), program.gradients(state), None, program.first_bad(state)

        return self._run(on_rank, params, batch, key, self._gradient_specs(params, batch), None)

    def forward(self, params: Tree, batch: Tree, key: jax.Array | None, outputs: Outputs) -> Results:
        """The same without gradients, and what the last stage returned, [num_microbatches, ...]."""

        def on_rank(params: Tree, batch: Tree, key: jax.Array | None) -> Any:
            program = _Program(self, params, batch, key, backward=False, outputs=outputs != "none")
            state = program.run()
            return *program.sums(state), None, program.outputs(state, outputs), program.first_bad(state)

        lead = (PP,) if outputs == "last_rank" else ()
        return self._run(on_rank, params, batch, key, None, PartitionSpec(*lead, None, self.batch_axes))

    def state(self, params: Tree, batch: Tree, key: jax.Array | None) -> State:
        """Types of what the scan carries on each device, by the entries that ``tick`` lists; computes nothing."""
        return self._shapes(_Program.initial_state, params, batch, key)

    def table(self, params: Tree, batch: Tree, key: jax.Array | None) -> TickTable:
        """What the program walks through; computes nothing."""
        found = []

        def keep(program: "_Program") -> State:
            found.append(program.table)
            return {}

        self._shapes(keep, params, batch, key)
        return found[0]

    def _shapes(self, of: Callable[["_Program"], State], params: Tree, batch: Tree, key: Any) -> State:
        """Types of what a function of one device's program returns."""
        unchecked = dataclasses.replace(self, check_vma=False)

        def on_rank(params: Tree, batch: Tree, key: jax.Array | None) -> State:
            return of(_Program(unchecked, params, batch, key, backward=True))

        # Called replicated, what it returns has the shapes that it has on one device.
        on_device = unchecked._shard_map(on_rank, params, PartitionSpec())
        return jax.eval_shape(on_device, params, batch, key)

    def _run(
        self, on_rank: Callable[..., Any], params: Tree, batch: Tree, key: Any, grads: Tree, outputs: Any
    ) -> Results:
        bad = PartitionSpec(*self.axes) if self.debug_nans else None
        specs = (PartitionSpec(), PartitionSpec(), grads, outputs, bad)
        return Results(*self._shard_map(on_rank, params, specs)(params, batch, key))

    def _shard_map(self, on_rank: Callable[..., Any], params: Tree, out_specs: Tree) -> Callable[..., Any]:
        specs = self.param_specs(len(params["stages"].local))
        return jax.shard_map(
            on_rank,
            mesh=self.mesh,
            in_specs=(specs, PartitionSpec(None, self.batch_axes), PartitionSpec()),
            out_specs=out_specs,
            axis_names=set(self.axes),
            check_vma=self.check_vma,
        )

    def _gradient_specs(self, params: Tree, batch: Tree) -> Tree:
        def listed(tree: Tree, layout: Tree, frozen: Tree, *lead: str) -> list[PartitionSpec | None]:
            rows = zip(jax.tree.leaves(tree), _leaves(layout), jax.tree.leaves(frozen), strict=True)
            return [
                None if stop or not is_floating(leaf) else PartitionSpec(*lead, *lies.stored)
                for leaf, lies, stop in rows
            ]

        stages = [
            listed(own, self.layout["stages"], self.frozen["stages"], PP) for own in params["stages"].local
        ]
        over = PartitionSpec(None, self.batch_axes)
        by_batch = [over if is_floating(leaf) else None for leaf in jax.tree.leaves(batch)]
        return {
            "stages": self._placed(tuple(stages)),
            "shared": listed(params["shared"], self.layout["shared"], self.frozen["shared"]),
            "batch": by_batch if self.input_grads else [],
        }


class _Program:
    """What one rank does, inside shard_map: parameters in, the scan, reductions, gradients out.

    Per device: stages [1, ...] of its rank, shared parameters as they are stored, batch [num_microbatches, part of a
    microbatch, ...].
    """

    def __init__(
        self, engine: Engine, params: Tree, batch: Tree, key: Any, *, backward: bool, outputs: bool = False
    ):
        self.engine, self.schedule = engine, engine.schedule
        self.backward, self.with_outputs, self.vary = backward, outputs, engine._vary
        local = tuple(jax.tree.map(lambda leaf: leaf[0], stage) for stage in params["stages"].local)
        self.stored = {"stages": local, "shared": params["shared"]}
        types = params["shared"], local[0], jax.tree.map(lambda leaf: leaf[0], batch), key

        local, shared, batch, key = self.vary(raw((local, params["shared"], batch, key)))
        own = tuple(_map_leaf(Leaf.gather, engine.layout["stages"], stage) for stage in local)
        shared = _map_leaf(Leaf.gather, engine.layout["shared"], shared)
        own = own + borrow(own, self.schedule.placement)
        self.shared, self.batch, self.key = shared, batch, key
        self.part = self.vary(_part(engine))
        self.kinds, self.prepared, self.boundary = self._traced(own[0], *types)
        self.own = self.prepared.stages(own, shared)
        self.layout: Layout = lay_out(
            [kind.kept for kind in self.kinds],
            [kind.keep_input for kind in self.kinds],
            self.prepared.kind_of,
        )
        self.table: TickTable = self._table()
        self.around = Surroundings(
            self.own,
            shared,
            batch,
            None if key is None else typed(key, types[3]),
            self.part,
            self._seeds(types[2]),
            slow_links(engine.mesh),
        )
        self.tasks = Works(self.table, self.kinds, self.layout, self.around, outputs=outputs).tasks(
            fuse_pairs=engine.fuse_pairs
        )

    def _traced(self, gathered: Tree, shared: Tree, own: Tree, batch: Tree, key: Any) -> Traced:
        """The model's kinds, given the types of parameters, of a batch and of a key as the caller has them."""
        engine = self.engine
        sums = (own, shared, engine.accumulate_dtype) if engine.wide_gradients else None
        own, shared = jax.eval_shape(lambda: (typed(gathered, own), typed(self.shared, shared)))
        at = jax.eval_shape(
            lambda: At(
                typed(jax.tree.map(lambda leaf: leaf[0], self.batch), batch),
                jnp.int32(0),
                jnp.int32(0),
                key_at(None if key is None else typed(self.key, key), 0, 0, 0),
            )
        )
        trained = jax.tree.map(lambda stop: not stop, (engine.frozen["stages"], engine.frozen["shared"]))
        of_at: Any = At(engine.input_grads, False, False, None if key is None else False)  # type: ignore[arg-type]
        wanted = (trained, of_at) if self.backward else None
        return trace(engine.model, (own, shared), at, self.schedule.placement, self.vary, wanted, sums)

    def _table(self) -> TickTable:
        engine = self.engine
        schedule = self.schedule if self.backward else forward_only(self.schedule)
        table = lower(schedule, engine.costs, self.layout.keeps)
        return units_alone(table, engine.units, every=engine.every_kind) if engine.units else table

    def _seeds(self, types: Tree) -> dict[str, jax.Array]:
        """For each loss its weight in each microbatch here, [num_microbatches], 1 on average over all parts."""
        engine = self.engine
        names = sorted({name for kind in self.kinds for name in kind.losses})

        def weights(microbatch: Tree) -> dict[str, jax.Array]:
            return self.vary(loss_weights(engine.model, typed(microbatch, types), names))

        given = lax.map(weights, self.batch)
        every = self.schedule.num_microbatches * engine.num_parts
        axes = engine.batch_axes
        return {name: w * (every / lax.psum(jnp.sum(w), axes)) if w.ndim else w for name, w in given.items()}

    # ------------------------------------------------------------------- the scan

    def run(self, instead: Repeated | None = None) -> State:
        """All ticks."""
        engine = self.engine
        body = Tick(
            self.table,
            self.tasks,
            self.boundary,
            engine.divergence,
            self.vary,
            engine.debug_nans,
            engine.idle_sends,
        )
        if instead is not None:
            return tick.repeat(body, self.initial_state(), *instead)
        return tick.run(body, self.initial_state())

    def initial_state(self) -> State:
        """Pools with nothing in them, nothing to send, zero sums."""
        slots = self.table.num_slots
        ends = tick.fresh(self.boundary)
        state: State = {"x": make_pool(slots["x"], self.boundary), "y_out": ends["y_out"]}
        for kind in self.kinds:
            state |= {f"loss.{name}": jnp.zeros((), jnp.float32) for name in kind.losses}
            state |= {f"metric.{name}": zeros(metric) for name, metric in kind.metrics.items()}
            state |= {} if kind.dropped is None else {"dropped": zeros(kind.dropped)}
        if self.with_outputs:
            last = self.kinds[self.table.keeps.kind_of[-1]]
            every = self.schedule.num_microbatches
            state["outputs"] = jax.tree.map(lambda y: jnp.zeros((every, *y.shape), y.dtype), last.y)
        if self.engine.debug_nans:
            state["first_bad"] = jnp.full((4,), NEVER, jnp.int32)
        if self.backward:
            state |= {"dy": make_pool(slots["dy"], ends["dx_out"]), "dx_out": ends["dx_out"]}
            state |= {name: make_kept(slots[name], entries) for name, entries in self.layout.types.items()}
            used = {name for task in self.tasks for name in task.changes}
            state |= {name: zero for name, zero in self._sums().items() if name in used}
        return self.vary(state)

    def _sums(self) -> State:
        """A zero for every gradient that there may be."""
        dtype, source = self.engine.accumulate_dtype, self.stored["stages"]
        owners = [*range(len(source))]
        owners += [owner for owner, _ in homes(self.schedule.placement).borrowed]
        sums = {}
        for name, seen, stored in (
            *((f"own{k}", self.own[k], (source[owner], self.own[k][1])) for k, owner in enumerate(owners)),
            ("shared", self.shared, self.stored["shared"]),
        ):
            for number, (leaf, kept) in enumerate(
                zip(jax.tree.leaves(seen), jax.tree.leaves(stored), strict=True)
            ):
                if is_floating(kept):
                    sums[f"{name}.{number}"] = jnp.zeros(leaf.shape, sum_dtype(kept.dtype, dtype))
        for number, leaf in enumerate(jax.tree.leaves(self.batch)):
            if is_floating(leaf):
                sums[f"batch.{number}"] = jnp.zeros(leaf.shape, leaf.dtype)
        return sums

    # ----------------------------------------------------------------- after it

    def sums(self, state: State) -> tuple[jax.Array, Report]:
        """The objective and the report, the same on all devices."""
        every = self.schedule.num_microbatches * self.engine.num_parts
        losses, metrics = {}, {}
        for name, value in state.items():
            if name.startswith("loss."):
                losses[name.removeprefix("loss.")] = lax.psum(value, self.engine.axes) / every
            elif name.startswith("metric."):
                metrics[name.removeprefix("metric.")] = lax.psum(value, self.engine.axes)
        dropped = lax.psum(state.get("dropped", jnp.int32(0)), self.engine.axes)
        return sum(losses.values(), jnp.float32(0)), Report(losses, metrics, dropped)

    def gradients(self, state: State) -> Tree:
        """Reduce each sum over the axes that it still owes, and scale what the device keeps of it."""
        engine, all_sums = self.engine, self._sums()
        scale = 1 / (self.schedule.num_microbatches * engine.num_parts)
        over = engine.batch_axes

        def listed(name: str, frozen: Tree, count: int) -> list[jax.Array | None]:
            def one(number: int) -> jax.Array | None:
                key = f"{name}.{number}"
                if key not in all_sums or stops[number]:
                    return None
                return state[key] if key in state else self.vary(all_sums[key])

            stops = jax.tree.leaves(frozen)
            return [one(number) for number in range(count)]

        def reduced(sums: list[Any], layout: Tree, stored: Tree, *more: str) -> list[Any]:
            rows = zip(sums, _leaves(layout), jax.tree.leaves(stored), strict=True)
            return [
                None if g is None else returned(scaled(lies.reduce(g, (*over, *more))), leaf)
                for g, lies, leaf in rows
            ]

        def scaled(total: jax.Array) -> jax.Array:
            return total * jnp.asarray(scale, total.dtype)

        def returned(gradient: jax.Array, leaf: jax.Array) -> jax.Array:
            return gradient.astype(leaf.dtype) if engine.accumulate_dtype is None else gradient

        num_own, num_shared = len(jax.tree.leaves(self.own[0])), len(jax.tree.leaves(self.shared))
        frozen = engine.frozen["stages"], jax.tree.map(lambda _: False, self.prepared.types)
        own = [listed(f"own{k}", frozen, num_own) for k in range(len(self.own))]
        of_shared = listed("shared", engine.frozen["shared"], num_shared)
        own, of_shared = self.prepared.lead_back(self.own, self.shared, own, of_shared)
        own = [
            reduced(stage, engine.layout["stages"], leaves)
            for stage, leaves in zip(
                give_back(own, self.schedule.placement), self.stored["stages"], strict=True
            )
        ]
        shared = reduced(of_shared, engine.layout["shared"], self.stored["shared"], PP)
        leaves = jax.tree.leaves(self.batch)
        by_batch = [
            None if g is None else scaled(lax.psum(g, PP))
            for g in listed("batch", [False] * len(leaves), len(leaves))
        ]
        lead = engine._placed(tuple([None if g is None else g[None] for g in stage] for stage in own))
        return {"stages": lead, "shared": shared, "batch": by_batch if engine.input_grads else []}

    def outputs(self, state: State, where: Outputs) -> Tree:
        """What the last stages returned; zeros on all ranks but theirs."""
        if where == "none":
            return None
        made = state["outputs"]
        return jax.tree.map(lambda a: a[None], made) if where == "last_rank" else lax.psum(made, PP)

    def first_bad(self, state: State) -> jax.Array | None:
        """Leading dims for the mesh's axes."""
        return state["first_bad"][(None,) * len(self.engine.axes)] if self.engine.debug_nans else None


def _part(engine: Engine) -> jax.Array:
    number = jnp.int32(0)
    for axis in engine.batch_axes:
        number = number * engine.mesh.shape[axis] + lax.axis_index(axis)
    return number


def _is_leaf(node: Any) -> bool:
    return isinstance(node, Leaf)


def _leaves(layout: Tree) -> list[Leaf]:
    return jax.tree.leaves(layout, is_leaf=_is_leaf)


def _map_leaf(function: Callable[..., Any], layout: Tree, *trees: Tree) -> Tree:
    return jax.tree.map(function, layout, *trees, is_leaf=_is_leaf)
