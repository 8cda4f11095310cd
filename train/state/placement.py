"""States whose experts are in any slots of the devices: how experts get there, back in order, and to a new placement.

The arrays of a checkpoint do not depend on the placement: the canonical form has every expert once, in order, so that a
run may go on under another layout, or without placements. The placement of a state is read from its own tables; see
``models.placement``.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import models
from dualpipe_jax.balance import Placement
from dualpipe_jax.engine import PlacedStages
from dualpipe_jax.engine.stages import owned_stages, stage_ownership, to_placed
from dualpipe_jax.parallel import DP, PP, move_experts, plan_moves
from dualpipe_jax.parallel.placement import Moves
from models.placement import TABLES, expert_axis, map_experts
from train.config import ConfigError, TrainConfig
from train.state.layout import Flat, Layout, TrainState, shardings

Tree = Any


def slots_per_device(config: TrainConfig, num_experts: int) -> int | None:
    """The number of experts of a layer that a device holds, copies included; None if experts always stay in order.

    Raises:
      ConfigError: the options' redundant experts do not fit the devices.
    """
    spare, ep = config.experts.redundant_experts, config.step.ep
    if not spare and config.experts.rebalance_every is None:
        return None
    most = num_experts * (ep - 1)
    if spare > most:
        raise ConfigError(
            f"--redundant-experts {spare}: must be at most {most}, with which each of the {ep} devices has all "
            f"{num_experts} experts"
        )
    if (num_experts + spare) % ep:
        below = (num_experts + spare) // ep * ep - num_experts
        near = " or ".join(str(n) for n in (below, below + ep) if 0 <= n <= most)
        raise ConfigError(
            f"--redundant-experts {spare}: with {num_experts} experts makes {num_experts + spare}, which --ep {ep} "
            f"devices cannot hold equally many of; try {near}"
        )
    return (num_experts + spare) // ep


@dataclasses.dataclass(frozen=True)
class PlacedLayout(Layout):
    """A layout of states whose experts are placed; ``placed_layout`` makes it.

    Attributes:
      in_order: the layout of the same states without placements, from which the canonical form is made.
      num_slots: the number of experts of a layer that a device holds, copies included.
      near: see ``parallel.share_copies``.
    """

    in_order: Layout = None  # type: ignore[assignment]  # always given; a default is needed after inherited ones
    num_slots: int = 0
    near: bool = True

    @property
    def num_experts(self) -> int:
        """The number of experts of a layer, each counted once."""
        return self.model.config.num_experts

    @property
    def num_devices(self) -> int:
        """The number of devices that share a layer's experts."""
        return self.mesh.size // (self.mesh.shape[DP] * self.mesh.shape[PP])

    @property
    def num_layers(self) -> int:
        """The number of layers with experts, modules of multi-token prediction included."""
        return int(self.model.layout.rows.max()) + 1

    @functools.cached_property
    def initial_placement(self) -> Placement:
        """The placement of experts before anything is known about their loads."""
        return Placement.in_order(self.num_layers, self.num_experts, self.num_devices, self.num_slots)

    def init(self, key: jax.Array) -> TrainState:
        """The state before the first step, with the same weights as that of ``in_order``."""
        return self._to_placed(self.in_order.init(key))

    @functools.cached_property
    def canonical(self) -> dict[str, jax.ShapeDtypeStruct]:
        return self.in_order.canonical

    @functools.cached_property
    def to_canonical(self) -> Callable[[TrainState], Flat]:
        return lambda state: self.in_order.to_canonical(self.plain(state))

    @functools.cached_property
    def from_canonical(self) -> Callable[[Flat], TrainState]:
        return lambda flat: self._to_placed(self.in_order.from_canonical(flat))

    def plain(self, state: TrainState) -> TrainState:
        """The state in the form of ``in_order``: every expert once, in order."""
        return self._unplace(state, self._moves(self.placement_of(state), self._one_copy_each), None)

    def rebalanced(self, state: TrainState, placement: Placement) -> TrainState:
        """The state with experts and their optimizer state in a new placement; the old state's memory is reused."""
        moves = self._moves(self.placement_of(state), placement)
        return self._rearrange(state, moves, self._tables(placement))

    def placement_of(self, state: TrainState) -> Placement:
        held = [stage["routing"]["held"] for stage in state.params["stages"].local]
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        here = jax.device_get(jax.jit(lambda tables: tables, out_shardings=everywhere)(held))
        rows = self.model.layout.rows
        experts = np.zeros((self.num_layers, self.num_devices, self.num_slots), int)
        for stages, tables in zip(stage_ownership(self.schedule.placement).owned, here, strict=True):
            filled = rows[stages] >= 0
            experts[rows[stages][filled]] = tables[filled]
        return Placement(experts, self.num_experts)

    @property
    def _one_copy_each(self) -> Placement:
        each = self.num_experts // self.num_devices
        return Placement.in_order(self.num_layers, self.num_experts, self.num_devices, each)

    def _to_placed(self, state: TrainState) -> TrainState:
        return self._place(
            state,
            self._moves(self._one_copy_each, self.initial_placement),
            self._tables(self.initial_placement),
        )

    def _params(self, key: jax.Array) -> Tree:
        """Placed parameters, to describe their form; ``init`` makes the real ones."""
        params = models.place_experts(self.model.init(key), self._by_stage(self.initial_placement))
        return params | {"stages": to_placed(params["stages"], self.schedule.placement)}

    @functools.cached_property
    def _place(self) -> Callable[..., TrainState]:
        return jax.jit(self._moved(self.abstract), out_shardings=shardings(self.abstract))

    @functools.cached_property
    def _unplace(self) -> Callable[..., TrainState]:
        plain = self.in_order.abstract
        return jax.jit(self._moved(plain), out_shardings=shardings(plain))

    @functools.cached_property
    def _rearrange(self) -> Callable[..., TrainState]:
        return jax.jit(self._moved(self.abstract), donate_argnums=0, out_shardings=shardings(self.abstract))

    def _moved(self, target: TrainState) -> Callable[[TrainState, Tree, Tree | None], TrainState]:
        """``moved(state, moves, tables)``: the state after the moves, in the form of ``target``."""

        def on_device(leaf: jax.Array, send: jax.Array, take: jax.Array) -> jax.Array:
            # leaf [1, S, ...] of this device; send [1, 1, N, W], take [1, 1, S'].
            return move_experts(leaf[0], send[0, 0], take[0, 0], axis)[None]

        axis = expert_axis(self.mesh)
        move = jax.shard_map(
            on_device, mesh=self.mesh, in_specs=PartitionSpec(PP, axis), out_specs=PartitionSpec(PP, axis)
        )

        def moved(state: TrainState, moves: Tree, tables: Tree | None) -> TrainState:
            def bring(leaf: jax.Array, own: Tree) -> jax.Array:
                return move(leaf, own["send"], own["take"])

            new = map_experts(bring, state, {"stages": moves})
            # The optimizer's state has a None by name for all that it does not own, such as tables. So its structure
            # must be that of ``target``; its leaves are the same.
            opt_state = jax.tree.unflatten(
                jax.tree.structure(target.opt_state), jax.tree.leaves(new.opt_state)
            )
            added = [{}] * len(new.params["stages"].local) if tables is None else tables.local
            stages = [
                stage | {"routing": _without_tables(stage["routing"]) | more}
                for stage, more in zip(new.params["stages"].local, added, strict=True)
            ]
            params = new.params | {"stages": dataclasses.replace(new.params["stages"], local=tuple(stages))}
            return TrainState(new.step, params, opt_state)

        return moved

    def _by_stage(self, placement: Placement) -> dict[str, np.ndarray]:
        nodes = num_nodes(self.mesh)
        return models.expert_tables(
            self.model.layout, placement.experts, self.num_experts, num_nodes=nodes, near=self.near
        )

    def _tables(self, placement: Placement) -> PlacedStages:
        specs = {"held": PartitionSpec(PP), "copies": PartitionSpec(PP, None, expert_axis(self.mesh))}
        return self._put_on_ranks(self._by_stage(placement), specs)

    def _moves(self, before: Placement, after: Placement) -> PlacedStages:
        planned: Moves = plan_moves(before.experts, after.experts, self.num_experts)
        rows = np.maximum(self.model.layout.rows, 0)
        over = PartitionSpec(PP, None, expert_axis(self.mesh))
        arrays = {"send": planned.send[rows], "take": planned.take[rows]}
        placed = self._put_on_ranks(arrays, {"send": over, "take": over})
        return dataclasses.replace(placed, local=tuple({"routing": tables} for tables in placed.local))

    def _put_on_ranks(self, arrays: dict[str, np.ndarray], specs: dict[str, PartitionSpec]) -> PlacedStages:
        """Place arrays [stages, ...] in model order on the ranks of their stages."""

        def lay(name: str, array: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(
                array.shape, NamedSharding(self.mesh, specs[name]), lambda index: array[index]
            )

        owned = owned_stages(self.schedule.placement)
        return PlacedStages(
            tuple({name: lay(name, array[list(on)]) for name, array in arrays.items()} for on in owned), owned
        )


def placed_layout(layout: Layout, num_slots: int, near: bool) -> PlacedLayout:
    """The layout of the same states with ``num_slots`` slots on each device."""
    specs = models.placed_specs(layout.model.param_specs, expert_axis(layout.mesh))
    model = dataclasses.replace(layout.model, param_specs=specs)
    fields = {field.name: getattr(layout, field.name) for field in dataclasses.fields(Layout)}
    return PlacedLayout(**fields | {"model": model}, in_order=layout, num_slots=num_slots, near=near)


def is_placed(params: Tree) -> bool:
    """Whether a run's parameters, as the engine takes them, have their experts placed."""
    stages = params["stages"]
    first = stages.local[0] if isinstance(stages, PlacedStages) else stages
    return isinstance(first, dict) and TABLES[0] in first.get("routing", {})


def num_nodes(mesh: Mesh) -> int:
    """The number of machines that have equal shares, in a row, of the devices of a layer's experts; 1 if there is no
    such division.

    If the mesh has no axis "node", a process counts as a machine.
    """
    if "node" in mesh.shape:
        return mesh.shape["node"]
    of = [device.process_index for device in mesh.devices[0, 0].flat]
    in_a_row = of == sorted(of, key=of.index)
    return len(set(of)) if in_a_row and len({of.count(process) for process in of}) == 1 else 1


def _without_tables(routing: Tree) -> Tree:
    return {name: value for name, value in routing.items() if name not in TABLES}
