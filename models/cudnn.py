"""cuDNN's flash attention, for programs that a GPU runs, compiled where there is one and where there is none.

What JAX checks before it calls cuDNN, its version and the GPU's generation, it asks of the machine that it runs on. A
program compiled ahead of time is for another one, so there the checks are answered for that one (``_checks``, the only
place here that touches JAX's internals). Shape suffixes as in ``models.attention``.
"""

import contextlib
import functools
import os
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
from jax import Array

from models.attention import same_segment

HOPPER = (9, 0)
"""The compute capability of an H100."""

_CAPABILITIES = {"V100": (7, 0), "A100": (8, 0), "H100": HOPPER, "H200": HOPPER, "B200": (10, 0)}
"""By a part of the device's name."""

UNEQUAL = 91000
"""cuDNN 9.10: the first that takes keys and values of different widths, on Hopper and later."""

CUDNN = UNEQUAL
"""What a program compiled where there is none may ask for. Nothing that came later is used."""


def cudnn_takes(q_BHSX: Array | jax.ShapeDtypeStruct) -> bool:
    """Whether cuDNN's attention knows the type and, on the GPU that runs the program, the width."""
    narrow = q_BHSX.dtype in (jnp.bfloat16, jnp.float16)
    return narrow and q_BHSX.shape[-1] % 8 == 0 and q_BHSX.shape[-1] <= widest_heads()


def widest_heads() -> int:
    """The widest heads that cuDNN's attention takes on the GPU that runs the program."""
    return 256 if compute_capability() >= HOPPER else 128


def compute_capability() -> tuple[int, ...]:
    """CUDA's number for the generation of the GPU for which a program is being traced.

    It is this machine's GPU; where there is none the one of the mesh, or an H100 if the mesh does not say.
    """
    if jax.default_backend() == "gpu":
        return _numbers(jax.devices()[0].compute_capability)
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = "" if device is None else device.device_kind
    return next((known for name, known in _CAPABILITIES.items() if name in kind), HOPPER)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def cudnn_attention(
    q_BHSX: Array, k_BHSX: Array, v_BHSV: Array, scale: float, segment_ids: Array | None = None
) -> Array:
    """cuDNN's flash attention; as ``causal_attention``. Segments cost a mask of [B, S, S] in its memory."""
    return _forward(q_BHSX, k_BHSX, v_BHSV, scale, segment_ids)[0]


def _forward(q: Array, k: Array, v: Array, scale: float, segment_ids: Array | None) -> tuple[Array, Any]:
    with _checks():
        return jax.vjp(lambda q, k, v: _attend(q, k, v, scale, segment_ids), q, k, v)


def _backward(scale: float, pull: Any, d: Array) -> tuple[Array, Array, Array, None]:
    del scale
    with _checks():
        return *pull(d), None


cudnn_attention.defvjp(_forward, _backward)


def _attend(q_BHSX: Array, k_BHSX: Array, v_BHSV: Array, scale: float, segment_ids: Array | None) -> Array:
    """Where keys and values differ in width, by what ``jax.nn.dot_product_attention`` calls, which itself refuses."""
    if v_BHSV.shape[-1] == k_BHSX.shape[-1] or not _takes_unequal():
        return padded_attention(q_BHSX, k_BHSX, v_BHSV, scale, "cudnn", segment_ids)
    from jax._src.cudnn import fused_attention_stablehlo as internal

    mask_BHQK = None if segment_ids is None else same_segment(segment_ids)[:, None]
    q_BSHX, k_BSHX, v_BSHV = (a.swapaxes(1, 2) for a in (q_BHSX, k_BHSX, v_BHSV))
    with jax.numpy_dtype_promotion("standard"):
        out_BSHV = internal.dot_product_attention(
            q_BSHX, k_BSHX, v_BSHV, mask=mask_BHQK, scale=scale, mask_type=internal.MaskType.CAUSAL
        )
    return out_BSHV.swapaxes(1, 2)


def _takes_unequal() -> bool:
    """Whether cuDNN takes values that are not as wide as keys, on the GPU that runs the program."""
    from jax._src.cudnn import fused_attention_stablehlo as internal

    if (
        _adds_in_order()
    ):  # of unequal widths XLA then failed to compile cuDNN's backward, on an H200, jax 0.11.2
        return False
    return compute_capability() >= HOPPER and internal.check_cudnn_version() >= UNEQUAL


def _adds_in_order() -> bool:
    """Whether XLA was told to give the same bits each time."""
    asked = os.environ.get("XLA_FLAGS", "").split()
    return any(
        f"--xla_gpu_{name}=true" in asked for name in ("deterministic_ops", "exclude_nondeterministic_ops")
    )


def padded_attention(
    q_BHSX: Array,
    k_BHSX: Array,
    v_BHSV: Array,
    scale: float,
    implementation: Literal["cudnn", "xla"],
    segment_ids: Array | None = None,
) -> Array:
    """``jax.nn.dot_product_attention``, which wants values as wide as keys."""
    mask_BHQK = None if segment_ids is None else same_segment(segment_ids)[:, None]
    missing = k_BHSX.shape[-1] - v_BHSV.shape[-1]
    wide_BHSX = jnp.pad(v_BHSV, ((0, 0), (0, 0), (0, 0), (0, missing)))
    q_BSHX, k_BSHX, wide_BSHX = (a.swapaxes(1, 2) for a in (q_BHSX, k_BHSX, wide_BHSX))
    with jax.numpy_dtype_promotion("standard"):
        out_BSHX = jax.nn.dot_product_attention(
            q_BSHX,
            k_BSHX,
            wide_BSHX,
            mask=mask_BHQK,
            scale=scale,
            is_causal=True,
            implementation=implementation,
        )
    return out_BSHX[..., : v_BHSV.shape[-1]].swapaxes(1, 2)


def _checks() -> contextlib.AbstractContextManager[Any]:
    """Within it, where no GPU is, JAX traces cuDNN's attention as on the GPU to compile for."""
    if jax.default_backend() == "gpu":
        return contextlib.nullcontext()
    from jax._src.cudnn import fused_attention_stablehlo as internal

    ours = compute_capability()
    return mock.patch.multiple(
        internal,
        check_cudnn_version=lambda: CUDNN,
        check_compute_capability=lambda least: _numbers(least) <= ours,
        is_cuda_compute_capability_equal=lambda one: _numbers(one) == ours,
    )
