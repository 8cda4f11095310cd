"""Every test runs on eight virtual CPU devices, with strict dtype promotion."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # Virtual devices share the machine's cores; on a busy one a permute may wait long for the last of them.
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    ]
)

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
