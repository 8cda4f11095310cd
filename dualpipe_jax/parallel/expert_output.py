"""The experts' last product and ``combine`` as one operation, whose backward needs no output of an expert.

The gradient of a routing weight is <y, d>: y is an expert's output for a token, d the gradient of that token's sum.
Keeping y for the backward takes more memory than all other arrays of a layer of experts; computing it again costs the
product and an all_to_all. But y is ``hidden @ w``, so <y, d> is <hidden, d @ w.T>, and the gradient of hidden needs
``d @ w.T`` in any case. So gradients travel to experts unweighted, the weights travel with them, one number per row,
and one number per row comes back. Nothing is divided by a weight, which may be zero.

In eight bits product and combine stay two operations: <hidden, d @ w.T> would be computed from rounded gradients, which
<y, d> is not.

Shape suffixes: as in ``expert``; F hidden width of an expert.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dualpipe_jax.parallel.expert import (
    combine,
    dispatch,
    expert_matmul,
    flatten_arrivals,
    from_experts,
    take_or_zeros,
    to_dispatch_layout,
    to_experts,
)
from dualpipe_jax.parallel.expert_groups import transposed_for_gradient
from dualpipe_jax.parallel.expert_plan import Handle
from dualpipe_jax.parallel.wire import RowTransfer, transfer_rows
from dualpipe_jax.varying import vary_alike

Matmul = Callable[[Array, Array, Handle], Array]
"""``expert_matmul``, or a ``functools.partial`` of it with a chosen kernel."""


def combine_product(
    hidden: Array, w_LFD: Array, weights_TK: Array, handle: Handle, *, matmul: Matmul = expert_matmul
) -> Array:
    """Compute ``combine(matmul(hidden, w_LFD, handle), weights_TK, handle)``; the backward keeps only the arguments.

    >>> import jax, jax.numpy as jnp
    >>> from dualpipe_jax.parallel import combine_product, dispatch, plan_dropless
    >>> @jax.jit
    ... def experts(tokens, chosen, weights, matrices):
    ...     handle = plan_dropless(chosen, num_experts=2)
    ...     return combine_product(jax.nn.relu(dispatch(tokens, handle)), matrices, weights, handle)
    ...
    >>> matrices = jnp.array([1.0, 10.0]).reshape(2, 1, 1)
    >>> experts(jnp.array([[1.0], [2.0]]), jnp.array([[1], [0]]), jnp.ones((2, 1)), matrices).tolist()
    [[10.0], [2.0]]

    Args:
      hidden: rows in the layout that ``dispatch`` returns, [L, N, C, F] or [R, F].
      w_LFD: the local experts' last matrices, of the rows' dtype.
      weights_TK: see ``combine``.
      handle: the one given to ``dispatch``, of any plan.
      matmul: ``expert_matmul``, or a ``functools.partial`` of it. It is compared by identity: do not make a new one
        for each call.

    Returns:
      [T, D].

    """
    chosen = getattr(matmul, "keywords", {})
    if handle.payload == "float8" or chosen.get("float8"):
        return combine(matmul(hidden, w_LFD, handle), weights_TK, handle)
    leaves, tree = jax.tree.flatten(handle)
    hidden, w_LFD, weights_TK, *leaves = vary_alike((hidden, w_LFD, weights_TK, *leaves))
    w_LDF = transposed_for_gradient(w_LFD, chosen.get("kernel", "plain")) if handle.capacity is None else None
    return _combine_product(matmul, hidden, w_LFD, w_LDF, weights_TK, jax.tree.unflatten(tree, leaves))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine_product(
    matmul: Matmul, hidden: Array, w_LFD: Array, w_LDF: Array | None, weights_TK: Array, handle: Handle
) -> Array:
    del w_LDF  # used in the backward only
    return combine(matmul(hidden, w_LFD, handle), weights_TK, handle)


def _combine_product_fwd(matmul: Matmul, *args: Any) -> tuple[Array, tuple[Any, ...]]:
    return _combine_product(matmul, *args), args


def _combine_product_bwd(matmul: Matmul, saved: tuple[Any, ...], d_TD: Array) -> tuple[Any, ...]:
    hidden, w_LFD, w_LDF, weights_TK, handle = saved
    weights, pull_weights = jax.vjp(lambda w: _weights_of_rows(w, handle), weights_TK)
    d_rows = dispatch(d_TD, handle, fill=False)
    if w_LDF is None:
        _, pull = jax.vjp(lambda rows: matmul(rows, w_LFD, handle), hidden)
        (d_hidden,) = pull(d_rows)
    else:
        d_hidden = matmul(d_rows, w_LDF, handle)
    wide, d_wide = hidden.astype(jnp.float32), d_hidden.astype(jnp.float32)  # not weighted yet
    # Weights multiply the narrow arrays, hidden and its gradient, never the rows that travelled.
    _, pull = jax.vjp(lambda w: matmul((wide * weights).astype(hidden.dtype), w, handle), w_LFD)
    d_weights = jnp.sum(wide * d_wide, axis=-1, keepdims=True)
    return (d_wide * weights).astype(hidden.dtype), *pull(d_rows), None, *pull_weights(d_weights), None


_combine_product.defvjp(_combine_product_fwd, _combine_product_bwd)


def _weights_of_rows(weights_TK: Array, handle: Handle) -> Array:
    """Return the weight of each row, float32 [L, N, C, 1] or [R, 1], zero in empty rows."""
    if handle.outer is not None:
        weights_TK = flatten_arrivals(dispatch(weights_TK, replace(handle.outer, payload="plain")))
    weights = transfer_rows(RowTransfer(_to_rows, _from_rows), weights_TK.astype(jnp.float32), handle)
    return to_dispatch_layout(weights, handle)[..., None]


def _to_rows(weights_TK: Array, handle: Handle) -> Array:
    """Bring one number per assignment to the rows of one hop: all_to_alls of one dim, which no compiler pads."""
    return to_experts(take_or_zeros(weights_TK.reshape(-1), handle.assignment_S), handle)


def _from_rows(d_R: Array, handle: Handle) -> Array:
    """The transpose of ``_to_rows``."""
    return take_or_zeros(from_experts(d_R, handle), handle.slot_TK)
