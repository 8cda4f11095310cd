"""A pipeline's loss for ``jax.grad``: its forward runs the whole step, its backward scales the step's gradients."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dualpipe_jax.contract import At, Out, Report, StagedModel, StageFunction, Tree, checked_output
from dualpipe_jax.engine.trees import add_to, as_metric, sum_dtype
from dualpipe_jax.split.leaves import is_floating


def differentiable(
    forward_only: Callable[..., Any],
    step: Callable[..., Any],
    gradients_by_report: Callable[..., Tree],
    *,
    input_grads: bool,
) -> Callable[..., tuple[jax.Array, Report]]:
    """``loss(params, batch, key=None) -> (objective, Report)``, compiled; see ``Pipeline.loss``.

    Arguments:
      forward_only: ``(params, batch, key) -> (objective, report, _)``.
      step: ``(params, batch, key) -> ((objective, report), gradients)``.
      gradients_by_report: ``(params, batch, key, cotangents) -> gradients``, the gradients of <cotangents,
        report>, the inner product; cotangents are a ``Report``, with None for those that are zero.
      input_grads: whether gradients have an entry "batch".
    """

    @jax.custom_vjp
    def loss(params: Tree, batch: Tree, key: jax.Array | None) -> tuple[jax.Array, Report]:
        objective, report, _ = forward_only(params, batch, key)
        return objective, report

    def forward(params: Tree, batch: Tree, key: Any) -> Any:
        if not input_grads and any(leaf.perturbed for leaf in jax.tree.leaves(batch)):
            raise ValueError(
                "Pipeline.loss: differentiable by params only; stop_gradient the batch, or make the Pipeline with "
                "input_grads=True"
            )
        arguments = jax.tree.map(lambda leaf: leaf.value, (params, batch, key))
        result, gradients = step(*arguments)
        return result, (arguments, gradients)

    def backward(residuals: Any, cotangents: Any) -> Any:
        (params, batch, key), gradients = residuals
        of_objective, of_report = cotangents
        more = []
        if not all(map(_is_zero, jax.tree.leaves(of_report))):
            of_report = jax.tree.map(lambda c: None if _is_zero(c) else c, of_report)
            more = [_without_float0(gradients_by_report(params, batch, key, of_report))]

        def scaled(gradient: jax.Array, *more: jax.Array) -> jax.Array:
            # Not in the gradient's own dtype: as float16 a loss scale of 2^16 is infinite, and one of 1e-9 zero.
            wide = gradient.astype(sum_dtype(gradient.dtype, None))
            # A gradient that is not finite stays out where the objective is: zero times infinity is NaN.
            own = jnp.zeros_like(wide) if _is_zero(of_objective) else wide * of_objective.astype(wide.dtype)
            return functools.reduce(add_to, more, own).astype(gradient.dtype)

        gradients = jax.tree.map(scaled, _without_float0(gradients), *more)
        cast = _cotangents(gradients, {**params, "batch": batch} if input_grads else params)
        by_batch = cast.pop("batch", None)
        return cast, by_batch, None

    loss.defvjp(forward, backward, symbolic_zeros=True)
    return jax.jit(lambda params, batch, key=None: loss(params, batch, key))


def with_report_objective(model: StagedModel, cotangents: Report, parts: int) -> StagedModel:
    """The model with another objective, <cotangents, report>, for ``Pipeline._gradients_by_report``.

    Its shared parameters are {"given": those of the model, "cotangents": (those of losses, those of
    metrics)}; a cotangent is None where it is zero. Metrics are sums over all ``parts`` of the microbatches,
    but an objective is a mean over them: so the terms of metrics are multiplied by ``parts``.
    """
    wanted = {name for name, cotangent in cotangents.losses.items() if cotangent is not None}

    def loss_name(name: str) -> str:
        return f"loss.{name}"  # never equal to "metrics" below, whatever names the user gives losses

    def weights(batch: Tree) -> dict[str, jax.Array]:
        given = {} if model.weights is None else model.weights(batch)
        return {loss_name(name): weight for name, weight in given.items() if name in wanted}

    def weighted(kind: str, function: StageFunction) -> StageFunction:
        def stage(own: Tree, shared: Tree, x: Tree, at: At) -> Out:
            out = checked_output(kind, function(own, shared["given"], x, at))
            by_loss, by_metric = shared["cotangents"]
            losses = {loss_name(name): by_loss[name] * v for name, v in out.losses.items() if name in wanted}
            terms = jax.tree.map(
                lambda c, m: (
                    jnp.float32(0) if c is None else jnp.sum(c * as_metric(m)).astype(jnp.float32) * parts
                ),
                {name: by_metric[name] for name in out.metrics},
                dict(out.metrics),
                is_leaf=lambda node: node is None,
            )
            return Out(out.x, losses | {"metrics": sum(jax.tree.leaves(terms), jnp.float32(0))})

        return stage

    kinds = {name: weighted(name, function) for name, function in model.kinds.items()}
    return dataclasses.replace(model, kinds=kinds, weights=weights)


def _is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero) or cotangent.dtype == jax.dtypes.float0


def _without_float0(gradients: Tree) -> Tree:
    """The gradients with None in place of those of dtype float0."""
    return jax.tree.map(lambda g: None if g.dtype == jax.dtypes.float0 else g, gradients)


def _cotangents(gradients: Tree, params: Tree) -> Tree:
    """Gradients in their parameters' dtypes, as cotangents must be; None for integers, zeros for frozen leaves."""

    def cotangent(p: Any, g: Any) -> Any:
        if p is None or not is_floating(p):
            return None
        return jnp.zeros(p.shape, p.dtype) if g is None else g.astype(p.dtype)

    return jax.tree.map(cotangent, params, gradients, is_leaf=lambda node: node is None)
