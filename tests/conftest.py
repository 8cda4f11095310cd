"""Every test runs on eight virtual CPU devices, with strict dtype promotion."""

import collections
import os

from tests.quick import QUICK

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        QUICK,
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # Virtual devices share the machine's cores; on a busy one a permute may wait long for the last of them.
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    ]
)

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a grid marked ``thin(n)`` all cases but every n-th are slow."""
    seen = collections.Counter()
    for item in items:
        if (mark := item.get_closest_marker("thin")) is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1
