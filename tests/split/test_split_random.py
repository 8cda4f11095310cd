"""Networks drawn at random: the split agrees with ``jax.vjp`` on every one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from split_checks import BATCH, WIDTH, check_split, norm, normal


def network(rng, depth=2):
    """A random function of (params, x); params is a dict from which each op draws by name."""
    kinds = ["linear", "bias", "gain", "norm", "act", "residual", "mix", "gather", "cast", "fold"]
    if depth:
        kinds += ["remat", "scan", "cond", "jit", "shared scan"]
    ops = [operation(str(rng.choice(kinds)), rng, depth) for _ in range(rng.integers(2, 4))]

    def f(params, x):
        for op in ops:
            x = op(params, x)
        return x

    return f


def operation(kind, rng, depth):
    matrix, vector = (f"{letter}{rng.integers(3)}" for letter in "wv")
    act = [jnp.tanh, jax.nn.silu, jax.nn.softmax, jax.nn.relu, lambda x: x * jnp.sin(x)][rng.integers(5)]
    if kind in ("remat", "scan", "cond", "jit", "shared scan"):
        return compound(kind, rng, depth - 1)
    return {
        "linear": lambda p, x: x @ p[matrix],
        "bias": lambda p, x: x + p[vector],
        "gain": lambda p, x: x * jnp.exp(p[vector]),
        "norm": lambda p, x: norm(p[vector], x),
        "act": lambda p, x: act(x),
        "residual": lambda p, x: x + act(x @ p[matrix]) @ p[matrix].T,
        "mix": lambda p, x: jax.nn.softmax(x @ x.T) @ (x @ p[matrix]),
        "gather": lambda p, x: x + p[matrix][np.array([1, 0, 1, 3, 1, 7, 6, 6])],
        "cast": lambda p, x: (x.astype(jnp.float16) @ p[matrix].astype(jnp.float16)).astype(x.dtype),
        "fold": lambda p, x: (x.T.reshape(WIDTH // 2, -1) * 2).reshape(WIDTH, BATCH).T @ p[matrix],
    }[kind]


def compound(kind, rng, depth):
    inner, other = network(rng, depth), network(rng, depth)
    policy = [None, jax.checkpoint_policies.dots_saveable][rng.integers(2)]
    return {
        "remat": jax.checkpoint(inner, policy=policy),
        "jit": jax.jit(inner),
        "scan": lambda p, x: lax.scan(lambda x, g: (inner(p, x) * g, None), x, jnp.exp(p["v0"][:2]))[0],
        "shared scan": lambda p, x: lax.scan(lambda x, _: (inner(p, x), x.sum()), x, None, length=2)[0],
        "cond": lambda p, x: lax.cond(x[0, 0] > 0, inner, other, p, x),
    }[kind]


@pytest.mark.thin(4)
@pytest.mark.parametrize("seed", range(16))
def test_random_network(seed):
    rng = np.random.default_rng(seed)
    params = {f"w{i}": normal(i, WIDTH, WIDTH) for i in range(3)} | {
        f"v{i}": normal(9 + i, WIDTH) for i in range(3)
    }
    check_split(network(rng), params, normal(seed + 50, BATCH, WIDTH))
