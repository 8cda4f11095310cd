"""The coordination service of ``jax.distributed``: barriers and values by key, without any device.

JAX offers these to its own libraries only, so this is the one module that uses private names of JAX. The public
``multihost_utils.sync_global_devices`` compiles and runs a collective, so it is useless before the first collective may
be run.
"""

from typing import Any

from jax._src import distributed

PATIENCE_MS = 24 * 3600 * 1000
"""Milliseconds to wait for other processes. One that died ends the wait much sooner, by its missing heartbeats."""


def wait_for_all(name: str) -> None:
    """Wait until every process has called this with the same name. A name can be used once."""
    _client().wait_at_barrier(name, PATIENCE_MS)


def set_value(key: str, value: str) -> None:
    """Store a value under a key for other processes. A key can be used once."""
    _client().key_value_set(key, value)


def wait_for_value(key: str) -> str:
    """The value that a process stored under a key; waits until it is there."""
    return _client().blocking_key_value_get(key, PATIENCE_MS)


def delete_value(key: str) -> None:
    """Delete the value of a key, or all values below a key that ends in a slash."""
    _client().key_value_delete(key)


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("coordination: jax.distributed.initialize has not been called")
    return client
