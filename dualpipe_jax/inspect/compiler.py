"""Compiler options and environment variables that decide whether communication is hidden."""

from typing import Any

from dualpipe_jax.arguments import typechecked

_EXPERIMENTAL = "xla_tpu_enable_all_experimental_scheduler_features"
"""The TPU scheduler's experimental features, which hide much more communication from v5p on (v5p: 51 -> 100 %)."""

_MATMUL_LATENCY = "xla_lhs_output_fusion_latency_multiplier"
"""Corrects the scheduler's estimate of matmuls, which is longer than the compiler's final figures: 5.6 times on v5e, 11
times on v5p (a product of 4096 x 4096 x 4096, libtpu 0.0.42.1; v6e and tpu7x were not measured). Without the
correction the scheduler puts too little work beside all-to-alls."""

_LOOP_LATENCY = "xla_lhs_loop_fusion_latency_multiplier"
"""Corrects the scheduler's estimate of elementwise work, which is too long as well, so that a pair's last all-to-all
starts too late (1.1 : 1 on v5p: 95.7 -> 97.2 % hidden)."""

_FUSION_MEMORY = "xla_tpu_scoped_vmem_limit_kib"
"""The KiB that one fusion may use of 128 MiB of VMEM. With twice the default, and the larger key blocks of
``models.kernels`` that this allows, a pair takes 5 % (v5e) to 7 % (v5p) fewer cycles, and a pair of DeepSeek-V3 15 %
fewer; four times the default gains no more."""

_TPU = {
    "v5e": {_MATMUL_LATENCY: "0.2", _LOOP_LATENCY: "0.5", _FUSION_MEMORY: "32768"},
    "v5p": {_EXPERIMENTAL: "true", _MATMUL_LATENCY: "0.1", _LOOP_LATENCY: "0.5", _FUSION_MEMORY: "32768"},
    "v6e": {_EXPERIMENTAL: "true", _MATMUL_LATENCY: "0.1"},
    "tpu7x": {_EXPERIMENTAL: "true", _MATMUL_LATENCY: "0.1"},
}
"""Options by TPU generation, in addition to those that every TPU takes."""

GPU_PROCESS = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
"""Environment variables of each process on GPUs. The first, for NCCL 2.26 and later, makes collectives of several
communicators run in the order in which the host issues them. The second is CUDA's default number of queues: launchers
of other frameworks set 1, and then kernels hardly overlap."""

PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")


@typechecked
def recommended_compiler_options(
    platform: str, generation: str | None = None, *, ahead_of_time: bool = False
) -> dict[str, Any]:
    """Return the compiler options with which the engine's step should be compiled.

    >>> options = recommended_compiler_options("tpu", "v5e")
    >>> for name, value in options.items():
    ...     print(f"{name}={value}")
    xla_tpu_enable_async_all_to_all=true
    xla_lhs_output_fusion_latency_multiplier=0.2
    xla_lhs_loop_fusion_latency_multiplier=0.5
    xla_tpu_scoped_vmem_limit_kib=32768
    >>> compiled = step.lower(params, inputs, targets).compile(options)  # doctest: +SKIP
    >>> step = jax.jit(step, compiler_options=options)  # doctest: +SKIP

    What they are for:
      TPU: all-to-alls are synchronous by default, and so exposed: one option makes them asynchronous. Latency hiding
        is on by default. From v5p on, the scheduler's experimental features hide communication that it otherwise
        leaves exposed. The estimates of matmuls and elementwise work are corrected: they decide when an all-to-all
        must start. Fusions may use more VMEM than by default, and so read their operands less often.
      GPU: latency hiding and asynchronous all-to-alls are on by default. Without a GPU nothing can be
        autotuned, and the compiler must be told not to try.
      CPU: nothing overlaps, so there are no options.

    Arguments:
      platform: the devices' platform, ``jax.devices()[0].platform``: "cpu", "gpu" (also "cuda", "rocm") or "tpu".
      generation: the TPU's generation, "v4", "v5e", "v5p", "v6e" or "tpu7x"; a device's ``device_kind`` says "TPU v5
        lite" for v5e and "TPU v5" for v5p. None, or an unknown one, gives the options that every TPU takes.
      ahead_of_time: whether the program is compiled for a device that is not present.

    Raises ValueError for an unknown platform, because compilers refuse options that they do not know.
    """
    if platform not in PLATFORMS:
        raise ValueError(
            f"recommended_compiler_options: platform {platform!r} is none of {', '.join(PLATFORMS)}; pass "
            "jax.devices()[0].platform"
        )
    if platform == "tpu":
        return {"xla_tpu_enable_async_all_to_all": "true"} | _TPU.get(generation or "", {})
    if platform != "cpu" and ahead_of_time:
        return {"xla_gpu_autotune_level": "0"}
    return {}


IN_ORDER = "--xla_gpu_deterministic_ops=true --xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0"
"""XLA flags with which a GPU sums in the same order in every run. XLA chooses the tiles of its own products by timing
them, which deterministic ops forbid; it then finds none (jax 0.11.2, compiled for an H100 that was not present), so all
products use cuBLAS. Nothing else is timed either, so two processes cannot choose differently. On an H200 no leaf of
gradients differed."""


NO_TILES_MESSAGE = "Couldn't find output tile sizes"
"""Part of XLA's error message if it may time nothing, as for a GPU that is not present, and finds no tiles for its own
product."""

CUBLAS = {"xla_gpu_enable_triton_gemm": "False"}
"""Compiler options with which all products use cuBLAS, which needs no tiles; less work is fused with the products."""


@typechecked
def gpu_process_environment(local: int) -> dict[str, str]:
    """Return environment variables for one process per GPU, to be set before JAX is imported.

    All devices must run collectives in one agreed order (docs/how_it_works.md), and NCCL has to keep this order. A
    process that drives several GPUs issues their collectives from several threads, which was seen to hang.

    >>> for name, value in gpu_process_environment(3).items():
    ...     print(f"{name}={value}")
    JAX_LOCAL_DEVICE_IDS=3
    NCCL_LAUNCH_ORDER_IMPLICIT=1
    CUDA_DEVICE_MAX_CONNECTIONS=8

    Arguments:
      local: the process's number on its machine, from 0, which is also the number of its GPU;
        ``jax.distributed.initialize`` reads it if it gets no ``local_device_ids``.

    Raises ValueError for a number below 0.
    """
    if local < 0:
        raise ValueError(
            f"gpu_process_environment: local is {local}, must be this process's number, from 0 on"
        )
    return {"JAX_LOCAL_DEVICE_IDS": str(local), **GPU_PROCESS}


@typechecked
def tpu_generation(device_kind: str) -> str | None:
    """Return the generation of a TPU from ``jax.devices()[0].device_kind``, None if it is not known.

    >>> tpu_generation("TPU v5 lite"), tpu_generation("TPU v5"), tpu_generation("TPU7x")
    ('v5e', 'v5p', 'tpu7x')
    """
    known = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p"}
    known |= {"TPU v6 lite": "v6e", "TPU v6e": "v6e", "TPU7x": "tpu7x"}
    return known.get(device_kind)
