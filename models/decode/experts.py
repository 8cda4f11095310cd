"""Place weights on a mesh, read part by part: experts in any slots of its devices, all else on every device;
and move experts to other slots.

Shape suffixes: R layers with experts and after them modules of multi-token prediction, E experts, N devices,
S slots of a device, X copies that an expert can have at most.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey
from numpy.typing import ArrayLike

from dualpipe_jax.functional import Tree
from dualpipe_jax.parallel import EP, move_experts, plan_moves, share_copies
from models.config import Config
from models.lazy import Lazy, on_host, read_all

OVER_EP = PartitionSpec(EP)


def default_placement(config: Config, num_devices: int) -> np.ndarray:
    """The placement that shares each layer's experts out in order, int32 [R, N, S].

    Raises a ValueError if the devices do not divide the experts.
    """
    if config.num_experts % num_devices:
        raise ValueError(
            f"Engine: {config.num_experts} experts do not divide over {num_devices} devices; give a placement with "
            f"at least {-(-config.num_experts // num_devices)} slots a device, or other devices"
        )
    placement_NS = np.arange(config.num_experts, dtype=np.int32).reshape(num_devices, -1)
    return np.tile(placement_NS, (_num_moe_layers(config), 1, 1))


def check_placement(config: Config, num_devices: int, placement: ArrayLike) -> np.ndarray:
    """Return a copy of a placement [R, N, S]. Raises a ValueError if its numbers of layers or devices are not these."""
    placement_RNS = np.array(placement)
    wanted = _num_moe_layers(config), num_devices
    if placement_RNS.ndim != 3 or placement_RNS.shape[:2] != wanted:
        raise ValueError(
            f"Engine: the placement is {list(placement_RNS.shape)}, must be [{wanted[0]} layers with experts, "
            f"{wanted[1]} devices, slots], modules of multi-token prediction last"
        )
    return placement_RNS


def weight_specs(weights: Tree) -> Tree:
    """The ``PartitionSpec`` of each of a decoder's weights on a mesh."""

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        del leaf
        return OVER_EP if _is_expert(path) or path[-1] == DictKey("copies") else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, weights)


def place(weights: Tree, placement_RNS: np.ndarray, num_experts: int, mesh: Mesh, *, near: bool) -> Tree:
    """Read lazy weights, as ``prepare`` made them, onto a mesh; every device gets the experts of its slots.

    A process reads only what its devices hold, and they hold nothing else meanwhile.
    """
    # Before anything is read, because it refuses a placement that lacks an expert.
    copies = share_copies(placement_RNS, num_experts, near=near)

    def read_leaf(leaf: Lazy, spec: PartitionSpec) -> Array:
        def read_shard(index: tuple[slice, ...] | None) -> np.ndarray:
            own = leaf.take(np.arange(len(leaf))[index[0]]) if index and spec == OVER_EP else leaf
            return np.asarray(own)

        made = jax.make_array_from_callback(leaf.shape, NamedSharding(mesh, spec), read_shard)
        return made.block_until_ready()  # otherwise the host would hold all parts that wait to be sent

    lazy = _map_experts(
        lambda leaf, placement_P: leaf.take(placement_P),
        weights,
        placement_RNS.reshape(len(placement_RNS), -1),
    )
    return _add_copy_tables(read_all(read_leaf, lazy, weight_specs(lazy)), copies, mesh)


def without_placement(weights: Tree, placement_RNS: np.ndarray) -> Tree:
    """Return placed weights as lazy weights, with each expert once and in order, as ``prepare`` made them."""

    def each_once(leaf: Array, placement_P: np.ndarray) -> Lazy:
        _, first = np.unique(placement_P, return_index=True)
        shape = len(first), *leaf.shape[1:]
        return Lazy(shape, np.dtype(leaf.dtype), lambda index: on_host(leaf)[first][index])

    whole = _map_experts(each_once, weights, placement_RNS.reshape(len(placement_RNS), -1))
    return _map_moe_layers(lambda own: {name: own[name] for name in own if name != "copies"}, whole)


def _add_copy_tables(weights: Tree, copies: Iterable[np.ndarray], mesh: Mesh) -> Tree:
    """Return placed weights with a table "copies" in each layer, int32 [N, E, X].

    For each device, it says where the device's tokens find the copies of an expert.
    """
    return _map_moe_layers(
        lambda own, row: own | {"copies": _put_on_mesh(row, mesh, OVER_EP)}, weights, copies
    )


def move_to_placement(
    weights: Tree, before_RNS: np.ndarray, after_RNS: np.ndarray, num_experts: int, mesh: Mesh, *, near: bool
) -> Tree:
    """Return weights with experts moved to another placement, in the same memory, and its tables of copies."""
    moves = plan_moves(before_RNS, after_RNS, num_experts)
    moved = _compiled_move(mesh)(weights, moves.send, moves.take)
    return _add_copy_tables(moved, share_copies(after_RNS, num_experts, near=near), mesh)


@functools.cache
def _compiled_move(mesh: Mesh) -> Any:
    def on_device(weights: Tree, send_RNNW: Array, take_RNS: Array) -> Tree:
        # Dim 1 of both is this device's own part, of size 1.
        return _map_experts(
            lambda leaf, send_NW, take_S: move_experts(leaf, send_NW, take_S, EP),
            weights,
            send_RNNW[:, 0],
            take_RNS[:, 0],
        )

    def move(weights: Tree, send_RNNW: Array, take_RNS: Array) -> Tree:
        specs = weight_specs(weights)
        tables = PartitionSpec(None, EP)
        mapped = jax.shard_map(
            on_device, mesh=mesh, in_specs=(specs, tables, tables), out_specs=specs, check_vma=False
        )
        return mapped(weights, send_RNNW, take_RNS)

    return jax.jit(move, donate_argnums=0)


def _put_on_mesh(leaf: Any, mesh: Mesh, spec: PartitionSpec) -> Array:
    """Put an array that every process has onto the devices of all processes."""
    sharding = NamedSharding(mesh, spec)
    if not mesh.is_multi_process:
        return jax.device_put(leaf, sharding)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])


def _num_moe_layers(config: Config) -> int:
    return config.num_moe_layers + config.num_mtp_layers


def _map_moe_layers(function: Callable[..., Tree], weights: Tree, *tables: Iterable[Any]) -> Tree:
    """Apply ``function(layer, *rows)`` to each layer with experts; ``rows`` are the layer's own row of each table."""
    rows = [*map(iter, tables)]
    return weights | {
        name: [own if own["bias"] is None else function(own, *map(next, rows)) for own in weights[name]]
        for name in ("layers", "mtp")
    }


def _map_experts(function: Callable[..., Any], weights: Tree, *tables: Iterable[Any]) -> Tree:
    """Apply ``function(leaf, *rows)`` to each leaf of experts; ``rows`` are its layer's row of each table."""

    def layer(own: Tree, *rows: Any) -> Tree:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: function(leaf, *rows) if _is_expert(path) else leaf, own
        )

    return _map_moe_layers(layer, weights, *tables)


def _is_expert(path: Any) -> bool:
    return DictKey("experts") in path
