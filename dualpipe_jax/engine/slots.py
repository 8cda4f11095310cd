"""Slot pools: arrays [slots, ...] where values wait from the unit that makes them to the last that reads."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def make_pool(num_slots: int, like: Any) -> Any:
    """Zeroed pool for each leaf of ``like`` (arrays or ShapeDtypeStructs), with a leading slot dim."""
    return jax.tree.map(lambda a: jnp.zeros((num_slots, *a.shape), a.dtype), like)


def read_slot(pool: Any, slot: jax.Array) -> Any:
    """The values in one slot."""
    return jax.tree.map(lambda b: lax.dynamic_index_in_dim(b, slot, 0, keepdims=False), pool)


def write_slot(pool: Any, slot: jax.Array, values: Any) -> Any:
    """The pool with one slot overwritten."""
    return jax.tree.map(lambda b, v: lax.dynamic_update_index_in_dim(b, v, slot, 0), pool, values)
