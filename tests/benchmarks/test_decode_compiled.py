"""What a step of decode launches and reads on an H100 that is not here, by the compiler's own text."""

import jax.numpy as jnp
import numpy as np
import pytest

import models
from benchmarks.decode_compiled import compiled_step, kernels, least
from dualpipe_jax import inspect
from dualpipe_jax.inspect.target import MissingCompiler, Target

CONFIG = models.v2_lite(num_layers=2, compute_dtype=jnp.bfloat16)


def test_the_least_is_what_a_step_asks_for():
    weights = {
        "embed_tokens": np.zeros((CONFIG.vocab, 8), np.float16),
        "layers": [
            {"block": {"mlp": {"experts": np.zeros((64, 5), np.float32), "gate": np.zeros(3, np.float32)}}}
        ],
    }
    cached = 2 * 16 * 100 * (512 + 64) * 2
    assert least(CONFIG, weights, 16, 100) == 16 * 8 * 2 + 64 * 5 * 4 + 3 * 4 + cached
    assert least(CONFIG, weights, 1, 0) == 8 * 2 + 6 * 5 * 4 + 3 * 4


@pytest.mark.slow
def test_a_step_of_one_request_reads_little_more_than_it_has_to():
    """Not the experts that nobody asked for, and every other weight once; a layer is some 40 kernels."""
    try:
        Target.parse("h100:1x1").check_compiler()
    except MissingCompiler as error:
        pytest.skip(str(error))
    weights, module = compiled_step(CONFIG, "h100", 1, 256)
    rates, clock = inspect.gpu_rates("h100"), inspect.DEVICES["h100"].clock
    found = kernels(module, rates, clock, CONFIG.top_k)
    # A dense layer's weights are padded, for a product that no GPU was there to choose: read and written once more.
    padded = 4 * CONFIG.dense_hidden * CONFIG.dim
    assert sum(kernel.moved for kernel in found) <= 1.1 * least(CONFIG, weights, 1, 256) + padded
    assert len(found) <= 45 * CONFIG.num_layers
