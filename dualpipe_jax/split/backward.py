"""The public entry: split the backward of any JAX function in two."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
from jax.extend import core as jex

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.split.leaves import flags, is_floating
from dualpipe_jax.split.plan import SplitPlan, make_plan
from dualpipe_jax.split.trace import trace_backward

Tree: TypeAlias = Any
Arrays: TypeAlias = list[Any]
Residuals: TypeAlias = tuple[Arrays, Arrays]
"""The arrays that the forward keeps for I alone, then those that it keeps for W (and perhaps for I)."""


@dataclass(frozen=True, eq=False)
class SplitFunction:
    """The result of ``split_backward``, which describes the fields and methods."""

    function: Callable[[Tree, Tree], Any]
    has_aux: bool
    wanted: tuple[Tree, Tree]
    at_hand: Tree
    sums: Sequence[Any] | None
    _plans: dict[Any, SplitPlan] = field(default_factory=dict, init=False, repr=False)

    def trace(self, params: Tree, x: Tree) -> SplitPlan:
        """Return the plan for these shapes of arrays, tracers or ShapeDtypeStructs; it is cached for later calls."""
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
            # The function captured tracers of the caller's trace: the plan is invalid outside that trace.
            if joint.holds_tracers:
                return plan
            self._plans[key] = plan
        return self._plans[key]

    def forward(self, params: Tree, x: Tree) -> tuple[Any, Residuals]:
        """Return ``(y, residuals)``, or ``((y, aux), residuals)`` with has_aux."""
        y, aux, residuals_i, residuals_w = self.trace(params, x).forward(params, x)
        return ((y, aux) if self.has_aux else y), (residuals_i, residuals_w)

    def backward_input(self, params: Tree, x: Tree, residuals: Residuals, dy: Tree) -> tuple[Tree, Arrays]:
        """Return ``(dx, stash)``."""
        return self.trace(params, x).backward_input(params, x, *residuals, dy)

    def backward_weight(self, params: Tree, x: Tree, residuals: Residuals, stash: Arrays) -> Tree:
        """Return dparams."""
        return self.trace(params, x).backward_weight(params, x, residuals[1], stash)

    def backward(self, params: Tree, x: Tree, residuals: Residuals, dy: Tree) -> tuple[Tree, Tree]:
        """Return ``(dparams, dx)``: I and W in one program."""
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
    """Split the backward of ``function(params, x) -> y`` in two; the function itself needs no change.

    ``backward_input`` alone computes ``dx``. ``backward_weight`` holds no collective and recomputes nothing
    of the dx chain; together they spend the matmul FLOPs of the fused backward. A weight gradient that needs
    a collective (for an all-gathered or replicated parameter) is computed in ``backward_input`` up to and including
    the collective. A value that ``jax.checkpoint`` recomputes for dx is stashed if the weights need it too.

    The forward never keeps parameters, values that derive from parameters alone, constants, or a second copy of x.

    Scans and conds are split inside. While loops, Pallas kernels and shard_maps are atomic: one that computes dx
    and dparams together belongs to ``backward_input``. ``split_vjp`` declares the two parts separately.

    Args:
      function: a pure function; ``params``, ``x`` and ``y`` are pytrees of arrays and typed keys. Leaves of integers,
        bools and keys have gradients of dtype float0, as with ``jax.vjp``; for such leaves of y, dy may hold anything,
        also None.
      has_aux: whether the function returns ``(y, aux)``; aux has no cotangent.
      wanted: which leaves of params and of x need a gradient: a pair of trees of bools, where a bool may also stand for
        a whole branch. For the other leaves (frozen parameters) nothing is computed or kept, and the gradient is None.
      at_hand: which leaves of x the caller still has in the backward, in the same form: to keep them costs nothing.
      sums: for each leaf of params the dtype in which the caller sums its gradient, or None. A gradient that a matrix
        product makes is returned in this dtype, without rounding, if it is wider than the gradient's own dtype; see
        ``widen``. The sums that ``gradient_sum`` marks then become inputs of the plan's programs.

    >>> import jax, jax.numpy as jnp
    >>> split = split_backward(lambda w, x: jnp.tanh(x @ w))
    >>> w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    >>> y, residuals = split.forward(w, x)
    >>> dx, stash = split.backward_input(w, x, residuals, jnp.ones_like(y))
    >>> dw = split.backward_weight(w, x, residuals, stash)
    """
    return SplitFunction(function, has_aux, wanted, at_hand, sums)


def _type_key(leaf: Any) -> Any:
    # A ShapeDtypeStruct compares what jax.typeof does, also the mesh axes over which its array varies.
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)


def _settings() -> tuple[Any, ...]:
    """The JAX settings that change a trace in addition to its arguments, and the sizes of ``jax.vmap``'s named axes."""
    names = "jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion"
    # A mesh has its sizes in its own key; those of other named axes become constants of the traced function.
    axes = ((name, jax.lax.axis_size(name)) for name in jex.unsafe_get_axis_names_DO_NOT_USE())
    return *(getattr(jax.config, name) for name in names), *axes
