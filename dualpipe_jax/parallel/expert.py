"""Expert dispatch: bring every token to the experts its router chose, and bring their answers back.

Four pieces, called one by one so that a schedule may put other work between them::

    handle = plan_capacity(topk_TK, num_experts, capacity, axis_name)   # or plan_dropless(...)
    routed = dispatch(x_TD, handle)               # one all_to_all
    y = expert_matmul(routed, w_LDF, handle)      # as often as the expert needs
    out_TD = combine(y, weights_TK, handle)       # one all_to_all back

A handle serves both directions of both passes: the backward of ``dispatch`` is a ``combine`` with unit
weights, the backward of ``combine`` is a ``dispatch``. Rows are only ever gathered, through the permutation
or its inverse; nothing is scatter-added. The only collective is ``all_to_all`` over ``axis_name``, so all of
it may stand in a branch that other pipeline ranks do not take.

With ``payload="float8"`` the rows that go to experts are in eight bits (see ``float8``): activations in the forward,
gradients of outputs in the backward. The rows that come back from experts, to be summed, are not. DeepSeek-V3 does the
same (section 3.3.3 of its report). Rows that cross no device are rounded, too, so results do not depend on the number
of devices.

Shape suffixes are those of ``expert_plan``, and D model dim.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.parallel.expert_groups import Kernel, multiply_groups
from dualpipe_jax.parallel.expert_plan import Handle
from dualpipe_jax.parallel.float8_matmul import float8_matmul
from dualpipe_jax.parallel.wire import RowTransfer, transfer_rows
from dualpipe_jax.varying import vary_alike


@typechecked
@jax.named_scope("dispatch")
def dispatch(x_TD: Array, handle: Handle, *, fill: bool = True) -> Array:
    """Send each token to its experts.

    >>> import jax, jax.numpy as jnp
    >>> from dualpipe_jax.parallel import dispatch, plan_dropless
    >>> @jax.jit
    ... def send(tokens, chosen):
    ...     return dispatch(tokens, plan_dropless(chosen, num_experts=3))
    ...
    >>> tokens, chosen = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[0, 1], [0, 2], [2, 1]])
    >>> send(tokens, chosen)[:, 0].tolist()  # two rows for each expert
    [1.0, 2.0, 1.0, 3.0, 2.0, 3.0]

    Args:
      x_TD: floating, this device's tokens.
      handle: where each token goes, as planned by ``plan_capacity``, ``plan_dropless`` or ``plan_two_hops``.
      fill: True fills the rows past the last group of a ``plan_dropless`` with zeros; False leaves rows of arbitrary
        tokens there, for a caller that ignores them, as ``expert_matmul`` does. False saves a pass over all rows that
        arrive, which takes a TPU as long as the gather itself.

    Returns:
      Rows on the devices of their experts, zeros where a slot is empty: [L, N, C, D] (N counts the source devices) if
      the handle comes from ``plan_capacity``, [R, D] grouped by expert if it comes from ``plan_dropless``.

    """
    if handle.outer is not None:
        x_TD = flatten_arrivals(dispatch(x_TD, handle.outer))
    T = handle.slot_TK.shape[0]
    if x_TD.ndim != 2 or x_TD.shape[0] != T:
        raise ValueError(f"dispatch: the handle was planned for {T} tokens, x_TD has shape {x_TD.shape}.")
    send_copies = _send_copies if fill else _send_copies_unfilled
    return to_dispatch_layout(
        transfer_rows(RowTransfer(send_copies, _collect_copies, handle.payload), x_TD, handle), handle
    )


def _check_rows(what: str, rows: Array, handle: Handle) -> None:
    """Raise ValueError unless the rows have the shape that ``dispatch`` returns."""
    S, N, C = handle.assignment_S.shape[0], handle.num_devices, handle.capacity
    wanted = (S,) if C is None else (S // (N * C), N, C)
    if rows.shape[:-1] != wanted:
        raise ValueError(
            f"{what} must be of shape [{', '.join(map(str, wanted))}, D] for this handle, got {list(rows.shape)}."
        )


def to_dispatch_layout(rows: Array, handle: Handle) -> Array:
    """Return rows [R, ...] in the layout that ``dispatch`` returns."""
    if handle.capacity is None:
        return rows
    # Transposed here, between matmul and all_to_all: the compiler lets the matmul read and write this order.
    return rows.reshape(handle.num_devices, -1, handle.capacity, *rows.shape[1:]).swapaxes(0, 1)


@typechecked
@jax.named_scope("combine")
def combine(y: Array, weights_TK: Array, handle: Handle) -> Array:
    """Bring the experts' outputs back and sum them for each token, weighted by ``weights_TK``.

    The sum is taken in float32 and returned in y's dtype.

    >>> import jax, jax.numpy as jnp
    >>> from dualpipe_jax.parallel import combine, dispatch, expert_matmul, plan_dropless
    >>> @jax.jit
    ... def experts(tokens, chosen, weights, matrices):
    ...     handle = plan_dropless(chosen, num_experts=3)
    ...     return combine(expert_matmul(dispatch(tokens, handle), matrices, handle), weights, handle)
    ...
    >>> tokens, chosen = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[0, 1], [0, 2], [2, 1]])
    >>> matrices = jnp.array([1.0, 10.0, 100.0]).reshape(3, 1, 1)  # each expert's, [1, 1]
    >>> experts(tokens, chosen, jnp.full((3, 2), 0.5), matrices)[:, 0].tolist()
    [5.5, 101.0, 165.0]

    Args:
      y: rows in the layout that ``dispatch`` returned, [L, N, C, D] or [R, D].
      weights_TK: floating; the weight of a dropped assignment has no effect and no gradient.
      handle: the one given to ``dispatch``.

    Returns:
      [T, D].

    """
    entry = handle if handle.outer is None else handle.outer
    planned = entry.slot_TK.shape[0], handle.slot_TK.shape[1]
    if weights_TK.shape != planned:
        raise ValueError(
            f"combine: the handle was planned for {planned} assignments, weights have shape {weights_TK.shape}."
        )
    _check_rows("combine: y", y, handle)
    if handle.outer is not None:
        # Sums are taken on the device at which the first hop arrives, so the weights take that hop, too.
        weights_TK = flatten_arrivals(dispatch(weights_TK, replace(handle.outer, payload="plain")))
    if handle.capacity is not None:
        y = y.swapaxes(0, 1)
    rows = y.reshape(-1, y.shape[-1])
    back_SD = transfer_rows(
        RowTransfer(from_experts, to_experts, payload_backward=handle.payload), rows, handle
    )
    out_TD = _weighted_sum(*vary_alike((back_SD, weights_TK, handle.assignment_S, handle.slot_TK)))
    if handle.outer is None:
        return out_TD
    return transfer_rows(
        RowTransfer(_collect_copies, _send_copies, payload_backward=handle.payload), out_TD, handle.outer
    )


def flatten_arrivals(rows: Array) -> Array:
    """Reshape the rows that a first hop brought, [1, N, C, D], to the input rows of a second hop, [N * C, D]."""
    return rows.reshape(-1, rows.shape[-1])


@typechecked
def expert_matmul(
    rows: Array,
    w_LDF: Array,
    handle: Handle,
    *,
    kernel: Kernel = "plain",
    gradient: Kernel | None = None,
    interpret: bool = False,
    float8: bool = False,
) -> Array:
    """Multiply each dispatched row by the matrix of its expert.

    >>> import jax, jax.numpy as jnp
    >>> from dualpipe_jax.parallel import dispatch, expert_matmul, plan_dropless
    >>> @jax.jit
    ... def first_matrices(tokens, chosen, matrices):
    ...     handle = plan_dropless(chosen, num_experts=2)
    ...     return expert_matmul(dispatch(tokens, handle), matrices, handle)
    ...
    >>> matrices = jnp.array([1.0, 10.0]).reshape(2, 1, 1)
    >>> first_matrices(jnp.array([[1.0], [2.0]]), jnp.array([[1], [0]]), matrices)[:, 0].tolist()
    [2.0, 10.0]

    Args:
      rows: [L, N, C, D] or [R, D], as ``dispatch`` returned them.
      w_LDF: the local experts' matrices, of the rows' dtype.
      handle: the one given to ``dispatch``.
      kernel, gradient, interpret: see ``multiply_groups``.
      float8: round both operands to eight bits, forward and backward, see ``float8_matmul``.

    Returns:
      [L, N, C, F] or [R, F].

    Raises:
      ValueError: there is no kernel of that name, or the shapes do not fit together.

    """
    _check_rows("expert_matmul: rows", rows, handle)
    wanted = (w_LDF.shape[0] if handle.capacity is None else rows.shape[0], rows.shape[-1])
    if w_LDF.shape[:2] != wanted:
        raise ValueError(
            f"expert_matmul: rows {list(rows.shape)} ask for w_LDF of shape [{wanted[0]}, {wanted[1]}, F], got "
            f"{list(w_LDF.shape)}."
        )
    multiply = float8_matmul if float8 else multiply_groups
    sizes_L = handle.group_sizes_L
    return multiply(rows, w_LDF, sizes_L, kernel=kernel, gradient=gradient, interpret=interpret)


def _exchange(rows_SD: Array, handle: Handle) -> Array:
    """Swap rows between devices, to the experts or back: the exchange is its own inverse."""
    if handle.num_devices == 1:
        return rows_SD
    return lax.all_to_all(rows_SD, handle.axis_name, 0, 0, tiled=True)


def to_experts(rows_SD: Array, handle: Handle, *, fill: bool = True) -> Array:
    """Send rows, which lie in the order of slots, to the devices of their experts, in the order of experts."""
    rows = _exchange(rows_SD, handle)
    if handle.arrival_R is None:
        return rows
    return take_or_zeros(rows, handle.arrival_R) if fill else _take_clipped(rows, handle.arrival_R)


def from_experts(rows: Array, handle: Handle) -> Array:
    """Bring rows back to the order of slots: the inverse of ``to_experts``.

    It is the transpose of ``to_experts``, too, for nobody reads what arrives in empty slots.
    """
    return _exchange(rows if handle.departure_R is None else _take_clipped(rows, handle.departure_R), handle)


def _send_copies(x_TD: Array, handle: Handle, *, fill: bool = True) -> Array:
    """Copy each token into the slots of its assignments, and send them."""
    token_S = handle.assignment_S // handle.slot_TK.shape[1]
    if fill or handle.capacity is not None:
        # Empty slots read a row of zeros: filling them later would take one more pass over all rows that are sent.
        padded_UD = jnp.pad(x_TD, ((0, 1), (0, 0)))
        return to_experts(padded_UD.at[token_S].get(mode="promise_in_bounds"), handle, fill=fill)
    return to_experts(_take_clipped(x_TD, token_S), handle, fill=fill)


_send_copies_unfilled = functools.partial(
    _send_copies, fill=False
)  # one object: transfers are compared by identity


def _collect_copies(rows: Array, handle: Handle) -> Array:
    """Bring rows back and sum those of each token in float32: the transpose of ``_send_copies``."""
    rows_SD, slot_TK = from_experts(rows, handle), handle.slot_TK
    # One gather per k: several times faster on CPU than one gather [T, K, D] and its sum.
    parts = (take_or_zeros(rows_SD, slot_TK[:, k]).astype(jnp.float32) for k in range(slot_TK.shape[1]))
    return functools.reduce(jnp.add, parts).astype(rows.dtype)


def take_or_zeros(array_RD: Array, index: Array) -> Array:
    """Gather rows; zeros where the index lies past the end."""
    return jnp.take(array_RD, index, axis=0, mode="fill", fill_value=0)


def _take_clipped(array_RD: Array, index: Array) -> Array:
    """Gather rows; the last one where the index lies past the end."""
    return array_RD.at[index].get(mode="clip")


@jax.custom_vjp
def _weighted_sum(rows_SD: Array, weights_TK: Array, assignment_S: Array, slot_TK: Array) -> Array:
    """Return for each token the weighted sum of the rows in the slots of its assignments."""
    del assignment_S
    # Zero rows alone do not cancel a dropped assignment: zero times a weight that is not finite is NaN.
    weights_KT = jnp.where(slot_TK < rows_SD.shape[0], weights_TK, 0).astype(jnp.float32).T
    parts = (
        take_or_zeros(rows_SD, slot_TK[:, k]).astype(jnp.float32) * weights_KT[k, :, None]
        for k in range(slot_TK.shape[1])
    )
    return functools.reduce(jnp.add, parts).astype(rows_SD.dtype)


def _weighted_sum_fwd(rows_SD: Array, weights_TK: Array, assignment_S: Array, slot_TK: Array):
    out_TD = _weighted_sum(rows_SD, weights_TK, assignment_S, slot_TK)
    return out_TD, (rows_SD, weights_TK, assignment_S, slot_TK)


def _weighted_sum_bwd(saved: tuple[Array, Array, Array, Array], d_TD: Array):
    rows_SD, weights_TK, assignment_S, slot_TK = saved
    weight_S = take_or_zeros(weights_TK.reshape(-1), assignment_S).astype(jnp.float32)
    d_SD = take_or_zeros(d_TD, assignment_S // slot_TK.shape[1]).astype(jnp.float32)
    products = (
        jnp.sum(take_or_zeros(rows_SD, slot_TK[:, k]).astype(jnp.float32) * d_TD.astype(jnp.float32), axis=-1)
        for k in range(slot_TK.shape[1])
    )
    d_rows_SD = (d_SD * weight_S[:, None]).astype(rows_SD.dtype)
    return d_rows_SD, jnp.stack(list(products), axis=-1).astype(weights_TK.dtype), None, None


_weighted_sum.defvjp(_weighted_sum_fwd, _weighted_sum_bwd)
