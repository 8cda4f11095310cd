"""A model that wants all that a model may want, small: kinds of stages, x a tree of floats, integers and a key, side
inputs, dropout, losses and metrics in stages, shared and tied parameters, matmuls of parameters alone, experts over ep,
integers and keys."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from dualpipe_jax import Out, StagedModel

WIDTH, VOCAB, SEQ, EXPERTS, SLOTS, RANK = 8, 12, 4, 4, 2, 5


def mlp(weights, h, at):
    """A residual MLP with dropout, which sees positions and the stage's number."""
    up = weights["up"] + weights["a"] @ weights["b"]  # of parameters alone
    hidden = jnp.tanh(h @ up + weights["bias"] + 0.1 * at.stage.astype(jnp.float32))
    if at.key is not None:
        hidden = hidden * jax.random.bernoulli(at.key, 0.8, hidden.shape).astype(hidden.dtype) / 0.8
    return h + hidden @ weights["down"] * jnp.cos(at.batch["positions"])[..., None]


def moe(weights, h):
    """Top-1 of experts that lie over ep; the balance loss of the router, and who was chosen."""
    local = weights["experts"].shape[0]
    scores = jax.nn.softmax(h @ weights["router"])
    gates = scores * jax.nn.one_hot(jnp.argmax(scores, -1), EXPERTS)
    copies = jnp.einsum("bsd,bse->ebsd", h, (gates > 0).astype(h.dtype))
    arrived = lax.all_to_all(copies.reshape(EXPERTS // local, local, *h.shape), "ep", 0, 0)
    made = jnp.tanh(jnp.einsum("nebsd,edf->nebsf", arrived, weights["experts"]))
    back = lax.all_to_all(made, "ep", 0, 0).reshape(EXPERTS, *h.shape)
    balance = (
        EXPERTS * jnp.mean(jnp.mean(scores, 1) ** 2)
        + jnp.mean(jax.nn.logsumexp(h @ weights["router"], -1) ** 2) / 8
    )
    counts = jnp.sum(gates > 0, (0, 1), dtype=jnp.int32)
    return h + jnp.einsum("ebsd,bse->bsd", back, gates), balance, counts


def run(own, h, at, *, slots):
    """Some of the stage's layers."""
    for slot in range(slots):
        layer = own["layers"][slot]
        h, balance, counts = moe(layer, mlp(layer, h, at))
        yield h, balance, counts


def trunk(own, x, at, slots):
    """Layers, their losses and metrics; the integers and the key of x go on unchanged."""
    h, balance, counts = x["h"], jnp.float32(0), jnp.zeros(EXPERTS, jnp.int32)
    for made, b, c in run(own, x["h"], at, slots=slots):
        h = made
        balance, counts = balance + b, counts + c
    noise = jax.random.uniform(x["noise"], h.shape) * (x["segments"] % 2)[..., None].astype(h.dtype)
    return x | {"h": h + 0.1 * noise}, {"balance": 0.3 * balance}, {"counts": counts, "norm": jnp.sum(h**2)}


def embed(own, shared, x, at):
    """First: embedding and dense layer, then one layer slot."""
    del x
    table = shared["embed"]
    h = table[at.batch["tokens"]] + jnp.tanh((table @ shared["dense"])[at.batch["tokens"]])
    if "extra" in at.batch:
        h = h + at.batch["extra"]
    x = {"h": h, "segments": at.batch["segments"], "noise": jax.random.key(7)}
    return Out(*trunk(own, x, at, 1))


def middle(own, shared, x, at):
    """Both layer slots, under remat."""
    del shared
    return Out(*jax.checkpoint(lambda own, x: trunk(own, x, at, SLOTS))(own, x))


def plain_middle(own, shared, x, at):
    """Both layer slots."""
    del shared
    return Out(*trunk(own, x, at, SLOTS))


def last(own, shared, x, at):
    """One layer slot, the tied head's loss, and a second head on what follows the next token."""
    x, losses, metrics = trunk(own, x, at, 1)
    h = x["h"] * own["scale"]
    if "targets" not in at.batch:
        return Out(h @ shared["embed"].T)
    targets, valid = at.batch["targets"], at.batch["valid"]

    def entropy(h, targets):
        logits = jax.nn.log_softmax(h @ shared["embed"].T + shared["bias"])
        picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return -jnp.sum(picked * valid) / jnp.maximum(jnp.sum(valid), 1)

    ahead = jnp.concatenate([h, shared["embed"][targets]], -1) @ shared["join"]
    losses = losses | {"lm": entropy(h, targets), "mtp": 0.5 * entropy(ahead, jnp.roll(targets, -1, -1))}
    return Out(h @ shared["embed"].T, losses, metrics | {"valid": jnp.sum(valid > 0, dtype=jnp.int32)})


def only(own, shared, x, at):
    """All there is, in one stage."""
    out = embed(own, shared, x, at)
    end = last(own, shared, out.x, at)
    losses = end.losses | {"balance": out.losses["balance"] + end.losses["balance"]}
    return Out(
        end.x,
        losses,
        end.metrics | jax.tree.map(jnp.add, out.metrics, {k: end.metrics[k] for k in out.metrics}),
    )


def weights(batch):
    """Valid tokens count alike, whatever their microbatch."""
    return {"lm": jnp.sum(batch["valid"]), "mtp": jnp.sum(batch["valid"])} if "valid" in batch else {}


def model(num_stages, remat=True):
    """Kinds: the first and the last stage, and what is between."""
    if num_stages == 1:
        return StagedModel({"only": only}, ("only",), weights)
    kinds = {"embed": embed, "middle": middle if remat else plain_middle, "last": last}
    return StagedModel(kinds, ("embed", *("middle",) * (num_stages - 2), "last"), weights)


def init(num_stages, seed=0):
    """Parameters."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32) / 3

    def layer():
        return {
            "up": normal(num_stages, WIDTH, WIDTH),
            "a": normal(num_stages, WIDTH, RANK),
            "b": normal(num_stages, RANK, WIDTH),
            "bias": normal(num_stages, WIDTH),
            "down": normal(num_stages, WIDTH, WIDTH),
            "router": normal(num_stages, WIDTH, EXPERTS),
            "experts": normal(num_stages, EXPERTS, WIDTH, WIDTH),
        }

    return {
        "stages": {
            "layers": [layer() for _ in range(SLOTS)],
            "scale": 1 + normal(num_stages, WIDTH),
            "number": np.arange(num_stages, dtype=np.int32),
            "key": jax.random.split(jax.random.key(seed), num_stages),
        },
        "shared": {
            "embed": normal(VOCAB, WIDTH),
            "dense": normal(WIDTH, WIDTH),
            "bias": normal(VOCAB),
            "join": normal(2 * WIDTH, WIDTH),
            "unused": normal(3),
        },
    }


LAYER_SPECS = dict.fromkeys(("up", "a", "b", "bias", "down", "router")) | {"experts": P("ep")}
SPECS = {"stages": {"layers": [LAYER_SPECS] * SLOTS, "scale": None, "number": None, "key": None}}


def data(num_microbatches, size=4, seed=1, extra=False):
    """A batch, its last tokens invalid here and there."""
    rng = np.random.default_rng(seed)
    shape = num_microbatches, size, SEQ
    tokens = rng.integers(0, VOCAB, (2, *shape), np.int32)
    lengths = rng.integers(1, SEQ + 1, shape[:2])
    batch = {
        "tokens": tokens[0],
        "targets": tokens[1],
        "positions": np.broadcast_to(np.arange(SEQ, dtype=np.float32), shape),
        "segments": rng.integers(0, 3, shape, np.int32),
        "valid": (np.arange(SEQ) < lengths[..., None]).astype(np.float32),
    }
    batch |= {"extra": rng.standard_normal((*shape, WIDTH), np.float32)} if extra else {}
    return jax.tree.map(jnp.asarray, batch)
