"""A training step as shapes: compiled for devices that this machine lacks, or only counted. No array is made."""

import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dualpipe_jax.engine.stages import stage_ownership
from dualpipe_jax.pods.program import Blueprint, Tree
from dualpipe_jax.pods.stage_memory import StageMemory
from dualpipe_jax.schedule import MemoryModel
from dualpipe_jax.schedule.costs import stages_a_share


def lower_units(blueprint: Blueprint, units: Collection[str], *, every_kind: bool = False) -> Any:
    """Lower some of the engine's units alone; see ``Pipeline.units``."""
    step: Any = blueprint.pipeline.units(units, every_kind=every_kind)
    return step.lower(blueprint.params, blueprint.batch)


def lower_step(blueprint: Blueprint) -> Any:
    """Lower the whole step: the gradients, and the program's update if it has one."""
    value_and_grad: Any = blueprint.pipeline.value_and_grad
    if blueprint.update is None:
        return value_and_grad.lower(blueprint.params, blueprint.batch)
    return blueprint.update.lower(value_and_grad, blueprint.batch)


def lower_update(blueprint: Blueprint) -> Any:
    """Lower the program's update alone, for gradients that are given. The program must have an update.

    The lowered function takes the parameters, the state, and in the place of a batch the leaves of
    (objective, report) and of the gradients.
    """
    assert blueprint.update is not None
    made = jax.eval_shape(blueprint.pipeline.value_and_grad, blueprint.params, blueprint.batch)
    everywhere = NamedSharding(blueprint.mesh, PartitionSpec())  # type: ignore[arg-type]  # an abstract mesh will do
    shardings = jax.tree.map(lambda leaf: leaf.sharding, blueprint.params)
    (report, grads), none = made, jax.dtypes.float0
    laid = (
        jax.tree.map(lambda leaf: _shape_struct(leaf, everywhere), report),
        jax.tree.map(_shape_struct, grads, shardings, is_leaf=lambda node: node is None),
    )
    leaves, form = jax.tree.flatten(laid)
    there = [leaf for leaf in leaves if leaf.dtype != none]

    def given_gradients(params: Tree, given: list[Any]) -> Any:
        del params
        own: Any = form
        rest = iter(given)
        return own.unflatten(np.zeros(s.shape, none) if s.dtype == none else next(rest) for s in leaves)

    return blueprint.update.lower(given_gradients, there)


def _shape_struct(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct | None:
    if leaf is None:  # frozen
        return None
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=None if leaf.dtype == jax.dtypes.float0 else sharding
    )


def memory_by_kind(blueprint: Blueprint) -> dict[str, int]:
    """Count exactly the bytes on one device of all arrays that last through a step; tiles are not padded.

    The compiler's temporaries are not counted, nor the arrays that the optimizer makes after the scan: by
    then the slots are free.

    Kinds:
      stages, shared: the parameters of the stages that the device owns; and those that all ranks have. As
        stored.
      cast: copies of parameters in the form in which they are used, where that is another dtype, or whole
        arrays that are stored in parts, or layer by layer; and values that stages compute of parameters
        alone.
      mirrored: the second copy of the stages on a bidirectional pipe, as used.
      optimizer: the state of the program's update, such as AdamW's two moments.
      gradients: sums for stages, mirrored stages, embedding and head, each like the parameter as it is used.
      residuals: slots for the values that forwards keep.
      stash: slots for the values that the backward for the input hands to the backward for the weights.
      boundary: slots for inputs of stages and gradients of their outputs, and the arrays that are being sent.
      batch: the batch, such as tokens and targets; the sums of losses and metrics.
    """
    state, params, used = blueprint.state, blueprint.params, blueprint.used
    borrowed = stage_ownership(blueprint.schedule.placement).borrowed
    kinds = {
        "stages": nbytes(params["stages"]),
        "shared": nbytes(params["shared"]),
        "cast": _converted_bytes(params, used) + nbytes(blueprint.sketch.values),
        "mirrored": sum(nbytes(used["stages"].local[source]) for source, _ in borrowed),
        "optimizer": 0 if blueprint.update is None else nbytes(blueprint.update.state),
        "gradients": nbytes((state.own, state.shared)),
        "residuals": nbytes(state.family("residual")),
        "stash": nbytes(state.family("stash")),
        "boundary": nbytes((state.pools["x"], state.pools["dy"], state.under_way)),
    }
    return kinds | {"batch": nbytes((blueprint.batch, state.losses, state.metrics))}


def _converted_bytes(stored: Tree, used: Tree) -> int:
    """Bytes, as used, of the leaves whose dtype or number of bytes on a device differs from the stored leaf's."""
    both = zip(jax.tree.leaves(stored), jax.tree.leaves(used), strict=True)
    return nbytes([new for old, new in both if old.dtype != new.dtype or nbytes(old) != nbytes(new)])


def rank_memory(blueprint: Blueprint) -> MemoryModel:
    """Bytes of a whole rank's share of the model, for ``choose``.

    "parameters" is one copy of the stages as used, the values that they compute of parameters alone, and the
    sums of their gradients. "fixed" is held whatever the schedule: embedding and head with their sums, the
    optimizer's state, the batch, and the stored parameters where they are not those that are used. Of several
    kinds of stages, the kind of most stages is counted; ``reserved_bytes`` tells kinds apart.
    """
    state, kinds, kept = blueprint.state, memory_by_kind(blueprint), stage_memory_of(blueprint)
    parts = int(stages_a_share(blueprint.schedule.placement))

    used = nbytes(blueprint.used["stages"])
    num_mine = len(blueprint.params["stages"].local)
    mine = [total for (local, _), total in state.own.items() if local < num_mine]
    rest, beside = ("stages", "shared", "cast", "optimizer", "batch"), used + nbytes(blueprint.sketch.values)
    return MemoryModel(
        residual_i=parts * kept.of_most_stages("FI"),
        residual_w=parts * kept.of_most_stages("FW"),
        stash=parts * kept.of_most_stages("IW"),
        boundary=kept.boundary,
        parameters=used + nbytes((blueprint.sketch.values[:num_mine], mine)),
        fixed=sum(kinds[kind] for kind in rest) - beside + nbytes(state.shared),
    )


def stage_memory_of(blueprint: Blueprint) -> StageMemory:
    """The bytes that stages keep of a microbatch on a device, by kinds of stages and pools."""
    state, keeps = blueprint.state, blueprint.sketch.table.keeps
    kinds = range(max(keeps.kind_of) + 1)

    return StageMemory(
        kind_of=keeps.kind_of,
        keep_input=keeps.keep_input,
        lives=tuple(tuple(own.get(kind, "") for kind in kinds) for own in keeps.pools.values()),
        sizes=tuple(_slot_bytes(state.pools[pool]) for pool in keeps.pools),
        boundary=_slot_bytes(state.pools["x"]),
        placed=blueprint.pipeline.placing_costs,
    )


def _slot_bytes(pools: Tree) -> int:
    """Bytes of one slot of each pool. Leaves are pools [slots, ...]."""
    return sum(nbytes(jax.ShapeDtypeStruct(a.shape[1:], a.dtype)) for a in jax.tree.leaves(pools))


def held_arrays(blueprint: Blueprint) -> set[str]:
    """The names of the arrays of a device that no loop should copy, as ``array_name`` writes them.

    These are slot pools and gradient sums, and so the parameters of the same shapes. A pool of one slot has
    the shape of the value in it, and is left out.
    """
    state = blueprint.state
    held = jax.tree.leaves((state.own, state.shared))
    held += [leaf for leaf in jax.tree.leaves(state.pools) if leaf.shape[0] > 1]
    return {array_name(hlo_dtype(leaf.dtype), leaf.shape) for leaf in held}


_HLO_WORDS = ("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s"), ("bool", "pred"), ("_", "")
"""Pairs of words of NumPy's and of HLO's names of dtypes, in the order in which they are replaced."""


def hlo_dtype(dtype: Any) -> str:
    """HLO's name of a dtype: bf16, f8e4m3fn, s32, pred."""
    name = str(dtype)
    for word, short in _HLO_WORDS:
        name = name.replace(word, short)
    return name


def array_name(dtype: str, dims: tuple[int, ...]) -> str:
    """An array's name, such as ``bf16[5,2048,1024]``. Dims of 1 are left out, since compilers drop and add them."""
    return f"{dtype}[{','.join(str(dim) for dim in dims if dim != 1)}]"


def num_parameters(tree: Tree, *, device: bool = False) -> int:
    """Count the trained parameters, in the whole tree or on one device. Integers and keys are not counted."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return sum(nbytes(leaf) // leaf.dtype.itemsize if device else math.prod(leaf.shape) for leaf in leaves)


def nbytes(tree: Tree) -> int:
    """Bytes of a tree's arrays on one device. An array without a sharding counts whole."""

    def of(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return int(jnp.dtype(leaf.dtype).itemsize) * math.prod(shape)

    return sum(of(leaf) for leaf in jax.tree.leaves(tree))
