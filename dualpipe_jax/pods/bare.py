"""An overlapped pair with nothing around it, for comparison: what do guards, slot pools and sends cost?"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from dualpipe_jax.engine import At
from dualpipe_jax.pair import interleave
from dualpipe_jax.parallel import DP, EP, PP
from dualpipe_jax.parallel.mesh import NODE
from dualpipe_jax.pods.program import Blueprint, Tree
from dualpipe_jax.split import split_backward
from dualpipe_jax.split.plan import SplitPlan
from dualpipe_jax.split.run import evaluate


def _everywhere(mesh: Any) -> PartitionSpec:
    """Each device has its own part of the first dim."""
    return PartitionSpec(tuple(axis for axis in (DP, PP, NODE, EP) if axis in mesh.shape))


def lower_bare_pair(blueprint: Blueprint, *, ordered: bool) -> Any:
    """A stage's forward of one microbatch and full backward of another in one function, lowered.

    Its arguments are (parameters, x) and (parameters, x, residuals, dy), its results output, figures, residuals,
    gradients of parameters and of x, on each device. There are no ticks, guards, slots, sends or sums of gradients.

    Arguments:
      ordered: in the order of ``interleave``, which its barriers keep, instead of the compiler's own.
    """
    mesh, model = blueprint.mesh, blueprint.program.model
    usual = model.kinds[max(model.kind_of, key=model.kind_of.count)]
    first = model.kinds[model.kind_of[0]]
    params = blueprint.used["stages"].local[0], blueprint.used["shared"]

    def at(batch: Tree) -> At:
        return At(batch, jnp.int32(1), jnp.int32(0), None)

    def stage(params: Tree, seen: tuple[Any, Any]) -> Any:
        own, shared = params
        out = usual(own, shared, seen[0], at(seen[1]))
        return (out.x, dict(out.losses)), dict(out.metrics)

    def plan(params: Tree, x: Any) -> SplitPlan:
        return split_backward(stage, has_aux=True, at_hand=(False, True)).trace(params, x)

    def enter(params: Tree, batch: Tree) -> Any:
        own, shared = _own(params)
        return first(own, shared, None, at(batch)).x

    def microbatches(leaf: Any) -> jax.ShapeDtypeStruct:
        _, size, *shape = leaf.shape
        return jax.ShapeDtypeStruct((mesh.shape[PP] * size, *shape), leaf.dtype)

    def forward(params: Tree, x: Any) -> list[Any]:
        *_, residuals_i, residuals_w = plan(_own(params), x).forward(_own(params), x)
        return _listed((residuals_i, residuals_w))

    def pair(
        params: Tree, x: Any, old_params: Tree, old_x: Any, residuals: Sequence[Any], dy: Any
    ) -> list[Any]:
        own, run = _own(params), _ordered if ordered else _plain
        split = plan(own, x)
        cotangents = dy, jax.tree.map(lambda loss: jnp.ones(loss.shape, loss.dtype), split.y[1])
        return _listed(run(split, (own, x), (old_params, old_x, residuals, cotangents)))

    batch = _laid(jax.tree.map(microbatches, blueprint.program.batch), mesh)
    _, x = _on_devices(enter, mesh, params, batch)
    _, residuals = _on_devices(forward, mesh, params, (x, batch))
    arguments = params, (x, batch), params, (x, batch), residuals, x
    function, _ = _on_devices(pair, mesh, *arguments)
    return jax.jit(function).lower(*arguments)


def _plain(plan: SplitPlan, forward: tuple[Any, ...], backward: tuple[Any, ...]) -> Any:
    params, x, residuals, dy = backward
    arguments = plan.backward_arguments(_own(params), x, *_shaped(plan, residuals), dy)
    return plan.forward(*forward), evaluate(plan.programs.backward, arguments)


def _ordered(plan: SplitPlan, forward: tuple[Any, ...], backward: tuple[Any, ...]) -> Any:
    """Run the two as the engine does, which takes residuals from pools only."""
    params, x, residuals, dy = backward
    own, programs = _own(params), plan.programs
    saved = plan.backward_arguments(own, x, *_shaped(plan, residuals), dy)
    fixed = range(len(plan.params.types))
    return interleave(
        programs.forward,
        plan.forward_arguments(*forward),
        programs.backward,
        saved,
        fixed=(fixed, fixed),
    )


def _own(params: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    """A rank's stage, without the dim of ranks, and what all share."""
    return jax.tree.map(lambda leaf: leaf[0], params[0]), params[1]


def _listed(tree: Tree) -> list[Any]:
    """What is laid over devices: no scalars, nor gradients of integers."""
    return [jnp.atleast_1d(leaf) for leaf in jax.tree.leaves(tree) if leaf.dtype != jax.dtypes.float0]


def _shaped(plan: SplitPlan, residuals: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Residuals for the backward for the input and for the weights', scalars as such again."""
    types = [*plan.residuals_i, *plan.residuals_w]
    arrays = [array.reshape(kind.shape) for array, kind in zip(residuals, types, strict=True)]
    return arrays[: len(plan.residuals_i)], arrays[len(plan.residuals_i) :]


def _on_devices(function: Callable[..., Any], mesh: Any, *arguments: Tree) -> tuple[Callable[..., Any], Tree]:
    """The function on each device, and types of what it makes."""
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, arguments)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=_everywhere(mesh), check_vma=False)
    return mapped, _laid(jax.eval_shape(mapped, *arguments), mesh)


def _laid(tree: Tree, mesh: Any) -> Tree:
    """Types of arrays that lie everywhere."""
    sharding = NamedSharding(mesh, _everywhere(mesh))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)
