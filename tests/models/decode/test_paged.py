"""Attention to a paged cache of latents by a kernel for Hopper GPUs.

It runs on such a GPU only, and these tests did on an H200. Here its numbers come from Pallas' simulator of one, beside
plain NumPy, and it is compiled for an H100 where the compiler is installed. All that no position uses is NaN.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax.inspect.target import MissingCompiler, Target
from dualpipe_jax.parallel import make_mesh
from models import Dispatch, Kernels, v2_lite, v3
from models.decode import Rows, decoder, experts, init_cache, paged
from models.decode.programs import in_one_batch, in_two_microbatches, on_mesh
from models.lazy import lazily
from tests.models.decode.small_models import QUICK, random_params, small
from tests.simulated_gpu import interpreted, simulated

SCALE = 0.1
CASES = {
    "one token, heads of V2-Lite; nothing cached, one position, whole tiles, a tile cut": (
        (4, 1, 16, 128, 64),
        16,
        6,
        (0, 1, 64, 93),
    ),
    "a draft beside each": ((2, 2, 8, 128, 64), 8, 9, (71, 32)),
    "rows of many positions, in parts": ((2, 2, 8, 128, 64), 8, 66, (300, 3)),
    "more queries than a tile, heads in parts": ((1, 2, 128, 128, 64), 32, 2, (40,)),
}
"""Rows, new tokens, heads, latents and rotated; positions of a block; blocks of a table; positions used."""


def arrays(sizes, block_size, table_size, used):
    """Float64: queries [B, S, H, L], two layers' cache, tables, positions used, latents of new tokens."""
    B, S, H, C, R = sizes
    rng = np.random.default_rng(0)
    num_blocks = B * table_size + 3
    tables = rng.permutation(num_blocks)[: B * table_size].reshape(B, table_size)
    cache = np.full((2, num_blocks, block_size, C + R), np.nan)
    for table, count in zip(tables, used, strict=True):
        for place in range(count):
            cache[:, table[place // block_size], place % block_size] = rng.normal(size=(2, C + R))
    q, new = rng.normal(size=(B, S, H, C + R)), rng.normal(size=(B, S, C + R))
    q, cache, new = (np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in (q, cache, new))
    return q, cache, tables, used, new


def by_numpy(q, cache, tables, used, new, latent, layer):
    """What each query attends to: [B, S, H, C]."""
    size = cache.shape[2]
    out = np.zeros((*q.shape[:3], latent))
    for b, (table, count) in enumerate(zip(tables, used, strict=True)):
        known = [cache[layer, table[place // size], place % size] for place in range(count)]
        for s in range(q.shape[1]):
            attended = np.stack([*known, *new[b, : s + 1]])
            scores = q[b, s] @ attended.T * SCALE
            powers = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[b, s] = powers / powers.sum(axis=1, keepdims=True) @ attended[:, :latent]
    return out


def by_kernel(q, cache, tables, used, new, latent, layer):
    q, cache, new = (jnp.asarray(a, jnp.bfloat16) for a in (q, cache, new))
    B, S, H, L = q.shape
    q_HTX = q.reshape(B * S, H, L).swapaxes(0, 1)
    tables, used = jnp.asarray(tables, jnp.int32), jnp.asarray(used, jnp.int32)
    out_THC = paged.attend(q_HTX[..., :latent], q_HTX, cache, layer, tables, used, new, SCALE)
    return out_THC.reshape(B, S, H, latent)


@pytest.mark.parametrize("case", CASES)
def test_it_hears_what_is_cached_and_the_new_tokens_up_to_its_own(case):
    given = arrays(*CASES[case])
    latent = CASES[case][0][3]
    found = simulated(functools.partial(by_kernel, *given, latent, 1))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(found, np.float64), by_numpy(*given, latent, 1), rtol=2**-6, atol=0.01
    )


def test_rows_are_split_where_there_are_fewer_than_multiprocessors():
    assert paged.num_splits(1, 128) == 1
    assert paged.num_splits(1, 256) == paged.num_splits(16, 256) == 4
    assert paged.num_splits(64, 256) == 1
    assert paged.num_splits(64, 4096) == 2
    assert paged.num_splits(500, 4096) == 1


@pytest.mark.parametrize("splits", [2, 8, 9])
def test_splits_are_put_together_by_what_their_powers_add_up_to(splits):
    """One of them attended to nothing, as where a row has fewer tiles than splits."""
    rng = np.random.default_rng(splits)
    found, log = rng.normal(size=(splits, 3, 4, 5)), rng.normal(scale=20.0, size=(splits, 3, 4))
    log[1] = -1e30
    powers = 2.0 ** (log - log.max(axis=0))
    wanted = np.einsum("zth,zthc->thc", powers / powers.sum(axis=0), found)
    made = jax.jit(paged._combine_splits)(*(jnp.asarray(a, jnp.float32) for a in (found, log)))
    np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-6)


CONFIG = small(
    num_heads=8, q_lora_rank=0, kv_lora_rank=128, qk_rope_dim=64, num_groups=1, compute_dtype=jnp.bfloat16
)


@pytest.mark.parametrize(
    "changed",
    [
        {"compute_dtype": jnp.float32},
        {"kv_lora_rank": 96},
        {"kv_lora_rank": 640},
        {"qk_rope_dim": 32},
        {"num_heads": 12},
        {"num_heads": 96},
    ],
)
def test_what_it_does_not_know_is_plain(changed):
    assert paged.takes(CONFIG, 2, 16)
    assert not paged.takes(CONFIG, 17, 16) and not paged.takes(CONFIG, 1, 64)
    assert not paged.takes(dataclasses.replace(CONFIG, **changed), 2, 16)


def test_it_knows_published_models():
    assert all(paged.takes(make(compute_dtype=jnp.bfloat16), 2, 16) for make in (v2_lite, v3))


@pytest.mark.parametrize("devices, microbatches", [(1, 1), (2, 1), (2, 2)])
def test_a_step_is_the_same_on_a_gpu(devices, microbatches, monkeypatch):
    """On one device and on several, in halves too; each row has two new tokens."""
    if devices > 1 and (jax.default_backend() != "gpu" or jax.device_count() < devices):
        pytest.skip(
            "no two GPUs; their simulators stand still, or end early, where devices wait for each other"
        )
    size, num_blocks, num_rows = 8, 12, 4
    called = []
    kernel = paged.attend
    monkeypatch.setattr(paged, "attend", lambda *given: called.append(1) or kernel(*given))
    dispatch = Dispatch(axis_name="ep" if devices > 1 else None)
    params = random_params(CONFIG, scale=0.1)
    rng = np.random.default_rng(2)
    tables = np.stack([rng.permutation(num_blocks).reshape(num_rows, 3) for _ in range(devices)])
    starts, lengths = np.asarray([17, 0, 9, 22]), np.asarray([2, 2, 1, 2])
    rows = Rows(
        rng.integers(CONFIG.vocab, size=(devices * num_rows, 2)),
        np.tile(starts, devices),
        np.tile(lengths, devices),
        tables.reshape(-1, 3),
    )
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.int32), rows)
    noise = jnp.asarray(rng.normal(size=init_cache(CONFIG, num_blocks, size).shape), jnp.bfloat16)
    cache = jnp.concatenate([noise] * devices, axis=1)

    def logits(platform):
        model = decoder(CONFIG, dispatch=dispatch, kernels=Kernels(matmul="plain"), platform=platform)

        def step(weights, cache, rows):
            x, made = model.forward(weights, cache, rows)
            return model.logits(weights, x), made

        run = (
            functools.partial(in_two_microbatches, step, False)
            if microbatches == 2
            else functools.partial(in_one_batch, step)
        )
        weights = model.prepare(params)
        if devices > 1:
            mesh = make_mesh(1, devices, jax.devices()[:devices])
            held = experts.default_placement(CONFIG, devices)
            weights = experts.place(model.prepare(lazily(params)), held, CONFIG.num_experts, mesh, near=True)
            run = on_mesh(run, mesh)
        out, _, written = jax.jit(run, compiler_options=QUICK)(weights, cache, rows)
        return np.asarray(out, np.float32), np.asarray(written, np.float32)

    plain = logits("cpu")
    assert not called
    with interpreted():
        found = logits("gpu")
    assert len(called) == CONFIG.num_layers * microbatches
    live = np.arange(2) < np.tile(lengths, devices)[:, None]
    np.testing.assert_allclose(found[0][live], plain[0][live], rtol=0.05, atol=0.1)
    np.testing.assert_allclose(found[1], plain[1], rtol=0.05, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("heads, new, positions", [(16, 1, 256), (16, 2, 2048), (128, 2, 256)])
def test_it_compiles_for_an_h100_that_is_not_here(heads, new, positions):
    try:
        device = Target.parse("h100:1x1").devices()[0]
    except MissingCompiler as error:
        pytest.skip(str(error))
    here = jax.sharding.SingleDeviceSharding(device)
    shapes = (
        (heads, new, 512),
        (heads, new, 192),
        (3, 200, 16, 576),
        (1, positions // 16),
        (1,),
        (1, new, 576),
    )
    dtypes = (*[jnp.bfloat16] * 3, *[jnp.int32] * 2, jnp.bfloat16)
    q, q_all, cache, *more = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=here) for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    run = jax.jit(lambda q, q_all, cache, *more: paged.attend(q, q_all, cache, 1, *more, SCALE))
    text = run.lower(q, q_all, cache, *more).compile().as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 1
    assert " copy(" not in text
