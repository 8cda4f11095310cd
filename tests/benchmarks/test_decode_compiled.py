"""What a step of decode launches and reads on an H100 that is not here, by the compiler's own text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from benchmarks.decode_compiled import compiled_step, kernels, least, started
from dualpipe_jax import inspect
from dualpipe_jax.inspect.target import MissingCompiler, Target
from models.decode import decoder, init_cache
from models.decode.programs import programs
from models.decode.running import empty_running
from models.decode.sampling import Sampling

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


def test_what_the_host_starts_is_a_graph_a_step_and_what_stands_around_the_loop(tmp_path):
    """As jax 0.11.2 dumps it."""
    lines = """000: kCommandBuffer [source       | next=010 (1)]
    001: kCopy         [source | sink] kCopy
010: kWhile         [prev=000 (1) | next=327 (1)]
condition:
    011: kCustomKernel [source | sink] loop_compare_fusion
  body:
    000: kCommandBuffer [source | sink]
        012: kCustomKernel [source         | next=016 (4)] loop_select_fusion_10
    013: kCopy         [source | sink] kCopy
327: kCustomKernel  [prev=010 (1) | sink        ] loop_reduce_fusion_17"""
    (tmp_path / "module.thunk_sequence_after_thunk_passes.txt").write_text(lines)
    assert started(tmp_path, 4) == 2 + 4 * 2
    assert started(tmp_path) == 2 + 2


def compiled_on_cpu(batch):
    config = models.v2_lite(num_layers=2)
    model = decoder(config, platform="cpu")
    weights = jax.eval_shape(
        model.prepare, jax.eval_shape(models.deepseek(config, 1).init, jax.random.key(0))
    )
    cache = jax.eval_shape(lambda: init_cache(config, 16 * batch, 16))
    wanted, reals, seeds = (
        jax.ShapeDtypeStruct((batch,), dtype) for dtype in (jnp.bool, jnp.float32, jnp.uint32)
    )
    tables = jax.ShapeDtypeStruct((batch, 16), jnp.int32)
    given = wanted, tables, Sampling(reals, reals, seeds), empty_running(batch)
    return inspect.read(programs(model, False).decode.lower(weights, cache, given).compile())


@pytest.mark.slow
def test_a_step_of_one_request_reads_little_more_than_it_has_to(tmp_path):
    """Not the experts that nobody asked for, every other weight once and the cache once; all is one CUDA graph."""
    try:
        Target.parse("h100:1x1").check_compiler()
    except MissingCompiler as error:
        pytest.skip(str(error))
    weights, module = compiled_step(CONFIG, "h100", 1, 256, str(tmp_path))
    rates, clock = inspect.gpu_rates("h100"), inspect.DEVICES["h100"].clock
    found = kernels(module, rates, clock, CONFIG.top_k)
    # A dense layer's weights are padded, for a product that no GPU was there to choose: read and written once more.
    padded = 4 * CONFIG.dense_hidden * CONFIG.dim
    assert sum(kernel.moved for kernel in found) <= 1.1 * least(CONFIG, weights, 1, 256) + padded
    # Embedding, head and the choice of tokens are some 15 of them.
    assert len(found) <= 31 * CONFIG.num_layers + 12
    assert started(tmp_path) == 1
    cached = [kernel for kernel in found if "gather" in kernel.name]
    assert len(cached) == 1  # the embedding's alone


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_no_matrix_is_turned_over_or_copied(platform):
    """As the compiled step says: matrices lie as products read them."""
    if platform == "gpu":
        try:
            Target.parse("h100:1x1").check_compiler()
        except MissingCompiler as error:
            pytest.skip(str(error))
        _, module = compiled_step(CONFIG, "h100", 16, 256)
    else:
        module = compiled_on_cpu(16)
    part = sorted((CONFIG.num_heads, CONFIG.qk_nope_dim, CONFIG.kv_lora_rank))  # of queries; of values alike
    moved = [
        made.arrays[0].dims
        for within in module.computations.values()
        for made in within
        if made.opcode in ("copy", "transpose") and len(made.arrays) == 1
    ]
    assert not [dims for dims in moved if sorted(dims) == part]
