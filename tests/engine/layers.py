"""Layers of many kinds: of these ``test_random_models`` makes its stages."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

D, T, V, E = 6, 5, 11, 4
"""Width, tokens of a sequence, vocabulary, experts."""


@jax.custom_vjp
def sine_of_product(x, w):
    return jnp.sin(x @ w)


def _backward_of_sine(kept, dy):
    x, w = kept
    dy = dy * jnp.cos(x @ w)
    return dy @ w.T, jnp.einsum("btd,bte->de", x, dy)


sine_of_product.defvjp(lambda x, w: (jnp.sin(x @ w), (x, w)), _backward_of_sine)


@jax.custom_jvp
def scaled_tanh(x, scale):
    return jnp.tanh(x) * scale


@scaled_tanh.defjvp
def _tangent_of_scaled_tanh(given, tangents):
    (x, scale), (dx, dscale) = given, tangents
    return scaled_tanh(x, scale), (1 - jnp.tanh(x) ** 2) * scale * dx + jnp.tanh(x) * dscale


def attention(x, qkv, out):
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dshk->btshk", x, qkv), 2, 0)
    later = jnp.where(np.tri(T, dtype=bool), 0.0, -1e9)
    weights = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k) + later)
    return x + jnp.einsum("bhqs,bshk,hkd->bqd", weights, v, out)


def routed(x, router, experts):
    scores = jax.nn.softmax(x @ router)
    top, chosen = lax.top_k(scores, 2)
    gates = (jax.nn.one_hot(chosen, E, dtype=x.dtype) * top[..., None]).sum(-2)
    balance = jnp.mean(scores.mean((0, 1)) ** 2)
    return x + jnp.einsum("bte,btd,edf->btf", gates, x, experts), {"loss": balance}


def exchanged(x, experts_of_ep):
    """Every expert sees every device's tokens, each expert them in another way."""
    local = experts_of_ep.shape[0]
    copies = jnp.stack([jnp.roll(x, e, -1) * (1 + e) for e in range(E)])
    arrived = lax.all_to_all(copies.reshape(E // local, local, *x.shape), "ep", 0, 0)
    made = jnp.tanh(jnp.einsum("nebtd,edf->nebtf", arrived, experts_of_ep))
    back = lax.all_to_all(made, "ep", 0, 0).reshape(E, *x.shape)
    return x + jnp.einsum("ebtd,e->btd", back, np.arange(1.0, E + 1) / E / 2)


def gathered(x, columns_of_ep):
    whole = lax.all_gather(columns_of_ep, "ep", axis=1, tiled=True)
    return x + jnp.tanh(x @ whole) @ whole.T


def scattered_and_gathered(x, w):
    padded = jnp.pad(x @ w, ((0, 0), (0, 0), (0, 2)))
    own = lax.psum_scatter(padded, "ep", scatter_dimension=2, tiled=True)
    return x + 0.1 * lax.all_gather(own, "ep", axis=2, tiled=True)[..., :D]


def scanned(x, stack, biases):
    return lax.scan(lambda x, own: (x + jnp.tanh(x @ own[0] + own[1]), None), x, (stack, biases))[0]


def scanned_and_recomputed(x, stack):
    step = jax.checkpoint(lambda x, w: (x + jnp.sin(x @ w), None))
    return lax.scan(step, x, stack[:2], unroll=2)[0]


def repeated(x, w):
    """Each time it computes a mean that nobody reads."""
    return lax.scan(lambda x, _: (x + 0.3 * jnp.tanh(x @ w), x.mean()), x, None, length=3)[0]


def indexed(x, stack):
    """It reads one of the matrices twice and one not at all."""
    for number in (0, 2, 0):
        x = x + jnp.tanh(x @ stack[number])
    return x


def by_microbatch(x, microbatch, w, v):
    return lax.cond(microbatch % 2 == 0, lambda x: x + jnp.tanh(x @ w), lambda x: x - 0.1 * x @ v, x)


def by_stage(x, stage, stack):
    ways = lambda x: x + x @ stack[0], jnp.sin, lambda x: x + jnp.tanh(x @ (stack[1] * stack[2]))
    return lax.switch(stage % 3, ways, x)


def over_ep(x, bias):
    return x + bias * lax.pmean(jnp.tanh(x).mean(), "ep") + 0.1 * lax.psum(x.mean(0), "ep")


def convolved(x, stack):
    return x + 0.5 * lax.conv_general_dilated(x, stack, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def of_segments(x, ids, table):
    sums = jax.ops.segment_sum(x.reshape(-1, D), ids.reshape(-1), V)
    return x + 0.2 * sums[ids] * table[ids]


def recurrence(x, w):
    def then(a, b):
        return a[0] * b[0], a[1] * b[0] + b[1]

    return x + lax.associative_scan(then, (jax.nn.sigmoid(x), x @ w), axis=1)[1]


def filtered(x, w):
    waves = jnp.fft.fft(x @ w, axis=1) * np.exp(1j * np.arange(T))[:, None]
    return x + 0.3 * jnp.fft.ifft(waves, axis=1).real


def with_names_saved(x, w, bias):
    policy = jax.checkpoint_policies.save_only_these_names("product")
    return jax.checkpoint(lambda x: x + jnp.tanh(checkpoint_name(x @ w, "product") + bias), policy=policy)(x)


def bypass(x, skip, rows):
    """What it adds to travels beside x from stage to stage."""
    skip = 0.9 * skip + jnp.tanh(rows)
    return x + 0.1 * skip, {"skip": skip}


def while_loop(x, w):
    """Of what has no gradient: JAX has none of a while loop."""
    start = 0, lax.stop_gradient(x).mean()
    _, factor = lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 0.5 + 1), start)
    return x + factor * 0.1 * jnp.tanh(x @ w)


OWN = {
    "w": (D, D),
    "v": (D, D),
    "up": (D, 2 * D),
    "down": (2 * D, D),
    "bias": (D,),
    "number": (),
    "stack": (3, D, D),
    "biases": (3, D),
    "qkv": (D, 3, 2, 3),
    "out": (2, 3, D),
    "table": (V, D),
    "rows": (T, D),
    "long": (2 * T, D),
    "router": (D, E),
    "experts": (E, D, D),
    "experts_of_ep": (E, D, D),
    "columns_of_ep": (D, 4),
    "order": (D,),
    "places": (3,),
}
"""Shapes of what a layer may have for itself."""
BELOW = {"order": D, "places": T}
"""Of these, integers, and what they are below."""
OVER_EP = {"experts_of_ep": P("ep"), "columns_of_ep": P(None, "ep")}
"""Of these, those that lie in parts on the devices of ep."""
SHARED = {"embed": (V, D), "head": (D, V), "square": (D, D), "offset": (D,)}
"""Shapes of what all stages share."""

LAYERS = {
    "mlp": lambda x, up, down: x + jnp.tanh(x @ up) @ down,
    "attention": attention,
    "scanned": scanned,
    "scanned_and_recomputed": scanned_and_recomputed,
    "repeated": repeated,
    "indexed": indexed,
    "indexed_in_a_loop": lambda x, stack: lax.fori_loop(0, 3, lambda i, x: x + jnp.tanh(x @ stack[i]), x),
    "norm": lambda x, bias: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3) * (1 + bias),
    "looked_up": lambda x, ids, table: x + table[ids],
    "routed": routed,
    "custom_vjp": lambda x, w: x + sine_of_product(x, w),
    "custom_jvp": lambda x, w, bias: x + scaled_tanh(x @ w, bias),
    "by_microbatch": by_microbatch,
    "by_stage": by_stage,
    "summed_and_sorted": lambda x, bias: jnp.cumsum(x * bias, 1) / T + jnp.sort(x, 1),
    "convolved": convolved,
    "over_ep": over_ep,
    "over_dp": lambda x, w: x + 0.1 * lax.pmean(jnp.tanh(x @ w).mean(0), "dp"),
    "exchanged": exchanged,
    "gathered": gathered,
    "scattered_and_gathered": scattered_and_gathered,
    "shared": lambda x, square: x + jnp.tanh(x @ square),
    "two_shared": lambda x, square, offset: x + jnp.sin(x @ square.T) * offset,
    "product_with_shared": lambda x, square, w: x + 0.3 * x @ (square @ w),
    "tied": lambda x, w: x + jnp.tanh(x @ w) @ w.T,
    "sliced_by_microbatch": lambda x, microbatch, long: x + lax.dynamic_slice_in_dim(long, microbatch, T),
    "inverse": lambda x, w: x + 0.2 * x @ jnp.linalg.inv(2 * jnp.eye(D) + 0.3 * w),
    "of_segments": of_segments,
    "of_the_batch": lambda x, noise, bias: x + bias * noise,
    "picked": lambda x, order, bias: x[..., order] * (1 + bias),
    "inner_gradient": lambda x, w: x + 0.2 * jax.grad(lambda x: jnp.sum(jnp.sin(x @ w)))(x),
    "stopped": lambda x, w, bias: x + lax.stop_gradient(jnp.tanh(x @ w)) * bias,
    "with_loss": lambda x, w: (x, {"loss": jnp.mean((x @ w) ** 2)}),
    "with_loss_of_weights": lambda x, bias: (x, {"loss": jnp.mean(jnp.cos(bias))}),
    "recurrence": recurrence,
    "mapped": lambda x, w: x + lax.map(lambda row: jnp.tanh(row @ w), x),
    "vmapped": lambda x, w: x + jax.vmap(jax.vmap(lambda row: jax.jit(jnp.dot)(w, jnp.tanh(row))))(x),
    "filtered": filtered,
    "scattered": lambda x, places, bias: x.at[:, places].add(bias * jnp.tanh(x[:, :1])),
    "with_names_saved": with_names_saved,
    "recomputed": lambda x, w, bias: jax.checkpoint(lambda x, w: x + jnp.sin(x @ w + bias))(x, w),
    "scaled": lambda x, w, number: x + number * jnp.tanh(x @ w * number),
    "used_in_part": lambda x, w: x + jnp.tanh(x[..., :3] @ w[:3]),
    "largest": lambda x, w: x + jnp.max(x @ w, -1, keepdims=True),
    "log_sum": lambda x: x + 0.1 * jax.nn.logsumexp(x, 1, keepdims=True),
    "product_of_weights": lambda x, w, v: x + 0.3 * x @ (w @ v),
    "bypass": bypass,
    "while_loop": while_loop,
}
"""Functions of x [size, T, D] to the next x, or to that and {"loss": ...} or {"skip": ...}.

What else one takes has the name of an entry of OWN or SHARED, or is one of ids, noise, skip, stage and microbatch.
"""


def parameters(layer):
    """What a layer takes besides x, and what of it is its own."""
    names = [*inspect.signature(LAYERS[layer]).parameters][1:]
    return names, [name for name in names if name in OWN]
