"""Flax modules, linen and nnx, as they are."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from split_checks import BATCH, WIDTH, check_split, normal

X = normal(0, BATCH, WIDTH)


class Layer(nn.Module):
    """Attention and a gated MLP."""

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(h, h)
        h = nn.RMSNorm()(x)
        return x + nn.Dense(WIDTH)(nn.silu(nn.Dense(32)(h)) * nn.Dense(32)(h))


class Gated(nnx.Module):
    """A gated MLP."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 32, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, 32, rngs=rngs)
        self.down = nnx.Linear(32, WIDTH, rngs=rngs)

    def __call__(self, x):
        h = self.norm(x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))


def numbers(init, *arguments):
    """Parameters of an initialisation's shapes, which is not run."""
    return jax.tree.map(lambda kind: 0.5 + normal(1, *kind.shape), jax.eval_shape(init, *arguments))


def test_linen():
    module = Layer()
    params = numbers(module.init, jax.random.key(0), X)
    check_split(module.apply, params, X)


def test_linen_scanned_and_rematerialised():
    """The layers that many Flax models are made of."""

    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(WIDTH)(jnp.tanh(nn.Dense(32)(nn.LayerNorm()(x)))), None

    rematerialised = nn.remat(Body, prevent_cse=False)
    layers = nn.scan(rematerialised, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
    params = numbers(layers.init, jax.random.key(0), X, None)
    plan = check_split(lambda params, x: layers.apply(params, x, None)[0], params, X)
    assert [kind.shape for kind in plan.residuals_i] == [(3, *X.shape)]
    assert plan.residuals_w == []


def test_nnx():
    definition, state = nnx.split(nnx.eval_shape(lambda: Gated(nnx.Rngs(0))))
    state = numbers(lambda: state)
    plan = check_split(lambda state, x: nnx.merge(definition, state)(x), state, X)
    rows = X.size * 4
    held = sum(kind.size * 4 for kind in (*plan.stash, *plan.residuals_w))
    inputs, cotangents = rows + 2 * rows, 2 * rows + 2 * rows + rows  # of up and gate; down
    assert held == inputs + cotangents + 2 * WIDTH * 4
