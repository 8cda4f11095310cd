"""The engine: one SPMD program that runs any lowered schedule."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from dualpipe_jax.engine import checks
from dualpipe_jax.engine.model import PipelineModel, Tree
from dualpipe_jax.engine.stages import PlacedStages, borrow, give_back
from dualpipe_jax.engine.tick import ForwardPlan, State, Tick
from dualpipe_jax.engine.trees import is_floating
from dualpipe_jax.engine.varying import vary
from dualpipe_jax.parallel import EP, PP
from dualpipe_jax.schedule import CostModel, Schedule
from dualpipe_jax.schedule.lowering.alone import units_alone
from dualpipe_jax.schedule.lowering.lower import TickTable, forward_only, lower
from dualpipe_jax.split import split_backward


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model, a schedule and a mesh as a program; ``pipeline_value_and_grad`` documents the fields.

    With ``units`` the program holds these alone, to be compiled and looked at in a fraction of the time; what it
    computes is of no use.
    """

    model: PipelineModel
    schedule: Schedule
    mesh: Mesh
    has_aux: bool
    costs: CostModel
    accumulate_dtype: Any
    fuse_pairs: bool
    check_vma: bool
    debug_nans: bool
    units: tuple[str, ...] = ()

    def value_and_grad(
        self, params: Tree, specs: Tree, inputs: Tree, targets: Tree
    ) -> tuple[Any, Any, Tree, Any]:
        """Loss, aux, gradients as lists over floating leaves, and the first values that are not finite.

        ``params["stages"]`` is placed; ``specs`` has a PartitionSpec over "ep" for each leaf of params.
        """
        listed = self._listed(params, specs)
        sharded = listed | {"stages": _over_ranks(listed["stages"])}
        outs = (PartitionSpec(), PartitionSpec(), sharded, PartitionSpec(PP, EP))

        def on_rank(params, inputs, targets):
            state = self._scan(params, inputs, targets, forward=False)
            return *self._sums(state), self._gradients(state, listed), state["first_bad"][None, None]

        return self._shard_map(on_rank, specs, outs)(params, inputs, targets)

    def forward(self, params: Tree, specs: Tree, inputs: Tree, targets: Tree) -> tuple[Any, Any, Tree, Any]:
        """Loss, aux, the last stage's outputs [num_microbatches, microbatch size, ...], first bad values."""
        outs = (PartitionSpec(), PartitionSpec(), PartitionSpec(None, EP), PartitionSpec(PP, EP))

        def on_rank(params, inputs, targets):
            state = self._scan(params, inputs, targets, forward=True)
            outputs = lax.psum(state["outputs"], PP)  # zeros but on the rank of the last stage
            return *self._sums(state), outputs, state["first_bad"][None, None]

        return self._shard_map(on_rank, specs, outs)(params, inputs, targets)

    def state(self, params: Tree, specs: Tree, inputs: Tree, targets: Tree) -> State:
        """Types of what the scan carries on each device, by the entries that ``tick`` lists; computes nothing."""
        unchecked = dataclasses.replace(self, check_vma=False)

        def on_rank(params, inputs, targets):
            return unchecked._tick(params, inputs, targets, forward=False).initial_state()

        # Called replicated, what it returns has the shapes that it has on one device.
        on_device = unchecked._shard_map(on_rank, specs, PartitionSpec())
        return jax.eval_shape(on_device, params, inputs, targets)

    def _shard_map(self, on_rank: Callable[..., Any], specs: Tree, out_specs: Tree) -> Callable[..., Any]:
        in_specs = (
            specs | {"stages": _over_ranks(specs["stages"])},
            PartitionSpec(None, EP),
            PartitionSpec(None, EP),
        )
        return jax.shard_map(
            on_rank, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=self.check_vma
        )

    def _scan(self, params: Tree, inputs: Tree, targets: Tree, *, forward: bool) -> State:
        tick = self._tick(params, inputs, targets, forward=forward)
        table = tick.table
        rows = lax.dynamic_index_in_dim(jnp.asarray(table.array), lax.axis_index(PP), axis=1, keepdims=False)
        ticks = (jnp.arange(table.num_ticks, dtype=jnp.int32), rows)
        state, _ = lax.scan(tick, tick.initial_state(), vary(ticks, self.check_vma))
        return state

    def _tick(self, params: Tree, inputs: Tree, targets: Tree, *, forward: bool) -> Tick:
        # Per device: stages [1, ...] of its rank, embed and head whole (but for ep), inputs and targets
        # [num_microbatches, microbatch size / ep, ...].
        params, inputs, targets = vary((params, inputs, targets), self.check_vma)
        own = tuple(jax.tree.map(lambda leaf: leaf[0], stage) for stage in params["stages"].local)
        params = params | {"stages": own + borrow(own, self.schedule.placement)}
        plan = self._plan(params, inputs, targets, forward)
        table = self._table(forward, plan.keep_input)
        return Tick(
            model=self.model,
            table=table,
            plan=plan,
            params=params,
            inputs=inputs,
            targets=targets,
            seed=None if forward else 1 / (self.schedule.num_microbatches * self.mesh.shape[EP]),
            accumulate_dtype=self.accumulate_dtype,
            fuse_pairs=self.fuse_pairs,
            check_vma=self.check_vma,
            debug_nans=self.debug_nans,
        )

    def _table(self, forward: bool, keep_input: Literal["F", "I", "W"]) -> TickTable:
        table = lower(forward_only(self.schedule) if forward else self.schedule, self.costs, keep_input)
        return units_alone(table, self.units) if self.units else table

    def _plan(self, params: Tree, inputs: Tree, targets: Tree, forward: bool) -> Any:
        def stage(params, x):
            y, aux = self.model.stage(params, x) if self.has_aux else (self.model.stage(params, x), ())
            return vary(y, self.check_vma), vary(aux, self.check_vma)

        first = jax.tree.map(lambda leaf: leaf[0], (inputs, targets))
        checks.check_model(self.model, self.has_aux, params, *first)
        x = jax.eval_shape(self.model.embed, params["embed"], first[0])
        x = vary(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), x), self.check_vma)
        if forward:
            return ForwardPlan(stage, *jax.eval_shape(stage, params["stages"][0], x))
        return split_backward(stage, has_aux=True).trace(params["stages"][0], x)

    def _sums(self, state: State) -> tuple[jax.Array, Tree]:
        loss = lax.psum(state["loss"], (PP, EP)) / (self.schedule.num_microbatches * self.mesh.shape[EP])
        return loss, lax.psum(state["aux"], (PP, EP))

    def _gradients(self, state: State, specs: Tree) -> Tree:
        """Reduce each sum over the axes that it still owes: pp at the ends, ep where a leaf is replicated."""

        def reduce(sums, specs, *axes):
            owed = [axes if EP in _axes(spec) else (*axes, EP) for spec in specs]
            return [lax.psum(g, over) if over else g for g, over in zip(sums, owed, strict=True)]

        own = give_back([state[f"grads{k}"] for k in range(len(self.schedule.placement.stages_on[0]))],
                        self.schedule.placement)  # fmt: skip
        stages = [reduce(sums, spec) for sums, spec in zip(own, specs["stages"].local, strict=True)]
        return {
            "embed": reduce(state["embed_grads"], specs["embed"], PP),
            "stages": PlacedStages(tuple([g[None] for g in stage] for stage in stages)),
            "head": reduce(state["head_grads"], specs["head"], PP),
        }

    def _listed(self, params: Tree, specs: Tree) -> Tree:
        """The specs of gradients: lists over the floating leaves."""

        def listed(tree, specs):
            pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True)
            return [spec for leaf, spec in pairs if is_floating(leaf)]

        local = zip(params["stages"].local, specs["stages"].local, strict=True)
        stages = PlacedStages(tuple(listed(tree, spec) for tree, spec in local))
        return {"stages": stages} | {end: listed(params[end], specs[end]) for end in ("embed", "head")}


def _over_ranks(specs: Tree) -> Tree:
    """Specs of placed stages: the leading dim is the rank."""
    return jax.tree.map(lambda spec: PartitionSpec(PP, *spec), specs)


def _axes(spec: PartitionSpec) -> set[str]:
    """The mesh axes that a PartitionSpec names."""
    return {axis for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis}
