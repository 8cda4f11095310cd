"""Generating text: nine layers of V2-Lite with random weights, prompts of 128 tokens and 128 new tokens for each.

Prompts are new in every round, because an engine reuses the beginnings of prompts that it has served. A
checksum of each round's tokens is recorded: a compiler option that does not change results must give the same
checksum. The compiler tries out the tiles of products at every start, and they change results, too;
``XLA_FLAGS=--xla_gpu_autotune_level=0`` turns that off.
"""

import functools
import statistics
import time
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import models
from benchmarks.on_gpu.bench import Bench
from models.decode import Engine, Limits, SamplingParams, decoder

PROMPT, NEW, BATCHES, ROUNDS = 128, 128, (1, 16, 64), 3


def serving(bench: Bench) -> None:
    """Time serving: tokens a second and milliseconds of a step, by the number of requests."""
    if bench.compiles_only:
        bench.say("left out", reason="the engine compiles its programs for the devices that it has")
        return
    config = models.v2_lite(num_layers=9)
    params = bench.made(lambda: jax.tree.map(_narrow, models.deepseek(config, 1).init(jax.random.key(0))))
    for batch in BATCHES:
        limits = Limits(
            max_requests=batch, max_positions=PROMPT + NEW, chunk_size=PROMPT, max_prefill=1 << 14
        )
        engine = Engine(decoder(config), params, limits)
        rounds = np.random.default_rng(batch).integers(0, config.vocab, (ROUNDS + 1, batch, PROMPT))
        first, *others = rounds
        _generate(engine, first)  # compiles
        found = [_generate(engine, prompts) for prompts in others]
        begun, ended = (statistics.median(seconds) for seconds in list(zip(*found, strict=True))[:2])
        step = (ended - begun) / (NEW - 1)
        bench.say(
            f"batch {batch}",
            tokens_per_s=batch * NEW / ended,
            first_ms=begun * 1e3,
            ms=step * 1e3,
            tokens=[checksum for *_, checksum in found],
        )


def _narrow(leaf: Any) -> Any:
    return leaf.astype(jnp.bfloat16) if leaf.ndim >= 2 and leaf.dtype == jnp.float32 else leaf


def _generate(engine: Engine, prompts: np.ndarray) -> tuple[float, float, int]:
    """Seconds until all requests have their first token, and until they have all tokens; a checksum of all tokens."""
    firsts: list[float] = []
    texts: list[list[int]] = [[] for _ in prompts]

    def hear(text: list[int], token: Any) -> None:
        if not text:
            firsts.append(time.perf_counter())
        text.append(int(token))

    began = time.perf_counter()
    for prompt, text in zip(prompts, texts, strict=True):
        engine.add(prompt, SamplingParams(max_tokens=NEW), functools.partial(hear, text))
    engine.run()
    return max(firsts) - began, time.perf_counter() - began, zlib.crc32(np.asarray(texts, np.int32).tobytes())
