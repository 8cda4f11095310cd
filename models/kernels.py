"""Which programs compute attention and the experts' matmuls: one switch, with an answer for each platform.

Shape suffixes as in ``models.attention``.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from dualpipe_jax.arguments import UnfitError
from dualpipe_jax.parallel import Handle, expert_matmul
from dualpipe_jax.parallel.expert_groups import KERNELS_BY_DEVICE, gpu_kind
from dualpipe_jax.parallel.kernel_cost import sums_as_additions, with_cost_estimate
from models.attention import Attend, causal_attention
from models.config import Config
from models.cudnn import compute_capability, cudnn_attention, cudnn_supports, widest_heads

AttentionKernel = Literal["auto", "plain", "splash", "cudnn"]
MatmulKernel = Literal["auto", "plain", "ragged", "megablox", "hopper", "blackwell", "triton", "float8"]

KERNEL_VMEM = 32 * 1024**2
"""Bytes of a TPU's VMEM that an attention kernel may take. With the usual 16 MiB, key blocks of 2048 overflow on v5p in
some programs."""
_PLATFORM_OF_KERNEL = {"splash": "tpu", "megablox": "tpu"} | dict.fromkeys(
    ("cudnn", "hopper", "blackwell", "triton"), "gpu"
)
"""The platform of each kernel that runs on one platform only."""
LANES = 128
"""The width, in numbers, of a TPU's vector registers and matrix units: heads are padded to a multiple of it."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The programs that compute attention and the experts' matmuls. All but "float8" give the same up to rounding.

    "auto" stands for

    - on a TPU, "splash" and "ragged", but "megablox" for gradients of matrices where 128 divides the rows;
    - on a GPU, "cudnn"; and for rows of 16 bits "hopper" on a Hopper and "blackwell" on a Blackwell, for other cases
      "triton", or "ragged" before the A100;
    - on a CPU, and wherever an attention kernel does not take the shapes, "plain".

    Attributes:
      attention: "plain" keeps the [S, S] probabilities. "splash" is Pallas' flash attention for TPU, for
        sequences that 128 divides. "cudnn" is cuDNN's flash attention for GPU, in 16 bits: heads are at most 256 wide,
        and 128 before the H100. Before the H100, and before cuDNN 9.10, values are padded to the width of the keys.
      matmul: "plain" flattens rows of equal groups to one batched matmul, and walks unequal groups in blocks
        on CPU. The others leave equal groups in the order in which they arrive, which accelerators read without a
        copy. For unequal groups "ragged" is ``lax.ragged_dot``, in which a GPU multiplies all rows once for each group;
        "megablox" is Pallas' grouped matmul for TPU, for buffers that 128 divides; "hopper" is our kernel for H100
        and H200, "blackwell" that for B200 and GB200, both for 16 bits; "triton" is our kernel for any GPU from the
        A100 on. "float8" rounds both operands to eight bits, forward and backward, on devices that
        ``parallel.check_float8`` takes, and multiplies them as "auto" does. Where "auto" is "hopper", the products are
        in eight bits, also for equal groups, except for gradients of matrices.
      interpret: run Pallas kernels in interpret mode, for tests on a CPU.

    Raises:
      ValueError: there is no kernel of that name; from ``attend`` and ``multiply``: the kernel is for another platform.
    """

    attention: AttentionKernel = "auto"
    matmul: MatmulKernel = "auto"
    interpret: bool = False

    def __post_init__(self) -> None:
        for name, kind in (("attention", AttentionKernel), ("matmul", MatmulKernel)):
            if getattr(self, name) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise ValueError(f"Kernels: {name} is {getattr(self, name)!r}, must be one of {known}.")

    def attend(self, platform: str) -> Attend:
        """Return the attention for "cpu", "gpu" or "tpu"."""
        self._check_platform("attention", self.attention, platform)
        splash = functools.partial(splash_attention, interpret=self.interpret)
        kernels = {
            "plain": Attend(causal_attention),
            "splash": Attend(splash, LANES),
            "cudnn": Attend(cudnn_attention),
        }
        if self.attention != "auto":
            return kernels[self.attention]
        if platform == "tpu":
            return Attend(functools.partial(_with_plain_fallback, splash, splash_supports), LANES)
        if platform == "cpu":
            return kernels["plain"]
        return Attend(functools.partial(_with_plain_fallback, cudnn_attention, cudnn_supports))

    def multiply(self, platform: str) -> Callable[..., Array]:
        """Return the experts' matmul for "cpu", "gpu" or "tpu"; see ``parallel.expert_matmul``."""
        self._check_platform("matmul", self.matmul, platform)
        options: dict[str, Any] = {"interpret": self.interpret, "float8": self.matmul == "float8"}
        if self.matmul != "auto" and self.matmul != "float8":
            return functools.partial(expert_matmul, kernel=self.matmul, **options)
        if platform == "gpu":
            return functools.partial(_on_gpu, **options)
        product, gradient = KERNELS_BY_DEVICE[platform]
        return functools.partial(expert_matmul, kernel=product, gradient=gradient, **options)

    def _check_platform(self, what: str, kernel: str, platform: str) -> None:
        required_platform = _PLATFORM_OF_KERNEL.get(kernel, platform)
        if required_platform != platform and not self.interpret:
            raise ValueError(
                f"{what} {kernel!r} is a kernel for {required_platform.upper()}s, and this is to run on a "
                f"{platform.upper()}; 'auto' takes what suits it"
            )

    def describe(self, platform: str, config: Config, dispatch: str) -> str:
        """Say which kernels compute attention and experts on an accelerator, and why not a faster one if there is one.

        Args:
          platform: "gpu" or "tpu".
          config: the model.
          dispatch: the method of ``models.moe.Dispatch``.
        """
        dtype, heads = jnp.dtype(config.compute_dtype), config.qk_nope_dim + config.qk_rope_dim
        attention, experts = f"attention {self.attention}", f"experts {self.matmul}"
        if self.attention == "auto" and platform == "gpu":
            q, v = (
                jax.ShapeDtypeStruct((1, config.num_heads, 1, width), dtype)
                for width in (heads, config.v_head_dim)
            )
            attention = (
                "attention cudnn"
                if cudnn_supports(q, v)
                else (
                    "attention plain, slow and with all scores at once: cuDNN takes 16 bits and heads of multiples "
                    f"of 8 up to {widest_heads()}, before Hopper no wider values; these are {dtype.name}, {heads} "
                    f"and {config.v_head_dim} wide"
                )
            )
        elif self.attention == "auto":
            attention = "attention splash where 128 divides the sequence, else plain"
        by_device = self.matmul in ("auto", "float8")
        in_eight_bits = self.matmul == "float8" and platform == "gpu" and this_gpu_kind(dtype) == "hopper"
        if dispatch == "capacity" and not in_eight_bits:
            experts = "experts one batched product"
        elif by_device and platform == "gpu":
            row = this_gpu_kind(dtype)
            experts = f"experts {KERNELS_BY_DEVICE[row][0]}"
            if row == "old_gpu":
                experts += (
                    ", slow: each of a device's experts multiplies all rows; --dispatch capacity is faster"
                )
            elif row != this_gpu_kind(jnp.bfloat16):
                experts += "; --precision bfloat16 has a faster kernel"
        elif by_device:
            experts = "experts ragged, gradients megablox"
        if self.matmul == "float8":
            experts += "; what they multiply in eight bits"
        return f"{attention}; {experts}"


AUTO = Kernels()
"""The kernels that suit the platform."""


def this_gpu_kind(dtype: Any) -> str:
    """Return the row of ``KERNELS_BY_DEVICE`` for the GPU that runs the program and rows of ``dtype``."""
    return gpu_kind(compute_capability(), dtype)


def _on_gpu(rows: Array, w_LDF: Array, handle: Handle, **options: bool) -> Array:
    product, gradient = KERNELS_BY_DEVICE[this_gpu_kind(rows.dtype)]
    return expert_matmul(rows, w_LDF, handle, kernel=product, gradient=gradient, **options)


def _with_plain_fallback(
    kernel: Callable[..., Array],
    takes: Callable[[Array, Array], bool],
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    segment_ids: Array | None = None,
) -> Array:
    return (kernel if takes(q, v) else causal_attention)(q, k, v, scale, segment_ids=segment_ids)


# ---------------------------------------------------------------------------------------------- splash


def splash_supports(q_BHSX: Array, v_BHSV: Array) -> bool:
    """Return whether the sequence divides into blocks of 128; values may have any width."""
    del v_BHSV
    return q_BHSX.shape[2] % 128 == 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def splash_attention(
    q_BHSX: Array,
    k_BHSX: Array,
    v_BHSV: Array,
    scale: float,
    interpret: bool = False,
    segment_ids: Array | None = None,
) -> Array:
    """Compute ``causal_attention`` by Pallas' flash attention for TPU, for S that 128 divides.

    Its calls state their cost, so that the compiler's scheduler knows how much other work can run meanwhile.

    Raises:
      ValueError: 128 does not divide the sequence.
    """
    return _splash_fwd(q_BHSX, k_BHSX, v_BHSV, scale, interpret, segment_ids)[0]


def _splash_fwd(
    q: Array, k: Array, v: Array, scale: float, interpret: bool, segment_ids: Array | None
) -> tuple[Array, Any]:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    kernel = _splash_kernel(q.shape[2], q.shape[1], interpret)
    segments = None if segment_ids is None else splash.SegmentIds(segment_ids, segment_ids)

    def attend(q: Array, k: Array, v: Array) -> Array:
        scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
        # The names keep exactly these arrays for the backward. Without names, if the same arrays with positions first
        # are cheap to get at, those would be kept, and transposed again in the backward: on TPU with the whole pool
        # of slots that holds them.
        named = {"queries": scaled, "keys": k, "values": v}
        return jax.vmap(kernel)(*(checkpoint_name(a, name) for name, a in named.items()), segments)

    return with_cost_estimate(
        functools.partial(jax.vjp, attend), _cost(q, v, 1, 1, (q, k, v, v)), KERNEL_VMEM
    )(q, k, v)


def _splash_bwd(scale: float, interpret: bool, pull: Any, d: Array) -> tuple[Array, Array, Array, None]:
    del scale, interpret
    q, _, v = jax.eval_shape(pull, d)
    # Scores once more, then the gradients of values, scores, queries and keys.
    cost = _cost(q, v, 3, 2, (q, q, q, q, v, v, v, v))
    return *with_cost_estimate(sums_as_additions(lambda pull, d: pull(d)), cost, KERNEL_VMEM)(pull, d), None


splash_attention.defvjp(_splash_fwd, _splash_bwd)


@functools.cache
def _splash_kernel(length: int, num_heads: int, interpret: bool) -> Callable[..., Array]:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    block = next((size for size in (512, 256, 128) if length % size == 0), None)
    if block is None:
        near = max(128, round(length / 128) * 128)
        raise UnfitError(f"splash attention: 128 must divide the sequence of {length}, as it does {near}.")
    whole = next(size for size in (2048, 1024, block) if length % size == 0)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=whole,  # each block of keys has a sum of its own for all queries' gradients
        block_kv_dkv_compute=block,
        use_fused_bwd_kernel=True,
    )
    mask = splash.MultiHeadMask([splash.CausalMask((length, length))] * num_heads)
    # The kernel is cached between traces, so no trace may own its arrays.
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mha(
            mask,
            head_shards=1,
            q_seq_shards=1,
            block_sizes=sizes,
            residual_checkpoint_name="attended",  # names the logarithms of the softmax's sums, too
            interpret=interpret,
        )


def _cost(q_BHSX: Array, v_BHSV: Array, num_keys: int, num_values: int, arrays: Any) -> pl.CostEstimate:
    """Return the cost of matmuls over the lower half of [S, S].

    ``num_keys`` of them are as wide as keys, ``num_values`` as wide as values; ``arrays`` are read or written once.
    """
    B, H, S, X = q_BHSX.shape
    pairs = B * H * S * S // 2
    return pl.CostEstimate(
        flops=2 * pairs * (num_keys * X + num_values * v_BHSV.shape[-1]),
        transcendentals=pairs,
        bytes_accessed=sum(array.size * array.dtype.itemsize for array in arrays),
    )
