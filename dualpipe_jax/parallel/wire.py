"""The form in which rows travel between devices: unchanged, or in eight bits.

A function that only moves rows (by gathers and all_to_alls, in one hop or two) can move encoded bytes just as well:
``transfer_rows`` encodes rows before they are copied for their experts, and decodes them where they are used.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
from jax import Array

from dualpipe_jax.parallel.float8 import decode, encode
from dualpipe_jax.varying import vary_alike

Payload = Literal["plain", "float8"]
"""How rows travel: "plain" is unchanged; "float8" is e4m3, with a byte of scale per 128 numbers (``float8.encode``)."""

MoveRows = Callable[[Array, Any], Array]
"""A function of rows [..., D] of any dtype and a plan that returns rows [..., D], zeros where no row goes."""


class RowTransfer(NamedTuple):
    """How rows move in the forward, and how their gradients move back.

    Attributes:
      forward: a linear function that moves rows, and also moves bytes if ``payload`` is not plain.
      backward: the transpose of ``forward``, which also moves bytes if ``payload_backward`` is not plain.
      payload, payload_backward: the form in which ``forward`` and ``backward`` move rows.
    """

    forward: MoveRows
    backward: MoveRows
    payload: Payload = "plain"
    payload_backward: Payload = "plain"


def transfer_rows(transfer: RowTransfer, rows: Array, plan: Any) -> Array:
    """Move rows [S, D] along ``transfer.forward``, and in the backward their gradients along ``transfer.backward``.

    Args:
      transfer: the two functions. They are compared by identity: define them in a module, make no new ones for each
        call.
      rows: floating.
      plan: a tree of integer arrays, given to both functions.

    Returns:
      Rows of the dtype given.

    """
    leaves, tree = jax.tree.flatten(plan)
    rows, *leaves = vary_alike((rows, *leaves))
    return _transfer_rows(transfer, rows, jax.tree.unflatten(tree, leaves))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _transfer_rows(transfer: RowTransfer, rows: Array, plan: Any) -> Array:
    return _move_encoded(transfer.forward, transfer.payload, rows, plan)


def _transfer_rows_fwd(transfer: RowTransfer, rows: Array, plan: Any):
    return _transfer_rows(transfer, rows, plan), plan


def _transfer_rows_bwd(transfer: RowTransfer, plan: Any, d: Array):
    return _move_encoded(transfer.backward, transfer.payload_backward, d, plan), None


_transfer_rows.defvjp(_transfer_rows_fwd, _transfer_rows_bwd)


def _move_encoded(move: MoveRows, payload: Payload, rows: Array, plan: Any) -> Array:
    if payload == "plain":
        return move(rows, plan)
    return decode(move(encode(rows), plan), rows.shape[-1], rows.dtype)
