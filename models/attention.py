"""Multi-head latent attention, its rotary embedding, and the two small modules that every block uses.

Shape suffixes: B batch, S sequence (Q and K where queries and keys differ), D model dim, H heads, N the part
of a head without position, R the rotated part, V the value of a head, C compressed keys and values.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from dualpipe_jax.gradient_sum import gradient_sum
from dualpipe_jax.made_once import made_once
from dualpipe_jax.varying import vary_alike
from models.config import Config

_EXACT = jax.lax.Precision.HIGHEST
"""The precision of a product with a matrix of zeros, ones and minus ones, so that numbers are not rounded."""

LATENT_EPS = 1e-6
"""The eps of the norms of compressed queries, keys and values. The published code fixes it, whatever ``norm_eps``."""


@dataclass(frozen=True)
class Attend:
    """A program for causal attention, and the padding of heads on its platform.

    ``(q [B, H, S, X], k [B, H, S, X], v [B, H, S, V], scale, segment_ids) -> [B, H, S, V]``. With ``segment_ids``,
    int [B, S], a token attends only to tokens of its own segment. The result has the ``checkpoint_name`` "attended"
    where keeping it spares the backward work.

    Attributes:
      function: as above.
      lanes: the platform pads heads to a multiple of this many numbers.
    """

    function: Callable[..., Array]
    lanes: int = 1

    def __call__(
        self, q: Array, k: Array, v: Array, scale: float, /, segment_ids: Array | None = None
    ) -> Array:
        return self.function(q, k, v, scale, segment_ids=segment_ids)


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


class ToHeads(nnx.LinearGeneral):
    """A linear layer to all heads, [..., dim_in] to [..., H, head]: kernel float32 [dim_in, H, head], no bias.

    The gradients come in head by head. If the kernel had two dims, a TPU would transpose their sum, there and back, in
    every backward. But for heads that do not fill a TPU's lanes (queries of 192) two dims are faster.
    """

    def __init__(self, config: Config, dim_in: int, head: int, rngs: nnx.Rngs):
        super().__init__(
            dim_in,
            (config.num_heads, head),
            use_bias=False,
            dtype=config.compute_dtype,
            kernel_init=jax.nn.initializers.normal(config.init_std),
            rngs=rngs,
        )


def rope_frequencies(config: Config) -> np.ndarray:
    """Return the rotation of each pair in radians per position, float64 [qk_rope_dim / 2].

    With ``yarn_factor`` above 1, frequencies that turn less than ``yarn_beta_slow`` times in the original
    length are divided by the factor, those above ``yarn_beta_fast`` turns are kept, with a ramp between
    (Peng et al. 2023, "YaRN").
    """
    dim, theta = config.qk_rope_dim, config.rope_theta
    freqs = theta ** (-np.arange(0, dim, 2) / dim)
    if config.yarn_factor <= 1:
        return freqs

    def pair_index(turns: float) -> float:
        return dim * math.log(config.yarn_original_seq / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_index(config.yarn_beta_fast)), 0)
    high = min(math.ceil(pair_index(config.yarn_beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return freqs / config.yarn_factor * ramp + freqs * (1 - ramp)


def rope(
    x_BSHR: Array, freqs: np.ndarray, positions: Array | None = None, factor: float = 1.0, lanes: int = 1
) -> Array:
    """Rotate each adjacent pair (2i, 2i + 1) by position times its frequency; float32 inside.

    The pairs lie as in DeepSeek's published weights.

    Args:
      x_BSHR: queries or keys.
      freqs: radians per position of each pair, float64 [R / 2].
      positions: int [B, S], 0 to 2**20; None counts from 0 along S.
      factor: scales the result.
      lanes: the width in numbers of a vector register, along which the last dim lies; see ``Attend``. The result does
        not depend on it.
    """
    R = x_BSHR.shape[-1]
    cos, sin = _cos_sin(np.repeat(freqs, 2), x_BSHR.shape[1], positions)
    wide = x_BSHR.astype(jnp.float32)
    if lanes > 1:
        # A matmul, exact at this precision, swaps neighbours: a TPU takes many times longer for slices within its
        # lanes, or for pairs as a dim of their own.
        turned = jnp.matmul(wide, _pair_rotation_matrix(R), precision=_EXACT)
    else:
        pairs = wide.reshape(*wide.shape[:-1], R // 2, 2)
        turned = jnp.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(wide.shape)
    return (wide * (cos * factor) + turned * (sin * factor)).astype(x_BSHR.dtype)


def _pair_rotation_matrix(dim: int) -> np.ndarray:
    """Return the matrix that turns each pair (a, b) into (-b, a), float32 [dim, dim]."""
    even = np.arange(0, dim, 2)
    turn_RR = np.zeros((dim, dim), np.float32)
    turn_RR[even + 1, even], turn_RR[even, even + 1] = -1, 1
    return turn_RR


def _cos_sin(freqs_R: np.ndarray, length: int, positions_BS: Array | None) -> tuple[Array, Array]:
    """Return cosine and sine of each position's angles, float32 [(B,) S, 1, R]."""
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

    Queries pass through a low-rank bottleneck (none if ``q_lora_rank`` is 0), keys and values share another.
    Position enters only through ``qk_rope_dim`` numbers per head; all heads share this part of the key. Parameter
    names follow the published checkpoints; kernels are [in, out], the transpose of the published ones, or
    [in, H, out] for ``kv_b_proj``.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs, attend: Attend | None = None):
        self.config = config
        self.attend = attend or Attend(causal_attention)
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
        self.kv_b_proj = ToHeads(config, config.kv_lora_rank, config.qk_nope_dim + config.v_head_dim, rngs)
        self.o_proj = linear(config, heads * config.v_head_dim, config.dim, rngs, bias)

    def __call__(
        self, x_BSD: Array, positions_BS: Array | None = None, segment_ids_BS: Array | None = None
    ) -> Array:
        """Attend from each position in the sequence to itself and the positions before it.

        Args:
          x_BSD: activations.
          positions_BS: int, the position of each token in its document, 0 to 2**20; None counts along S.
          segment_ids_BS: int, the document of each token, which attends to no other document. Padding is a document
            of its own. None means a single document.

        Returns:
          An array [B, S, D] of x's dtype.
        """
        heads = self._wide_heads if self._wide_heads_are_free() else self._narrow_heads
        scale = softmax_scale(self.config)
        q_BHSX, k_BHSX, v_BHSV = heads(x_BSD, positions_BS)
        q_BHSX = checkpoint_name(q_BHSX, "queries")
        out_BHSV = self.attend(q_BHSX, k_BHSX, v_BHSV, scale, segment_ids=segment_ids_BS)
        return self.output(out_BHSV)

    def output(self, out_BHSV: Array) -> Array:
        """Project the results of all heads, [B, H, S, V], to [B, S, D]."""
        project = _project_heads if self.attend.lanes == 1 else _from_heads
        out_BSD = project(*vary_alike((out_BHSV, self.o_proj.kernel[...].astype(out_BHSV.dtype))))
        return out_BSD if self.o_proj.bias is None else out_BSD + self.o_proj.bias[...].astype(out_BSD.dtype)

    def _wide_heads_are_free(self) -> bool:
        """Return whether heads that hold the rotated part twice need no more lanes."""
        nope, rot, lanes = self.config.qk_nope_dim, self.config.qk_rope_dim, self.attend.lanes
        return -(-(nope + 2 * rot) // lanes) == -(-(nope + rot) // lanes)

    def _narrow_heads(self, x_BSD: Array, positions_BS: Array | None) -> tuple[Array, Array, Array]:
        """Return queries, keys and values as in the paper, with the dim of heads before that of the sequence."""
        config = self.config
        nope = config.qk_nope_dim
        c_BSC, k_BSR = self.latents(x_BSD, positions_BS)
        kv_BSHX = self.kv_b_proj(c_BSC)
        k_BSHR = jnp.broadcast_to(k_BSR[:, :, None], (*kv_BSHX.shape[:3], config.qk_rope_dim))
        k_BSHX = jnp.concatenate([kv_BSHX[..., :nope], k_BSHR], axis=-1)
        q, k, v = (a.swapaxes(1, 2) for a in (self.queries(x_BSD, positions_BS), k_BSHX, kv_BSHX[..., nope:]))
        return q, k, v

    def _wide_heads(self, x_BSD: Array, positions_BS: Array | None) -> tuple[Array, Array, Array]:
        """Return wider queries and keys that give the same scores, and the values, all with heads first.

        They come from products that write heads first: activations are neither sliced nor concatenated. A rotated
        query is q cos + turned(q) sin, so its score with a key is that of [q cos, turned(q) sin] with [key, key].
        """
        config = self.config
        H, N, R = config.num_heads, config.qk_nope_dim, config.qk_rope_dim
        dtype = x_BSD.dtype
        freqs, factor = np.repeat(rope_frequencies(config), 2), rope_factor(config)
        cos, sin = (a.swapaxes(-3, -2) * factor for a in _cos_sin(freqs, x_BSD.shape[1], positions_BS))
        turns = jnp.concatenate([jnp.ones((*cos.shape[:-1], N), cos.dtype), cos, sin], axis=-1)
        x_BSC, projection = self._query_latents(x_BSD)
        w_CHX = projection.kernel[...].astype(dtype).reshape(-1, H, N + R)
        x_BSC, w_CHX = vary_alike((x_BSC, w_CHX))
        w_HYC = made_once(
            jnp.einsum("xy,chx->hyc", _append_rotated_matrix(N, R, dtype), w_CHX, precision=_EXACT)
        )
        wide_BHSY = _to_heads(R, x_BSC, w_CHX, w_HYC)
        q_BHSY = (wide_BHSY.astype(jnp.float32) * turns).astype(dtype)

        c_BSC, k_BSR = self.latents(x_BSD, positions_BS)
        w_CHX = self.kv_b_proj.kernel[...].astype(dtype)
        c_BSC, k_BSR, w_CHX = vary_alike((c_BSC, k_BSR, w_CHX))
        w_CHN, w_CHV = jnp.split(w_CHX, [N], axis=-1)
        # The rotated key, which all heads share, enters as R additional latents: each becomes two numbers of every
        # head's key.
        copied_RY = np.eye(R, N + 2 * R, N) + np.eye(R, N + 2 * R, N + R)
        copied_RHY = jnp.broadcast_to(jnp.asarray(copied_RY, dtype)[:, None], (R, H, N + 2 * R))
        w_CHY = jnp.concatenate([w_CHN, jnp.zeros((*w_CHN.shape[:2], 2 * R), dtype)], axis=-1)
        w_CHY = jnp.concatenate([w_CHY, copied_RHY], axis=0)
        k_BHSY, v_BHSV = _keys_and_values(c_BSC, k_BSR, w_CHX, made_once(w_CHY), made_once(w_CHV))
        return q_BHSY, k_BHSY, v_BHSV

    def queries(self, x_BSD: Array, positions_BS: Array | None) -> Array:
        """Return the queries, [B, S, H, N + R], their last R numbers rotated."""
        config = self.config
        nope = config.qk_nope_dim
        x_BSC, projection = self._query_latents(x_BSD)
        q_BSHX = projection(x_BSC).reshape(*x_BSD.shape[:2], config.num_heads, nope + config.qk_rope_dim)
        return jnp.concatenate([q_BSHX[..., :nope], self._rotate(q_BSHX[..., nope:], positions_BS)], axis=-1)

    def latents(self, x_BSD: Array, positions_BS: Array | None) -> tuple[Array, Array]:
        """Return all that later tokens need from these tokens: c [B, S, C], normalised, and k [B, S, R], rotated."""
        both = checkpoint_name(self.kv_a_proj_with_mqa(x_BSD), "latents")
        c_BSC, k_BSR = both[..., : self.config.kv_lora_rank], both[..., self.config.kv_lora_rank :]
        k_BSR = self._rotate(k_BSR[:, :, None], positions_BS)[:, :, 0]
        return self.kv_a_layernorm(c_BSC), k_BSR

    def _query_latents(self, x_BSD: Array) -> tuple[Array, nnx.Linear]:
        """Return the input of the last projection to queries, and that projection."""
        if self.config.q_lora_rank:
            x_BSC = checkpoint_name(self.q_a_proj(x_BSD), "latents")
            return self.q_a_layernorm(x_BSC), self.q_b_proj
        return x_BSD, self.q_proj

    def _rotate(self, x_BSHR: Array, positions_BS: Array | None) -> Array:
        freqs, factor = rope_frequencies(self.config), rope_factor(self.config)
        return rope(x_BSHR, freqs, positions_BS, factor, self.attend.lanes)


def _append_rotated_matrix(nope: int, rot: int, dtype: Any) -> Array:
    """Return the matrix [N + R, N + 2 R] that keeps a head's numbers and appends its rotated part, turned."""
    into_XY = np.eye(nope + rot, nope + 2 * rot)
    into_XY[nope:, nope + rot :] = _pair_rotation_matrix(rot)
    return jnp.asarray(into_XY, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _to_heads(rot: int, x_BSC: Array, w_CHX: Array, w_HYC: Array) -> Array:
    """Return the product of x and w, heads first, with its rotated part, turned, appended.

    It is one product with ``w_HYC``, w with that part appended. ``w_HYC`` lies in the order in which a TPU reads it:
    otherwise XLA would copy it into this order in every product.
    """
    del rot, w_CHX  # the backward returns the gradient of w_CHX
    return jnp.einsum("bsc,hyc->bhsy", x_BSC, w_HYC)


def _to_heads_fwd(rot: int, x_BSC: Array, w_CHX: Array, w_HYC: Array) -> tuple[Array, tuple[Array, Array]]:
    return _to_heads(rot, x_BSC, w_CHX, w_HYC), (x_BSC, w_HYC)


def _to_heads_bwd(rot: int, saved: tuple[Array, Array], dy_BHSY: Array) -> tuple[Array, Array, None]:
    x_BSC, w_HYC = saved
    into_XY = _append_rotated_matrix(w_HYC.shape[1] - 2 * rot, rot, dy_BHSY.dtype)
    dy_BHSX = jnp.einsum("bhsy,xy->bhsx", dy_BHSY, into_XY, precision=_EXACT)
    w_HXC = w_HYC[:, : into_XY.shape[0]]
    return jnp.einsum("bhsx,hxc->bsc", dy_BHSX, w_HXC), jnp.einsum("bsc,bhsx->chx", x_BSC, dy_BHSX), None


_to_heads.defvjp(_to_heads_fwd, _to_heads_bwd)


@jax.custom_vjp
def _keys_and_values(
    c_BSC: Array, k_BSR: Array, w_CHX: Array, w_CHY: Array, w_CHV: Array
) -> tuple[Array, Array]:
    """Return keys and values, heads first: products of the latents with matrices that are made from w once a step."""
    del w_CHX  # the backward returns its gradient
    latents = jnp.concatenate([c_BSC, k_BSR], axis=-1)
    return jnp.einsum("bsc,chy->bhsy", latents, w_CHY), jnp.einsum("bsc,chv->bhsv", c_BSC, w_CHV)


def _keys_and_values_fwd(
    c_BSC: Array, k_BSR: Array, w_CHX: Array, w_CHY: Array, w_CHV: Array
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    return _keys_and_values(c_BSC, k_BSR, w_CHX, w_CHY, w_CHV), (c_BSC, w_CHY, w_CHV)


def _keys_and_values_bwd(
    saved: tuple[Array, ...], d: tuple[Array, Array]
) -> tuple[Array, Array, Array, None, None]:
    (c_BSC, w_CHY, w_CHV), (dk_BHSY, dv_BHSV) = saved, d
    C = c_BSC.shape[-1]
    N = w_CHY.shape[-1] - 2 * (w_CHY.shape[0] - C)
    dc_BSC, dk_BSR = jnp.split(jnp.einsum("bhsy,chy->bsc", dk_BHSY, w_CHY), [C], axis=-1)
    outer = functools.partial(jnp.einsum, "bsc,bhsx->chx", c_BSC, preferred_element_type=jnp.float32)
    # The parts are added to the sum one by one: concatenating them first would copy them twice.
    dw_CHX = gradient_sum((*w_CHV.shape[:2], N + w_CHV.shape[2]), varying_like=c_BSC)
    dw_CHX = dw_CHX.at[..., :N].add(outer(dk_BHSY[..., :N])).at[..., N:].add(outer(dv_BHSV))
    dw_CHX = dw_CHX.astype(w_CHV.dtype)
    return dc_BSC + jnp.einsum("bhsv,chv->bsc", dv_BHSV, w_CHV), dk_BSR, dw_CHX, None, None


_keys_and_values.defvjp(_keys_and_values_fwd, _keys_and_values_bwd)


def _project_heads(out_BHSV: Array, w_XD: Array) -> Array:
    """Return the product of the results of all heads with w, whose rows belong to the heads in turn."""
    _, H, _, V = out_BHSV.shape
    return jnp.einsum("bhsv,hvd->bsd", out_BHSV, w_XD.reshape(H, V, -1))


@jax.custom_vjp
def _from_heads(out_BHSV: Array, w_XD: Array) -> Array:
    """Do the same as ``_project_heads``, but add the gradient of w to its sum head by head.

    With all rows in one dim, a TPU would transpose all heads.
    """
    return _project_heads(out_BHSV, w_XD)


def _from_heads_fwd(out_BHSV: Array, w_XD: Array) -> tuple[Array, tuple[Array, Array]]:
    return _from_heads(out_BHSV, w_XD), (out_BHSV, w_XD)


def _from_heads_bwd(saved: tuple[Array, Array], dy_BSD: Array) -> tuple[Array, Array]:
    out_BHSV, w_XD = saved
    _, H, _, V = out_BHSV.shape
    dw_HVD = gradient_sum(w_XD.shape, varying_like=out_BHSV).reshape(H, V, -1)
    dw_HVD += jnp.einsum("bhsv,bsd->hvd", out_BHSV, dy_BSD, preferred_element_type=jnp.float32)
    dout_BHSV = jnp.einsum("bsd,hvd->bhsv", dy_BSD, w_XD.reshape(H, V, -1))
    return dout_BHSV, dw_HVD.reshape(w_XD.shape).astype(w_XD.dtype)


_from_heads.defvjp(_from_heads_fwd, _from_heads_bwd)


def causal_attention(
    q_BHSX: Array, k_BHSX: Array, v_BHSV: Array, scale: float, /, segment_ids: Array | None = None
) -> Array:
    """Compute softmax attention as ``Attend`` describes it, scores and softmax in float32; [B, H, S, V]."""
    scores_BHQK = jnp.einsum("bhqx,bhkx->bhqk", q_BHSX, k_BHSX, preferred_element_type=jnp.float32) * scale
    may_attend = np.tril(np.ones((q_BHSX.shape[2],) * 2, bool))
    if segment_ids is not None:
        may_attend = may_attend & same_segment(segment_ids)[:, None]
    probs_BHQK = _softmax(jnp.where(may_attend, scores_BHQK, -jnp.inf), v_BHSV.dtype)
    return checkpoint_name(jnp.einsum("bhqk,bhkv->bhqv", probs_BHQK, v_BHSV), "attended")


def same_segment(segment_ids_BS: Array) -> Array:
    """Return whether two tokens belong to one segment, bool [B, S, S]."""
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
