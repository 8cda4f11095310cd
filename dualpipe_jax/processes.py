"""Processes on this machine: cores, the port where several of one program meet, the GPU of each. Loads no JAX."""

import os
import socket
import subprocess

from dualpipe_jax.inspect.compiler import GPU_PROCESS, gpu_process_environment


def num_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port() -> int:
    """A port of the loopback interface on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def gpu_environment(number: int, count: int, *, one_gpu: bool = False) -> dict[str, str]:
    """Environment variables of process ``number`` of ``count`` on a machine with GPUs; set them before importing JAX.

    Each process takes the GPU of its number; with ``one_gpu`` all take the first. NCCL lets several ranks use
    one GPU from version 2.30 on; a JAX that comes with an older NCCL needs the newer library by LD_PRELOAD.
    With ``one_gpu`` a rank's collectives take few of the GPU's multiprocessors, since the collectives of all
    ranks must run at the same time or none ends; and each process may take 0.8 / ``count`` of the memory,
    none of it preallocated.
    """
    if not one_gpu:
        return gpu_process_environment(number)
    return {
        **GPU_PROCESS,
        "JAX_LOCAL_DEVICE_IDS": "0",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_MAX_CTAS": "2",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.8 / count:.3f}",
    }


def too_few_gpus(count: int) -> str:
    """The error message if this machine has fewer than ``count`` GPUs; empty if it has enough or that is not known."""
    found = count_gpus()
    if found is None or found >= count:
        return ""
    if found == 0:
        return f"--processes {count}: each process takes a GPU, and there is none; take CPU devices"
    return (
        f"--processes {count}: each process takes a GPU, and there {'is' if found == 1 else 'are'} {found}; give "
        f"--processes {found}, or for tests of what is computed, not of speed, --one-gpu"
    )


def count_gpus() -> int | None:
    """The number of NVIDIA GPUs that a process here sees; None if nvidia-smi is missing or fails."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else sum(line.startswith("GPU ") for line in done.stdout.splitlines())
