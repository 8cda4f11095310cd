"""cuDNN's flash attention, as the custom calls that XLA hands to cuDNN, for programs that a GPU runs.

This module makes the calls itself instead of using ``jax.nn.dot_product_attention``, which needs values as wide as keys
and checks the GPU of the machine that compiles, not of the one that runs. Besides, if sums must have a fixed order, XLA
fails to compile two layers of the calls that it makes.

Shape suffixes as in ``models.attention``; cuDNN takes arrays as B S H X here.
"""

import functools
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout

from dualpipe_jax.arguments import UnfitError
from models.attention import same_segment

HOPPER = (9, 0)
"""The compute capability of an H100."""

_CAPABILITIES = {"V100": (7, 0), "A100": (8, 0), "H100": HOPPER, "H200": HOPPER, "B200": (10, 0)}
"""The compute capability of GPUs, by a part of the device's name."""

MIN_VERSION_UNEQUAL_WIDTHS = 91000
"""cuDNN 9.10, the first version that takes keys and values of different widths, on Hopper and later."""


def cudnn_supports(q_BHSX: Array | jax.ShapeDtypeStruct, v_BHSV: Array | jax.ShapeDtypeStruct) -> bool:
    """Return whether cuDNN's attention takes the dtype and, on the GPU that runs the program, the widths of heads."""
    narrow, width = q_BHSX.dtype in (jnp.bfloat16, jnp.float16), q_BHSX.shape[-1]
    values_fit = v_BHSV.shape[-1] <= width or _supports_unequal_widths()
    return narrow and values_fit and width % 8 == 0 and width <= widest_heads()


def widest_heads() -> int:
    """Return the largest width of heads that cuDNN's attention takes on the GPU that runs the program."""
    return 256 if compute_capability() >= HOPPER else 128


def compute_capability() -> tuple[int, ...]:
    """Return CUDA's number for the generation of the GPU for which a program is being traced.

    That is this machine's GPU. On a machine without one it is the GPU of the mesh, or an H100 if the mesh does not
    name one that is known.
    """
    if jax.default_backend() == "gpu":
        return tuple(map(int, jax.devices()[0].compute_capability.split(".")))
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = "" if device is None else device.device_kind
    return next((known for name, known in _CAPABILITIES.items() if name in kind), HOPPER)


def cudnn_attention(
    q_BHSX: Array, k_BHSX: Array, v_BHSV: Array, scale: float, segment_ids: Array | None = None
) -> Array:
    """Compute ``causal_attention`` by cuDNN's flash attention. Segments take a mask [B, S, S] in the GPU's memory.

    Raises:
      UnfitError: cuDNN does not take the dtype or widths of heads on the GPU that runs the program.
    """
    if not cudnn_supports(q_BHSX, v_BHSV):
        raise UnfitError(
            f"cudnn_attention: heads are {q_BHSX.shape[-1]} wide and {q_BHSX.dtype.name}, values {v_BHSV.shape[-1]} "
            f"wide; cuDNN takes 16 bits and multiples of 8, on this GPU {widest_heads()} at most, and before Hopper "
            "no values wider than heads: take attention 'plain'"
        )
    length, width = v_BHSV.shape[-2:]
    # cuDNN's mask needs an even length; no token sees one after it.
    if segment_ids is not None and length % 2:
        q_BHSX, k_BHSX, v_BHSV = (
            jnp.pad(a, ((0, 0), (0, 0), (0, 1), (0, 0))) for a in (q_BHSX, k_BHSX, v_BHSV)
        )
        segment_ids = jnp.pad(segment_ids, ((0, 0), (0, 1)))
    if width != k_BHSX.shape[-1] and not _supports_unequal_widths():
        v_BHSV = jnp.pad(v_BHSV, ((0, 0), (0, 0), (0, 0), (0, k_BHSX.shape[-1] - width)))
    mask_BHQK = None
    if segment_ids is not None:
        may_attend_BHQK = same_segment(segment_ids)[:, None]
        mask_BHQK = jnp.where(may_attend_BHQK, 0, _MASKED_SCORE[q_BHSX.dtype.name]).astype(q_BHSX.dtype)
    q_BSHX, k_BSHX, v_BSHV = (a.swapaxes(1, 2) for a in (q_BHSX, k_BHSX, v_BHSV))
    return _attention(scale, q_BSHX, k_BSHX, v_BSHV, mask_BHQK)[..., :length, :width]


_MASKED_SCORE = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}
"""The number added to the score of a token of another segment. cuDNN subtracts two such scores; this must not overflow.
"""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(scale: float, q_BSHX: Array, k_BSHX: Array, v_BSHV: Array, mask_BHQK: Array | None) -> Array:
    return _forward(scale, q_BSHX, k_BSHX, v_BSHV, mask_BHQK, with_sums=False)[0]


def _forward(
    scale: float, q: Array, k: Array, v: Array, mask: Array | None, *, with_sums: bool = True
) -> tuple[Array, Any]:
    """Compute attention, and with ``with_sums`` also the softmax's sums, which the backward needs."""
    B, S, H, _ = q.shape
    results = [_heads_first(v)]
    if with_sums:
        results.append(_Result((B, H, S), jnp.float32))
    out_BHSV, *sums = _call(scale, [q, k, v], mask, results, backward=False)
    return out_BHSV, (q, k, v, mask, *sums, out_BHSV)


def _backward(scale: float, saved: Any, d_BHSV: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, mask, sums, out_BHSV = saved
    d, out = d_BHSV.swapaxes(1, 2), out_BHSV.swapaxes(1, 2)
    results = [_heads_first(a) for a in (q, k, v)]
    dq, dk, dv = _call(scale, [q, k, v, sums, d], mask, results, [out], backward=True)
    return dq.swapaxes(1, 2), dk.swapaxes(1, 2), dv.swapaxes(1, 2), None


_attention.defvjp(_forward, _backward)


class _Result(NamedTuple):
    """An array that cuDNN returns; ``order`` is the order of its dims in memory, the fastest varying one last."""

    shape: tuple[int, ...]
    dtype: Any
    order: tuple[int, ...] = ()

    @property
    def layout(self) -> Layout:
        return Layout(self.order or tuple(range(len(self.shape))))


def _heads_first(like_BSHX: Array) -> _Result:
    """Return a result [B, H, S, X] that lies in memory like the argument, with the sequence before the heads."""
    B, S, H, X = like_BSHX.shape
    return _Result((B, H, S, X), like_BSHX.dtype, (0, 2, 1, 3))


def _call(
    scale: float,
    operands: Sequence[Array],
    mask: Array | None,
    results: Sequence[_Result],
    extra_operands: Sequence[Array] = (),
    *,
    backward: bool,
) -> Sequence[Array]:
    """Make XLA's custom call and return its results, without the last one: the memory that cuDNN works in."""
    B, S, H, _ = operands[0].shape
    masks = [] if mask is None else [mask]
    results = [*results, _Result((0,), jnp.uint8)]
    call = jax.ffi.ffi_call(
        f"__cudnn$fmha{'ScaleBias' if masks else ''}Softmax{'Backward' if backward else ''}",
        [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results],
        output_layouts=[result.layout for result in results],
        custom_call_api_version=2,
        legacy_backend_config=json.dumps(config((B, H, S), operands[0].dtype, scale, backward=backward)),
    )
    return call(*operands, *masks, *extra_operands)[:-1]


def config(sizes: tuple[int, int, int], dtype: Any, scale: float, *, backward: bool) -> dict[str, Any]:
    """Return XLA's ``CudnnfMHABackendConfig`` (xla/service/gpu/backend_configs.proto), in the form of its JSON.

    Args:
      sizes: batch, heads and sequence.
      dtype: the dtype of queries.
      scale: the factor on scores.
      backward: whether the call computes gradients.
    """
    B, H, S = sizes
    backend_config: dict[str, Any] = {
        "algorithm": {"math_type": "TENSOR_OP_MATH", "is_cudnn_frontend": True},
        "fmha_scale": scale,
        "intermediate_tensor_shape": {
            "element_type": {"bfloat16": "BF16", "float16": "F16"}[jnp.dtype(dtype).name],
            "dimensions": [str(size) for size in (B, H, S, S)],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": "CAUSAL",
        "seed": 42,
        "max_seg_per_batch": 1,
    }
    backend_config |= {
        f"{name}_dot_dimension_numbers": _dims(*dims) for name, dims in _PRODUCTS[backward].items()
    }
    if backward and _wants_deterministic_results():
        # Otherwise XLA sets this flag itself when it compiles such a call. It does not set it in a second, equal call,
        # does not recognise that call any more, and fails. Where the flag is set already, XLA changes nothing.
        backend_config["force_deterministic"] = True
    return {"operation_queue_id": "0", "cudnn_fmha_backend_config": backend_config}


_PRODUCTS = {
    False: {"bmm1": (3, 3, 2, 2), "bmm2": (3, 1, 1, 2)},
    True: {
        "bmm1_grad_gemm1": (2, 1, 1, 2),
        "bmm1_grad_gemm2": (3, 1, 1, 2),
        "bmm2_grad_gemm1": (2, 1, 1, 2),
        "bmm2_grad_gemm2": (3, 3, 2, 2),
    },
}
"""For each product: the dim that it sums over in the left and in the right operand, then the dim of heads in both.

Scores are B H Q K, all other operands B S H X."""


def _dims(left: int, right: int, left_heads: int, right_heads: int) -> dict[str, list[str]]:
    return {
        "lhs_contracting_dimensions": [str(left)],
        "rhs_contracting_dimensions": [str(right)],
        "lhs_batch_dimensions": ["0", str(left_heads)],
        "rhs_batch_dimensions": ["0", str(right_heads)],
    }


def _supports_unequal_widths() -> bool:
    """Return whether cuDNN takes values that are not as wide as keys, on the GPU that runs the program."""
    if compute_capability() < HOPPER:
        return False
    if jax.default_backend() != "gpu":
        return True  # the version of that GPU's cuDNN is not known here
    from jax._src.cudnn.fused_attention_stablehlo import check_cudnn_version

    return check_cudnn_version() >= MIN_VERSION_UNEQUAL_WIDTHS


def _wants_deterministic_results() -> bool:
    """Return whether ``XLA_FLAGS`` ask for results with the same bits each time."""
    asked = os.environ.get("XLA_FLAGS", "").split()
    names = "deterministic_ops", "exclude_nondeterministic_ops"
    return any(f"--xla_gpu_{name}{on}" in asked for name in names for on in ("", "=1", "=true"))
