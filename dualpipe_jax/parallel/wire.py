"""The form in which rows travel between devices: unchanged, or in eight bits.

A function that only moves rows (by gathers and all_to_alls, in one hop or two) can move encoded bytes just as well:
``carry`` encodes rows before they are copied for their experts, and decodes them where they are used.
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
"""How rows travel: "plain" is unchanged; "float8" is e4m3, with a byte of scale per 128 numbers (``float8.encode``)."""

Move = Callable[[Array, Any], Array]
"""A function of rows [..., D] of any dtype and a plan that returns rows [..., D], zeros where no row goes."""


class Way(NamedTuple):
    """How rows move in the forward, and how their gradients move back.

    Attributes:
      out: a linear function that moves rows, and also moves bytes if ``payload`` is not plain.
      back: the transpose of ``out``, which also moves bytes if ``payload_back`` is not plain.
      payload, payload_back: the form in which ``out`` and ``back`` move rows.
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
      way: the two functions. They are compared by identity: define them in a module, make no new ones for each call.
      rows: floating.
      plan: a tree of integer arrays, given to both functions.

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
