"""The coordination service of ``jax.distributed``: meet, tell, hear, without any device.

JAX offers these to its own libraries only, so this is the one module that reaches behind its public names. What is
public, ``multihost_utils.sync_global_devices``, compiles and runs a collective: useless before the first collective
may be run.
"""

from typing import Any

from jax._src import distributed

PATIENCE_MS = 24 * 3600 * 1000
"""How long to wait for others; a process that died ends the wait much sooner, by its missing heartbeats."""


def wait_for_all(name: str) -> None:
    """Return when every process is here. A name can be used once."""
    _client().wait_at_barrier(name, PATIENCE_MS)


def tell(key: str, value: str) -> None:
    """Leave a value for others. A key can be used once."""
    _client().key_value_set(key, value)


def hear(key: str) -> str:
    """The value that some process tells, or told already."""
    return _client().blocking_key_value_get(key, PATIENCE_MS)


def forget(key: str) -> None:
    """Take a value away, or all values below a key that ends in a slash."""
    _client().key_value_delete(key)


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("coordination: jax.distributed.initialize has not been called")
    return client
