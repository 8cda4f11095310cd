"""The loss in blocks against the plain one on whole logits: values, gradients, operands, memory."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dualpipe_jax.parallel import make_mesh
from models.loss import cross_entropy_in_blocks
from tests.jaxprs import named

B, S, D, V = 2, 9, 8, 31


def made(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((B, S, D), (D, V)))
    return x.astype(dtype), kernel, jnp.asarray(rng.integers(0, V, (B, S)), jnp.int32)


def plain(x, kernel, targets, valid):
    """log softmax of whole logits in float32, picked and averaged."""
    logits = x.astype(jnp.float32) @ kernel
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return jnp.sum(losses * valid) / jnp.maximum(jnp.sum(valid), 1)


@pytest.mark.parametrize("block, masked", [(1, True), (5, False), (6, True), (100, False)])
def test_value_and_gradients_are_the_plain_ones(block, masked):
    x, kernel, targets = made()
    valid = (jnp.arange(S) < 6) & jnp.ones((B, 1), bool) if masked else jnp.ones((B, S), bool)
    ours = functools.partial(cross_entropy_in_blocks, block=block)
    got = jax.jit(jax.value_and_grad(ours, (0, 1)))(x, kernel, targets, valid if masked else None)
    wanted = jax.jit(jax.value_and_grad(plain, (0, 1)))(x, kernel, targets, valid.astype(jnp.float32))
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_no_valid_token_is_no_loss():
    x, kernel, targets = made()
    step = jax.jit(jax.value_and_grad(cross_entropy_in_blocks, (0, 1)))
    value, gradients = step(x, kernel, targets, np.zeros((B, S), bool))
    assert value == 0 and not any(np.any(g) for g in gradients)


def test_in_bfloat16_every_matmul_takes_bfloat16_and_sums_float32():
    x, kernel, targets = made(jnp.bfloat16)
    ours = functools.partial(cross_entropy_in_blocks, block=5)
    found = named(jax.make_jaxpr(jax.grad(ours, (0, 1)))(x, kernel, targets).jaxpr, "dot_general")
    assert len(found) == 4  # logits, again in the backward, and the gradients of both
    assert {v.aval.dtype for eqn in found for v in eqn.invars} == {jnp.dtype(jnp.bfloat16)}
    assert {v.aval.dtype for eqn in found for v in eqn.outvars} == {jnp.dtype(jnp.float32)}
    value, gradients = jax.jit(jax.value_and_grad(ours, (0, 1)))(x, kernel, targets)
    wanted, exact = jax.value_and_grad(plain, (0, 1))(
        x.astype(jnp.float32), kernel.astype(jnp.bfloat16).astype(jnp.float32), targets, jnp.ones((B, S))
    )
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for got, e, dtype in zip(gradients, exact, (jnp.bfloat16, jnp.float32), strict=True):
        assert got.dtype == dtype
        assert np.linalg.norm(got.astype(jnp.float32) - e) < 0.01 * np.linalg.norm(e)


def test_logits_never_stand_whole():
    """Of 2048 tokens and 4096 words they take 32 MiB, of which the blocks together need less than an eighth."""
    tokens, words, block = 2048, 4096, 64
    kinds = ((tokens, 16), jnp.float32), ((16, words), jnp.float32), ((tokens,), jnp.int32)
    shapes = [jax.ShapeDtypeStruct(*kind) for kind in kinds]

    def temporary(loss):
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    whole = temporary(lambda x, w, t: plain(x, w, t, jnp.ones(tokens)))
    blocks = temporary(functools.partial(cross_entropy_in_blocks, block=block))
    assert whole > 4 * tokens * words > 8 * blocks


@pytest.mark.parametrize("check_vma", [False, True])
def test_each_device_has_its_tokens_and_all_one_kernel(check_vma):
    x, kernel, targets = made()

    def local(x, kernel, targets):
        value, (d_x, d_kernel) = jax.value_and_grad(
            lambda *a: cross_entropy_in_blocks(*a, targets, block=4) / 2, (0, 1)
        )(x, kernel)
        if not check_vma:  # else the cast of the unvarying kernel has done it
            d_kernel = jax.lax.psum(d_kernel, "ep")
        return jax.lax.psum(value, "ep"), d_x, d_kernel

    how = dict(mesh=make_mesh(1, 2), in_specs=(P("ep"), P(), P("ep")), out_specs=(P(), P("ep"), P()))
    run = jax.shard_map(local, check_vma=check_vma, **how)
    value, *gradients = jax.jit(run)(x, kernel, targets)
    wanted = jax.value_and_grad(plain, (0, 1))(x, kernel, targets, jnp.ones((B, S)))
    chex.assert_trees_all_close((value, tuple(gradients)), wanted, rtol=1e-5, atol=1e-6)
