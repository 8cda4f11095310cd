"""A training step as shapes: compiled for devices that are not here, or only counted, with no array made."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import models
from dualpipe_jax.engine import (
    Pipeline,
)
from dualpipe_jax.engine.stages import homes
from dualpipe_jax.parallel import EP, NODE, PP, batch_spec
from dualpipe_jax.schedule import MemoryModel, Schedule
from dualpipe_jax.schedule.costs import stages_a_share
from train.state import TrainState, shard_moments, trainable
from train.step import make_optimizer, make_update

Tree = Any


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """All that a training step is made from.

    Attributes:
      model: the plain functions and the specs of their parameters.
      schedule: who does what in which order.
      mesh: pp x ep devices, or an abstract mesh, which is enough for counting.
      params: ShapeDtypeStructs as the engine takes parameters, with their shardings.
      tokens: of inputs and of targets, int32 [microbatches, microbatch size, sequence].
      shard_optimizer: whether the optimizer's state of replicated parameters is shared out; see ``shard_moments``.
      fuse_pairs: see ``Pipeline``.
      moments, gradient_sums: dtypes that the optimizer's averages and the sums of gradients have.
    """

    model: models.Model
    schedule: Schedule
    mesh: Mesh | AbstractMesh
    params: Tree
    tokens: jax.ShapeDtypeStruct
    shard_optimizer: bool = False
    fuse_pairs: bool = True
    moments: str = "float32"
    gradient_sums: str = "float32"

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The trainer's; how fast it moves is no matter here."""
        return make_optimizer(1e-4, clip=1.0, weight_decay=0.1, moments=self.moments)


def draw(
    model: models.Model,
    schedule: Schedule,
    mesh: Mesh | AbstractMesh,
    tokens: tuple[int, int, int],
    **options: Any,
) -> Blueprint:
    """The blueprint of a model's step on batches of (microbatches, microbatch size, sequence).

    Further fields of ``Blueprint`` are its options.
    """
    pipeline = Pipeline(model.staged, schedule, mesh, param_specs=model.param_specs)
    shapes = jax.eval_shape(lambda: pipeline.placed(model.init(jax.random.key(0))))
    lies = pipeline.shardings(shapes)
    params = jax.tree.map(
        lambda leaf, lie: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lie), shapes, lies
    )
    batch = jax.ShapeDtypeStruct(tokens, jnp.int32, sharding=NamedSharding(mesh, batch_spec(mesh)))
    return Blueprint(model, schedule, mesh, params, batch, **options)


def abstract_mesh(num_pp: int, ep: int | tuple[int, int]) -> AbstractMesh:
    """A mesh of no devices in particular, enough for counting; ep as ``make_mesh`` takes it."""
    sizes = {PP: num_pp, EP: ep} if isinstance(ep, int) else {PP: num_pp, NODE: ep[0], EP: ep[1]}
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def lower_units(blueprint: Blueprint, units: Collection[str], *, every_kind: bool = False) -> Any:
    """Some of the engine's units alone, lowered; see ``Pipeline.units``."""
    step: Any = _pipeline(blueprint).units(units, every_kind=every_kind)
    return step.lower(blueprint.params, _batch(blueprint))


def lower_step(blueprint: Blueprint) -> Any:
    """The trainer's own step, lowered: gradients, clipping, AdamW, routing biases, the old state donated."""
    value_and_grad = _pipeline(blueprint).value_and_grad
    state = abstract_state(blueprint)
    update: Any = make_update(value_and_grad, blueprint.optimizer, 1e-3, state)
    return update.lower(state, _batch(blueprint))


def abstract_state(blueprint: Blueprint) -> TrainState:
    """What ``init_state`` makes, as ShapeDtypeStructs with shardings."""
    params, optimizer = trainable(blueprint.params), blueprint.optimizer
    opt_state = jax.eval_shape(optimizer.init, params)
    everywhere = NamedSharding(blueprint.mesh, PartitionSpec())  # type: ignore[arg-type]  # an abstract mesh will do
    lying = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), opt_state
    )
    lying = optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, p: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=p.sharding),
        lying,
        params,
    )
    if blueprint.shard_optimizer:
        lying = shard_moments(lying)
    step: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    return TrainState(step, blueprint.params, lying)


def memory_by_kind(blueprint: Blueprint) -> dict[str, int]:
    """Bytes on one device of all that lasts through a step, counted exactly; values packed, tiles not padded.

    What the compiler needs besides for a moment, its temporaries, is not in it, nor what the optimizer makes new
    after the scan: by then the slots are free.

    Kinds:
      stages, shared: parameters of the stages that the device owns; and those of all, which every rank holds.
      mirrored: the second copy of the stages on a bidirectional pipe.
      optimizer: AdamW's two moments.
      gradients: sums for stages, mirrored ones, embedding and head.
      residuals: slots for what forwards keep.
      stash: slots for what the backward for the input hands to that for the weights.
      boundary: slots for inputs of stages and gradients of their outputs, and what is on its way.
      batch: tokens and targets, sums of figures.
    """
    state = _state(blueprint)
    stages = [nbytes(stage) for stage in blueprint.params["stages"].local]
    optimizer = abstract_state(blueprint).opt_state
    pools = {name: nbytes(entry) for name, entry in state.items()}
    kinds = {
        "stages": sum(stages),
        "shared": nbytes(blueprint.params["shared"]),
        "mirrored": sum(stages[source] for source, _ in homes(blueprint.schedule.placement).borrowed),
        "optimizer": nbytes(optimizer),
        "gradients": sum(size for name, size in pools.items() if _is_sum(name)),
        "residuals": sum(size for name, size in pools.items() if name.startswith("residual")),
        "stash": sum(size for name, size in pools.items() if name.startswith("stash")),
        "boundary": sum(pools[name] for name in ("x", "dy", "y_out", "dx_out")),
    }
    figures = sum(size for name, size in pools.items() if name.startswith(("loss.", "metric.")))
    return kinds | {"batch": 2 * nbytes(blueprint.tokens) + figures}


def _is_sum(name: str) -> bool:
    """Whether an entry of the engine's state is a sum of gradients."""
    return name.startswith(("own", "shared."))


def rank_memory(blueprint: Blueprint) -> tuple[MemoryModel, int]:
    """Bytes of a whole rank's share of the model, for ``choose``; and what a device holds whatever the schedule.

    "parameters" are one copy of the stages and its gradients' sums; the rest, which no schedule changes, is both
    ends with their sums, the optimizer's state and the batch. Where stages are of several kinds this is an upper bound:
    every stage counts with the pools of all kinds.
    """
    state, kinds = _state(blueprint), memory_by_kind(blueprint)
    parts = int(stages_a_share(blueprint.schedule.placement))

    def share(*pools: str) -> int:
        leaves = jax.tree.leaves([value for name, value in state.items() if name.split(".")[0] in pools])
        return parts * sum(nbytes(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)) for leaf in leaves)

    mine = tuple(f"own{k}." for k in range(len(blueprint.params["stages"].local)))
    own = sum(nbytes(value) for name, value in state.items() if name.startswith(mine))
    sizes = MemoryModel(
        residual_w=share("residual"),
        stash=share("stash"),
        boundary=share("x") // parts,
        parameters=kinds["stages"] + own,
    )
    fixed = kinds["shared"] + sum(
        nbytes(value) for name, value in state.items() if name.startswith("shared.")
    )
    return sizes, fixed + kinds["optimizer"] + kinds["batch"]


def held_arrays(blueprint: Blueprint) -> set[str]:
    """Slot pools, sums and parameters of a device, as ``array_name`` writes them: what no loop should copy.

    A pool of one slot looks like the value in it, and is left out.
    """
    state = _state(blueprint)
    pools = ("x", "dy", "residual", "stash")
    held = [leaf for name, entry in state.items() if _is_sum(name) for leaf in jax.tree.leaves(entry)]
    waiting = [entry for name, entry in state.items() if name.split(".")[0] in pools]
    held += [leaf for leaf in jax.tree.leaves(waiting) if leaf.shape[0] > 1]
    return {array_name(_HLO_NAMES.get(str(leaf.dtype), str(leaf.dtype)), leaf.shape) for leaf in held}


_HLO_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int32": "s32"}


def array_name(dtype: str, dims: tuple[int, ...]) -> str:
    """Such as ``bf16[5,2048,1024]``; dims of 1, which compilers drop and add, left out."""
    return f"{dtype}[{','.join(str(dim) for dim in dims if dim != 1)}]"


def _state(blueprint: Blueprint) -> dict[str, Tree]:
    return _pipeline(blueprint).state(blueprint.params, _batch(blueprint))


def nbytes(tree: Tree) -> int:
    """Bytes of a tree's arrays on one device; those without a sharding lie there whole."""

    def of(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return int(jnp.dtype(leaf.dtype).itemsize) * _product(shape)

    return sum(of(leaf) for leaf in jax.tree.leaves(tree))


def _product(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _pipeline(blueprint: Blueprint) -> Pipeline:
    b = blueprint
    mesh: Any = b.mesh
    return Pipeline(
        b.model.staged,
        b.schedule,
        mesh,
        param_specs=b.model.param_specs,
        accumulate_dtype=b.gradient_sums,
        fuse_pairs=b.fuse_pairs,
    )


def _batch(blueprint: Blueprint) -> Tree:
    return {"inputs": blueprint.tokens, "targets": blueprint.tokens}
