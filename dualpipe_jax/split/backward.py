"""Split the backward of any JAX function in two: the front door."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.split.leaves import flags, is_floating
from dualpipe_jax.split.plan import SplitPlan, make_plan
from dualpipe_jax.split.trace import trace_backward

Tree: TypeAlias = Any
Arrays: TypeAlias = list[Any]
Residuals: TypeAlias = tuple[Arrays, Arrays]
"""What the forward keeps for I alone, and what it keeps for W."""


@dataclass(frozen=True, eq=False)
class SplitFunction:
    """What ``split_backward`` gives; see there."""

    function: Callable[[Tree, Tree], Any]
    has_aux: bool
    wanted: tuple[Tree, Tree]
    at_hand: Tree
    sums: Sequence[Any] | None
    _plans: dict[Any, SplitPlan] = field(default_factory=dict, init=False, repr=False)

    def trace(self, params: Tree, x: Tree) -> SplitPlan:
        """The plan for these shapes; arrays, tracers or ShapeDtypeStructs. Kept for the next call."""
        leaves, tree = jax.tree.flatten((params, x))
        key = tree, tuple(map(_type_key, leaves)), jax.sharding.get_abstract_mesh(), _settings()
        if key not in self._plans:
            asked = [*flags("wanted", self.wanted[0], params), *flags("wanted", self.wanted[1], x)]
            wanted = [
                ask and is_floating(leaf) for ask, leaf in zip(asked, map(jax.typeof, leaves), strict=True)
            ]
            joint = trace_backward(self.function, params, x, self.has_aux, wanted, self.sums)
            trees = jax.tree.structure(params), jax.tree.structure(x)
            plan = make_plan(joint, wanted, flags("at_hand", self.at_hand, x), trees)
            if joint.holds_tracers:  # captured from the caller's trace: no use to anyone else
                return plan
            self._plans[key] = plan
        return self._plans[key]

    def forward(self, params: Tree, x: Tree) -> tuple[Any, Residuals]:
        """Gives ``(y, residuals)``, or ``((y, aux), residuals)`` with has_aux."""
        y, aux, residuals_i, residuals_w = self.trace(params, x).forward(params, x)
        return ((y, aux) if self.has_aux else y), (residuals_i, residuals_w)

    def backward_input(self, params: Tree, x: Tree, residuals: Residuals, dy: Tree) -> tuple[Tree, Arrays]:
        """Gives ``(dx, stash)``."""
        return self.trace(params, x).backward_input(params, x, *residuals, dy)

    def backward_weight(self, params: Tree, x: Tree, residuals: Residuals, stash: Arrays) -> Tree:
        """Gives dparams."""
        return self.trace(params, x).backward_weight(params, x, residuals[1], stash)

    def backward(self, params: Tree, x: Tree, residuals: Residuals, dy: Tree) -> tuple[Tree, Tree]:
        """Gives ``(dparams, dx)``: I and W at once."""
        return self.trace(params, x).backward(params, x, *residuals, dy)


@typechecked
def split_backward(
    function: Callable[[Tree, Tree], Any],
    has_aux: bool = False,
    *,
    wanted: tuple[Tree, Tree] = (True, True),
    at_hand: Tree = False,
    sums: Sequence[Any] | None = None,
) -> SplitFunction:
    """Splits the backward of ``function(params, x) -> y`` in two, with no change to the function.

    ``dx`` comes from ``backward_input`` alone. ``backward_weight`` holds no collective and recomputes nothing
    of the dx chain; together they spend the matmul FLOPs of the fused backward. A weight gradient that needs
    a collective (of an all-gathered or replicated parameter) is computed in ``backward_input`` as far as the
    collective. What ``jax.checkpoint`` recomputes for dx is stashed where the weights need it too.

    The forward never keeps parameters, what derives from parameters alone, constants, or x a second time.

    Scans and conds are split inside. While loops, Pallas kernels and shard_maps are atomic: one that gives dx
    and dparams together belongs to ``backward_input``. See ``split_vjp`` to give the two apart.

    Args:
      function: pure; ``params``, ``x`` and ``y`` are pytrees of arrays and typed keys. Leaves of integers, bools and
        keys have gradients of dtype float0, as with ``jax.vjp``; where y has such, dy may have anything, None too.
      has_aux: whether the function gives ``(y, aux)``; aux has no cotangent.
      wanted: of params and of x, the leaves whose gradient is wanted: bools in place of leaves or of whole branches.
        For the others (frozen parameters) nothing is computed and nothing kept, and their gradient is None.
      at_hand: which leaves of x the caller has in the backward anyway, in the same form: to keep them costs nothing.
      sums: for each leaf of params the dtype in which the caller sums its gradient, or None. Where a matrix product
        makes it, it comes in that dtype if that is wider than its own, and is not rounded; see ``widen``. What
        ``gradient_sum`` marks is then an input of the plan's programs.

    >>> import jax, jax.numpy as jnp
    >>> split = split_backward(lambda w, x: jnp.tanh(x @ w))
    >>> w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    >>> y, residuals = split.forward(w, x)
    >>> dx, stash = split.backward_input(w, x, residuals, jnp.ones_like(y))
    >>> dw = split.backward_weight(w, x, residuals, stash)
    """
    return SplitFunction(function, has_aux, wanted, at_hand, sums)


def _type_key(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, leaf.weak_type
    return jax.typeof(leaf)


def _settings() -> tuple[Any, ...]:
    """What changes a trace besides its arguments."""
    names = "jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion"
    return tuple(getattr(jax.config, name) for name in names)
