"""What rows look like between devices: as they are, or in eight bits.

Whatever moves rows about without looking into them (gathers, all_to_alls, one hop or two) can move bytes in their
place: ``carry`` encodes rows before they are copied for their experts, and decodes them where they are used.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
from jax import Array

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.parallel.float8 import decode, encode
from dualpipe_jax.varying import vary_alike

Payload = Literal["plain", "float8"]
"""Rows as they are; or e4m3, and for each 128 numbers a byte of scale; see ``float8.encode``."""

Move = Callable[[Array, Any], Array]
"""A function of rows [..., D] of any dtype, and a plan, to rows [..., D]; those that nothing goes to are zeros."""


class Way(NamedTuple):
    """A way that rows take, and their gradients come back by.

    Attributes:
      out: linear, and moves bytes as well as numbers where ``payload`` is not plain.
      back: its transpose, likewise for ``payload_back``.
      payload, payload_back: what is moved.
    """

    out: Move
    back: Move
    payload: Payload = "plain"
    payload_back: Payload = "plain"


@typechecked
def check_payload(where: str, payload: str) -> None:
    """Raise ValueError unless ``payload`` is "plain" or "float8"."""
    if payload not in get_args(Payload):
        raise ValueError(f"{where}: payload is {payload!r}, must be one of {', '.join(get_args(Payload))}.")


def carry(way: Way, rows: Array, plan: Any) -> Array:
    """Move rows [S, D] along ``way.out``, and in the backward their gradients along ``way.back``.

    Args:
      way: the functions are compared by identity: take them from a module, make none for the call.
      rows: floating.
      plan: a tree of integer arrays that both functions are given.

    Returns:
      Rows of the dtype given.

    """
    leaves, tree = jax.tree.flatten(plan)
    rows, *leaves = vary_alike((rows, *leaves))
    return _carry(way, rows, jax.tree.unflatten(tree, leaves))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _carry(way: Way, rows: Array, plan: Any) -> Array:
    return _moved(way.out, way.payload, rows, plan)


def _carry_fwd(way: Way, rows: Array, plan: Any):
    return _carry(way, rows, plan), plan


def _carry_bwd(way: Way, plan: Any, d: Array):
    return _moved(way.back, way.payload_back, d, plan), None


_carry.defvjp(_carry_fwd, _carry_bwd)


def _moved(move: Move, payload: Payload, rows: Array, plan: Any) -> Array:
    if payload == "plain":
        return move(rows, plan)
    return decode(move(encode(rows), plan), rows.shape[-1], rows.dtype)
