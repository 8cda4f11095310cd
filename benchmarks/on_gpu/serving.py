"""Generating text: nine layers of V2-Lite with random weights, prompts of 128 tokens and 128 new ones of each."""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import models
from benchmarks.on_gpu.bench import Bench
from models.decode import Engine, Limits, SamplingParams, decoder

PROMPT, NEW, BATCHES, ROUNDS = 128, 128, (1, 16, 64), 3


def serving(bench: Bench) -> None:
    """Tokens a second and milliseconds of a step, by the number of requests."""
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
        prompts = np.random.default_rng(batch).integers(0, config.vocab, (batch, PROMPT))
        _generate(engine, prompts)  # compiles
        took = statistics.median(_generate(engine, prompts) for _ in range(ROUNDS))
        bench.say(f"batch {batch}", tokens_per_s=batch * NEW / took, ms=took / NEW * 1e3)


def _narrow(leaf: Any) -> Any:
    return leaf.astype(jnp.bfloat16) if leaf.ndim >= 2 and leaf.dtype == jnp.float32 else leaf


def _generate(engine: Engine, prompts: np.ndarray) -> float:
    """Seconds of all requests together."""
    began = time.perf_counter()
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_tokens=NEW))
    engine.run()
    return time.perf_counter() - began
