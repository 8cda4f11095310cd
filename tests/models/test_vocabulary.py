"""Embedding and head shared out over devices: the whole ones' results and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import models
from benchmarks.on_gpu.bench import unordered_scatters
from dualpipe_jax.engine import Pipeline
from dualpipe_jax.parallel import make_mesh
from dualpipe_jax.schedule import zb_h1
from models.vocabulary import cross_entropy, look_up, project

VOCAB, DIM, TOKENS = 24, 8, 20
RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(VOCAB, DIM)).astype(np.float32)
KERNEL = RNG.normal(size=(DIM, VOCAB)).astype(np.float32)
X = RNG.normal(size=(TOKENS, DIM)).astype(np.float32)
INPUTS, TARGETS = RNG.integers(0, VOCAB, (2, TOKENS)).astype(np.int32)
WEIGHTS = RNG.normal(size=TOKENS).astype(np.float32)


def whole(x, kernel):
    """In float64, from the definition."""
    logits = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    exp = np.exp(logits)
    probs = exp / exp.sum(-1, keepdims=True)
    losses = -np.log(probs[np.arange(TOKENS), TARGETS])
    d_logits = WEIGHTS[:, None] * (probs - np.eye(VOCAB)[TARGETS])
    return losses, d_logits @ np.asarray(kernel).T, np.asarray(x).T @ d_logits


@pytest.mark.parametrize("num_ep, block, check_vma", [(1, 20, False), (1, 6, True), (4, 2, False)])
def test_cross_entropy_equals_that_of_whole_logits(num_ep, block, check_vma):
    """Blocks that divide the tokens and blocks that do not; gradients of x and of the kernel."""
    axis = "ep" if num_ep > 1 else None

    def local(x, kernel, targets, weights):
        losses, pull = jax.vjp(lambda x, w: cross_entropy(x, w, targets, axis, block), x, kernel)
        return losses, pull(weights)

    kernel_spec = P(None, axis)
    how = dict(in_specs=(P(axis), kernel_spec, P(axis), P(axis)), out_specs=(P(axis), (P(axis), kernel_spec)))
    run = jax.shard_map(local, mesh=make_mesh(1, num_ep), check_vma=check_vma, **how)
    losses, (dx, dw) = jax.jit(run)(X, KERNEL, TARGETS.astype(np.uint8), WEIGHTS)
    for got, wanted in zip((losses, dx, dw), whole(X, KERNEL), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_ep, check_vma", [(1, False), (2, True)])
def test_look_up_equals_indexing(num_ep, check_vma):
    axis = "ep" if num_ep > 1 else None
    d_rows = RNG.normal(size=(4, 5, DIM)).astype(np.float32)
    tokens = INPUTS.reshape(4, 5)

    def local(table, tokens, d_rows):
        rows, pull = jax.vjp(lambda table: look_up(table, tokens, jnp.float32, axis), table)
        return rows, *pull(d_rows)

    spec = P(None, axis)
    how = dict(in_specs=(spec, P(axis), P(axis)), out_specs=(P(axis), spec))
    run = jax.shard_map(local, mesh=make_mesh(1, num_ep), check_vma=check_vma, **how)
    rows, d_table = jax.jit(run)(TABLE, tokens, d_rows)
    np.testing.assert_array_equal(rows, TABLE[tokens])
    wanted = np.zeros_like(TABLE)
    np.add.at(wanted, tokens, d_rows)
    np.testing.assert_allclose(d_table, wanted, rtol=1e-5, atol=1e-6)


ZIPF = np.minimum(RNG.zipf(1.3, 1000) - 1, 299)


@pytest.mark.parametrize(
    "tokens, vocab",
    [
        pytest.param(ZIPF.astype(np.int32), 300, id="zipf"),
        pytest.param(np.full(100, 7, np.int32), 24, id="one-word"),
        pytest.param(np.array([3], np.int32), 24, id="one-token"),
        pytest.param(RNG.permutation(64).astype(np.int32), 64, id="each-word-once"),
        pytest.param((65400 + ZIPF[:500] % 100).astype(np.uint16), 65500, id="uint16"),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradient_of_looking_up_is_the_sum_of_its_tokens(tokens, vocab, dtype):
    """Of a table in bfloat16 rounded once, at the end. A word that no token is has a gradient of exactly 0."""
    d_rows = jnp.asarray(RNG.normal(size=(1, len(tokens), 3)) + 1, dtype)
    table = jnp.zeros((vocab, 3), dtype)
    _, pull = jax.vjp(lambda table: look_up(table, tokens[None], dtype), table)
    d_table = jax.jit(pull)(d_rows)[0]
    wanted = np.zeros(table.shape)
    np.add.at(wanted, tokens, np.asarray(d_rows[0], np.float64))
    assert d_table.dtype == dtype
    half_a_bit = float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(np.asarray(d_table, np.float64), wanted, rtol=half_a_bit + 2e-6, atol=2e-5)
    unused = np.setdiff1d(np.arange(vocab), tokens)
    assert not np.asarray(d_table)[unused].any()


def test_a_gradient_that_is_no_number_stays_with_its_word():
    d_rows = np.ones((1, 6, DIM), np.float32)
    d_rows[0, 2] = np.nan
    tokens = np.array([[5, 5, 4, 6, 4, 6]])
    d_table = jax.vjp(lambda table: look_up(table, tokens, jnp.float32), jnp.asarray(TABLE))[1](d_rows)[0]
    assert np.isnan(d_table[4]).all() and np.isfinite(np.delete(d_table, 4, axis=0)).all()


def test_a_whole_table_under_check_vma():
    """Tokens vary over the axis, the table does not: its gradient is the sum over devices, as that of indexing is."""

    def local(table, tokens):
        return jax.grad(lambda table: jnp.sum(look_up(table, tokens, jnp.float32) ** 2))(table)

    run = jax.shard_map(local, mesh=make_mesh(1, 2), in_specs=(P(), P("ep")), out_specs=P())
    wanted = np.zeros_like(TABLE)
    np.add.at(wanted, INPUTS, 2 * TABLE[INPUTS])
    np.testing.assert_allclose(jax.jit(run)(TABLE, INPUTS[:, None]), wanted, rtol=1e-5, atol=1e-6)


def test_unordered_sees_the_gradient_of_indexing():
    lowered = jax.jit(jax.grad(lambda table: jnp.sum(table[INPUTS] ** 2))).lower(TABLE)
    assert unordered_scatters(lowered.as_text()) == 1


@pytest.mark.thin(3)
@pytest.mark.parametrize("num_ep, num_mtp_layers", [(1, 1), (2, 0)])
@pytest.mark.parametrize("dispatch, factor", [("dropless", None), ("capacity", 1.25)])
def test_nothing_in_a_step_is_added_in_any_order(num_ep, num_mtp_layers, dispatch, factor):
    """Dispatch, combine, losses, the embedding, in halves or whole: everything that the engine runs."""
    numbers = models.tiny(num_layers=3, num_mtp_layers=num_mtp_layers)
    axis = "ep" if num_ep > 1 else None
    model = models.deepseek(numbers, 1, dispatch=dispatch, capacity_factor=factor, ep_axis=axis)
    pipeline = Pipeline(model.staged, zb_h1(1, 2), make_mesh(1, num_ep), param_specs=model.param_specs)
    params = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((2, 2 * num_ep, 16), jnp.int32)
    lowered = jax.jit(pipeline.value_and_grad).lower(params, {"inputs": tokens, "targets": tokens})
    text = lowered.as_text()
    assert '"stablehlo.scatter"' in text and unordered_scatters(text) == 0


def test_whole_logits_stand_nowhere():
    """On four devices, V3's words and 1024 tokens of each: blocks of 128, two blocks' worth of copies at most."""
    vocab, dim, tokens, block = 129280, 64, 1024, 128
    kinds = ((4 * tokens, dim), jnp.bfloat16), ((dim, vocab), jnp.float32), ((4 * tokens,), jnp.int32)
    shapes = [jax.ShapeDtypeStruct(*kind) for kind in kinds]

    def local(x, kernel, targets):
        def loss(x, kernel):
            return jnp.mean(cross_entropy(x, kernel, targets, "ep", block))

        return jax.grad(loss, argnums=(0, 1))(x, kernel)

    specs = P("ep"), P(None, "ep"), P("ep")
    run = jax.shard_map(local, mesh=make_mesh(1, 4), in_specs=specs, out_specs=specs[:2], check_vma=False)
    compiled = jax.jit(run).lower(*shapes).compile()
    logits_of_a_block = 4 * block * vocab
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * logits_of_a_block < 4 * tokens * vocab


def test_gradients_of_the_projection_take_narrow_operands():
    x = jnp.asarray(X, jnp.bfloat16)
    gradients = jax.make_jaxpr(lambda x, w, d: jax.vjp(project, x, w)[1](d))
    equations = gradients(x, KERNEL, jnp.ones((TOKENS, VOCAB))).jaxpr.eqns
    products = [eqn for eqn in equations if eqn.primitive.name == "dot_general"]
    assert len(products) == 2
    assert all(var.aval.dtype == jnp.bfloat16 for eqn in products for var in eqn.invars)
    assert all(eqn.outvars[0].aval.dtype == jnp.float32 for eqn in products)
    dx, dw = jax.vjp(project, x, jnp.asarray(KERNEL))[1](
        jnp.asarray(RNG.normal(size=(TOKENS, VOCAB)), jnp.float32)
    )
    assert dx.dtype == jnp.bfloat16 and dw.dtype == jnp.float32
