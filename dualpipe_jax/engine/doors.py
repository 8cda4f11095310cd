"""The short way in: an embedding, equal stages and a head, as functions of a ``PipelineModel``.

Each makes a ``Pipeline`` of it and renames what goes in and comes out; see there for all that it can do.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.sharding import Mesh

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.contract import PipelineModel, Tree, staged
from dualpipe_jax.engine.pipeline import Pipeline
from dualpipe_jax.engine.state import State
from dualpipe_jax.schedule import CostModel, Schedule

Step = Callable[[Tree, Tree, Tree], tuple[Any, Tree]]
PARTS = ("embed", "stages", "head")


@typechecked
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

    Returns ``step(params, inputs, targets) -> (loss, grads)``, or ``((loss, aux), grads)``, compiled at its first call:
    make it once, for a step built anew in each iteration is compiled anew each time. It computes what
    ``jax.value_and_grad`` of the plain model does; the oracle ``sequential_value_and_grad`` is that function.

    params: {"embed", "stages", "head"}; leaves of "stages" have a leading stage dim in model order (as many
      stages as a pipe of the schedule), or are what ``place_stages`` returned. Gradients have the same form.
    inputs, targets: leaves [num_microbatches, microbatch size, ...]; the microbatch size is cut over "dp" and "ep". A
      schedule with two pipes sends the first half of the microbatches into pipe 0.
    loss: float32, the mean of ``head_loss`` over microbatches and over the devices that share one.
    aux: what the stages returned besides x, summed over microbatches, stages and devices; integers stay exact.

    Arguments:
      model: plain functions; see ``PipelineModel``.
      param_specs: PartitionSpec over "ep" of each leaf of params, without the stage dim; a prefix of the tree
        will do, None (the default) means replicated. A replicated leaf's gradient is summed over "ep".
      has_aux: whether a stage returns ``(x, aux)``.
      schedule, mesh and the rest: see ``Pipeline``.

    Raises ValueError, with all that is wrong at once, for a mesh or arguments that do not fit.
    """
    options = dict(costs=costs, accumulate_dtype=accumulate_dtype, fuse_pairs=fuse_pairs)
    options |= dict(check_vma=check_vma, debug_nans=debug_nans)
    pipeline = _pipeline(model, schedule, mesh, param_specs, has_aux, **options)
    return _step(pipeline.value_and_grad, has_aux)


@typechecked
def pipeline_units(
    model: PipelineModel,
    schedule: Schedule,
    mesh: Mesh,
    units: Collection[str] = ("FB",),
    *,
    param_specs: Tree = None,
    has_aux: bool = False,
    every_kind: bool = False,
    **options: Any,
) -> Step:
    """``pipeline_value_and_grad`` with only some of its units, to be lowered and looked at; see ``Pipeline.units``."""
    pipeline = _pipeline(model, schedule, mesh, param_specs, has_aux, **options)
    return _step(pipeline.units(units, every_kind=every_kind), has_aux)


def pipeline_state(
    model: PipelineModel,
    schedule: Schedule,
    mesh: Mesh,
    *,
    param_specs: Tree = None,
    has_aux: bool = False,
    **options: Any,
) -> Callable[[Tree, Tree, Tree], State]:
    """What the engine keeps on each device while a step runs, as shapes; see ``Pipeline.state``.

    Returns ``state(params, inputs, targets)``, whose arguments are those of ``pipeline_value_and_grad``'s step.
    """
    pipeline = _pipeline(model, schedule, mesh, param_specs, has_aux, **options)
    return lambda params, inputs, targets: pipeline.state(_ours(params), _batch(inputs, targets))


@typechecked
def pipeline_apply(
    model: PipelineModel,
    schedule: Schedule,
    mesh: Mesh,
    *,
    param_specs: Tree = None,
    has_aux: bool = False,
    **options: Any,
) -> Step:
    """Forward only: ``apply(params, inputs, targets) -> (loss, outputs)``, or ``((loss, aux), outputs)``.

    Runs the forwards of the schedule in its order, keeps no residuals and computes no gradients.
    ``outputs`` is what the last stage returned, [num_microbatches, microbatch size, ...]. Arguments and errors as in
    ``pipeline_value_and_grad``.
    """
    pipeline = _pipeline(model, schedule, mesh, param_specs, has_aux, **options)

    def apply(params: Tree, inputs: Tree, targets: Tree) -> tuple[Any, Tree]:
        objective, report, outputs = pipeline.apply(
            _ours(params), _batch(inputs, targets), outputs="everywhere"
        )
        return _result(objective, report, has_aux), outputs

    return jax.jit(apply)


@typechecked
def pipeline_loss(
    model: PipelineModel,
    schedule: Schedule,
    mesh: Mesh,
    *,
    param_specs: Tree = None,
    has_aux: bool = False,
    **options: Any,
) -> Callable[[Tree, Tree, Tree], Any]:
    """The pipelined loss as a function that ``jax.grad`` and ``jax.value_and_grad`` differentiate.

    Returns ``loss(params, inputs, targets)``, or ``(loss, aux)``; so it may be a term of a larger loss, and so may
    aux's floating leaves. See ``Pipeline.loss``. Only params are differentiable. Options as in
    ``pipeline_value_and_grad``.
    """
    pipeline = _pipeline(model, schedule, mesh, param_specs, has_aux, **options)

    def loss(params: Tree, inputs: Tree, targets: Tree) -> Any:
        return _result(*pipeline.loss(_ours(params), _batch(inputs, targets)), has_aux)

    return loss


def _pipeline(
    model: PipelineModel, schedule: Schedule, mesh: Mesh, param_specs: Tree, has_aux: bool, **options: Any
) -> Pipeline:
    if param_specs is not None:
        if not isinstance(param_specs, dict) or not set(param_specs) <= set(PARTS):
            given = sorted(param_specs) if isinstance(param_specs, dict) else type(param_specs).__name__
            raise ValueError(f"param_specs must be a dict with keys among {list(PARTS)}, got {given}.")
        ends = {part: param_specs.get(part) for part in ("embed", "head")}
        param_specs = {"stages": param_specs.get("stages"), "shared": ends}
    stages = schedule.placement.num_model_stages
    return Pipeline(
        staged(PipelineModel(*model), stages, has_aux=has_aux),
        schedule,
        mesh,
        param_specs=param_specs,
        **options,
    )


def _step(function: Callable[..., Any], has_aux: bool) -> Step:
    def step(params: Tree, inputs: Tree, targets: Tree) -> tuple[Any, Tree]:
        (objective, report), grads = function(_ours(params), _batch(inputs, targets))
        return _result(objective, report, has_aux), grads["shared"] | {"stages": grads["stages"]}

    return jax.jit(step)


def _result(objective: jax.Array, report: Any, has_aux: bool) -> Any:
    return (objective, report.metrics["aux"]) if has_aux else objective


def _ours(params: Tree) -> Tree:
    if not isinstance(params, dict) or set(params) != set(PARTS):
        given = sorted(params) if isinstance(params, dict) else type(params).__name__
        raise ValueError(f"params must be a dict with the keys {list(PARTS)}, got {given}.")
    return {"stages": params["stages"], "shared": {part: params[part] for part in ("embed", "head")}}


def _batch(inputs: Tree, targets: Tree) -> Tree:
    return {"inputs": inputs, "targets": targets}
