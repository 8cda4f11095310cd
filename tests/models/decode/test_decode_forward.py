"""Prefill in chunks and decode over a cache in blocks give the plain forward's logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import v3
from models.decode import Rows, decoder, init_cache, write
from models.decode.attention import absorbing_is_cheaper
from models.lazy import lazily
from tests.models.decode.small_models import QUICK, logits_ahead, random_params, small, whole

LENGTHS = (11, 3, 8)
"""Of the prompts, in tokens; all go on to TOTAL."""

TOTAL, CHUNK, BLOCK = 14, 4, 3


def programs(model):
    def run(weights, cache, rows):
        x, made = model.forward(weights, cache, rows)
        return model.logits(weights, x), write(cache, rows, made.latents)

    return jax.jit(run, donate_argnums=1, compiler_options=QUICK)


def served(config, params, tokens, absorbed):
    """Logits of all tokens, the prompts' in chunks, row by row at places of their own, then one by one."""
    model = decoder(config, absorbed=absorbed)
    run, weights = programs(model), model.prepare(params)
    cache = init_cache(config, 20, BLOCK)
    rng = np.random.default_rng(1)
    tables = rng.permutation(20)[: 3 * 5].reshape(3, 5).astype(np.int32)
    cache = cache + jnp.nan  # of whoever had the blocks before
    done, found = np.zeros(3, np.int32), np.zeros((3, TOTAL, config.vocab), np.float32)

    def step(width, lengths):
        nonlocal cache
        fed = np.full((3, width), 7, np.int32)
        for row, length in enumerate(lengths):
            fed[row, :length] = tokens[row, done[row] : done[row] + length]
        out, cache = run(weights, cache, Rows(fed, done.copy(), np.asarray(lengths, np.int32), tables))
        for row, length in enumerate(lengths):
            found[row, done[row] : done[row] + length] = out[row, :length]
            done[row] += length

    while (done < LENGTHS).any():
        step(CHUNK, [min(CHUNK, n - d) for n, d in zip(LENGTHS, done, strict=True)])
    while (done < TOTAL).any():
        step(1, [int(d < TOTAL) for d in done])
    return found


CONFIGS = {
    "v3": small(norm_eps=0.03),
    "no q_lora, yarn": small(q_lora_rank=0, yarn_factor=4.0, yarn_original_seq=4, yarn_mscale_all_dim=0.707),
    "v2, biases, tied": small(
        score="softmax", normalize_top_k=False, attention_bias=True, tie_embeddings=True
    ),
}


@pytest.mark.parametrize(
    "name, absorbed",
    [
        ("v3", True),
        pytest.param("no q_lora, yarn", False, marks=pytest.mark.slow),
        pytest.param("v2, biases, tied", True, marks=pytest.mark.slow),
    ],
)
def test_prefill_and_decode_are_the_plain_forward(name, absorbed):
    config = CONFIGS[name]
    params = random_params(config, scale=0.2)  # with 0.4 float32's own noise is larger than what is allowed
    tokens = np.random.default_rng(0).integers(0, config.vocab, (3, TOTAL)).astype(np.int32)
    wanted = np.asarray(whole(config, params, tokens))
    assert wanted.std() > 0.5
    np.testing.assert_allclose(served(config, params, tokens, absorbed), wanted, rtol=1e-5, atol=1e-5)


def test_drafts_of_published_weights_read_the_hidden_state_after_the_final_norm():
    config = small(num_groups=1, num_mtp_layers=1)
    params = random_params(config, scale=0.2)
    model = decoder(config, mtp_after_norm=True).fresh()
    tokens = np.random.default_rng(0).integers(0, config.vocab, (3, TOTAL)).astype(np.int32)
    zeros = np.zeros(3, np.int32)
    rows = Rows(tokens[:, :-1], zeros, zeros + TOTAL - 1, np.zeros((3, 1), np.int32))

    def run(weights, cache):
        x, _ = model.forward(weights, cache, rows)
        x, _ = model.draft(weights, cache, rows._replace(tokens=tokens[:, 1:]), x)
        return model.draft_logits(weights, x)

    got = jax.jit(run, compiler_options=QUICK)(model.prepare(params), init_cache(config, 1, BLOCK))
    wanted = logits_ahead(config, params, tokens, after_norm=True)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_dense_layers_hidden_numbers_are_filled_up_with_zeros(lazy):
    """As V2-Lite's 10,944 are to 11,008; of a small model, whose blocks would be mostly zeros, none."""
    config = small(dense_hidden=1276, num_mtp_layers=0, num_dense_layers=1)
    params = random_params(config, scale=0.1)
    tokens = np.random.default_rng(0).integers(0, config.vocab, (3, TOTAL)).astype(np.int32)
    wanted = np.asarray(whole(config, params, tokens))
    if lazy:
        made = decoder(config).prepare(lazily(params))["layers"][0]["block"]["mlp"]
        made = jax.tree.map(np.asarray, made)
    else:
        made = decoder(config).prepare(params)["layers"][0]["block"]["mlp"]
        np.testing.assert_allclose(served(config, params, tokens, True), wanted, rtol=1e-5, atol=1e-5)
    for name, kernel in made.items():
        own = np.asarray(params["shared"]["layers"][0]["mlp"][name]["kernel"])
        grown = tuple(size + 4 * (size == 1276) for size in own.shape)
        assert kernel["kernel"].shape == grown
        np.testing.assert_array_equal(kernel["kernel"][: own.shape[0], : own.shape[1]], own)
        assert np.count_nonzero(kernel["kernel"]) == np.count_nonzero(own)
    narrow = small(dense_hidden=20)
    weights = jax.eval_shape(decoder(narrow).prepare, random_params(narrow))
    assert weights["layers"][0]["block"]["mlp"]["down_proj"]["kernel"].shape == (20, 16)


def test_the_cache_is_as_narrow_as_published():
    shape = jax.eval_shape(functools.partial(init_cache, v3(num_mtp_layers=1), 1000, 64))
    assert shape.shape == (62, 1000, 64, 576) and shape.dtype == jnp.bfloat16


@pytest.mark.slow
def test_bfloat16_is_near():
    config = small(compute_dtype=jnp.bfloat16)
    wide = dataclasses.replace(config, compute_dtype=jnp.float32)
    params = random_params(wide)
    tokens = np.random.default_rng(0).integers(0, config.vocab, (3, TOTAL)).astype(np.int32)
    wanted = np.asarray(whole(config, params, tokens))
    got = served(config, params, tokens, None)
    assert np.median(np.abs(got - wanted)) < 0.02 * wanted.std()


def test_weights_are_in_the_compute_dtype_but_for_the_router():
    config = small(compute_dtype=jnp.bfloat16, num_mtp_layers=1)
    params = random_params(dataclasses.replace(config, compute_dtype=jnp.float32))
    weights = jax.eval_shape(decoder(config).prepare, params)
    wide = {
        jax.tree_util.keystr(path[-1:])
        for path, leaf in jax.tree_util.tree_leaves_with_path(weights)
        if leaf.dtype == jnp.float32
    }
    assert wide == {"['gate']", "['weight']", "['bias']"}


def test_which_form_is_cheaper():
    """128 heads of 128 + 64 and 128 over latents of 512 + 64: by hand, up to 170 tokens."""
    assert absorbing_is_cheaper(v3(), 1) and absorbing_is_cheaper(v3(), 170)
    assert not absorbing_is_cheaper(v3(), 171)


def test_params_of_two_stages_are_refused():
    config = small()
    params = {"stages": {"routing": {"row": np.zeros((2, 1))}}}
    with pytest.raises(
        ValueError, match=r"decoder: params are of 2 stages, must be of 1: deepseek\(config, 1\)"
    ):
        decoder(config).prepare(params)
