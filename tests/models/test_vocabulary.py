"""Embedding and head shared out over devices: the whole ones' results and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dualpipe_jax.parallel import make_mesh
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
