"""A training step as shapes: compiled for devices that are not here, or only counted, with no array made."""

import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dualpipe_jax.engine.stages import stage_ownership
from dualpipe_jax.pods.kept import Kept
from dualpipe_jax.pods.program import Blueprint, Tree
from dualpipe_jax.schedule import MemoryModel
from dualpipe_jax.schedule.costs import stages_a_share


def lower_units(blueprint: Blueprint, units: Collection[str], *, every_kind: bool = False) -> Any:
    """Some of the engine's units alone, lowered; see ``Pipeline.units``."""
    step: Any = blueprint.pipeline.units(units, every_kind=every_kind)
    return step.lower(blueprint.params, blueprint.batch)


def lower_step(blueprint: Blueprint) -> Any:
    """The whole step, lowered: gradients, and what the program does with them, if it does anything."""
    value_and_grad: Any = blueprint.pipeline.value_and_grad
    if blueprint.update is None:
        return value_and_grad.lower(blueprint.params, blueprint.batch)
    return blueprint.update.lower(value_and_grad, blueprint.batch)


def lower_update(blueprint: Blueprint) -> Any:
    """What a step does with gradients that are there already, lowered alone; the program has an update.

    Arguments are the state, and in the place of a batch (objective, report) and gradients.
    """
    assert blueprint.update is not None
    made = jax.eval_shape(blueprint.pipeline.value_and_grad, blueprint.params, blueprint.batch)
    everywhere = NamedSharding(blueprint.mesh, PartitionSpec())  # type: ignore[arg-type]  # an abstract mesh will do
    lies = jax.tree.map(lambda leaf: leaf.sharding, blueprint.params)
    (report, grads), none = made, jax.dtypes.float0
    laid = (
        jax.tree.map(lambda leaf: _struct(leaf, everywhere), report),
        jax.tree.map(_struct, grads, lies, is_leaf=lambda node: node is None),
    )
    leaves, form = jax.tree.flatten(laid)
    there = [leaf for leaf in leaves if leaf.dtype != none]

    def at_hand(params: Tree, given: list[Any]) -> Any:
        del params
        own: Any = form
        rest = iter(given)
        return own.unflatten(np.zeros(s.shape, none) if s.dtype == none else next(rest) for s in leaves)

    return blueprint.update.lower(at_hand, there)


def _struct(leaf: Any, lies: Any) -> jax.ShapeDtypeStruct | None:
    if leaf is None:  # frozen
        return None
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=None if leaf.dtype == jax.dtypes.float0 else lies
    )


def memory_by_kind(blueprint: Blueprint) -> dict[str, int]:
    """Bytes on one device of all that lasts through a step, counted exactly; values packed, tiles not padded.

    What the compiler needs besides for a moment, its temporaries, is not in it, nor what the optimizer makes new
    after the scan: by then the slots are free.

    Kinds:
      stages, shared: parameters of the stages that the device owns; and those of all ranks. Both as they are stored.
      cast: copies of parameters as they are used, where that is in another dtype, or whole what is stored in parts, or
        layer by layer; and what stages make of parameters alone.
      mirrored: the second copy of the stages on a bidirectional pipe, as they are used.
      optimizer: what the program's update keeps, such as AdamW's two moments.
      gradients: sums for stages, mirrored ones, embedding and head, each like the parameter as it is used.
      residuals: slots for what forwards keep.
      stash: slots for what the backward for the input hands to that for the weights.
      boundary: slots for inputs of stages and gradients of their outputs, and what is on its way.
      batch: such as tokens and targets; sums of figures.
    """
    state, params, used = blueprint.state, blueprint.params, blueprint.used
    borrowed = stage_ownership(blueprint.schedule.placement).borrowed
    kinds = {
        "stages": nbytes(params["stages"]),
        "shared": nbytes(params["shared"]),
        "cast": _changed(params, used) + nbytes(blueprint.sketch.values),
        "mirrored": sum(nbytes(used["stages"].local[source]) for source, _ in borrowed),
        "optimizer": 0 if blueprint.update is None else nbytes(blueprint.update.state),
        "gradients": nbytes((state.own, state.shared)),
        "residuals": nbytes(state.family("residual")),
        "stash": nbytes(state.family("stash")),
        "boundary": nbytes((state.pools["x"], state.pools["dy"], state.under_way)),
    }
    return kinds | {"batch": nbytes((blueprint.batch, state.losses, state.metrics))}


def _changed(stored: Tree, used: Tree) -> int:
    """Bytes of leaves that are used in another dtype, or more of them on a device, than they are stored."""
    both = zip(jax.tree.leaves(stored), jax.tree.leaves(used), strict=True)
    return nbytes([new for old, new in both if old.dtype != new.dtype or nbytes(old) != nbytes(new)])


def rank_memory(blueprint: Blueprint) -> MemoryModel:
    """Bytes of a whole rank's share of the model, for ``choose``; "fixed" is held whatever the schedule.

    "parameters" are one copy of the stages, as it is used, what they make of it alone, and its gradients' sums; the
    rest, which no schedule changes, is both ends with their sums, the optimizer's state, the batch, and what is stored
    beside what is used.
    Where stages are of several kinds it is what most of them keep; ``set_aside`` tells kinds apart.
    """
    state, kinds, kept = blueprint.state, memory_by_kind(blueprint), kept_of(blueprint)
    parts = int(stages_a_share(blueprint.schedule.placement))

    used = nbytes(blueprint.used["stages"])
    num_mine = len(blueprint.params["stages"].local)
    mine = [total for (local, _), total in state.own.items() if local < num_mine]
    rest, beside = ("stages", "shared", "cast", "optimizer", "batch"), used + nbytes(blueprint.sketch.values)
    return MemoryModel(
        residual_i=parts * kept.by_most("FI"),
        residual_w=parts * kept.by_most("FW"),
        stash=parts * kept.by_most("IW"),
        boundary=kept.boundary,
        parameters=used + nbytes((blueprint.sketch.values[:num_mine], mine)),
        fixed=sum(kinds[kind] for kind in rest) - beside + nbytes(state.shared),
    )


def kept_of(blueprint: Blueprint) -> Kept:
    """What stages keep of a microbatch on a device, by kinds of stages and pools."""
    state, keeps = blueprint.state, blueprint.sketch.table.keeps
    kinds = range(max(keeps.kind_of) + 1)

    return Kept(
        kind_of=keeps.kind_of,
        keep_input=keeps.keep_input,
        lives=tuple(tuple(own.get(kind, "") for kind in kinds) for own in keeps.pools.values()),
        sizes=tuple(_slot(state.pools[pool]) for pool in keeps.pools),
        boundary=_slot(state.pools["x"]),
        placed=blueprint.pipeline.placing_costs,
    )


def _slot(pools: Tree) -> int:
    """Bytes of one slot of each."""
    return sum(nbytes(jax.ShapeDtypeStruct(a.shape[1:], a.dtype)) for a in jax.tree.leaves(pools))


def held_arrays(blueprint: Blueprint) -> set[str]:
    """Slot pools, sums and parameters of a device, as ``array_name`` writes them: what no loop should copy.

    A pool of one slot looks like the value in it, and is left out.
    """
    state = blueprint.state
    held = jax.tree.leaves((state.own, state.shared))
    held += [leaf for leaf in jax.tree.leaves(state.pools) if leaf.shape[0] > 1]
    return {array_name(_HLO_NAMES.get(str(leaf.dtype), str(leaf.dtype)), leaf.shape) for leaf in held}


_HLO_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int32": "s32"}


def array_name(dtype: str, dims: tuple[int, ...]) -> str:
    """Such as ``bf16[5,2048,1024]``; dims of 1, which compilers drop and add, left out."""
    return f"{dtype}[{','.join(str(dim) for dim in dims if dim != 1)}]"


def num_parameters(tree: Tree, *, device: bool = False) -> int:
    """Numbers that are learnt, of the whole tree or of what one device stores of it: integers and keys are not."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return sum(nbytes(leaf) // leaf.dtype.itemsize if device else math.prod(leaf.shape) for leaf in leaves)


def nbytes(tree: Tree) -> int:
    """Bytes of a tree's arrays on one device; those without a sharding lie there whole."""

    def of(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return int(jnp.dtype(leaf.dtype).itemsize) * math.prod(shape)

    return sum(of(leaf) for leaf in jax.tree.leaves(tree))
