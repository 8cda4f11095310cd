"""Small models for the engine's tests: an MLP, and a mixture of experts whose tokens cross the ep axis."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from dualpipe_jax import PipelineModel
from tests.engine.plain import plain_value_and_grad

WIDTH, VOCAB, SEQ, EXPERTS = 8, 11, 3, 4


@functools.cache
def oracle(kind, num_stages, num_microbatches):
    """What the plain model gives, as ``pipeline_value_and_grad`` would with has_aux."""
    step = quick(plain_value_and_grad(model(kind), has_aux=True))
    return jax.device_get(step(init(kind, num_stages)[0], *data(num_microbatches)))


def quick(function, **options):
    """Compiled with little optimization, which takes half as long: for results, not for texts."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0}, **options)


def assert_close(got, want, rtol=2e-6):
    """Leaf by leaf, to a part of each leaf's largest entry."""
    found = jax.tree_util.tree_leaves_with_path(jax.device_get(got))
    for (path, g), w in zip(found, jax.tree.leaves(jax.device_get(want)), strict=True):
        name = jax.tree_util.keystr(path)
        assert (g.dtype, g.shape) == (w.dtype, w.shape), name
        if g.dtype != jax.dtypes.float0:
            assert np.abs(w).max() > 0, name
            np.testing.assert_allclose(g, w, atol=rtol * np.abs(w).max(), rtol=0, err_msg=name)


def assert_same(result, expected):
    """Loss, aux and every leaf of the gradients; aux exactly."""
    (loss, aux), grads = jax.device_get(result)
    (expected_loss, expected_aux), expected_grads = jax.device_get(expected)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, aux, expected_aux)
    assert jax.tree.structure(grads) == jax.tree.structure(expected_grads)
    assert_close(grads, expected_grads)


def embed(params, tokens):
    """Tokens [size, seq] to x [size, seq, width]."""
    return params[tokens]


def head_loss(params, x, targets):
    """Mean cross entropy."""
    log_probs = jax.nn.log_softmax(x @ params)
    return -jnp.mean(jnp.take_along_axis(log_probs, targets[..., None], -1))


def mlp(params, x):
    """Residual MLP; aux counts positive hidden units."""
    hidden = x @ params["up"] + params["bias"]
    return x + jnp.tanh(hidden) @ params["down"], jnp.sum(hidden > 0, dtype=jnp.int32)


def moe(params, x):
    """Top-1 experts, as many tokens a device as experts allow: every expert sees every device's tokens.

    Each device holds EXPERTS / ep experts; tokens go to all of them through an all_to_all of copies, gated by
    the router, so that router, experts and x all get gradients through the exchange.
    """
    local = params["w1"].shape[0]
    num_ep = EXPERTS // local
    scores = jax.nn.softmax(x @ params["router"])
    chosen = jnp.argmax(scores, -1)
    gates = scores * jax.nn.one_hot(chosen, EXPERTS)
    copies = jnp.einsum("bsd,bse->ebsd", x, (gates > 0).astype(x.dtype))
    sent = copies.reshape(num_ep, local, *x.shape)
    arrived = lax.all_to_all(sent, "ep", 0, 0)
    hidden = jnp.tanh(jnp.einsum("nebsd,edf->nebsf", arrived, params["w1"]))
    made = lax.all_to_all(jnp.einsum("nebsf,efd->nebsd", hidden, params["w2"]), "ep", 0, 0)
    out = jnp.einsum("ebsd,bse->bsd", made.reshape(EXPERTS, *x.shape), gates)
    counts = (
        jnp.zeros(params["counts"].shape[0], jnp.int32).at[params["stage"]].add(jnp.int32(x.shape[0] * SEQ))
    )
    return x + out + params["bias"], {"tokens": counts, "load": jnp.sum(chosen == 0, dtype=jnp.int32)}


MLP = PipelineModel(embed, lambda params, x: mlp(params, x)[0], head_loss)
MOE = PipelineModel(embed, lambda params, x: moe(params, x)[0], head_loss)
"""Without aux."""


def model(kind, remat=None):
    """A PipelineModel of MLP or MoE stages; ``remat`` is a jax.checkpoint policy or "all"."""
    stage = {"mlp": mlp, "moe": moe}[kind]
    if remat is not None:
        stage = jax.checkpoint(stage, policy=None if remat == "all" else remat)
    return PipelineModel(embed, stage, head_loss)


def init(kind, num_stages, seed=0):
    """Parameters and their specs over ep."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32) / 3)

    if kind == "mlp":
        stages = {
            "up": normal(num_stages, WIDTH, 2 * WIDTH),
            "bias": normal(num_stages, 2 * WIDTH),
            "down": normal(num_stages, 2 * WIDTH, WIDTH),
        }
        specs = None
    else:
        stages = {
            "router": normal(num_stages, WIDTH, EXPERTS),
            "w1": normal(num_stages, EXPERTS, WIDTH, WIDTH),
            "w2": normal(num_stages, EXPERTS, WIDTH, WIDTH),
            "bias": normal(num_stages, WIDTH),
            "stage": jnp.asarray(np.arange(num_stages, dtype=np.int32)),
            "counts": jnp.asarray(np.zeros((num_stages, num_stages), np.int32)),
        }
        experts = {"w1", "w2"}
        specs = {"stages": {name: PartitionSpec("ep") if name in experts else None for name in stages}}
    return {"embed": normal(VOCAB, WIDTH), "stages": stages, "head": normal(WIDTH, VOCAB)}, specs


def data(num_microbatches, size=4, seed=1):
    """Tokens and targets [num_microbatches, size, seq]."""
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (2, num_microbatches, size, SEQ), np.int32)
    return jnp.asarray(tokens[0]), jnp.asarray(tokens[1])


def given(kind, num_stages, num_microbatches):
    """The same for a ``Pipeline`` of ``staged(model)``: parameters with their stages, and a batch."""
    params, _ = init(kind, num_stages)
    inputs, targets = data(num_microbatches)
    shared = {"embed": params["embed"], "head": params["head"]}
    return {"stages": params["stages"], "shared": shared}, {"inputs": inputs, "targets": targets}


def flat(given):
    """The same for functions of a ``PipelineModel``: params, inputs, targets."""
    (params, batch) = given
    return {"stages": params["stages"], **params["shared"]}, batch["inputs"], batch["targets"]
