"""A model's experts in any slots of any devices: the tables of their places, and parameters that follow the tables.

Parameters of ``deepseek`` hold experts in order, [stages, E, ...]. Placed parameters hold slots, [stages, N * S, ...],
and next to the routing bias two tables that every layer reads: "held", int32 [stages, slots, N, S], the expert in each
slot, and "copies", int32 [stages, slots, N, E, X], see ``parallel.share_copies``. The router, its bias, its counts and
the balance losses do not depend on the placement.

Shape suffixes: R rows of the routers' figures, one for each layer with experts; E experts, N devices, S slots of a
device, X copies an expert can have at most.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.tree_util import DictKey, KeyPath, SequenceKey, tree_leaves_with_path, tree_map_with_path
from numpy.typing import ArrayLike

import dualpipe_jax.parallel as parallel
from dualpipe_jax.functional import Tree
from dualpipe_jax.parallel import EP, PP
from dualpipe_jax.parallel.expert_plan import Axis
from dualpipe_jax.parallel.placement import first_copies
from models.plan import Layout

TABLES = "held", "copies"
"""The names of the tables that a placed model's routing has besides the bias."""


def expert_tables(
    layout: Layout, held_RNS: ArrayLike, num_experts: int, *, num_nodes: int = 1, near: bool = True
) -> dict[str, np.ndarray]:
    """Return the tables of all layers by stage, for params["stages"]["routing"].

    Args:
      layout: the place of each layer.
      held_RNS: int, the expert in each slot of each device, for every layer with experts, then for modules of
        multi-token prediction.
      num_experts: E.
      num_nodes: see ``parallel.share_copies``.
      near: see ``parallel.share_copies``.

    Raises:
      ValueError: held is not such a table.
    """
    held, num_rows = np.asarray(held_RNS), int(layout.rows.max()) + 1
    if held.ndim != 3 or len(held) != num_rows:
        raise ValueError(
            f"expert_tables: held is {list(held.shape)}; the model has {num_rows} layers with experts, give "
            f"[{num_rows}, devices, slots]."
        )
    copies = parallel.share_copies(held, num_experts, num_nodes=num_nodes, near=near)
    rows = np.maximum(layout.rows, 0)  # a place without a layer gets the table of row 0
    return {"held": held[rows].astype(np.int32), "copies": copies[rows]}


def place_experts(params: Tree, tables: dict[str, np.ndarray]) -> Tree:
    """Return params of ``deepseek``, stages in model order, with experts placed as ``expert_tables`` says."""

    def copy_experts(leaf: Array, routing: Tree) -> Array:
        slots = jnp.asarray(routing["held"]).reshape(len(leaf), -1)
        return jax.vmap(lambda experts, held: jnp.take(experts, held, axis=0))(leaf, slots)

    stages = map_experts(copy_experts, params, {"stages": {"routing": tables}})["stages"]
    routing = stages["routing"] | {name: jnp.asarray(table) for name, table in tables.items()}
    return params | {"stages": stages | {"routing": routing}}


def placed_specs(specs: Tree, ep_axis: Axis) -> Tree:
    """Return ``Model.param_specs`` for placed params: each device has its own part of "copies"."""
    stages = specs["stages"]
    routing = stages["routing"] | {"held": PartitionSpec(), "copies": PartitionSpec(None, ep_axis)}
    return specs | {"stages": stages | {"routing": routing}}


def map_experts(function: Callable[[Array, Tree], Any], tree: Tree, params: Tree) -> Tree:
    """Apply ``function(leaf, routing)`` to every leaf of experts in a tree, and leave the other leaves.

    Args:
      function: takes a leaf of experts of one slot for layers, and this layer's part of "routing", each table
        [stages, ...].
      tree: params, or a tree that contains trees of their form, like an optimizer's state.
      params: {"stages": ...}, in model order or as the engine places them. Only "routing" is read: arrays
        [stages, slots, ...].
    """

    def is_stages(node: Any) -> bool:
        return isinstance(node, dict) and "routing" in node

    stages = dict(tree_leaves_with_path(params["stages"], is_leaf=is_stages))

    def visit(path: KeyPath, leaf: Any) -> Any:
        if DictKey("stages") not in path or DictKey("experts") not in path:
            return leaf
        within = path[path.index(DictKey("stages")) + 1 :]
        at = within.index(DictKey("layers"))
        slot = within[at + 1]
        assert isinstance(slot, SequenceKey)
        routing = stages[within[:at]]["routing"]
        return function(leaf, {name: table[:, slot.idx] for name, table in routing.items()})

    return tree_map_with_path(visit, tree)


def expert_axis(mesh: Mesh | AbstractMesh) -> Axis:
    """Return the axis over which a mesh shards experts: "ep", or ("node", "ep") if it has both."""
    found = tuple(axis for axis in mesh.axis_names if axis in ("node", EP))
    return found if len(found) > 1 else EP


def sum_copies(grads: Tree, params: Tree, mesh: Mesh | AbstractMesh) -> Tree:
    """Return gradients of placed params in which every copy of an expert has the sum of all copies' gradients.

    Args:
      grads: the gradients of params as the engine places them: leaves of experts [ranks, N * S, ...] over (pp, ep).
      params: the params, placed in the same way.
      mesh: the engine's mesh.
    """
    axis = expert_axis(mesh)

    def total(gradient: Array, routing: Tree) -> Array:
        num_experts = routing["bias"].shape[-1]

        def on_device(gradient: Array, held_NS: Array) -> Array:
            # gradient [1, S, ...] of this device; held_NS [1, N, S] of this rank.
            return parallel.sum_copies(gradient[0], held_NS[0], num_experts, axis)[None]

        mapped = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(PartitionSpec(PP, axis), PartitionSpec(PP)),
            out_specs=PartitionSpec(PP, axis),
        )
        return mapped(gradient, routing["held"])

    return map_experts(total, grads, params)


def count_once(grads: Tree, params: Tree) -> Tree:
    """Return gradients with zeros for all copies of an expert except the first, so that a norm counts each one once."""

    def keep_first_copies(gradient: Array, routing: Tree) -> Array:
        num_experts = routing["bias"].shape[-1]
        counts = jax.vmap(lambda held: first_copies(held, num_experts))(routing["held"])
        counts = counts.reshape(*gradient.shape[:2], *(1,) * (gradient.ndim - 2))
        return jnp.where(counts, gradient, 0)

    return map_experts(keep_first_copies, grads, params)
