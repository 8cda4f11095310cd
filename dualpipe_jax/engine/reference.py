"""The plain model on one device, with which every pipelined step is compared."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.contract import (
    At,
    PipelineModel,
    Report,
    StagedModel,
    StageFunction,
    Tree,
    checked_output,
    key_at,
    loss_weights,
    staged,
)
from dualpipe_jax.engine import checks
from dualpipe_jax.engine.kinds import sum_marked
from dualpipe_jax.engine.stages import PlacedStages, check_num_stages, is_listed
from dualpipe_jax.engine.trees import as_metric, sum_dtype, types_of
from dualpipe_jax.parallel.expert_plan import DROPPED
from dualpipe_jax.parallel.mesh import AXES
from dualpipe_jax.split.marks import capture_marked


@typechecked
def reference_loss(
    model: StagedModel | PipelineModel, *, num_parts: int = 1
) -> Callable[..., tuple[jax.Array, Report]]:
    """``loss(params, batch, key=None) -> (loss, Report)``: each microbatch through every stage, one after another.

    Its arguments and results are those of ``Pipeline.loss``, on one device, with stages in model order; the
    model's collectives see axes of size one. Its gradients are summed over microbatches in float32 at least,
    whatever the parameters' dtype.

    >>> import jax, jax.numpy as jnp
    >>> from dualpipe_jax import Out, StagedModel, reference_loss
    >>> def stage(own, shared, x, at):
    ...     return Out(losses={"error": jnp.mean((at.batch["x"] * own - shared) ** 2)})
    ...
    >>> params = {"stages": jnp.array([3.0]), "shared": jnp.array(1.0)}
    >>> loss = jax.jit(reference_loss(StagedModel({"only": stage}, ("only",))))
    >>> objective, report = loss(params, {"x": jnp.ones((2, 4))})
    >>> float(objective), float(report.losses["error"])
    (4.0, 4.0)

    Arguments:
      num_parts: the number of parts into which dp and ep would cut a microbatch. Each part is run by itself,
        with the key and the weights that it would have on its device.
    """

    def run(
        model: StagedModel, params: Tree, batch: Tree, key: jax.Array | None, number: jax.Array
    ) -> tuple[Tree, ...]:
        losses: dict[str, jax.Array] = {}
        metrics: dict[str, Tree] = {}
        dropped = jnp.int32(0)
        x = None
        stages = of_each_stage(params["stages"], model.num_stages)
        for stage, (kind, own) in enumerate(zip(model.kind_of, stages, strict=True)):
            microbatch, part = number // num_parts, number % num_parts
            at = At(batch, jnp.int32(stage), microbatch, key_at(key, stage, microbatch, part))
            out = checked_output(kind, model.kinds[kind](own, params["shared"], x, at))
            dropped += _dropped(model.kinds[kind], own, params["shared"], x, at)
            x = out.x
            for name, value in out.losses.items():
                losses[name] = losses.get(name, jnp.float32(0)) + jnp.asarray(value).astype(jnp.float32)
            for name, value in out.metrics.items():
                value = jax.tree.map(as_metric, value)
                metrics[name] = jax.tree.map(jnp.add, metrics[name], value) if name in metrics else value
        return losses, metrics, dropped, loss_weights(model, batch, losses)

    def loss(params: Tree, batch: Tree, key: jax.Array | None = None) -> tuple[jax.Array, Report]:
        sizes = {leaf.shape[1:2] for leaf in jax.tree.leaves(batch)}
        if num_parts < 1 or len(sizes) != 1 or not all(size and size[0] % num_parts == 0 for size in sizes):
            shapes = ", ".join(str(leaf.shape) for leaf in jax.tree.leaves(batch))
            raise ValueError(
                f"the batch needs leaves [num_microbatches, microbatch size, ...] of one microbatch size that "
                f"num_parts={num_parts} divides; their shapes are {shapes or 'none'}."
            )
        parts = jax.tree.map(
            lambda leaf: leaf.reshape(-1, leaf.shape[1] // num_parts, *leaf.shape[2:]), batch
        )
        numbers = jnp.arange(jax.tree.leaves(parts)[0].shape[0], dtype=jnp.int32)
        checks.check_param_keys(params)
        plain = staged(model, num_stages_of(params["stages"])) if isinstance(model, PipelineModel) else model
        wide = _widened(params)
        losses, metrics, dropped, weights = jax.lax.map(
            lambda item: run(plain, _as_given(wide, params), item[0], key, item[1]), (parts, numbers)
        )
        means = {name: jnp.sum(losses[name] * weights[name]) / jnp.sum(weights[name]) for name in losses}
        totals = jax.tree.map(lambda a: a.sum(0, dtype=a.dtype), metrics)
        return sum(means.values(), jnp.float32(0)), Report(means, totals, dropped.sum(dtype=jnp.int32))

    return _on_one_device(loss)


def _dropped(stage: StageFunction, *arguments: Any) -> jax.Array:
    """The number of assignments that the stage drops, int32 []; see ``Report``.

    It runs the stage once more, so that the gradients stay those of the plain function.
    """
    arguments = jax.tree.map(jax.lax.stop_gradient, arguments)
    with_marked = capture_marked(stage, DROPPED, *arguments)
    return jnp.int32(0) if with_marked is None else sum_marked(with_marked(*arguments)[1])


def _widened(params: Tree) -> Tree:
    """Params with narrower floats cast to float32.

    The loop over microbatches sums the gradients of the arrays that it reads, in their dtype.
    """
    return jax.tree.map(lambda leaf: leaf.astype(sum_dtype(leaf.dtype, None)), params)


def _as_given(wide: Tree, params: Tree) -> Tree:
    return jax.tree.map(lambda leaf, given: leaf.astype(given.dtype), wide, params)


def num_stages_of(stages: Tree) -> int:
    """The number of stages of leaves [num_stages, ...] or of a list of one tree for each stage.

    Raises ValueError if there are no leaves, if their leading dims differ, for a list that may be either, and for
    placed stages.
    """
    _check_in_model_order(stages)
    shapes = [leaf.shape for leaf in jax.tree.leaves(stages)]
    counts = {shape[:1] for shape in shapes}
    stacked = len(counts) == 1 and () not in counts
    if isinstance(stages, list):
        alike = all(types_of(tree) == types_of(stages[0]) for tree in stages)
        if not stacked:
            return len(stages)
        if alike and shapes[0][0] != len(stages):
            raise ValueError(
                f"params['stages'] is a list of {len(stages)} alike trees of leaves [{shapes[0][0]}, ...]: that may be "
                f"{len(stages)} stages, or one tree of {shapes[0][0]}. Stack the first, jax.tree.map(lambda *leaves: "
                "jnp.stack(leaves), *stages), or give the second as a tuple."
            )
    if not stacked:
        raise ValueError(
            "params['stages'] must have leaves of one leading dim, the number of stages: [num_stages, ...]; their "
            f"shapes are {', '.join(map(str, shapes)) or 'none'}."
        )
    return shapes[0][0]


def of_each_stage(stages: Tree, num_stages: int) -> list[Tree]:
    """The parameters of each stage, from leaves [num_stages, ...] or from a list of one tree for each stage.

    Raises ValueError for placed stages, and for another number of stages.
    """
    _check_in_model_order(stages)
    if is_listed(stages, num_stages):
        return stages
    check_num_stages(stages, num_stages, "the model")
    return [jax.tree.map(lambda leaf, stage=stage: leaf[stage], stages) for stage in range(num_stages)]


def _check_in_model_order(stages: Tree) -> None:
    if isinstance(stages, PlacedStages):
        raise ValueError(
            "params['stages'] are placed on ranks, which the plain model does not have: bring them to model order with "
            "Pipeline.unplace (or unplace_stages)."
        )


@typechecked
def reference_value_and_grad(
    model: StagedModel | PipelineModel, *, num_parts: int = 1, input_grads: bool = False
) -> Callable[..., tuple[tuple[jax.Array, Report], Tree]]:
    """The step that every pipelined step is compared with: ``jax.value_and_grad`` of ``reference_loss``.

    Its arguments and results are those of ``Pipeline.value_and_grad``. It is not compiled.

    >>> import jax.numpy as jnp
    >>> from dualpipe_jax import Out, StagedModel, reference_value_and_grad
    >>> def stage(own, shared, x, at):
    ...     return Out(losses={"error": jnp.mean((at.batch["x"] * own - shared) ** 2)})
    ...
    >>> params = {"stages": jnp.array([3.0]), "shared": jnp.array(1.0)}
    >>> step = reference_value_and_grad(StagedModel({"only": stage}, ("only",)))
    >>> (loss, _), grads = step(params, {"x": jnp.ones((2, 4))})
    >>> float(loss), grads["stages"].tolist()
    (4.0, [4.0])

    Arguments:
      num_parts: see ``reference_loss``.
      input_grads: whether gradients have an entry "batch" too.
    """
    loss = reference_loss(model, num_parts=num_parts)

    def step(
        params: Tree, batch: Tree, key: jax.Array | None = None
    ) -> tuple[tuple[jax.Array, Report], Tree]:
        if not input_grads:
            return jax.value_and_grad(loss, has_aux=True, allow_int=True)(params, batch, key)
        both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True, allow_int=True)
        result, (gradients, by_batch) = both(params, batch, key)
        return result, gradients | {"batch": by_batch}

    return step


def _on_one_device(function: Callable[..., Tree]) -> Callable[..., Tree]:
    def run(*arguments: Tree) -> Tree:
        ones, types = (1,) * len(AXES), (AxisType.Auto,) * len(AXES)
        mesh = jax.make_mesh(ones, AXES, types, devices=jax.devices()[:1])
        everywhere = PartitionSpec()
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
        )
        return mapped(*arguments)

    return run
