"""Operations that give the two parts of their backward themselves.

``split_backward`` needs no such help: it finds the weight part of any function in its jaxpr. What it cannot
do is cut a kernel in two. An operation whose backward is hand-written declares both parts with
``split_vjp``; the linear and the grouped expert matmul are given that way.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from dualpipe_jax.engine.jaxprs import WEIGHT_PART
from dualpipe_jax.engine.varying import varying_axes

Tree: TypeAlias = Any


class split_vjp:
    """A ``custom_vjp`` of ``function(x, weights)`` whose backward comes in two parts.

    ``defsplit`` takes three functions:

    - ``forward(x, weights) -> (y, residuals)``;
    - ``backward_input(residuals, dy) -> (dx, stash)``, where ``stash`` is whatever the other part wants, dy
      itself as a rule;
    - ``backward_weight(residuals, stash) -> dweights``.

    Under ``jax.grad`` both run at once. Under ``split_backward`` the second belongs to I and the third to W.
    None of its equations is moved, however cheap; only a collective is, with what it needs, so keep those in
    ``backward_input``. Each part may be one fused kernel. A kernel that computes dx and dweights in one call
    cannot be cut; it belongs to I whole.

    >>> @split_vjp
    ... def scale(x, weight):
    ...     return x * weight
    >>> scale.defsplit(
    ...     lambda x, weight: (x * weight, (x, weight)),
    ...     lambda residuals, dy: (dy * residuals[1], dy),
    ...     lambda residuals, dy: (dy * residuals[0]).sum(0),
    ... )
    """

    def __init__(self, function: Callable[[Tree, Tree], Tree]):
        self._function = jax.custom_vjp(function)
        functools.update_wrapper(self, function)

    def defsplit(
        self,
        forward: Callable[[Tree, Tree], tuple[Tree, Tree]],
        backward_input: Callable[[Tree, Tree], tuple[Tree, Tree]],
        backward_weight: Callable[[Tree, Tree], Tree],
    ) -> None:
        """Says how to differentiate the function."""
        marked = weight_part(backward_weight)

        def backward(residuals: Tree, dy: Tree) -> tuple[Tree, Tree]:
            dx, stash = backward_input(residuals, dy)
            return dx, marked(residuals, stash)

        self._function.defvjp(forward, backward)

    def __call__(self, x: Tree, weights: Tree) -> Tree:
        """Applies the function. In a shard_map, both arguments come to vary over the axes of either."""
        return self._function(*_match_varying(x, weights))


def _match_varying(*trees: Tree) -> tuple[Tree, ...]:
    """Casts each leaf to vary as all of them do, or check_vma would refuse the gradients' types."""
    axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(trees)))

    def cast(leaf: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, trees)


def weight_part(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function as part of a weight gradient: the split leaves it to W, however cheap it is."""

    def marked(*args: Any) -> Any:
        return function(*args)

    marked.__name__ = WEIGHT_PART
    return jax.jit(marked)


@split_vjp
def linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """``x[..., D] @ w[D, F] -> [..., F]``."""
    _check("linear", x.ndim >= 1 and w.ndim == 2 and x.shape[-1] == w.shape[0], x, w, "x[..., D] and w[D, F]")
    return x @ w


def _linear_input(residuals: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    _, w = residuals
    return lax.dot_general(dy, w, (((dy.ndim - 1,), (1,)), ((), ()))), dy


def _linear_weight(residuals: tuple[jax.Array, jax.Array], dy: jax.Array) -> jax.Array:
    x, _ = residuals
    rows = tuple(range(x.ndim - 1))
    return lax.dot_general(x, dy, ((rows, rows), ((), ())))


linear.defsplit(lambda x, w: (x @ w, (x, w)), _linear_input, _linear_weight)


@split_vjp
def grouped_matmul(x_ECD: jax.Array, w_EDF: jax.Array) -> jax.Array:
    """Each expert's tokens by its own matrix: ``[E, C, D], [E, D, F] -> [E, C, F]``."""
    fits = x_ECD.ndim == w_EDF.ndim == 3 and (x_ECD.shape[0], x_ECD.shape[2]) == w_EDF.shape[:2]
    _check("grouped_matmul", fits, x_ECD, w_EDF, "x[E, C, D] and w[E, D, F]")
    return jnp.einsum("ecd,edf->ecf", x_ECD, w_EDF)


def _grouped_input(residuals: tuple[jax.Array, jax.Array], dy_ECF: jax.Array) -> tuple[jax.Array, jax.Array]:
    _, w_EDF = residuals
    return jnp.einsum("ecf,edf->ecd", dy_ECF, w_EDF), dy_ECF


def _grouped_weight(residuals: tuple[jax.Array, jax.Array], dy_ECF: jax.Array) -> jax.Array:
    x_ECD, _ = residuals
    return jnp.einsum("ecd,ecf->edf", x_ECD, dy_ECF)


grouped_matmul.defsplit(lambda x, w: (grouped_matmul(x, w), (x, w)), _grouped_input, _grouped_weight)


def _check(name: str, fits: bool, x: jax.Array, w: jax.Array, wanted: str) -> None:
    if not fits:
        raise ValueError(f"{name}: wants {wanted}, got {list(x.shape)} and {list(w.shape)}.")
