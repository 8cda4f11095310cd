"""DeepSeek's configurations: frozen numbers, derived from one another."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp

from dualpipe_jax.arguments import typechecked

_POSITIVE = ("routed_scale", "norm_eps", "rope_theta", "yarn_beta_fast", "yarn_beta_slow")
_FACTORS = ("yarn_mscale", "yarn_mscale_all_dim", "init_std")
_MAY_BE_ZERO = (
    "q_lora_rank",
    "qk_nope_dim",
    "qk_rope_dim",
    "dense_hidden",
    "num_shared_experts",
    "num_mtp_layers",
)
_COUNTS = ("vocab", "dim", "num_heads", "kv_lora_rank", "v_head_dim", "expert_hidden", "yarn_original_seq")
_MIN_VALUES = dict.fromkeys(_COUNTS, 1) | dict.fromkeys((*_MAY_BE_ZERO, *_FACTORS), 0)
_MAX_VALUE = float(jnp.finfo(jnp.float32).max)


@typechecked
@dataclass(frozen=True)
class Config:
    """The numbers that make one model; see ``v3`` for the published values.

    Attributes:
      vocab: number of words: rows of the embedding, columns of the output projection.
      dim: width of the residual stream.
      num_layers: number of blocks, including the dense ones.
      num_dense_layers: number of blocks at the start that have a dense SwiGLU of ``dense_hidden`` instead of experts.
      num_heads: number of attention heads.
      q_lora_rank: width of the compressed queries; 0 for one plain query projection.
      kv_lora_rank: width of the compressed keys and values.
      qk_nope_dim: width per head of the part of query and key without position.
      qk_rope_dim: width per head of the rotated part; all heads share this part of the key.
      v_head_dim: width per head of the value.
      dense_hidden: hidden width of the dense SwiGLU.
      expert_hidden: hidden width of one expert.
      num_experts: number of routed experts of a layer.
      num_shared_experts: number of experts that every token uses, built as one SwiGLU of that many times
        ``expert_hidden``.
      top_k: number of routed experts per token.
      num_groups: number of equal groups of experts; 1 for no group limit.
      top_groups: number of groups from which a token may choose experts.
      score: how logits become scores: "sigmoid" (V3) or "softmax" (V2).
      normalize_top_k: whether to divide a token's chosen scores by their sum.
      routed_scale: factor on the routed experts' sum.
      norm_eps: eps of every RMSNorm except those of the latents, whose eps the published code fixes at 1e-6.
      attention_bias: whether q_a_proj, kv_a_proj_with_mqa and o_proj have a bias.
      tie_embeddings: whether the output projection is the embedding's table.
      rope_theta: base of the rotation frequencies.
      yarn_factor: factor of the context extension by YaRN; 1 for none (as V3 trains at 4096).
      yarn_original_seq: sequence length before the extension.
      yarn_beta_fast: number of turns in the original length above which a frequency is kept.
      yarn_beta_slow: number of turns below which a frequency is divided by the factor.
      yarn_mscale: attention temperature of YaRN for the rotated part alone; 0 if none is given.
      yarn_mscale_all_dim: attention temperature of YaRN for whole heads; 0 if none is given. The rotated parts of
        queries and keys are scaled by the ratio of the first temperature to this one, see
        ``models.attention.rope_factor``.
      num_mtp_layers: number of multi-token prediction modules after the last layer; V3 was trained with 1.
      init_std: standard deviation of every weight matrix at the start.
      compute_dtype: dtype of matmuls and activations; parameters, router, softmaxes and loss are float32.

    Raises:
      ValueError: the numbers do not fit together; the message names every one that is wrong.
    """

    vocab: int
    dim: int
    num_layers: int
    num_dense_layers: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_dim: int
    qk_rope_dim: int
    v_head_dim: int
    dense_hidden: int
    expert_hidden: int
    num_experts: int
    num_shared_experts: int
    top_k: int
    num_groups: int = 1
    top_groups: int = 1
    score: Literal["sigmoid", "softmax"] = "sigmoid"
    normalize_top_k: bool = True
    routed_scale: float = 1.0
    norm_eps: float = 1e-6
    attention_bias: bool = False
    tie_embeddings: bool = False
    rope_theta: float = 10000.0
    yarn_factor: float = 1.0
    yarn_original_seq: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float = 1.0
    yarn_mscale_all_dim: float = 1.0
    num_mtp_layers: int = 0
    init_std: float = 0.006
    compute_dtype: Any = jnp.float32

    @property
    def num_moe_layers(self) -> int:
        """The number of blocks with experts."""
        return self.num_layers - self.num_dense_layers

    def __post_init__(self) -> None:
        groups = max(self.num_groups, 1)
        reach = self.num_experts // groups * self.top_groups
        complaints = [
            (f"num_groups is {self.num_groups}, must be at least 1", self.num_groups < 1),
            (
                f"num_experts {self.num_experts} does not divide into num_groups {groups}",
                self.num_experts % groups != 0,
            ),
            (
                f"top_groups {self.top_groups} must lie between 1 and num_groups {groups}",
                not 1 <= self.top_groups <= groups,
            ),
            (
                f"top_k {self.top_k} must lie between 1 and the {reach} experts that top_groups leaves",
                not 1 <= self.top_k <= reach,
            ),
            (
                f"num_dense_layers {self.num_dense_layers} must lie between 0 and "
                f"num_layers {self.num_layers}",
                not 0 <= self.num_dense_layers <= self.num_layers,
            ),
            (f"qk_rope_dim {self.qk_rope_dim} must be even", self.qk_rope_dim % 2 != 0),
            (f"yarn_factor {self.yarn_factor} must be at least 1, which is none", not self.yarn_factor >= 1),
            (
                "qk_nope_dim and qk_rope_dim are 0: queries and keys have no width",
                self.qk_nope_dim == self.qk_rope_dim == 0,
            ),
        ]
        # "not number >= least" also finds NaN, which "number < least" does not.
        for name, least in _MIN_VALUES.items():
            number = getattr(self, name)
            complaints.append((f"{name} is {number}, must be at least {least}", not number >= least))
        for name in _POSITIVE:
            number = getattr(self, name)
            complaints.append((f"{name} is {number}, must be above 0", not number > 0))
        for name in (*_POSITIVE, *_FACTORS, "yarn_factor"):
            number = getattr(self, name)
            complaints.append((f"{name} is {number}, more than float32 holds", number > _MAX_VALUE))
        if wrong := [text for text, bad in complaints if bad]:
            raise ValueError("Config: " + "; ".join(wrong) + ".")


def v3(**changes: Any) -> Config:
    """DeepSeek-V3, 671.03 billion parameters without the multi-token prediction module."""
    config = Config(
        vocab=129280,
        dim=7168,
        num_layers=61,
        num_dense_layers=3,
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_dim=128,
        qk_rope_dim=64,
        v_head_dim=128,
        dense_hidden=18432,
        expert_hidden=2048,
        num_experts=256,
        num_shared_experts=1,
        top_k=8,
        num_groups=8,
        top_groups=4,
        routed_scale=2.5,
        compute_dtype=jnp.bfloat16,
    )
    return dataclasses.replace(config, **changes)


def v2(**changes: Any) -> Config:
    """DeepSeek-V2, 235.7 billion parameters: softmax scores, not normalised."""
    ours: dict[str, Any] = dict(
        vocab=102400,
        dim=5120,
        num_layers=60,
        num_dense_layers=1,
        dense_hidden=12288,
        expert_hidden=1536,
        num_experts=160,
        num_shared_experts=2,
        top_k=6,
        top_groups=3,
        score="softmax",
        normalize_top_k=False,
        routed_scale=16.0,
    )
    return v3(**(ours | changes))


def v2_lite(**changes: Any) -> Config:
    """DeepSeek-V2-Lite, 15.71 billion parameters: plain queries, no groups."""
    ours: dict[str, Any] = dict(
        dim=2048,
        num_layers=27,
        num_heads=16,
        q_lora_rank=0,
        dense_hidden=10944,
        expert_hidden=1408,
        num_experts=64,
        num_groups=1,
        top_groups=1,
        routed_scale=1.0,
    )
    return v2(**(ours | changes))


def moe_67b(**changes: Any) -> Config:
    """A model of 67 billion parameters, 2 billion active: 60 experts of each layer on each of 8 devices.

    The numbers are our own, for 64 GPUs of 80 GB as pp 8 x ep 8: its 32 layers with experts divide into 8 and into 16
    equal stages.
    """
    ours: dict[str, Any] = dict(
        dim=2048,
        num_layers=33,
        num_dense_layers=1,
        num_heads=16,
        q_lora_rank=0,
        dense_hidden=8192,
        expert_hidden=704,
        num_experts=480,
        top_k=6,
    )
    return v3(**(ours | changes))


def small(**changes: Any) -> Config:
    """V3 for a CPU: eight layers with experts, which 1, 2, 4 or 8 stages divide; about 20 million parameters."""
    ours: dict[str, Any] = dict(
        vocab=8192,
        dim=256,
        num_layers=9,
        num_dense_layers=1,
        num_heads=8,
        q_lora_rank=128,
        kv_lora_rank=64,
        qk_nope_dim=32,
        qk_rope_dim=16,
        v_head_dim=32,
        dense_hidden=688,
        expert_hidden=128,
        num_experts=16,
        top_k=4,
        num_groups=4,
        top_groups=2,
        init_std=0.02,
        compute_dtype=jnp.float32,
    )
    return v3(**(ours | changes))


def tiny(**changes: Any) -> Config:
    """V3 for unit tests, over bytes by default (``vocab=256``); eight layers with experts."""
    ours: dict[str, Any] = dict(
        vocab=256,
        dim=64,
        num_heads=4,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_dim=16,
        qk_rope_dim=8,
        v_head_dim=16,
        dense_hidden=128,
        expert_hidden=32,
    )
    return small(**(ours | changes))


def byte(**changes: Any) -> Config:
    """The model of the default run, sized for two CPU cores and a few minutes: eight layers with experts."""
    ours: dict[str, Any] = dict(
        num_heads=2,
        q_lora_rank=0,
        kv_lora_rank=32,
        qk_nope_dim=24,
        qk_rope_dim=8,
        v_head_dim=32,
        num_experts=8,
        top_k=2,
        num_groups=1,
        top_groups=1,
    )
    return tiny(**(ours | changes))


MODELS: Mapping[str, Callable[..., Config]] = {
    "v3": v3,
    "v2": v2,
    "v2-lite": v2_lite,
    "67b-a2b": moe_67b,
    "small": small,
    "tiny": tiny,
    "byte": byte,
}
"""The function that makes each model's configuration, by the model's name in commands."""
