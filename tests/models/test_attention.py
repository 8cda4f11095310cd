"""Attention and its parts, against NumPy written the obvious way."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax.functional import pure_nnx
from dualpipe_jax.split import split_backward
from models.attention import (
    Attend,
    Attention,
    RMSNorm,
    causal_attention,
    rope,
    rope_factor,
    rope_frequencies,
    softmax_scale,
)
from models.config import tiny, v3
from tests.models import plain


def rotate_by_complex_numbers(x_SHR, freqs, positions=None):
    """Each adjacent pair is a complex number; position s turns it by s * freq."""
    positions = np.arange(len(x_SHR)) if positions is None else positions
    z = x_SHR[..., 0::2] + 1j * x_SHR[..., 1::2]
    z = z * np.exp(1j * np.asarray(positions)[:, None, None] * freqs)
    out = np.empty_like(x_SHR)
    out[..., 0::2], out[..., 1::2] = z.real, z.imag
    return out


@pytest.mark.parametrize(
    "rope_dim, factor, highest", [(8, 1.0, 0), (64, 40.0, 2**12), (64, 1.0, 2**20), (2, 1.0, 0)]
)
def test_rope_is_multiplication_by_complex_numbers(rope_dim, factor, highest):
    """By float64, at positions far out too: a float32 angle would be off by 0.06 at a million."""
    freqs, rng = rope_frequencies(tiny(qk_rope_dim=rope_dim, yarn_factor=factor)), np.random.default_rng(0)
    positions = rng.integers(0, highest, (2, 11)).astype(np.int32) if highest else None
    x = rng.normal(size=(2, 11, 3, rope_dim)).astype(np.float32)
    at = [None, None] if positions is None else positions
    wanted = [
        1.5 * rotate_by_complex_numbers(row.astype(np.float64), freqs, n)
        for row, n in zip(x, at, strict=True)
    ]
    got = jax.jit(lambda x, p: rope(x, freqs, p, 1.5))(x, positions)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_frequencies_are_powers_of_theta():
    for theta in (1e4, 5e4):
        expected = [theta ** (-2 * pair / 64) for pair in range(32)]
        np.testing.assert_allclose(rope_frequencies(v3(rope_theta=theta)), expected, rtol=1e-12)


def test_yarn_of_v3_goes_over_between_pairs_10_and_23():
    """4096 tokens are 32 turns of pair 10.47 and one of pair 22.51: rounded outwards, as published."""
    slower = [min(max(pair - 10, 0) / 13, 1) for pair in range(32)]
    expected = [1e4 ** (-2 * pair / 64) * (1 - share + share / 40) for pair, share in enumerate(slower)]
    np.testing.assert_allclose(rope_frequencies(v3(yarn_factor=40.0)), expected, rtol=1e-12)


def test_yarn_keeps_fast_turns_and_divides_slow_ones():
    plain, yarn = rope_frequencies(v3()), rope_frequencies(v3(yarn_factor=40.0))
    turns = 4096 * plain / (2 * np.pi)
    ratio = plain / yarn
    np.testing.assert_allclose(ratio[turns > 64], 1)
    np.testing.assert_allclose(ratio[turns < 0.5], 40)
    assert np.all(np.diff(ratio) >= 0)
    # The published model: mscale 0.1 ln 40 + 1 = 1.3689, squared onto the scale.
    assert math.isclose(softmax_scale(v3(yarn_factor=40.0)) / softmax_scale(v3()), 1.8739, rel_tol=1e-4)
    assert math.isclose(softmax_scale(v3()), 192**-0.5)
    assert rope_factor(v3(yarn_factor=40.0)) == rope_factor(v3()) == 1.0
    unlike = v3(yarn_factor=40.0, yarn_mscale_all_dim=0.707)
    assert math.isclose(rope_factor(unlike), 1.3689 / 1.2608, rel_tol=1e-4)
    alone = v3(yarn_factor=40.0, yarn_mscale=0.0)
    assert math.isclose(rope_factor(alone), 1.3689, rel_tol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rms_norm_has_float32_statistics(dtype):
    x = jnp.asarray(np.random.default_rng(2).normal(size=(4, 512)) * 30, dtype)
    norm = RMSNorm(512, 1e-6)
    norm.weight[...] = jnp.linspace(0.5, 2, 512)
    out = norm(x)
    assert out.dtype == dtype
    wide = np.asarray(x, np.float64)
    wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * np.linspace(0.5, 2, 512)
    np.testing.assert_allclose(
        np.asarray(out, np.float64), wanted, rtol=1e-5 if dtype == jnp.float32 else 8e-3
    )


def attention_by_loops(p, x_BSD, config, positions_BS=None):
    """Position by position, head by head, in float64."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), p)
    heads, nope, rot, val = config.num_heads, config.qk_nope_dim, config.qk_rope_dim, config.v_head_dim
    freqs, factor = rope_frequencies(config), rope_factor(config)

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight

    out = np.zeros_like(x_BSD)
    for b, x in enumerate(x_BSD):
        positions = np.arange(len(x)) if positions_BS is None else positions_BS[b]
        if config.q_lora_rank:
            q = norm(x @ p["q_a_proj"]["kernel"], p["q_a_layernorm"]["weight"]) @ p["q_b_proj"]["kernel"]
        else:
            q = x @ p["q_proj"]["kernel"]
        q = q.reshape(len(x), heads, nope + rot)
        q_rot = factor * rotate_by_complex_numbers(q[..., nope:].copy(), freqs, positions)
        both = x @ p["kv_a_proj_with_mqa"]["kernel"]
        k_rot = rotate_by_complex_numbers(both[:, None, config.kv_lora_rank :].copy(), freqs, positions)[:, 0]
        k_rot = factor * k_rot
        kv = norm(both[:, : config.kv_lora_rank], p["kv_a_layernorm"]["weight"])
        kv = kv @ p["kv_b_proj"]["kernel"].reshape(config.kv_lora_rank, -1)
        kv = kv.reshape(len(x), heads, nope + val)
        for s in range(len(x)):
            heard = []
            for h in range(heads):
                scores = [
                    (q[s, h, :nope] @ kv[t, h, :nope] + q_rot[s, h] @ k_rot[t]) * softmax_scale(config)
                    for t in range(s + 1)
                ]
                probs = np.exp(scores - np.max(scores))
                heard.append(sum(w * kv[t, h, nope:] for t, w in enumerate(probs / probs.sum())))
            out[b, s] = np.concatenate(heard) @ p["o_proj"]["kernel"]
    return out


def attended(seen, lanes):
    """The plain attention, which notes the widths of its arguments, as if for so many lanes."""

    def run(q, k, v, scale, segment_ids=None):
        seen.append((q.shape[-1], k.shape[-1], v.shape[-1]))
        return causal_attention(q, k, v, scale, segment_ids=segment_ids)

    return Attend(run, lanes)


@pytest.mark.parametrize(
    "lanes, wide, changes",
    [
        (1, 24, {"norm_eps": 1.0}),
        (30, 24, {"q_lora_rank": 0}),
        (32, 32, {"q_lora_rank": 0}),
        (128, 32, {"yarn_factor": 4.0, "v_head_dim": 12, "yarn_mscale_all_dim": 0.5}),
    ],
)
def test_attention_equals_loops(lanes, wide, changes):
    """With the rotated part of heads once, or spread where that costs no lanes."""
    config, seen = tiny(init_std=0.2, **changes), []
    pure = pure_nnx(lambda rngs: Attention(config, rngs, attended(seen, lanes)))
    params = pure.init(jax.random.key(0))
    params["kv_a_layernorm"]["weight"] += 0.3
    rng = np.random.default_rng(3)
    x, positions = rng.normal(size=(2, 7, config.dim)), None
    if "q_lora_rank" in changes:
        positions = np.sort(rng.integers(0, 50, (2, 7)))
    out = jax.jit(pure.apply)(params, jnp.asarray(x, jnp.float32), positions)
    wanted = attention_by_loops(params, x, config, positions)
    np.testing.assert_allclose(out, wanted, rtol=2e-4, atol=2e-4)
    assert seen == [(wide, wide, config.v_head_dim)]


def test_spread_heads_have_the_gradients_of_narrow_ones():
    """Of parameters and x, against JAX's of the paper's formulas."""
    config = tiny(init_std=0.2)
    pure = pure_nnx(lambda rngs: Attention(config, rngs, attended([], 128)))
    params = pure.init(jax.random.key(0))
    x, target = jax.random.normal(jax.random.key(4), (2, 2, 7, config.dim))
    one = jnp.zeros((2, 7), jnp.int32)

    def ours(params, x):
        return jnp.sum(pure.apply(params, x) * target)

    def papers(params, x):
        return jnp.sum(plain.attention(x, params, config, one) * target)

    got, wanted = (jax.jit(jax.grad(f, (0, 1)))(params, x) for f in (ours, papers))
    chex.assert_trees_all_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 128])
def test_gradients_of_matrices_are_summed_as_wide_as_their_products(lanes):
    """In bfloat16, heads spread or not: each comes in the dtype of its sum, and rounded it is JAX's own."""
    config = tiny(init_std=0.2, compute_dtype="bfloat16")
    pure = pure_nnx(lambda rngs: Attention(config, rngs, attended([], lanes)))
    params = pure.init(jax.random.key(0))
    x, target = jax.random.normal(jax.random.key(4), (2, 2, 7, config.dim), jnp.bfloat16)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.ndim > 1 else leaf, params)
    half = jax.device_get(half)
    split = split_backward(pure.apply, sums=[jnp.float32] * len(jax.tree.leaves(params)))
    got, _ = split.backward(half, x, split.forward(half, x)[1], target)
    rounded = jax.vjp(pure.apply, half, x)[1](target)[0]
    plainly = tiny(init_std=0.2)
    exactly, one = x.astype(jnp.float32), jnp.zeros((2, 7), jnp.int32)
    target = target.astype(jnp.float32)
    papers = jax.jit(
        jax.grad(lambda params: jnp.sum(plain.attention(exactly, params, plainly, one) * target))
    )
    wanted = papers(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half))
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
        wide, narrow, exact = (tree[name]["kernel"] for tree in (got, rounded, wanted))
        assert wide.dtype == jnp.float32 and narrow.dtype == jnp.bfloat16, name
        np.testing.assert_array_equal(wide.astype(jnp.bfloat16), narrow)
        assert abs(wide - exact).max() < 0.05 * abs(exact).max(), name


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_attention_gradients_equal_those_of_the_plain_formula(dtype):
    q, k, v, target = (jax.random.normal(key, (2, 3, 5, 4)) for key in jax.random.split(jax.random.key(2), 4))
    q, k, v = (a.astype(dtype) for a in (q, k, v))

    def plain(q, k, v):
        q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
        scores = jnp.einsum("bhqx,bhkx->bhqk", q, k) * 0.7
        probs = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((5, 5), bool)), scores, -jnp.inf))
        return jnp.sum(jnp.einsum("bhqk,bhkv->bhqv", probs, v) * target)

    def ours(q, k, v):
        return jnp.sum(causal_attention(q, k, v, 0.7).astype(jnp.float32) * target)

    for got, wanted in zip(*(jax.jit(jax.grad(f, (0, 1, 2)))(q, k, v) for f in (ours, plain)), strict=True):
        assert got.dtype == dtype
        tolerance = 1e-5 if dtype == jnp.float32 else 0.05
        got, wanted = (a.astype(jnp.float32) for a in (got, wanted))
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
