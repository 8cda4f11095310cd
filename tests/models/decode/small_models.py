"""Small models with nothing left at its initial value, for tests of decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import models
from models import deepseek, tiny
from tests.models import plain

SMALL = dict(
    vocab=48, dim=16, num_layers=2, num_heads=2, q_lora_rank=12, kv_lora_rank=8, qk_nope_dim=8, qk_rope_dim=4,
    v_head_dim=6, dense_hidden=20, expert_hidden=10, num_experts=4, top_k=2, num_groups=2, top_groups=1,
)  # fmt: skip


def small(**changes):
    return tiny(**(SMALL | changes))


@functools.cache
def random_params(config, seed=0, scale=0.4, plan=1):
    """Matrices that make tokens depend on each other, norms that are not one, biases that matter."""
    model, rng = deepseek(config, plan), np.random.default_rng(seed)

    def fill(path, leaf):
        name = jax.tree_util.keystr(path)
        if "row" in name:
            return jnp.asarray(model.layout.rows)
        made = rng.uniform(0.5, 1.5, leaf.shape) if "norm" in name else scale * rng.normal(size=leaf.shape)
        return jnp.asarray(made, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, jax.eval_shape(model.init, jax.random.key(0)))


@functools.cache
def loud_params(config):
    """The same, but four tokens are louder than the others, so that some guesses are right."""
    params = random_params(config)
    kernel = params["shared"]["lm_head"]["kernel"].at[:, :4].multiply(3)
    return params | {"shared": params["shared"] | {"lm_head": {"kernel": kernel}}}


def drawn(config, *lengths, seed=0):
    """Prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, config.vocab, length).astype(np.int32) for length in lengths]


QUICK = {"xla_backend_optimization_level": 0}

whole = jax.jit(models.logits, static_argnums=0, compiler_options=QUICK)
"""The plain forward over the whole text: the oracle."""


def continued(config, params, prompt, number, length):
    """The likeliest tokens behind a prompt, by the plain forward over all ``length`` places, once a token."""
    text = list(prompt)
    for _ in range(number):
        padded = np.zeros((1, length), np.int32)
        padded[0, : len(text)] = text
        logits = np.asarray(whole(config, params, padded))
        text.append(int(np.argmax(logits[0, len(text) - 1])))
    return tuple(text[len(prompt) :])


@functools.partial(jax.jit, static_argnums=0, static_argnames="after_norm", compiler_options=QUICK)
def logits_ahead(config, params, tokens, *, after_norm=False):
    """Of a dense layer, one with experts and a module ahead, by the paper's formulas: at i of token i + 2."""
    shared, length = params["shared"], tokens.shape[1]
    segments, live = np.zeros(tokens.shape, np.int32), np.ones(tokens.shape, bool)

    def routed(x, row, n):
        own = jax.tree.map(lambda a: a[0], params["stages"]["layers"][row])
        bias = params["stages"]["routing"]["bias"][0, row]
        return plain.layer(x, own, config, segments[:, :n], bias, live[:, :n])[0]

    x = plain.layer(shared["embed_tokens"][tokens], shared["layers"][0], config, segments)
    x = routed(x, 0, length)[:, :-1]
    x = plain.norm(x, shared["norm"]) if after_norm else x
    module = shared["mtp"][0]
    both = plain.norm(shared["embed_tokens"][tokens[:, 1:]], module["enorm"]), plain.norm(x, module["hnorm"])
    x = routed(jnp.concatenate(both, -1) @ module["eh_proj"]["kernel"], 1, length - 1)
    return plain.norm(x, module["norm"]) @ shared["lm_head"]["kernel"]


COMPILED = []
"""What has been compiled in this process."""


def note(name, seconds, **more):
    if name == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(seconds)


jax.monitoring.register_event_duration_secs_listener(note)
