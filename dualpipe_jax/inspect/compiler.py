"""Compiler options that decide whether communication is hidden."""

from dualpipe_jax.arguments import typechecked

_EXPERIMENTAL = "xla_tpu_enable_all_experimental_scheduler_features"
"""The scheduler hides markedly more with them from v5p on (v5p: 51 -> 100 %)."""

_MATMULS = "xla_lhs_output_fusion_latency_multiplier"
"""The scheduler takes matmuls for longer than the compiler's final figures say: 5.6 times on v5e, 11 on v5p (4096
cubed, libtpu 0.0.42.1; v6e and tpu7x were not measured). Uncorrected it lets all-to-alls run out of work."""

_LOOPS = "xla_lhs_loop_fusion_latency_multiplier"
"""And elementwise work, so that a pair's last all-to-all starts too late (1.1 : 1 on v5p: 95.7 -> 97.2 % hidden)."""

_FUSION_MEMORY = "xla_tpu_scoped_vmem_limit_kib"
"""What one fusion may hold of 128 MiB of VMEM. With twice the default, and the key blocks of ``models.kernels`` that it
allows, a pair takes 5 (v5e) to 7 % (v5p) fewer cycles, one of DeepSeek-V3 15 %; four times gives no more."""

_TPU = {
    "v5e": {_MATMULS: "0.2", _LOOPS: "0.5", _FUSION_MEMORY: "32768"},
    "v5p": {_EXPERIMENTAL: "true", _MATMULS: "0.1", _LOOPS: "0.5", _FUSION_MEMORY: "32768"},
    "v6e": {_EXPERIMENTAL: "true", _MATMULS: "0.1"},
    "tpu7x": {_EXPERIMENTAL: "true", _MATMULS: "0.1"},
}
"""What a generation takes besides what every TPU does."""

GPU_PROCESS = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
"""For NCCL of 2.26 and later: collectives of several communicators run in the order in which the host issues them. And
CUDA's own number of queues: launchers for other frameworks set 1, with which little runs beside anything else."""

PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")


@typechecked
def recommended_compiler_options(
    platform: str, generation: str | None = None, *, ahead_of_time: bool = False
) -> dict[str, str]:
    """Options with which the engine's step should be compiled.

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
      TPU: all-to-alls are synchronous, and so exposed, unless asked otherwise; latency hiding is on by default.
        From v5p on, the scheduler's experimental features hide what it leaves exposed without them. Matmuls and
        elementwise work are priced as what they cost, which decides when an all-to-all must start. Fusions may
        hold more of VMEM than by default, and pass over their operands less often.
      GPU: latency hiding and asynchronous all-to-alls are on by default. With no GPU at hand nothing can be
        autotuned, and the compiler must be told not to try.
      CPU: nothing overlaps, nothing to say.

    Arguments:
      platform: a device's, ``jax.devices()[0].platform``: "cpu", "gpu" (also "cuda", "rocm") or "tpu".
      generation: of a TPU, "v4", "v5e", "v5p", "v6e" or "tpu7x"; a device's ``device_kind`` says "TPU v5 lite" for v5e
        and "TPU v5" for v5p. None, or one not known, gives what every TPU takes.
      ahead_of_time: whether the device compiled for is not there.

    Raises ValueError for a platform that is not known: compilers refuse options that they do not know.
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
"""A GPU's sums in an order that is the same each time. XLA chooses the tiles of its own products by timing them. It
then may not, and finds none (jax 0.11.2, compiled for an H100 that was not there): so all products are cuBLAS'. Nor is
anything else timed, by which two processes could choose differently. On an H200 no leaf of gradients differed."""


NO_TILES = "Couldn't find output tile sizes"
"""What XLA says where it may time nothing, as for a GPU that is not there, and finds no tiles for its own product."""

CUBLAS = {"xla_gpu_enable_triton_gemm": "False"}
"""All products are cuBLAS', which needs no tiles; less is fused with them."""


@typechecked
def gpu_process_environment(local: int) -> dict[str, str]:
    """Variables for one process per GPU, to be set before JAX is imported.

    Collectives meet in an order on which all devices agree (docs/how_it_works.md), and NCCL has to keep to it. A
    process that drives several GPUs issues for them from several threads, which has been seen to hang.

    >>> for name, value in gpu_process_environment(3).items():
    ...     print(f"{name}={value}")
    JAX_LOCAL_DEVICE_IDS=3
    NCCL_LAUNCH_ORDER_IMPLICIT=1
    CUDA_DEVICE_MAX_CONNECTIONS=8

    Arguments:
      local: the process's number on its machine, from 0, which is that of its GPU; ``jax.distributed.initialize`` reads
        it where it is given no ``local_device_ids``.

    Raises ValueError for a number below 0.
    """
    if local < 0:
        raise ValueError(
            f"gpu_process_environment: local is {local}, must be this process's number, from 0 on"
        )
    return {"JAX_LOCAL_DEVICE_IDS": str(local), **GPU_PROCESS}


@typechecked
def tpu_generation(device_kind: str) -> str | None:
    """The generation of a TPU from ``jax.devices()[0].device_kind``, None if it is not known.

    >>> tpu_generation("TPU v5 lite"), tpu_generation("TPU v5"), tpu_generation("TPU7x")
    ('v5e', 'v5p', 'tpu7x')
    """
    known = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p"}
    known |= {"TPU v6 lite": "v6e", "TPU v6e": "v6e", "TPU7x": "tpu7x"}
    return known.get(device_kind)
