"""Split the backward of any JAX function in two: the front door."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from dualpipe_jax.split.jaxprs import trace_backward
from dualpipe_jax.split.plan import SplitPlan, make_plan

Tree: TypeAlias = Any
Arrays: TypeAlias = list[Any]


class SplitFunction:
    """What ``split_backward`` gives; see there."""

    def __init__(self, function: Callable[[Tree, Tree], Any], has_aux: bool):
        self._function = function
        self._has_aux = has_aux
        self._plans: dict[Any, SplitPlan] = {}

    def trace(self, params: Tree, x: Tree) -> SplitPlan:
        """The plan for these shapes; arrays, tracers or ShapeDtypeStructs. Kept for the next call."""
        leaves, tree = jax.tree.flatten((params, x))
        key = tree, tuple(map(_type_key, leaves)), jax.sharding.get_abstract_mesh(), _settings()
        if key not in self._plans:
            joint = trace_backward(self._function, params, x, self._has_aux)
            plan = make_plan(joint, params, x)
            if joint.holds_tracers:  # captured from the caller's trace: no use to anyone else
                return plan
            self._plans[key] = plan
        return self._plans[key]

    def forward(self, params: Tree, x: Tree) -> tuple[Any, Any]:
        """Gives ``(y, residuals)``, or ``((y, aux), residuals)`` with has_aux."""
        y, aux, residuals_i, residuals_w = self.trace(params, x).forward(params, x)
        return ((y, aux) if self._has_aux else y), (residuals_i, residuals_w)

    def backward_input(self, params: Tree, x: Tree, residuals: Any, dy: Tree) -> tuple[Tree, Arrays]:
        """Gives ``(dx, stash)``."""
        residuals_i, residuals_w = residuals
        return self.trace(params, x).backward_input(params, x, residuals_i, residuals_w, dy)

    def backward_weight(self, params: Tree, x: Tree, residuals: Any, stash: Arrays) -> Tree:
        """Gives dparams."""
        return self.trace(params, x).backward_weight(params, x, residuals[1], stash)

    def backward(self, params: Tree, x: Tree, residuals: Any, dy: Tree) -> tuple[Tree, Tree]:
        """Gives ``(dparams, dx)``: I and W at once."""
        residuals_i, residuals_w = residuals
        return self.trace(params, x).backward(params, x, residuals_i, residuals_w, dy)


def split_backward(function: Callable[[Tree, Tree], Any], has_aux: bool = False) -> SplitFunction:
    """Splits the backward of ``function(params, x) -> y`` in two, with no change to the function.

    ``dx`` comes from ``backward_input`` alone. ``backward_weight`` holds no collective and recomputes nothing
    of the dx chain; together they spend the matmul FLOPs of the fused backward. A weight gradient that needs
    a collective (of an all-gathered or replicated parameter) is computed in ``backward_input`` as far as the
    collective. What ``jax.checkpoint`` recomputes for dx is stashed where the weights need it too.

    The forward never keeps parameters, what derives from parameters alone, constants, or x a second time.

    Scans and conds are split inside. While loops, Pallas kernels and shard_maps are atomic: one that gives dx
    and dparams together belongs to ``backward_input``. See ``split_vjp`` to give the two apart.

    Args:
      function: pure; ``params`` and ``x`` are pytrees. Integer leaves have gradients of dtype float0, as with
        ``jax.vjp``.
      has_aux: whether the function gives ``(y, aux)``; aux has no cotangent.

    >>> import jax, jax.numpy as jnp
    >>> split = split_backward(lambda w, x: jnp.tanh(x @ w))
    >>> w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    >>> y, residuals = split.forward(w, x)
    >>> dx, stash = split.backward_input(w, x, residuals, jnp.ones_like(y))
    >>> dw = split.backward_weight(w, x, residuals, stash)
    """
    return SplitFunction(function, has_aux)


def _type_key(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, leaf.weak_type
    return jax.typeof(leaf)


def _settings() -> tuple[Any, ...]:
    """What changes a trace besides its arguments."""
    names = "jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion"
    return tuple(getattr(jax.config, name) for name in names)
