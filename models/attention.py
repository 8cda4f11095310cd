"""Multi-head latent attention, its rotary embedding, and the two small modules that every block uses.

Shape suffixes: B batch, S sequence (Q and K where queries and keys differ), D model dim, H heads, N the part
of a head without position, R the rotated part, V the value of a head, C compressed keys and values.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from models.config import Config

Attend = Callable[[Array, Array, Array, float], Array]
"""``(q [B, S, H, X], k [B, S, H, X], v [B, S, H, V], scale) -> [B, S, H, V]``, causal."""


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


def linear(config: Config, dim_in: int, dim_out: int, rngs: nnx.Rngs) -> nnx.Linear:
    """Make a linear layer without bias: float32 kernel [dim_in, dim_out], compute in ``compute_dtype``."""
    return nnx.Linear(
        dim_in,
        dim_out,
        use_bias=False,
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


def rope(x_BSHR: Array, freqs: np.ndarray) -> Array:
    """Rotate each adjacent pair (2i, 2i + 1) by position times its frequency; float32 inside.

    The pairs lie as in DeepSeek's published weights. Positions count from 0 along S.
    """
    S, R = x_BSHR.shape[1], x_BSHR.shape[-1]
    angles = np.arange(S)[:, None, None] * np.repeat(freqs, 2)
    cos, sin = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    wide = x_BSHR.astype(jnp.float32)
    # Neighbours change places in a matmul, exact at this precision: a TPU's lanes hold the last dim, and it
    # takes many times longer over slices of it, or over pairs as a dim of their own.
    even = np.arange(0, R, 2)
    turn_RR = np.zeros((R, R), np.float32)
    turn_RR[even + 1, even], turn_RR[even, even + 1] = -1, 1
    turned = jnp.matmul(wide, turn_RR, precision=jax.lax.Precision.HIGHEST)
    return (wide * cos + turned * sin).astype(x_BSHR.dtype)


def softmax_scale(config: Config) -> float:
    """Return the factor on attention scores: head dim to the -1/2, times YaRN's temperature squared."""
    scale = (config.qk_nope_dim + config.qk_rope_dim) ** -0.5
    if config.yarn_factor > 1:
        scale *= (0.1 * config.yarn_mscale * math.log(config.yarn_factor) + 1) ** 2
    return scale


class Attention(nnx.Module):
    """Causal multi-head latent attention (DeepSeek-V2, section 2.1), in its naive form for training.

    Queries pass through a low-rank bottleneck (none if ``q_lora_rank`` is 0), keys and values share another;
    position enters only through ``qk_rope_dim`` numbers per head, whose key all heads share. Parameter names
    follow the published checkpoints; kernels are [in, out], the transpose of theirs.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs, attend: Attend | None = None):
        self.config = config
        self.attend = attend or causal_attention
        heads, head = config.num_heads, config.qk_nope_dim + config.qk_rope_dim
        if config.q_lora_rank:
            self.q_a_proj = linear(config, config.dim, config.q_lora_rank, rngs)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.norm_eps)
            self.q_b_proj = linear(config, config.q_lora_rank, heads * head, rngs)
        else:
            self.q_proj = linear(config, config.dim, heads * head, rngs)
        self.kv_a_proj_with_mqa = linear(config, config.dim, config.kv_lora_rank + config.qk_rope_dim, rngs)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.norm_eps)
        self.kv_b_proj = linear(
            config, config.kv_lora_rank, heads * (config.qk_nope_dim + config.v_head_dim), rngs
        )
        self.o_proj = linear(config, heads * config.v_head_dim, config.dim, rngs)

    def __call__(self, x_BSD: Array) -> Array:
        """Attend from each position to itself and those before it; [B, S, D], dtype kept."""
        config = self.config
        B, S, _ = x_BSD.shape
        heads, nope = config.num_heads, config.qk_nope_dim
        freqs = rope_frequencies(config)

        q_BSHX = self._queries(x_BSD).reshape(B, S, heads, nope + config.qk_rope_dim)
        q_BSHX = jnp.concatenate([q_BSHX[..., :nope], rope(q_BSHX[..., nope:], freqs)], axis=-1)

        compressed = self.kv_a_proj_with_mqa(x_BSD)
        c_BSC, k_BSR = compressed[..., : config.kv_lora_rank], compressed[..., config.kv_lora_rank :]
        k_BSHR = jnp.broadcast_to(rope(k_BSR[:, :, None], freqs), (B, S, heads, config.qk_rope_dim))
        kv_BSHX = self.kv_b_proj(self.kv_a_layernorm(c_BSC)).reshape(B, S, heads, nope + config.v_head_dim)
        k_BSHX = jnp.concatenate([kv_BSHX[..., :nope], k_BSHR], axis=-1)

        out_BSHV = self.attend(q_BSHX, k_BSHX, kv_BSHX[..., nope:], softmax_scale(config))
        return self.o_proj(out_BSHV.reshape(B, S, heads * config.v_head_dim))

    def _queries(self, x_BSD: Array) -> Array:
        if self.config.q_lora_rank:
            return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSD)))
        return self.q_proj(x_BSD)


def causal_attention(q_BSHX: Array, k_BSHX: Array, v_BSHV: Array, scale: float) -> Array:
    """Softmax attention over positions up to one's own, scores and softmax in float32; [B, S, H, V]."""
    scores_BHQK = jnp.einsum("bqhx,bkhx->bhqk", q_BSHX, k_BSHX, preferred_element_type=jnp.float32) * scale
    S = q_BSHX.shape[1]
    past_QK = np.tril(np.ones((S, S), bool))
    probs_BHQK = _softmax(jnp.where(past_QK, scores_BHQK, -jnp.inf), v_BSHV.dtype)
    return jnp.einsum("bhqk,bkhv->bqhv", probs_BHQK, v_BSHV)


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
