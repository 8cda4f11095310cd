"""A training step as shapes: all that a dry run knows of a model, and of its place on devices."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from dualpipe_jax.contract import StagedModel
from dualpipe_jax.engine import Pipeline
from dualpipe_jax.engine.stages import broadcast
from dualpipe_jax.engine.state import State
from dualpipe_jax.parallel import DP, EP, PP
from dualpipe_jax.parallel.mesh import NODE, batch_spec
from dualpipe_jax.pods.links import Dispatch
from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.schedule import Schedule

Tree = Any


class Update(NamedTuple):
    """What a step does with gradients.

    Attributes:
      state: what lasts from step to step besides the parameters, such as AdamW's averages: ShapeDtypeStructs with
        shardings.
      lower: ``lower(value_and_grad, batch)``, the whole step lowered; see ``Pipeline.value_and_grad``.
    """

    state: Tree
    lower: Callable[[Callable[..., Any], Tree], Any]


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where a program is to run: what its maker is told.

    Attributes:
      plan: all that was asked for; of it a program cuts its layers as ``plan.stage_layers`` says, where it says so.
      schedule: whose stages the model is cut into: ``schedule.placement.num_model_stages``.
      mesh: of "pp" and "ep" devices, and "dp" replicas, or an abstract mesh where nothing is to be compiled.
      platform: as JAX calls it; None where nobody knows.
    """

    plan: Plan
    schedule: Schedule
    mesh: Mesh | AbstractMesh
    platform: Literal["cpu", "gpu", "tpu"] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A pipelined training step, as shapes. No array is made of it.

    Attributes:
      model: the functions of its stages.
      params: {"stages", "shared"} as the model has them: ShapeDtypeStructs, as ``jax.eval_shape`` gives of its init.
      batch: of a step: ShapeDtypeStructs [microbatches, microbatch size, ...].
      tokens: that a step learns from.
      flops: floating-point operations that the training of one token needs, by whatever count MFU shall go.
      counted: that count in words.
      routed: of ``flops``, those of routed experts, of which there are more where they have more room than tokens.
      param_specs: how parameters lie on "ep"; see ``Pipeline``.
      update: from the parameters as they are placed to what a step does with gradients; None: nothing, and only
        parameters and gradients are counted.
      active: parameters that one token meets; None: all.
      total: parameters of the model; None: those that ``params`` has.
      dispatch: what its dispatch to experts sends; None without.
      pipeline: further arguments of ``Pipeline``, such as ``storage_specs``.
      stage_layers: layers of each stage of the model, which are ``plan.stage_layers`` where those are given; empty
        where they cannot be chosen. `dualpipe plan` moves them where the ends are of kinds "first" and "last".
    """

    model: StagedModel
    params: Tree
    batch: Tree
    tokens: int
    flops: float
    param_specs: Tree = None
    update: Callable[[Tree], Update] | None = None
    active: int | None = None
    total: int | None = None
    dispatch: Dispatch | None = None
    counted: str = ""
    routed: float = 0.0
    pipeline: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stage_layers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Blueprint:
    """A program in its place: all that a training step is made from.

    Attributes:
      program: what runs.
      schedule: who does what in which order.
      mesh: pp x ep devices, or an abstract mesh, which is enough for counting.
      fuse_pairs: see ``Pipeline``.
      gradient_sums: the dtype in which gradients are summed over microbatches.
    """

    program: Program
    schedule: Schedule
    mesh: Mesh | AbstractMesh
    fuse_pairs: bool | None = True
    gradient_sums: str = "float32"

    @functools.cached_property
    def pipeline(self) -> Pipeline:
        return Pipeline(
            self.program.model,
            self.schedule,
            self.mesh,
            param_specs=self.program.param_specs,
            accumulate_dtype=jnp.dtype(self.gradient_sums),
            fuse_pairs=self.fuse_pairs,
            **self.program.pipeline,
        )

    @functools.cached_property
    def params(self) -> Tree:
        """ShapeDtypeStructs as the engine takes parameters, with their shardings."""
        shapes = jax.eval_shape(self.pipeline.placed, self.program.params)
        lies = self.pipeline.shardings(shapes)
        return jax.tree.map(
            lambda leaf, lie: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lie), shapes, lies
        )

    @functools.cached_property
    def used(self) -> Tree:
        """``params`` as stages' functions see them: in ``Pipeline.compute_dtype``, gathered where stored in parts."""
        given, stages = self.pipeline.compute_dtype, self.params["stages"].local
        lies = dataclasses.replace(self.pipeline, storage_specs=None).shardings(self.params)

        def of(part: str, tree: Tree, lies: Tree) -> Tree:
            own = given.get(part) if isinstance(given, dict) else given
            return jax.tree.map(_as_used, tree, lies, broadcast(own, tree, _OWN, "compute_dtype"))

        local = (of("stages", *stage) for stage in zip(stages, lies["stages"].local, strict=True))
        return {
            "stages": dataclasses.replace(self.params["stages"], local=tuple(local)),
            "shared": of("shared", self.params["shared"], lies["shared"]),
        }

    @functools.cached_property
    def batch(self) -> Tree:
        lies = NamedSharding(self.mesh, batch_spec(self.mesh))  # type: ignore[arg-type]  # an abstract mesh will do
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lies), self.program.batch
        )

    @functools.cached_property
    def state(self) -> State:
        """What the engine keeps while a step runs; see ``Pipeline.state``. It takes seconds: the model is traced."""
        return self.pipeline.state(self.params, self.batch)

    @functools.cached_property
    def update(self) -> Update | None:
        return None if self.program.update is None else self.program.update(self.params)

    @property
    def num_microbatches(self) -> int:
        return self.schedule.num_microbatches

    @property
    def tokens_of_device(self) -> int:
        """The number of a device's tokens of one microbatch."""
        devices = self.mesh.size // self.mesh.shape[PP]
        return self.program.tokens // (self.num_microbatches * devices)


_OWN = object()


def _as_used(leaf: Any, lies: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    own = dtype is _OWN or not jnp.issubdtype(leaf.dtype, jnp.floating)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if own else dtype, sharding=lies)


def abstract_mesh(num_pp: int, ep: int | tuple[int, int], *, dp: int = 1) -> AbstractMesh:
    """A mesh of no devices in particular, enough for counting; arguments as ``make_mesh`` takes them."""
    sizes = {PP: num_pp, EP: ep} if isinstance(ep, int) else {PP: num_pp, NODE: ep[0], EP: ep[1]}
    sizes = {DP: dp} | sizes if dp > 1 else sizes
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
