"""Prompts that begin: a program that reads no cache gives what the one that reads it gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.decode import Rows, attention, decoder, init_cache
from models.decode.programs import programs
from models.decode.running import FinishedPrompts, empty_running, no_stops
from models.decode.sampling import Sampling
from tests.models.decode.small_models import random_params, small

NUM_ROWS, WIDTH, BLOCK = 4, 7, 3
LENGTHS = np.asarray([7, 2, 0, 5], np.int32)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_it_is_the_chunked_program_of_rows_that_start_at_0(microbatches):
    config = small(num_mtp_layers=1)
    model = decoder(config)
    run = programs(model, True, microbatches=microbatches)
    weights = model.prepare(random_params(config))
    rng = np.random.default_rng(0)
    tables = rng.permutation(12).reshape(NUM_ROWS, 3).astype(np.int32)
    tokens = rng.integers(config.vocab, size=(NUM_ROWS, WIDTH)).astype(np.int32)
    zeros = np.zeros(NUM_ROWS, np.int32)
    sampling = Sampling(zeros.astype(np.float32), zeros.astype(np.float32) + 1, zeros.astype(np.uint32))
    next_tokens = np.asarray([-1, 3, -1, -1], np.int32)
    finished = FinishedPrompts(np.arange(NUM_ROWS, dtype=np.int32), zeros + 20, no_stops(NUM_ROWS))

    def outcome(prefill, noise):
        rows = Rows(tokens, zeros, LENGTHS, tables)
        cache = run.init_cache(12, BLOCK) + np.float32(noise)
        (out, running), counts, cache = prefill(
            weights, cache, (rows, next_tokens, sampling, run.init_running(NUM_ROWS), finished)
        )
        return jax.device_get((out, running, counts, cache))

    found, wanted = outcome(run.prefill_fresh, np.nan), outcome(run.prefill, 0)
    live = LENGTHS > 0
    for a, b in zip(found[0][:3], wanted[0][:3], strict=True):  # tokens, finite, drafts
        np.testing.assert_array_equal(a[live], b[live])
    assert found[0].finite[live].all()
    for a, b in zip(found[1], wanted[1], strict=True):
        np.testing.assert_array_equal(a[live], b[live])
    np.testing.assert_array_equal(found[2], wanted[2])
    written = np.isfinite(found[3])
    assert written.sum() == found[3].shape[0] * LENGTHS.sum() * found[3].shape[3]
    np.testing.assert_allclose(found[3][written], wanted[3][written], rtol=1e-4, atol=1e-5)


def test_it_reads_no_cache():
    config = small()
    model = decoder(config)
    weights = jax.eval_shape(model.prepare, random_params(config))
    cache = jax.ShapeDtypeStruct((3, 12, BLOCK, config.kv_lora_rank + config.qk_rope_dim), jnp.float32)
    numbers = jax.ShapeDtypeStruct((NUM_ROWS,), jnp.int32)
    tokens, tables = (jax.ShapeDtypeStruct((NUM_ROWS, n), jnp.int32) for n in (WIDTH, 3))
    rows = Rows(tokens, numbers, numbers, tables)

    def uses_cache(of):
        traced = jax.make_jaxpr(of.forward)(weights, cache, rows)
        place = len(jax.tree.leaves(weights))
        given = traced.jaxpr.invars[place]
        return any(given in equation.invars for equation in traced.jaxpr.eqns)

    assert uses_cache(model) and not uses_cache(model.fresh())


@pytest.mark.parametrize("microbatches", [1, 2])
def test_neither_does_its_program(microbatches, monkeypatch):
    """Of a width that no other test has traced."""

    def refuse(*given):
        raise AssertionError("the cache is read")

    monkeypatch.setattr(attention, "read", refuse)
    config, width = small(), WIDTH + 1
    model = decoder(config)
    run = programs(model, False, microbatches=microbatches)
    weights = jax.eval_shape(model.prepare, random_params(config))
    cache = jax.eval_shape(lambda: init_cache(config, 12, BLOCK))
    zeros = np.zeros(NUM_ROWS, np.int32)
    rows = Rows(np.zeros((NUM_ROWS, width), np.int32), zeros, zeros, np.zeros((NUM_ROWS, 3), np.int32))
    sampling = Sampling(zeros.astype(np.float32), zeros.astype(np.float32), zeros.astype(np.uint32))
    given = (
        rows,
        zeros - 1,
        sampling,
        empty_running(NUM_ROWS),
        FinishedPrompts(zeros - 1, zeros, no_stops(NUM_ROWS)),
    )
    run.prefill_fresh.lower(weights, cache, given)
    with pytest.raises(AssertionError, match="the cache is read"):
        run.prefill.lower(weights, cache, given)
