"""DeepSeek-V3 once more, from the paper's formulas: every expert on every token, whole logits, no stage, no block.

It takes the parameters of ``models.deepseek`` apart layer by layer and shares no code with it.
"""

import jax
import jax.numpy as jnp
import numpy as np


def norm(x, p, eps=1e-6):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * p["weight"]


def rotate(x, theta):
    """Each adjacent pair as a complex number, turned by its position; x [B, S, H, R]."""
    S, R = x.shape[1], x.shape[-1]
    angle = np.arange(S)[:, None] * theta ** (-np.arange(0, R, 2) / R)
    turned = jax.lax.complex(x[..., ::2], x[..., 1::2]) * np.exp(1j * angle)[:, None].astype(np.complex64)
    return jnp.stack([turned.real, turned.imag], -1).reshape(x.shape)


def attention(x, p, config, segments):
    B, S, _ = x.shape
    H, N, R, V = config.num_heads, config.qk_nope_dim, config.qk_rope_dim, config.v_head_dim
    q = x @ p["q_proj"]["kernel"] if not config.q_lora_rank else None
    if q is None:
        q = norm(x @ p["q_a_proj"]["kernel"], p["q_a_layernorm"]) @ p["q_b_proj"]["kernel"]
    q = q.reshape(B, S, H, N + R)
    c = x @ p["kv_a_proj_with_mqa"]["kernel"]
    kv = norm(c[..., : config.kv_lora_rank], p["kv_a_layernorm"]) @ p["kv_b_proj"]["kernel"].reshape(
        config.kv_lora_rank, -1
    )
    kv = kv.reshape(B, S, H, N + V)
    k_turned = rotate(c[..., None, config.kv_lora_rank :], config.rope_theta)[:, :, 0]
    scores = jnp.einsum("bqhn,bkhn->bhqk", q[..., :N], kv[..., :N])
    scores = scores + jnp.einsum("bqhr,bkr->bhqk", rotate(q[..., N:], config.rope_theta), k_turned)
    seen = np.tril(np.ones((S, S), bool)) & (segments[:, :, None] == segments[:, None, :])
    probs = jax.nn.softmax(jnp.where(seen[:, None], scores / np.sqrt(N + R), -jnp.inf))
    out = jnp.einsum("bhqk,bkhv->bqhv", probs, kv[..., N:])
    return out.reshape(B, S, H * V) @ p["o_proj"]["kernel"]


def swiglu(x, gate, up, down):
    hidden = x @ gate
    return (hidden / (1 + jnp.exp(-hidden)) * (x @ up)) @ down


def experts(x, p, bias, config, live):
    """Returns y, counts of live tokens [E], and each sequence's balance loss [B]; one group only."""
    assert config.num_groups == 1 and config.score == "sigmoid"
    E, K = config.num_experts, config.top_k
    scores = 1 / (1 + jnp.exp(-(x @ p["gate"])))

    def chosen_by(values):  # rank of each expert among all
        return jnp.argsort(jnp.argsort(-values, stable=True), stable=True) < K

    chosen = chosen_by(jax.lax.stop_gradient(scores) + bias)
    weights = jnp.where(chosen, scores, 0)
    weights = weights / weights.sum(-1, keepdims=True) * config.routed_scale
    shared = (p["shared_experts"][name]["kernel"] for name in ("gate_proj", "up_proj", "down_proj"))
    gate_up, down = p["experts"]["gate_up_proj"], p["experts"]["down_proj"]
    own_EBSD = swiglu(x, *(w[:, None] for w in (*jnp.split(gate_up, 2, axis=-1), down)))
    y = swiglu(x, *shared) + jnp.einsum("bse,ebsd->bsd", weights, own_EBSD)
    T = jnp.maximum(live.sum(1), 1)[:, None].astype(jnp.float32)
    unbiased = chosen_by(jax.lax.stop_gradient(scores)) & live[..., None]
    f = E / (K * T) * unbiased.sum(1).astype(jnp.float32)
    normal = scores / scores.sum(-1, keepdims=True)
    P = jnp.where(live[..., None], normal, 0).sum(1) / T
    return y, (chosen & live[..., None]).sum((0, 1)), (f * P).sum(-1)


def layer(x, p, config, segments, *routing):
    x = x + attention(norm(x, p["input_layernorm"]), p["self_attn"], config, segments)
    h = norm(x, p["post_attention_layernorm"])
    if not routing:
        return x + swiglu(h, *(p["mlp"][name]["kernel"] for name in ("gate_proj", "up_proj", "down_proj")))
    y, counts, balance = experts(h, p["mlp"], routing[0], config, routing[1])
    return x + y, counts, balance


def loss(params, batch, model, *, mtp_weight, balance_factor, after_norm=False):
    """The objective over a batch [M, B, S] as one; its terms, and counts [R, E]."""
    config, rows = model.config, model.layout.rows
    batch = jax.tree.map(lambda a: jnp.asarray(a).reshape(-1, *a.shape[2:]), batch)
    shared, inputs, targets = params["shared"], batch["inputs"], batch["targets"]
    B, S = inputs.shape
    segments = batch.get("segment_ids", jnp.zeros((B, S), jnp.int32))
    valid = batch.get("valid", jnp.ones((B, S), bool))
    mask = batch.get("mask", jnp.ones((B, S), bool)) & valid
    head = shared["embed_tokens"].T if config.tie_embeddings else shared["lm_head"]["kernel"]
    counts, balances = [], []

    def routed(x, row, live):
        stage, slot = (int(n[0]) for n in np.nonzero(rows == row))
        own = jax.tree.map(lambda a: a[stage], params["stages"]["layers"][slot])
        bias = params["stages"]["routing"]["bias"][stage, slot]
        x, n, balance = layer(x, own, config, segments, jax.lax.stop_gradient(bias), live)
        counts.append(n)
        balances.append(balance)
        return x

    def nll(x, targets):
        logits = x @ head
        log_probs = logits - jnp.log(jnp.exp(logits).sum(-1, keepdims=True))
        return -jnp.take_along_axis(log_probs, targets[..., None], -1)[..., 0]

    def mean(values, counted):
        return jnp.where(counted, values, 0).sum() / counted.sum().astype(jnp.float32)

    x = shared["embed_tokens"][inputs]
    for p in shared["layers"]:
        x = layer(x, p, config, segments)
    for row in range(config.num_moe_layers):
        x = routed(x, row, valid)
    terms = {"lm": mean(nll(norm(x, shared["norm"]), targets), mask)}
    x = norm(x, shared["norm"]) if after_norm else x
    for k, p in enumerate(shared["mtp"], 1):
        # Position i of S - k sees token i + k and is asked for target i + k. The rest is cut off.
        x, segments, valid, mask = x[:, :-1], segments[:, :-1], valid[:, :-1], mask[:, 1:]
        there = {name: batch[name][:, k:] for name in ("segment_ids", "valid") if name in batch}
        live = valid & there.get("valid", True) & (segments == there.get("segment_ids", segments))
        both = [norm(shared["embed_tokens"][inputs[:, k:]], p["enorm"]), norm(x, p["hnorm"])]
        x = routed(jnp.concatenate(both, -1) @ p["eh_proj"]["kernel"], config.num_moe_layers + k - 1, live)
        lam = batch["mtp_weight"][:, None] if "mtp_weight" in batch else mtp_weight
        values = nll(norm(x, p["norm"]), targets[:, k:]) * lam
        terms[f"mtp_{k}"] = mean(values, mask & live) / config.num_mtp_layers
        x = norm(x, p["norm"]) if after_norm else x
    terms["balance"] = balance_factor * sum(balances).mean()
    return sum(terms.values()), (terms, jnp.stack(counts))
