"""The short API, for a ``PipelineModel``: an embedding, equal stages and a head.

Each function makes a ``Pipeline`` of the model and renames arguments and results; ``Pipeline`` documents all options.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.contract import PipelineModel, Tree, staged
from dualpipe_jax.engine import checks
from dualpipe_jax.engine.pipeline import Pipeline
from dualpipe_jax.engine.reference import num_stages_of, reference_loss
from dualpipe_jax.schedule import Schedule

Step = Callable[[Tree, Tree, Tree], tuple[Any, Tree]]
PIPELINE_MODEL_KEYS = ("embed", "stages", "head")
_OPTIONS_BY_LEAF = "param_specs", "storage_specs", "compute_dtype", "frozen"


@typechecked
def pipeline_value_and_grad(
    model: PipelineModel, schedule: Schedule, mesh: Mesh, *, has_aux: bool = False, **options: Any
) -> Step:
    """Loss and gradients of a model, computed in the order of a schedule on the ranks of a mesh.

    >>> import jax.numpy as jnp
    >>> from dualpipe_jax import PipelineModel, make_mesh, pipeline_value_and_grad
    >>> from dualpipe_jax.schedule import one_f_one_b
    >>> model = PipelineModel(
    ...     embed=lambda table, tokens: table[tokens],
    ...     stage=lambda w, x: x + jnp.tanh(x @ w),
    ...     head_loss=lambda w, x, targets: jnp.mean((x @ w - targets) ** 2),
    ... )
    >>> params = {"embed": jnp.ones((5, 2)), "stages": jnp.ones((1, 2, 2)), "head": jnp.ones(2)}
    >>> step = pipeline_value_and_grad(model, one_f_one_b(1, 2), make_mesh(1))
    >>> loss, grads = step(params, jnp.zeros((2, 4, 3), int), jnp.ones((2, 4, 3)))
    >>> round(float(loss), 3), grads["stages"].shape
    (8.574, (1, 2, 2))

    Returns ``step(params, inputs, targets) -> (loss, grads)``, or ``((loss, aux), grads)``, compiled at its
    first call. Make it once: a step that is made anew in each iteration is compiled anew each time. It
    computes the same as ``sequential_value_and_grad``, ``jax.value_and_grad`` of the plain model.

    params: {"embed", "stages", "head"}. Leaves of "stages" have a leading stage dim in model order, as long
      as a pipe of the schedule, or "stages" is what ``place_stages`` returned. Gradients have the same form.
    inputs, targets: leaves [num_microbatches, microbatch size, ...]; the microbatch size is cut over "dp" and "ep". A
      schedule with two pipes sends the first half of the microbatches into pipe 0.
    loss: float32, the mean of ``head_loss`` over microbatches and over the devices that share one.
    aux: what the stages returned besides x, summed over microbatches, stages and devices, integers exactly.

    Arguments:
      model: plain functions; see ``PipelineModel``.
      schedule, mesh: see ``Pipeline``.
      has_aux: whether a stage returns ``(x, aux)``.
      options: further arguments of ``Pipeline``, by name. Those that have an entry for each leaf, such as
        param_specs, use the keys of params here: "embed", "stages" and "head".

    Raises ValueError, with all that is wrong at once, for a mesh or arguments that do not fit.
    """
    return _step(_make_pipeline(model, schedule, mesh, has_aux, options).value_and_grad, has_aux)


@typechecked
def pipeline_apply(
    model: PipelineModel, schedule: Schedule, mesh: Mesh, *, has_aux: bool = False, **options: Any
) -> Step:
    """Forward only: ``apply(params, inputs, targets) -> (loss, outputs)``, or ``((loss, aux), outputs)``.

    Runs the forwards of the schedule in its order, keeps no residuals and computes no gradients.
    ``outputs`` is what the last stage returned, [num_microbatches, microbatch size, ...]. Arguments and errors as in
    ``pipeline_value_and_grad``.

    >>> import jax.numpy as jnp
    >>> from dualpipe_jax import PipelineModel, make_mesh, pipeline_apply
    >>> from dualpipe_jax.schedule import one_f_one_b
    >>> model = PipelineModel(
    ...     embed=lambda w, x: x * w,
    ...     stage=lambda w, x: x * w,
    ...     head_loss=lambda w, x, targets: jnp.mean((x * w - targets) ** 2),
    ... )
    >>> params = {"embed": jnp.array(1.0), "stages": jnp.array([2.0]), "head": jnp.array(3.0)}
    >>> apply = pipeline_apply(model, one_f_one_b(1, 2), make_mesh(1))
    >>> loss, outputs = apply(params, jnp.ones((2, 4)), jnp.full((2, 4), 5.0))
    >>> float(loss), outputs.tolist()
    (1.0, [[2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0]])
    """
    pipeline = _make_pipeline(model, schedule, mesh, has_aux, options)

    def apply(params: Tree, inputs: Tree, targets: Tree) -> tuple[Any, Tree]:
        objective, report, outputs = pipeline.apply(
            _engine_params(params), _engine_batch(inputs, targets), outputs="everywhere"
        )
        return _result(objective, report, has_aux), outputs

    return jax.jit(apply)


@typechecked
def pipeline_loss(
    model: PipelineModel, schedule: Schedule, mesh: Mesh, *, has_aux: bool = False, **options: Any
) -> Callable[[Tree, Tree, Tree], Any]:
    """The pipelined loss as a function that ``jax.grad`` and ``jax.value_and_grad`` differentiate.

    Returns ``loss(params, inputs, targets) -> loss``, or ``-> (loss, aux)``. The loss and the floating leaves
    of aux may be terms of a larger loss; see ``Pipeline.loss``. Only params are differentiable. Arguments as
    in ``pipeline_value_and_grad``.

    >>> import jax, jax.numpy as jnp
    >>> from dualpipe_jax import PipelineModel, make_mesh, pipeline_loss
    >>> from dualpipe_jax.schedule import one_f_one_b
    >>> model = PipelineModel(
    ...     embed=lambda w, x: x * w,
    ...     stage=lambda w, x: x * w,
    ...     head_loss=lambda w, x, targets: jnp.mean((x * w - targets) ** 2),
    ... )
    >>> params = {"embed": jnp.array(1.0), "stages": jnp.array([2.0]), "head": jnp.array(3.0)}
    >>> loss = pipeline_loss(model, one_f_one_b(1, 2), make_mesh(1))
    >>> grads = jax.grad(loss)(params, jnp.ones((2, 4)), jnp.full((2, 4), 5.0))
    >>> grads["stages"].tolist(), grads["head"].tolist()
    ([6.0], 4.0)
    """
    return _loss(_make_pipeline(model, schedule, mesh, has_aux, options).loss, has_aux)


@typechecked
def sequential_loss(model: PipelineModel, *, has_aux: bool = False) -> Callable[[Tree, Tree, Tree], Any]:
    """The loss of the plain model on one device: ``loss(params, inputs, targets) -> loss``, or ``-> (loss, aux)``.

    Its arguments and results are those of ``pipeline_loss``, with stages in model order; see ``reference_loss``.
    ``PipelineModel`` has an example.
    """

    def plain(params: Tree, batch: Tree) -> Any:
        return reference_loss(staged(model, num_stages_of(params["stages"]), has_aux=has_aux))(params, batch)

    return _loss(plain, has_aux)


@typechecked
def sequential_value_and_grad(model: PipelineModel, *, has_aux: bool = False) -> Step:
    """The step that every pipelined step is compared with: ``jax.value_and_grad`` of ``sequential_loss``.

    Its arguments and results are those of ``pipeline_value_and_grad``. It is not compiled.

    >>> import jax, jax.numpy as jnp
    >>> from dualpipe_jax import PipelineModel, sequential_value_and_grad
    >>> model = PipelineModel(
    ...     embed=lambda w, x: x * w,
    ...     stage=lambda w, x: x * w,
    ...     head_loss=lambda w, x, targets: jnp.mean((x * w - targets) ** 2),
    ... )
    >>> params = {"embed": jnp.array(1.0), "stages": jnp.array([2.0]), "head": jnp.array(3.0)}
    >>> step = jax.jit(sequential_value_and_grad(model))
    >>> loss, grads = step(params, jnp.ones((2, 4)), jnp.full((2, 4), 5.0))
    >>> float(loss), grads["stages"].tolist()
    (1.0, [6.0])
    """
    return jax.value_and_grad(sequential_loss(model, has_aux=has_aux), has_aux=has_aux, allow_int=True)


def _make_pipeline(
    model: PipelineModel, schedule: Schedule, mesh: Mesh, has_aux: bool, options: Mapping[str, Any]
) -> Pipeline:
    stages = schedule.placement.num_model_stages
    ours = {
        name: _engine_option(name, given) if name in _OPTIONS_BY_LEAF else given
        for name, given in options.items()
    }
    return Pipeline(staged(PipelineModel(*model), stages, has_aux=has_aux), schedule, mesh, **ours)


def _engine_option(name: str, given: Tree) -> Tree:
    """An option with an entry for each leaf, from ``PIPELINE_MODEL_KEYS`` to the engine's: "stages" and "shared"."""
    if given is None or (name == "compute_dtype" and not isinstance(given, dict)):
        return given
    checks.check_prefix_keys(name, given, PIPELINE_MODEL_KEYS)
    ends = {part: given[part] for part in ("embed", "head") if part in given}
    stages = {"stages": given["stages"]} if "stages" in given else {}
    return stages | ({"shared": {"embed": None, "head": None} | ends} if ends else {})


def _step(function: Callable[..., Any], has_aux: bool) -> Step:
    def step(params: Tree, inputs: Tree, targets: Tree) -> tuple[Any, Tree]:
        (objective, report), grads = function(_engine_params(params), _engine_batch(inputs, targets))
        others = {part: tree for part, tree in grads.items() if part != "shared"}
        return _result(objective, report, has_aux), grads["shared"] | others

    return jax.jit(step)


def _loss(function: Callable[..., Any], has_aux: bool) -> Callable[[Tree, Tree, Tree], Any]:
    def loss(params: Tree, inputs: Tree, targets: Tree) -> Any:
        objective, report = function(_engine_params(params), _engine_batch(inputs, targets))
        return _result(objective, report, has_aux)

    return loss


def _result(objective: jax.Array, report: Any, has_aux: bool) -> Any:
    return (objective, report.metrics.get("aux")) if has_aux else objective


def _engine_params(params: Tree) -> Tree:
    checks.check_param_keys(params, PIPELINE_MODEL_KEYS)
    return {"stages": params["stages"], "shared": {part: params[part] for part in ("embed", "head")}}


def _engine_batch(inputs: Tree, targets: Tree) -> Tree:
    return {"inputs": inputs, "targets": targets}
