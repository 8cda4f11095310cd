"""The state of training: its arrays, where they are placed, and their form on disk.

All that the trainer knows about the form of a parameter tree is in this module. There are two forms: *placed*, with
stages on the ranks that compute them, as the engine needs it; and *canonical*, a flat dict of arrays by name with
layers in model order, the same for every schedule and mesh. Placed trees of different schedules have equal shapes, so a
placed tree that is written to disk would be read as another model under another schedule, without an error.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey, KeyPath, tree_map_with_path

import models
from dualpipe_jax.engine import Pipeline, PlacedStages
from dualpipe_jax.engine.stages import from_placed, to_placed
from dualpipe_jax.parallel import PP
from dualpipe_jax.schedule import Placement, Schedule
from train.state.sharing import Shard, shard_further, storage_specs

Tree = Any
Flat = dict[str, jax.Array]


class TrainState(NamedTuple):
    """All that a step reads and replaces.

    Attributes:
      step: int32, the number of steps done.
      params: the parameters, as the engine takes them.
      opt_state: the optimizer's state, of the trainable part of params alone.
    """

    step: jax.Array
    params: Tree
    opt_state: optax.OptState


@dataclasses.dataclass(frozen=True)
class Layout:
    """How states are placed on devices. It makes states, describes them, and converts them to the canonical form and
    back.

    Attributes:
      model: the model's functions, and the specs of its parameters.
      schedule: the schedule, which determines the ranks of the stages.
      mesh: a mesh of devices, or an abstract one, which is enough for all but ``init``.
      optimizer: the optimizer whose state belongs to the parameters.
      shard: what is sharded over devices that would hold the same; see ``train.state.sharing``.
    """

    model: models.Model
    schedule: Schedule
    mesh: Mesh
    optimizer: optax.GradientTransformation
    shard: Shard = "nothing"

    def init(self, key: jax.Array) -> TrainState:
        """The state before the first step, with the same values on every mesh. Each device makes its own part."""
        return self.initializer(key)

    @functools.cached_property
    def initializer(self) -> Callable[[jax.Array], TrainState]:
        """``init`` as a jitted function."""
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        # It runs once. On CPU, random bits take half a second per leaf to compile, most of it for optimisation.
        options = {"xla_backend_optimization_level": "0"} if on_cpu else None
        return jax.jit(self._make, out_shardings=shardings(self.abstract), compiler_options=options)

    @functools.cached_property
    def abstract(self) -> TrainState:
        """A state as ShapeDtypeStructs with shardings; nothing is computed."""
        return abstract_state(self._described(self.storage_specs), self.optimizer, self.shard)

    @functools.cached_property
    def storage_specs(self) -> Tree:
        """The specs by which parameters are stored, for the ``Pipeline`` of a step; None: as they are used."""
        return storage_specs(trainable(self._described(None))) if self.shard == "parameters" else None

    def _described(self, stored: Tree) -> Tree:
        params = jax.eval_shape(lambda: self._params(jax.random.key(0)))
        pipeline = Pipeline(
            self.model.staged,
            self.schedule,
            self.mesh,
            param_specs=self.model.param_specs,
            storage_specs=stored,
        )
        lies = pipeline.shardings(params)
        return jax.tree.map(lambda leaf, lie: _lay(leaf, self.mesh, lie.spec), params, lies)

    @functools.cached_property
    def canonical(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Names, shapes, dtypes and shardings of the canonical form on this mesh.

        Layers are sharded over pp if it divides their number, and experts as in the placed form; everything else has
        the sharding of the placed form.
        """
        named = _open(self.abstract)
        shapes = jax.eval_shape(self._to_canonical, self.abstract)
        lies = _flatten(jax.tree.map(self._layer_shardings, named, is_leaf=_is_placed))
        return {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lies[name])
            for name, leaf in shapes.items()
        }

    def plain(self, state: TrainState) -> TrainState:
        """The state with every expert once, in order; for this class ``state`` itself."""
        return state

    @functools.cached_property
    def to_canonical(self) -> Callable[[TrainState], Flat]:
        """``to_canonical(state)``: arrays by name, layers in model order."""
        return jax.jit(self._to_canonical, out_shardings=shardings(self.canonical))

    @functools.cached_property
    def from_canonical(self) -> Callable[[Flat], TrainState]:
        """``from_canonical(flat)``: the state as the engine takes it."""
        return jax.jit(self._from_canonical, out_shardings=shardings(self.abstract))

    def _make(self, key: jax.Array) -> TrainState:
        return fresh(self._params(key), self.optimizer)

    def _params(self, key: jax.Array) -> Tree:
        params = self.model.init(key)
        return params | {"stages": to_placed(params["stages"], self.schedule.placement)}

    def _to_canonical(self, state: TrainState) -> Flat:
        def layers(node: Tree) -> Tree:
            if not _is_placed(node):
                return node
            return _to_layers(node, self.schedule.placement, self.model.layout.rows)

        # Copied, because a jitted function returns an unchanged argument as the same buffer, which the next step reuses
        # while it is still being written.
        return jax.tree.map(jnp.copy, _flatten(jax.tree.map(layers, _open(state), is_leaf=_is_placed)))

    def _from_canonical(self, flat: Flat) -> TrainState:
        def stages(node: Tree, now: Tree) -> Tree:
            if not _is_placed(node):
                return now
            return _to_stages(now, self.schedule.placement, self.model.layout.rows)

        named = _open(self.abstract)
        skeleton = jax.tree.map(self._layer_shardings, named, is_leaf=_is_placed)
        # Copied, so as not to return the buffers that were read.
        found = tree_map_with_path(lambda path, _: jnp.copy(flat[_name(path)]), skeleton)
        return _close(jax.tree.map(stages, named, found, is_leaf=_is_placed), self.optimizer)

    def _layer_shardings(self, node: Tree) -> Tree:
        if not _is_placed(node):
            return node.sharding
        num_rows = int(np.sum(self.model.layout.rows >= 0))
        first = PP if num_rows % self.mesh.shape[PP] == 0 else None

        def of(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
            inner = tuple(leaf.sharding.spec)[1:]  # placed leaves are [ranks, ...]
            return NamedSharding(self.mesh, PartitionSpec(first, *inner))

        stage = node.local[0]
        bias = stage["routing"]["bias"]
        everywhere = None if bias is None else NamedSharding(self.mesh, PartitionSpec(first))
        return {"layers": jax.tree.map(of, stage["layers"][0]), "routing": {"bias": everywhere}}


def fresh(params: Tree, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step, from placed parameters, which may be arrays or tracers."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(trainable(params)))


def init_state(params: Tree, optimizer: optax.GradientTransformation) -> TrainState:
    """``fresh`` with every array on its devices; params, which are placed already, are used as they are.

    The optimizer's arrays of a parameter have its sharding; counters are replicated.
    """
    lies = shardings(abstract_state(params, optimizer))._replace(params=None)
    rest = jax.jit(lambda params: fresh(params, optimizer)._replace(params=None), out_shardings=lies)
    return rest(params)._replace(params=params)


def abstract_state(
    params: Tree, optimizer: optax.GradientTransformation, shard: Shard = "nothing"
) -> TrainState:
    """The result of ``init_state`` as ShapeDtypeStructs with shardings, from params of the same kind.

    With ``shard`` "optimizer" the optimizer's arrays are sharded further than their parameters.
    """
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    state = jax.eval_shape(lambda params: fresh(params, optimizer), params)
    step, opt_state = jax.tree.map(
        lambda leaf: _lay(leaf, mesh, PartitionSpec()), (state.step, state.opt_state)
    )

    def lay(leaf: jax.ShapeDtypeStruct, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        leaf = _lay(leaf, mesh, like.sharding.spec)
        return shard_further(leaf) if shard == "optimizer" else leaf

    opt_state = optax.tree.map_params(optimizer, lay, opt_state, trainable(params))
    return TrainState(step, params, opt_state)


def trainable(params: Tree) -> Tree:
    """The part of params that the optimizer owns, with None in place of the rest."""
    return tree_map_with_path(lambda path, leaf: None if DictKey("routing") in path else leaf, params)


def without_biases(state: TrainState) -> TrainState | None:
    """The state with selection biases of zero, for routers that have none; None if they are zero already."""

    def is_bias(path: KeyPath) -> bool:
        return DictKey("routing") in path and DictKey("bias") in path

    def zeroed(path: KeyPath, leaf: Any) -> Any:
        return jax.jit(jnp.zeros_like, out_shardings=leaf.sharding)(leaf) if is_bias(path) else leaf

    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    moved = [jax.jit(jnp.any)(leaf) for path, leaf in leaves if is_bias(path)]
    return state._replace(params=tree_map_with_path(zeroed, state.params)) if any(map(bool, moved)) else None


def with_trainable(params: Tree, new: Tree) -> Tree:
    return jax.tree.map(lambda old, new: old if new is None else new, params, new)


def shardings(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _lay(leaf: jax.ShapeDtypeStruct, mesh: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def _is_placed(node: Tree) -> bool:
    return isinstance(node, PlacedStages)


def _open(state: TrainState) -> dict[str, Tree]:
    """A state as a dict whose names do not depend on how optax nests its state. One counter stands for all of optax's,
    which all count steps."""
    counts = [count for _, count in optax.tree.get_all_with_path(state.opt_state, "count")]
    moments = {name: optax.tree.get(state.opt_state, name) for name in ("mu", "nu")}
    return {"step": state.step, "params": state.params, **moments, "count": counts[0]}


def _close(named: dict[str, Tree], optimizer: optax.GradientTransformation) -> TrainState:
    """The inverse of ``_open``."""
    params = named["params"]
    moments = {name: named[name] for name in ("mu", "nu", "count")}
    return TrainState(named["step"], params, optax.tree.set(optimizer.init(trainable(params)), **moments))


def _to_layers(placed: PlacedStages, placement: Placement, rows: np.ndarray) -> Tree:
    """Slots of stages, leaves [stages, ...], as layers in model order, leaves [rows, ...], without empty slots."""
    stages = from_placed(placed, placement)
    where = [np.argwhere(rows == row)[0] for row in range(int(rows.max()) + 1)]

    def join(*slots: jax.Array) -> jax.Array:
        return jnp.stack([slots[slot][stage] for stage, slot in where])

    bias = stages["routing"]["bias"]
    if bias is not None:
        bias = jnp.stack([bias[stage, slot] for stage, slot in where])
    return {"layers": jax.tree.map(join, *stages["layers"]), "routing": {"bias": bias}}


def _to_stages(layers: Tree, placement: Placement, rows: np.ndarray) -> PlacedStages:
    """The inverse of ``_to_layers``, with zeros in empty slots."""

    def into(leaf: jax.Array, wanted: np.ndarray) -> jax.Array:
        return jnp.take(leaf, np.where(wanted < 0, len(leaf), wanted), axis=0, mode="fill", fill_value=0)

    bias = layers["routing"]["bias"]
    routing: dict[str, Any] = {"bias": None, "row": None}
    if bias is not None:
        routing = {"bias": into(bias, rows), "row": jnp.asarray(rows)}
    slots = [jax.tree.map(functools.partial(into, wanted=wanted), layers["layers"]) for wanted in rows.T]
    return to_placed({"layers": slots, "routing": routing}, placement)


def _flatten(tree: Tree) -> dict[str, Any]:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path: KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
