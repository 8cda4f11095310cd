"""Multi-head latent attention, its rotary embedding, and the two small modules that every block uses.

Shape suffixes: B batch, S sequence (Q and K where queries and keys differ), D model dim, H heads, N the part
of a head without position, R the rotated part, V the value of a head, C compressed keys and values.
"""

import functools
import math
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from models.config import Config

LATENT_EPS = 1e-6
"""Of the norms of compressed queries, keys and values, whatever the model's own eps: so in the published code."""


class Attend(Protocol):
    """``(q [B, S, H, X], k [B, S, H, X], v [B, S, H, V], scale, segment_ids) -> [B, S, H, V]``.

    Causal. With ``segment_ids``, int [B, S], a token hears those of its own segment alone.
    """

    def __call__(
        self, q: Array, k: Array, v: Array, scale: float, /, segment_ids: Array | None = None
    ) -> Array:
        """Attend."""


class RMSNorm(nnx.Module):
    """Scale to unit root mean square, in float32, then by a learned weight.

    (``nnx.RMSNorm`` asks for implicit promotion, which strict dtype promotion refuses in bfloat16.)
    """

    def __init__(self, dim: int, eps: float):
        self.weight = nnx.Param(jnp.ones(dim, jnp.float32))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        """Normalise the last dim; x's dtype is kept."""
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * inverse * self.weight[...]).astype(x.dtype)


def linear(config: Config, dim_in: int, dim_out: int, rngs: nnx.Rngs, use_bias: bool = False) -> nnx.Linear:
    """Make a linear layer: float32 kernel [dim_in, dim_out], compute in ``compute_dtype``."""
    return nnx.Linear(
        dim_in,
        dim_out,
        use_bias=use_bias,
        dtype=config.compute_dtype,
        param_dtype=jnp.float32,
        kernel_init=jax.nn.initializers.normal(config.init_std),
        rngs=rngs,
    )


def rope_frequencies(config: Config) -> np.ndarray:
    """Return the rotation of each pair in radians per position, float64 [qk_rope_dim / 2].

    With ``yarn_factor`` above 1, frequencies that turn less than ``yarn_beta_slow`` times in the original
    length are divided by it, those above ``yarn_beta_fast`` turns are kept, with a ramp between
    (Peng et al. 2023, "YaRN").
    """
    dim, theta = config.qk_rope_dim, config.rope_theta
    freqs = theta ** (-np.arange(0, dim, 2) / dim)
    if config.yarn_factor <= 1:
        return freqs

    def pair_that_turns(turns: float) -> float:
        return dim * math.log(config.yarn_original_seq / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(config.yarn_beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(config.yarn_beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return freqs / config.yarn_factor * ramp + freqs * (1 - ramp)


def rope(x_BSHR: Array, freqs: np.ndarray, positions: Array | None = None, factor: float = 1.0) -> Array:
    """Rotate each adjacent pair (2i, 2i + 1) by position times its frequency; float32 inside.

    The pairs lie as in DeepSeek's published weights.

    Args:
      x_BSHR: queries or keys.
      freqs: radians per position of each pair, float64 [R / 2].
      positions: int [B, S], 0 to 2**20; None counts from 0 along S.
      factor: scales the result.

    """
    R = x_BSHR.shape[-1]
    cos, sin = _cos_sin(np.repeat(freqs, 2), x_BSHR.shape[1], positions)
    wide = x_BSHR.astype(jnp.float32)
    # Neighbours change places in a matmul, exact at this precision: a TPU's lanes hold the last dim, and it
    # takes many times longer over slices of it, or over pairs as a dim of their own.
    even = np.arange(0, R, 2)
    turn_RR = np.zeros((R, R), np.float32)
    turn_RR[even + 1, even], turn_RR[even, even + 1] = -1, 1
    turned = jnp.matmul(wide, turn_RR, precision=jax.lax.Precision.HIGHEST)
    return (wide * (cos * factor) + turned * (sin * factor)).astype(x_BSHR.dtype)


def _cos_sin(freqs_R: np.ndarray, length: int, positions_BS: Array | None) -> tuple[Array, Array]:
    """Of each position's angles, float32 [(B,) S, 1, R]."""
    if positions_BS is None:
        angles = np.arange(length)[:, None, None] * freqs_R
        return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    # A float32 angle is off by 0.01 at position 160,000. Whole turns do not matter, so turns are counted in
    # integers that wrap: 32 binary digits of a turn, and 12 more, whose product with 2**20 still fits.
    turns_R = np.mod(freqs_R / (2 * np.pi), 1.0) * 2.0**32
    coarse_R = np.floor(turns_R)
    fine_R = np.floor((turns_R - coarse_R) * 2**12)
    count = jnp.asarray(positions_BS).astype(jnp.uint32)[..., None, None]
    turned = count * coarse_R.astype(np.uint32) + (count * fine_R.astype(np.uint32) >> np.uint32(12))
    angles = jax.lax.bitcast_convert_type(turned, jnp.int32).astype(jnp.float32) * np.float32(np.pi / 2**31)
    return jnp.cos(angles), jnp.sin(angles)


def _temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1


def rope_factor(config: Config) -> float:
    """Return YaRN's factor on rotated queries and keys: the ratio of its temperatures, if both are given."""
    if config.yarn_mscale and config.yarn_mscale_all_dim:
        part, whole = config.yarn_mscale, config.yarn_mscale_all_dim
        return _temperature(config.yarn_factor, part) / _temperature(config.yarn_factor, whole)
    return _temperature(config.yarn_factor, 1)


def softmax_scale(config: Config) -> float:
    """Return the factor on attention scores: head dim to the -1/2, times YaRN's temperature squared."""
    scale = (config.qk_nope_dim + config.qk_rope_dim) ** -0.5
    return scale * _temperature(config.yarn_factor, config.yarn_mscale_all_dim) ** 2


class Attention(nnx.Module):
    """Causal multi-head latent attention (DeepSeek-V2, section 2.1), in its naive form for training.

    Queries pass through a low-rank bottleneck (none if ``q_lora_rank`` is 0), keys and values share another;
    position enters only through ``qk_rope_dim`` numbers per head, whose key all heads share. Parameter names
    follow the published checkpoints; kernels are [in, out], the transpose of theirs.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs, attend: Attend | None = None):
        self.config = config
        self.attend: Attend = attend or causal_attention
        bias = config.attention_bias
        heads, head = config.num_heads, config.qk_nope_dim + config.qk_rope_dim
        if config.q_lora_rank:
            self.q_a_proj = linear(config, config.dim, config.q_lora_rank, rngs, bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_EPS)
            self.q_b_proj = linear(config, config.q_lora_rank, heads * head, rngs)
        else:
            self.q_proj = linear(config, config.dim, heads * head, rngs)
        self.kv_a_proj_with_mqa = linear(
            config, config.dim, config.kv_lora_rank + config.qk_rope_dim, rngs, bias
        )
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_EPS)
        self.kv_b_proj = linear(
            config, config.kv_lora_rank, heads * (config.qk_nope_dim + config.v_head_dim), rngs
        )
        self.o_proj = linear(config, heads * config.v_head_dim, config.dim, rngs, bias)

    def __call__(
        self, x_BSD: Array, positions_BS: Array | None = None, segment_ids_BS: Array | None = None
    ) -> Array:
        """Attend from each place in the sequence to itself and those before it.

        Args:
          x_BSD: activations.
          positions_BS: int, where in its document each token stands, 0 to 2**20; None counts along S.
          segment_ids_BS: int, which document each token belongs to: it hears no other. Padding is a document
            of its own. None is one document.

        Returns:
          x's like.

        """
        config = self.config
        B, S, _ = x_BSD.shape
        heads, nope = config.num_heads, config.qk_nope_dim
        q_BSHX = self.queries(x_BSD, positions_BS)
        c_BSC, k_BSR = self.latents(x_BSD, positions_BS)
        k_BSHR = jnp.broadcast_to(k_BSR[:, :, None], (B, S, heads, config.qk_rope_dim))
        kv_BSHX = self.kv_b_proj(c_BSC).reshape(B, S, heads, nope + config.v_head_dim)
        k_BSHX = jnp.concatenate([kv_BSHX[..., :nope], k_BSHR], axis=-1)

        scale = softmax_scale(config)
        out_BSHV = self.attend(q_BSHX, k_BSHX, kv_BSHX[..., nope:], scale, segment_ids=segment_ids_BS)
        return self.o_proj(out_BSHV.reshape(B, S, heads * config.v_head_dim))

    def queries(self, x_BSD: Array, positions_BS: Array | None) -> Array:
        """Return the queries, [B, S, H, N + R], their last R numbers rotated."""
        config = self.config
        nope = config.qk_nope_dim
        q_BSHX = self._project(x_BSD).reshape(*x_BSD.shape[:2], config.num_heads, nope + config.qk_rope_dim)
        return jnp.concatenate([q_BSHX[..., :nope], self._rotate(q_BSHX[..., nope:], positions_BS)], axis=-1)

    def latents(self, x_BSD: Array, positions_BS: Array | None) -> tuple[Array, Array]:
        """Return all that later tokens need to know of these: c [B, S, C], normalised, and k [B, S, R], rotated."""
        both = self.kv_a_proj_with_mqa(x_BSD)
        c_BSC, k_BSR = both[..., : self.config.kv_lora_rank], both[..., self.config.kv_lora_rank :]
        k_BSR = self._rotate(k_BSR[:, :, None], positions_BS)[:, :, 0]
        return self.kv_a_layernorm(c_BSC), k_BSR

    def _project(self, x_BSD: Array) -> Array:
        if self.config.q_lora_rank:
            return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSD)))
        return self.q_proj(x_BSD)

    def _rotate(self, x_BSHR: Array, positions_BS: Array | None) -> Array:
        freqs, factor = rope_frequencies(self.config), rope_factor(self.config)
        return rope(x_BSHR, freqs, positions_BS, factor)


def causal_attention(
    q_BSHX: Array, k_BSHX: Array, v_BSHV: Array, scale: float, /, segment_ids: Array | None = None
) -> Array:
    """Softmax attention as ``Attend`` says, scores and softmax in float32; [B, S, H, V]."""
    scores_BHQK = jnp.einsum("bqhx,bkhx->bhqk", q_BSHX, k_BSHX, preferred_element_type=jnp.float32) * scale
    heard = np.tril(np.ones((q_BSHX.shape[1],) * 2, bool))
    if segment_ids is not None:
        heard = heard & same_segment(segment_ids)[:, None]
    probs_BHQK = _softmax(jnp.where(heard, scores_BHQK, -jnp.inf), v_BSHV.dtype)
    return jnp.einsum("bhqk,bkhv->bqhv", probs_BHQK, v_BSHV)


def same_segment(segment_ids_BS: Array) -> Array:
    """Whether two tokens are of one segment: bool [B, S, S]."""
    return jnp.asarray(segment_ids_BS)[:, :, None] == jnp.asarray(segment_ids_BS)[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _softmax(scores: Array, dtype: jnp.dtype) -> Array:
    """Softmax in float32, returned in ``dtype``. (``jax.nn.softmax`` would keep a second, wide copy.)"""
    return jax.nn.softmax(scores, axis=-1).astype(dtype)


def _softmax_fwd(scores: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    probs = _softmax(scores, dtype)
    return probs, probs


def _softmax_bwd(dtype: jnp.dtype, probs: Array, d_probs: Array) -> tuple[Array]:
    del dtype
    wide, d_wide = probs.astype(jnp.float32), d_probs.astype(jnp.float32)
    return (wide * (d_wide - jnp.sum(wide * d_wide, axis=-1, keepdims=True)),)


_softmax.defvjp(_softmax_fwd, _softmax_bwd)
