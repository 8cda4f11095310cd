"""A training step as shapes: all that a dry run knows of a model and of its place on devices."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from dualpipe_jax.contract import StagedModel
from dualpipe_jax.engine import Pipeline
from dualpipe_jax.engine.spmd import Sketch
from dualpipe_jax.engine.stages import broadcast
from dualpipe_jax.engine.state import State
from dualpipe_jax.parallel import DP, PP
from dualpipe_jax.parallel.mesh import batch_spec, expert_axis_sizes
from dualpipe_jax.pods.links import Dispatch
from dualpipe_jax.pods.plan import Plan
from dualpipe_jax.schedule import Schedule

Tree = Any


class Update(NamedTuple):
    """How a step uses its gradients; ``optimized_by`` makes it of an optimizer.

    Attributes:
      state: what is kept from step to step in addition to the parameters, such as AdamW's averages: a tree of
        ShapeDtypeStructs with shardings.
      lower: ``lower(value_and_grad, batch)`` returns the whole step, lowered; see
        ``Pipeline.value_and_grad``.
    """

    state: Tree
    lower: Callable[[Callable[..., Any], Tree], Any]


@dataclasses.dataclass(frozen=True)
class Setting:
    """The first argument of your function that makes a ``Program``: what was asked for, and where it is to run.

    >>> from dualpipe_jax import make_mesh
    >>> from dualpipe_jax.pods import Plan, Setting
    >>> plan = Plan(schedule="dualpipe_v", pp=2, ep=1, microbatches=8, microbatch_size=4)
    >>> setting = Setting(plan, plan.make_schedule(), make_mesh(pp=2))
    >>> setting.schedule.placement.num_model_stages, setting.plan.num_microbatches
    (4, 8)

    Attributes:
      plan: the options that were given. A program that can cut its layers unevenly cuts them as
        ``plan.stage_layers`` says.
      schedule: the model has ``schedule.placement.num_model_stages`` stages.
      mesh: the mesh of "pp" and "ep" devices, and "dp" replicas; an abstract mesh where nothing is to be
        compiled.
      platform: JAX's name of the devices' platform; None where it is not known.
    """

    plan: Plan
    schedule: Schedule
    mesh: Mesh | AbstractMesh
    platform: Literal["cpu", "gpu", "tpu"] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A pipelined training step, as shapes. No arrays are made.

    >>> import jax, jax.numpy as jnp
    >>> from dualpipe_jax import Out, StagedModel
    >>> from dualpipe_jax.pods import Program, Setting
    >>> def step(setting: Setting, dim: int = 512) -> Program:
    ...     def stage(own, shared, x, at):
    ...         y = jnp.tanh((at.batch if x is None else x) @ own)
    ...         return Out(y, losses={"size": jnp.mean(y**2)})
    ...     stages, plan = setting.schedule.placement.num_model_stages, setting.plan
    ...     shape = plan.num_microbatches, plan.batch, plan.sequence, dim
    ...     return Program(
    ...         model=StagedModel({"all": stage}, ("all",) * stages),
    ...         params={"stages": jax.ShapeDtypeStruct((stages, dim, dim), jnp.float32), "shared": {}},
    ...         batch=jax.ShapeDtypeStruct(shape, jnp.float32),
    ...         tokens=plan.num_microbatches * plan.batch * plan.sequence,
    ...         flops=6 * dim * dim * stages,
    ...     )

    In a file my_step.py, ``dualpipe dryrun --program my_step.py:step`` counts it. The function by itself:

    >>> from dualpipe_jax import make_mesh
    >>> from dualpipe_jax.pods import Plan
    >>> plan = Plan(schedule="zb_h1", pp=2, ep=1, microbatches=8, microbatch_size=1, sequence=128)
    >>> step(Setting(plan, plan.make_schedule(), make_mesh(pp=2))).tokens
    1024

    Attributes:
      model: the functions of its stages.
      params: {"stages", "shared"} as the model has them: ShapeDtypeStructs, such as ``jax.eval_shape``
        returns.
      batch: the batch of a step, as ShapeDtypeStructs [microbatches, microbatch size, ...].
      tokens: the number of tokens that a step learns from.
      flops: floating-point operations that training one token takes, as MFU is to count them.
      counted: what ``flops`` counts, in words.
      routed: the part of ``flops`` that routed experts do. A device does more than that where the room of
        experts exceeds their tokens.
      param_specs: how parameters are sharded over "ep"; see ``Pipeline``.
      update: ``update(placed parameters)`` returns how a step uses its gradients. A second argument of the name
        ``trained`` is given ``Pipeline.trained``. None counts only parameters and gradients.
      active: number of parameters that one token uses; None: all.
      total: number of parameters of the model; None: those that ``params`` has.
      dispatch: how tokens choose experts; None if there are none.
      pipeline: further arguments of ``Pipeline``, such as ``storage_specs``.
      stage_layers: number of layers of each stage of the model, which is ``plan.stage_layers`` where that is
        given; empty where it cannot be chosen. `dualpipe plan` moves layers where the ends are of kinds
        "first" and "last".
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
    """A program with its schedule and its mesh: all that a training step is made from.

    Attributes:
      program: the program.
      schedule: the order of actions on each rank.
      mesh: a mesh of pp x ep devices, dp times; or an abstract mesh, which is enough for counting.
      fuse_pairs: see ``Pipeline``.
      gradient_sums: the dtype in which gradients are summed over microbatches.
    """

    program: Program
    schedule: Schedule
    mesh: Mesh | AbstractMesh
    fuse_pairs: bool = True
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
        """The parameters as the engine takes them: ShapeDtypeStructs with shardings."""
        shapes = jax.eval_shape(self.pipeline.placed, self.program.params)
        shardings = self.pipeline.shardings(shapes)
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            shardings,
        )

    @functools.cached_property
    def used(self) -> Tree:
        """``params`` as stages' functions see them: in ``Pipeline.compute_dtype``, gathered where stored in parts."""
        given, stages = self.pipeline.compute_dtype, self.params["stages"].local
        shardings = dataclasses.replace(self.pipeline, storage_specs=None).shardings(self.params)

        def of(part: str, tree: Tree, shardings: Tree) -> Tree:
            own = given.get(part) if isinstance(given, dict) else given
            return jax.tree.map(
                _as_used, tree, shardings, broadcast(own, tree, _STORED_DTYPE, "compute_dtype")
            )

        local = (of("stages", *stage) for stage in zip(stages, shardings["stages"].local, strict=True))
        return {
            "stages": dataclasses.replace(self.params["stages"], local=tuple(local)),
            "shared": of("shared", self.params["shared"], shardings["shared"]),
        }

    @functools.cached_property
    def batch(self) -> Tree:
        sharding = NamedSharding(self.mesh, batch_spec(self.mesh))  # type: ignore[arg-type]  # an abstract mesh will do
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), self.program.batch
        )

    @functools.cached_property
    def sketch(self) -> Sketch:
        """The engine's state and its matrix products; see ``Pipeline.sketch``. Takes seconds: the model is traced."""
        return self.pipeline.sketch(self.params, self.batch)

    @property
    def state(self) -> State:
        return self.sketch.state

    @functools.cached_property
    def update(self) -> Update | None:
        update: Any = self.program.update
        if update is None:
            return None
        takes_trained = "trained" in inspect.signature(update).parameters
        return update(self.params, trained=self.pipeline.trained) if takes_trained else update(self.params)

    @property
    def num_microbatches(self) -> int:
        return self.schedule.num_microbatches

    @property
    def tokens_of_device(self) -> int:
        """The number of a device's tokens of one microbatch."""
        devices = self.mesh.size // self.mesh.shape[PP]
        return self.program.tokens // (self.num_microbatches * devices)


_STORED_DTYPE = object()


def _as_used(leaf: Any, sharding: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    own = dtype is _STORED_DTYPE or not jnp.issubdtype(leaf.dtype, jnp.floating)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if own else dtype, sharding=sharding)


def abstract_mesh(num_pp: int, ep: int | tuple[int, int], *, dp: int = 1) -> AbstractMesh:
    """A mesh without devices, enough for counting. The arguments are those of ``make_mesh``."""
    sizes = ({DP: dp} if dp > 1 else {}) | {PP: num_pp, **expert_axis_sizes(ep)}
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
