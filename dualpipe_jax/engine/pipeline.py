"""What users call: a model, a schedule and a mesh become a step."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dualpipe_jax.engine import checks
from dualpipe_jax.engine.model import PipelineModel, Tree
from dualpipe_jax.engine.spmd import Engine
from dualpipe_jax.engine.stages import PlacedStages, broadcast_specs, from_placed, to_placed
from dualpipe_jax.engine.trees import with_float0
from dualpipe_jax.schedule import CostModel, Schedule

Step = Callable[[Tree, Tree, Tree], tuple[Any, Tree]]


def pipeline_value_and_grad(
    model: PipelineModel,
    schedule: Schedule,
    mesh: Mesh,
    *,
    param_specs: Tree = None,
    has_aux: bool = False,
    costs: CostModel | None = None,
    accumulate_dtype: Any = None,
    fuse_pairs: bool | None = None,
    check_vma: bool = False,
    debug_nans: bool = False,
) -> Step:
    """Loss and gradients of a model, computed in the order of a schedule on the ranks of a mesh.

    Returns ``step(params, inputs, targets) -> (loss, grads)``, or ``((loss, aux), grads)``, to be called
    under ``jax.jit``. It computes what ``jax.value_and_grad`` of the plain model does; the oracle
    ``sequential_value_and_grad`` is that function.

    params: {"embed", "stages", "head"}; leaves of "stages" have a leading stage dim in model order (as many
      stages as a pipe of the schedule), or are what ``place_stages`` returned. Gradients have the same form.
    inputs, targets: leaves [num_microbatches, microbatch size, ...]; the microbatch size is sharded over
      "ep". A schedule with two pipes sends the first half of the microbatches into pipe 0.
    loss: float32, the mean of ``head_loss`` over microbatches and over "ep".
    aux: what the stages returned besides x, summed over microbatches, stages and "ep"; integers stay exact.

    Arguments:
      model: plain functions; see ``PipelineModel``.
      schedule: any that ``validate`` accepts and whose ranks hold equally many stages.
      mesh: with the axes "pp" (the schedule's ranks) and "ep"; see ``make_mesh``.
      param_specs: PartitionSpec over "ep" of each leaf of params, without the stage dim; a prefix of the tree
        will do, None (the default) means replicated. A replicated leaf's gradient is summed over "ep".
      has_aux: whether a stage returns ``(x, aux)``.
      costs: relative costs by which actions are placed on ticks; changes the speed, not the result.
      accumulate_dtype: dtype of the gradients, summed over microbatches; None keeps each parameter's own.
      fuse_pairs: run an overlapped pair as one computation, in which the compiler can hide the all-to-alls of
        one direction behind the other's work, or as F and B after each other, with the same result. None: fuse
        but on CPU, which overlaps nothing and would copy every slot pool once a pair.
      check_vma: let ``shard_map`` check over which axes values vary.
      debug_nans: raise when the loss is not finite, naming the microbatch and stage where it first appears.

    Raises ValueError, with all that is wrong at once, for a mesh or arguments that do not fit.
    """
    engine = _engine(
        model, schedule, mesh, has_aux, costs, accumulate_dtype, fuse_pairs, check_vma, debug_nans
    )

    return _step(engine, param_specs)


def pipeline_units(
    model: PipelineModel,
    schedule: Schedule,
    mesh: Mesh,
    units: Collection[str] = ("FB",),
    *,
    param_specs: Tree = None,
    has_aux: bool = False,
    costs: CostModel | None = None,
    accumulate_dtype: Any = None,
    fuse_pairs: bool | None = None,
    check_vma: bool = False,
) -> Step:
    """The engine's step with only some of its units in it, to be compiled and looked at, not to be run.

    Each unit stands there once, exactly as in the whole step: behind its guard, with the same slot pools, and
    with the sends of every tick. By default that is one overlapped pair, F of one microbatch and B of another:
    what a step spends most of its time on, in a fraction of the time that a step takes to compile. In compiled
    programs the guards are found by the scopes "pair", "forward", "backward", "backward_input",
    "backward_weight", "embed", "head" and "embed_backward".

    Takes and returns what ``pipeline_value_and_grad`` does, ShapeDtypeStructs with shardings too, and is to be
    lowered: ``pipeline_units(...).lower(params, inputs, targets).compile()``. What it would compute has no
    meaning.

    Arguments:
      units: of "FB", "F", "B", "I", "W", "embed", "head", "embed_backward"; see ``units_alone``.
      model, schedule, mesh and the rest: as in ``pipeline_value_and_grad``.

    Raises ValueError where that does, and for units that the schedule runs nowhere.
    """
    engine = _engine(model, schedule, mesh, has_aux, costs, accumulate_dtype, fuse_pairs, check_vma, False)
    return _step(dataclasses.replace(engine, units=tuple(units)), param_specs)


def pipeline_state(
    model: PipelineModel,
    schedule: Schedule,
    mesh: Mesh,
    *,
    param_specs: Tree = None,
    has_aux: bool = False,
    costs: CostModel | None = None,
    accumulate_dtype: Any = None,
) -> Callable[[Tree, Tree, Tree], dict[str, Tree]]:
    """What the engine keeps on each device while a step runs, as shapes; nothing is computed or compiled.

    Returns ``state(params, inputs, targets)``, whose arguments are those of ``pipeline_value_and_grad``'s step
    (ShapeDtypeStructs will do). It gives ShapeDtypeStructs of one device:
      x, dy: slots for inputs of stages, and for gradients of their outputs.
      y_out, dx_out: what is on its way to other ranks.
      residual_i, residual_w: slots for what forwards keep for the backward for the input, and for the weights'.
      stash: slots for what the former hands to the latter.
      grads0, grads1, ...: sums of gradients of each local stage, those of a borrowed copy too.
      embed_grads, head_grads: and of both ends.
      loss, aux, first_bad: figures.

    Arguments and errors as in ``pipeline_value_and_grad``.
    """
    engine = _engine(model, schedule, mesh, has_aux, costs, accumulate_dtype, True, False, False)

    def state(params: Tree, inputs: Tree, targets: Tree) -> dict[str, Tree]:
        placed = jax.eval_shape(lambda p: _prepare(engine, p, param_specs, inputs, targets)[0], params)
        _, specs = _prepare(engine, placed, param_specs, inputs, targets)
        return engine.state(placed, specs, inputs, targets)

    return state


def pipeline_apply(
    model: PipelineModel,
    schedule: Schedule,
    mesh: Mesh,
    *,
    param_specs: Tree = None,
    has_aux: bool = False,
    costs: CostModel | None = None,
    check_vma: bool = False,
    debug_nans: bool = False,
) -> Step:
    """Forward only: ``apply(params, inputs, targets) -> (loss, outputs)``, or ``((loss, aux), outputs)``.

    Runs the forwards of the schedule in its order, keeps no residuals and computes no gradients.
    ``outputs`` is what the last stage returned, [num_microbatches, microbatch size, ...]. Arguments and errors as in
    ``pipeline_value_and_grad``.
    """
    engine = _engine(model, schedule, mesh, has_aux, costs, None, False, check_vma, debug_nans)

    def apply(params: Tree, inputs: Tree, targets: Tree) -> tuple[Any, Tree]:
        placed, specs = _prepare(engine, params, param_specs, inputs, targets)
        loss, aux, outputs, first_bad = engine.forward(placed, specs, inputs, targets)
        if debug_nans:
            checks.report_first_bad(loss, first_bad, schedule)
        return ((loss, aux) if has_aux else loss), outputs

    return jax.jit(apply)


def pipeline_loss(
    model: PipelineModel,
    schedule: Schedule,
    mesh: Mesh,
    *,
    param_specs: Tree = None,
    has_aux: bool = False,
    **options,
) -> Callable[[Tree, Tree, Tree], Any]:
    """The pipelined loss as a function that ``jax.grad`` and ``jax.value_and_grad`` differentiate.

    Returns ``loss(params, inputs, targets)``, or ``(loss, aux)``. Not differentiated it runs forward only;
    differentiated, its forward does the whole pipelined step and keeps the gradients, which the backward
    scales: so it may be a term of a larger loss, at the cost of one step.

    Only params are differentiable: differentiating by inputs or targets raises. Options as in
    ``pipeline_value_and_grad``.
    """
    step = pipeline_value_and_grad(model, schedule, mesh, param_specs=param_specs, has_aux=has_aux, **options)
    for only_for_gradients in ("accumulate_dtype", "fuse_pairs"):
        options.pop(only_for_gradients, None)
    apply = pipeline_apply(model, schedule, mesh, param_specs=param_specs, has_aux=has_aux, **options)

    @jax.custom_vjp
    def loss(params, inputs, targets):
        return apply(params, inputs, targets)[0]

    def forward(params, inputs, targets):
        if any(leaf.perturbed for leaf in jax.tree.leaves((inputs, targets))):
            raise ValueError("pipeline_loss: differentiable by params only; stop_gradient inputs and targets")
        value, gradients = step(*jax.tree.map(lambda leaf: leaf.value, (params, inputs, targets)))
        return value, jax.tree.map(lambda g, p: _scalable(g, p.value.dtype), gradients, params)

    def backward(gradients, cotangent):
        scale = cotangent[0] if has_aux else cotangent
        if isinstance(scale, jax.custom_derivatives.SymbolicZero):
            scale = jnp.zeros(scale.shape, scale.dtype)
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients), None, None

    loss.defvjp(forward, backward, symbolic_zeros=True)
    return loss


def _engine(
    model: PipelineModel,
    schedule: Schedule,
    mesh: Mesh,
    has_aux: bool,
    costs: CostModel | None,
    accumulate_dtype: Any,
    fuse_pairs: bool | None,
    check_vma: bool,
    debug_nans: bool,
) -> Engine:
    checks.check_mesh(schedule, mesh)
    if fuse_pairs is None:
        fuse_pairs = mesh.devices.flat[0].platform != "cpu"
    return Engine(
        model=PipelineModel(*model),
        schedule=schedule,
        mesh=mesh,
        has_aux=has_aux,
        costs=CostModel() if costs is None else costs,
        accumulate_dtype=accumulate_dtype,
        fuse_pairs=fuse_pairs,
        check_vma=check_vma,
        debug_nans=debug_nans,
    )


def _step(engine: Engine, param_specs: Tree) -> Step:
    def step(params: Tree, inputs: Tree, targets: Tree) -> tuple[Any, Tree]:
        placed, specs = _prepare(engine, params, param_specs, inputs, targets)
        loss, aux, lists, first_bad = engine.value_and_grad(placed, specs, inputs, targets)
        if engine.debug_nans:
            checks.report_first_bad(loss, first_bad, engine.schedule)
        return ((loss, aux) if engine.has_aux else loss), _as_params(params, lists, engine.schedule)

    return jax.jit(step)


def _prepare(
    engine: Engine, params: Tree, param_specs: Tree, inputs: Tree, targets: Tree
) -> tuple[Tree, Tree]:
    """Check the arguments and bring the stages to their ranks; parameters and their specs."""
    checks.check_arguments(engine.schedule, engine.mesh, params, inputs, targets)
    given = {} if param_specs is None else param_specs
    checks.check_spec_keys(given)
    params = params | {"stages": to_placed(params["stages"], engine.schedule.placement)}
    specs = {part: broadcast_specs(given.get(part), params[part]) for part in ("embed", "head")}
    specs["stages"] = PlacedStages(
        tuple(broadcast_specs(given.get("stages"), s) for s in params["stages"].local)
    )
    checks.check_specs(engine.mesh, params, specs)
    return params, specs


def _scalable(gradient: Any, dtype: Any) -> Any:
    """A gradient in its parameter's dtype, as a cotangent must be; None for an integer parameter's."""
    return None if gradient.dtype == jax.dtypes.float0 else gradient.astype(dtype)


def _as_params(params: Tree, lists: Tree, schedule: Schedule) -> Tree:
    """Gradient lists in the form of params."""
    gradients = {part: with_float0(params[part], lists[part]) for part in ("embed", "head")}
    stages = params["stages"]
    if isinstance(stages, PlacedStages):
        local = zip(stages.local, lists["stages"].local, strict=True)
        return gradients | {"stages": PlacedStages(tuple(with_float0(*pair) for pair in local))}
    return gradients | {"stages": with_float0(stages, from_placed(lists["stages"], schedule.placement))}
