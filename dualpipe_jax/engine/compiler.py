"""Compiler options that decide whether communication is hidden."""

_EXPERIMENTAL = ("v5p", "v6e", "tpu7x")
"""TPU generations whose scheduler hides markedly more with its experimental features (v5p: 51 -> 100 %)."""

_MATMULS = {"v5e": "0.2", "v5p": "0.1", "v6e": "0.1", "tpu7x": "0.1"}
"""By how much the scheduler takes matmuls for longer than the compiler's final figures say: 5.6 times on v5e, 11 on
v5p (4096 cubed, libtpu 0.0.42.1; v6e and tpu7x were not measured). Uncorrected it lets all-to-alls run out of work."""

_LOOPS = {"v5e": "0.5", "v5p": "0.5"}
"""The same for elementwise work and writes to slots, of which it thinks a fifth too much on v5p."""

_SCOPED_VMEM_KIB = {"v5e": "32768", "v5p": "32768"}
"""What one fusion may hold of 128 MiB, twice the default: a pair takes 2-5 % fewer cycles, one of DeepSeek-V3 15 %
(with the longer key blocks of ``models.kernels``); four times the default is no better and compiles longer."""

PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")


def recommended_compiler_options(
    platform: str, generation: str | None = None, *, ahead_of_time: bool = False
) -> dict[str, str]:
    """Options with which the engine's step should be compiled.

    >>> options = recommended_compiler_options("tpu", "v5e")
    >>> for name, value in options.items():
    ...     print(name, value)
    xla_tpu_enable_async_all_to_all true
    xla_lhs_output_fusion_latency_multiplier 0.2
    xla_lhs_loop_fusion_latency_multiplier 0.5
    xla_tpu_scoped_vmem_limit_kib 32768
    >>> compiled = step.lower(params, inputs, targets).compile(options)  # doctest: +SKIP
    >>> step = jax.jit(step, compiler_options=options)  # doctest: +SKIP

    What they are for:
      TPU: all-to-alls are synchronous, and so exposed, unless asked otherwise; latency hiding is on by default.
        From v5p on, the scheduler's experimental features hide what it leaves exposed without them. Matmuls are
        priced as what they cost, which is what decides when an all-to-all must start. Fusions may hold more of
        VMEM than by default, and pass over their operands less often.
      GPU: latency hiding and asynchronous all-to-alls are on by default. With no GPU at hand nothing can be
        autotuned, and the compiler must be told not to try.
      CPU: nothing overlaps, nothing to say.

    Arguments:
      platform: of a device, ``jax.devices()[0].platform``: "cpu", "gpu" (also "cuda", "rocm") or "tpu".
      generation: "v4", "v5e", "v5p", "v6e" or "tpu7x" of a TPU (``tpu_generation`` tells a device's); None, or one
        not known, gives what every TPU takes.
      ahead_of_time: whether the device compiled for is not there.

    Raises ValueError for a platform that is not known: compilers refuse options that they do not know.
    """
    if platform not in PLATFORMS:
        raise ValueError(
            f"recommended_compiler_options: platform {platform!r} is none of {', '.join(PLATFORMS)}; pass "
            "jax.devices()[0].platform"
        )
    if platform == "tpu":
        options = {"xla_tpu_enable_async_all_to_all": "true"}
        if generation in _EXPERIMENTAL:
            options["xla_tpu_enable_all_experimental_scheduler_features"] = "true"
        if generation in _MATMULS:
            options["xla_lhs_output_fusion_latency_multiplier"] = _MATMULS[generation]
        if generation in _LOOPS:
            options["xla_lhs_loop_fusion_latency_multiplier"] = _LOOPS[generation]
        if generation in _SCOPED_VMEM_KIB:
            options["xla_tpu_scoped_vmem_limit_kib"] = _SCOPED_VMEM_KIB[generation]
        return options
    if platform != "cpu" and ahead_of_time:
        return {"xla_gpu_autotune_level": "0"}
    return {}


def tpu_generation(device_kind: str) -> str | None:
    """The generation of a TPU from ``jax.devices()[0].device_kind``, None if it is not known.

    >>> tpu_generation("TPU v5 lite"), tpu_generation("TPU v5"), tpu_generation("TPU7x")
    ('v5e', 'v5p', 'tpu7x')
    """
    known = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p"}
    known |= {"TPU v6 lite": "v6e", "TPU v6e": "v6e", "TPU7x": "tpu7x"}
    return known.get(device_kind)
