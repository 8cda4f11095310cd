"""Mixture of experts as DeepSeek builds it: the router, the experts, and the bias that balances them.

The selection bias is an input of the layer and the counts are an output: the layer keeps no state, so
rematerialisation cannot count twice.

Shape suffixes: B batch, S sequence, T = B * S tokens, D model dim, E experts, K experts per token, G groups,
M experts of a group, F hidden width of an expert.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

import dualpipe_jax.parallel as parallel
from dualpipe_jax.arguments import typechecked
from dualpipe_jax.parallel.expert_plan import Axis
from dualpipe_jax.parallel.wire import Payload
from models.attention import linear
from models.config import Config


@typechecked
@dataclass(frozen=True)
class Dispatch:
    """How tokens travel to experts.

    Attributes:
      method: "capacity" gives each expert the same number of rows, for one batched matmul; "dropless" gives each
        expert a group of as many rows as chose it.
      factor: the room for assignments, in multiples of an even load; assignments beyond it are dropped. It holds per
        expert and source device for "capacity", per pair of devices for "dropless"; over two axes also per pair of
        nodes. None drops nothing; for "capacity" that means room for every token at every expert, E / K times the
        work.
      axis_name: the mesh axis over which experts are sharded; two axes, (nodes, devices of a node), for dispatch in two
        hops; None if each device holds all experts.
      payload: "plain" sends tokens unchanged, "float8" in eight bits; see ``parallel.plan_capacity``.

    Raises:
      ValueError: there is no such method or payload, or factor is not positive and finite.
    """

    method: Literal["capacity", "dropless"] = "dropless"
    factor: float | None = None
    axis_name: Axis | None = None
    payload: Payload = "plain"

    def __post_init__(self) -> None:
        if self.factor is not None and not 0 < self.factor < math.inf:
            raise ValueError(f"Dispatch: factor must be positive and finite, or None, got {self.factor}.")

    def plan(self, topk_TK: Array, num_experts: int, groups: tuple[int, int] = (1, 1)) -> parallel.Handle:
        """Plan one layer's dispatch.

        Args:
          topk_TK: the chosen experts, as ``parallel.plan_capacity`` takes them.
          num_experts: the number of experts over all devices.
          groups: the number of equal groups of consecutive experts, and the number of groups that one token may choose
            from. If each node holds whole groups, a token goes to at most that many nodes, and the room per node is
            planned for that.
        """
        if not isinstance(self.axis_name, tuple):
            return self._one_hop(topk_TK, num_experts, self.axis_name, len(topk_TK))
        across, inside = self.axis_name
        T, K = topk_TK.shape
        num_nodes, room = jax.lax.axis_size(across), None
        if self.factor is not None:
            visits = num_nodes if groups[0] % num_nodes else groups[1]
            room = parallel.capacity_for(T, min(visits, num_nodes, K), num_nodes, self.factor)

        def plan_second_hop(topk_RK: Array, experts: int) -> parallel.Handle:
            # On average a device receives as many assignments as it sends, whatever the number of rows in its buffer.
            return self._one_hop(topk_RK, experts, inside, T)

        return parallel.plan_two_hops(topk_TK, num_experts, (across, inside), plan_second_hop, room)

    def _one_hop(
        self, topk_RK: Array, num_experts: int, axis: Axis | None, num_tokens: int
    ) -> parallel.Handle:
        """Plan one hop, with room for the assignments of ``num_tokens`` tokens times ``factor``."""
        (R, K), factor = topk_RK.shape, self.factor
        if self.method == "dropless":
            bound = None if factor is None else factor * num_tokens / R
            return parallel.plan_dropless(topk_RK, num_experts, axis, bound, self.payload)
        capacity = None if factor is None else math.ceil(factor * num_tokens * K / num_experts)
        return parallel.plan_capacity(topk_RK, num_experts, capacity, axis, self.payload)


def route(logits_TE: Array, bias_E: Array, config: Config) -> tuple[Array, Array]:
    """Choose each token's experts and weigh them (DeepSeek-V3, section 2.1.2).

    The bias takes part in the choice only. Of ``num_groups`` equal groups a token keeps the best
    ``top_groups``, judged by the sum of a group's two best biased scores (sigmoid) or its best one (softmax);
    experts of other groups are masked with -inf, which is below any negative bias. Of equal scores the lower index is
    chosen.

    Args:
      logits_TE: float32.
      bias_E: float32.
      config: the model.

    Returns:
      int32 [T, K] experts, best first, and float32 [T, K] weights: the unbiased scores of the chosen,
      normalised if the config says so, times ``routed_scale``. Gradients flow through the weights.
    """
    scores_TE = _scores(logits_TE, config)
    choice_TE = jax.lax.stop_gradient(scores_TE + bias_E)
    if config.top_groups < config.num_groups:
        choice_TE = _mask_groups(choice_TE, config)
    _, topk_TK = jax.lax.top_k(choice_TE, config.top_k)
    # Compare and sum: the backward of a gather here would be a scatter.
    chosen_TKE = topk_TK[..., None] == jnp.arange(config.num_experts, dtype=topk_TK.dtype)
    weights_TK = jnp.sum(jnp.where(chosen_TKE, scores_TE[:, None], 0), axis=-1)
    if config.normalize_top_k:
        weights_TK = weights_TK / (jnp.sum(weights_TK, axis=-1, keepdims=True) + 1e-20)
    return topk_TK, weights_TK * config.routed_scale


def _scores(logits_TE: Array, config: Config) -> Array:
    return (jax.nn.sigmoid if config.score == "sigmoid" else jax.nn.softmax)(logits_TE)


def _mask_groups(choice_TE: Array, config: Config) -> Array:
    T, E = choice_TE.shape
    groups = config.num_groups
    choice_TGM = choice_TE.reshape(T, groups, E // groups)
    best = min(2, E // groups) if config.score == "sigmoid" else 1
    group_TG = jnp.sum(jax.lax.top_k(choice_TGM, best)[0], axis=-1)
    _, kept = jax.lax.top_k(group_TG, config.top_groups)
    keep_TG = jnp.any(kept[..., None] == jnp.arange(groups, dtype=kept.dtype), axis=1)
    return jnp.where(keep_TG[..., None], choice_TGM, -jnp.inf).reshape(T, E)


def sequence_balance(scores_BSE: Array, live_BS: Array, top_k: int) -> Array:
    """Return each sequence's balance loss without its factor; 1 for an even load (DeepSeek-V3, eq. 17 to 20).

    It is the sum over experts of f times P: f is the share of choices that an expert has if each token chooses its
    ``top_k`` best unbiased scores, times E; P is the mean of the expert's scores, normalised over experts. Gradients
    flow through P.

    Args:
      scores_BSE: float32, positive.
      live_BS: bool, the tokens that count; a sequence without any has a loss of 0.
      top_k: experts per token.

    Returns:
      float32 [B].
    """
    num_experts = scores_BSE.shape[-1]
    live_BS1 = live_BS[..., None].astype(jnp.float32)
    num_live_B1 = jnp.maximum(jnp.sum(live_BS1, axis=1), 1)
    _, best_BSK = jax.lax.top_k(jax.lax.stop_gradient(scores_BSE), top_k)
    chosen_BSE = jnp.any(best_BSK[..., None] == jnp.arange(num_experts, dtype=best_BSK.dtype), axis=2)
    f_BE = jnp.sum(jnp.where(chosen_BSE, live_BS1, 0), axis=1) * (num_experts / top_k) / num_live_B1
    normal_BSE = scores_BSE / (jnp.sum(scores_BSE, axis=-1, keepdims=True) + 1e-20)
    p_BE = jnp.sum(normal_BSE * live_BS1, axis=1) / num_live_B1
    return jnp.sum(f_BE * p_BE, axis=-1)


@typechecked
def update_bias(bias: Array, counts: Array, rate: float | Array, *, center: bool = False) -> Array:
    """Move the selection bias against the load: up by ``rate`` below the mean, down above it.

    Call it once per optimizer step, outside the optimizer, with counts summed over everything that step
    trained on (Wang et al. 2024, "Auxiliary-loss-free load balancing").

    Args:
      bias: float32 [..., E].
      counts: integer [..., E]; the sum over E must fit its dtype. (Floating counts would be rounded, and the sign of a
        step could flip.)
      rate: the size of the step; 0.001 for V3.
      center: subtract the mean of the steps, so that the bias does not drift. Routing is the same.

    Returns:
      The new bias.

    Raises:
      TypeError: counts are not integers, or bias is not floating.
      ValueError: bias and counts differ in shape, or rate is not a scalar.
    """
    if not jnp.issubdtype(counts.dtype, jnp.integer):
        raise TypeError(f"update_bias: counts must be integers, got {counts.dtype}.")
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"update_bias: bias must be floating, got {bias.dtype}.")
    if counts.shape != bias.shape or jnp.ndim(rate):
        raise ValueError(
            f"update_bias: bias {list(bias.shape)} and counts {list(counts.shape)} must have one shape, and rate "
            f"{list(jnp.shape(rate))} none."
        )
    # sign(mean - count) in integers: count * E could overflow.
    total, experts = jnp.sum(counts, axis=-1, keepdims=True, dtype=counts.dtype), counts.shape[-1]
    below, above = counts < -(-total // experts), counts > total // experts
    step = (below.astype(bias.dtype) - above.astype(bias.dtype)) * jnp.asarray(rate, bias.dtype)
    if center:
        step = step - jnp.mean(step, axis=-1, keepdims=True)
    return bias + step


@jax.custom_vjp
def gated(gate: Array, up: Array) -> Array:
    """Return silu(gate) * up, float32 inside; only the two arguments are kept for the backward."""
    wide = gate.astype(jnp.float32)
    return (wide * jax.nn.sigmoid(wide) * up.astype(jnp.float32)).astype(up.dtype)


def _gated_fwd(gate: Array, up: Array) -> tuple[Array, tuple[Array, Array]]:
    return gated(gate, up), (gate, up)


def _gated_bwd(saved: tuple[Array, Array], d: Array) -> tuple[Array, Array]:
    gate, up, d = (a.astype(jnp.float32) for a in (*saved, d))
    sigmoid = jax.nn.sigmoid(gate)
    d_gate, d_up = d * up * sigmoid * (1 + gate * (1 - sigmoid)), d * gate * sigmoid
    return d_gate.astype(saved[0].dtype), d_up.astype(saved[1].dtype)


gated.defvjp(_gated_fwd, _gated_bwd)


class SwiGLU(nnx.Module):
    """The dense feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Config, hidden: int, rngs: nnx.Rngs, name: str = "hidden"):
        self.name = name
        self.gate_proj = linear(config, config.dim, hidden, rngs)
        self.up_proj = linear(config, config.dim, hidden, rngs)
        self.down_proj = linear(config, hidden, config.dim, rngs)

    def __call__(self, x: Array) -> Array:
        gate, up = (checkpoint_name(project(x), self.name) for project in (self.gate_proj, self.up_proj))
        return self.down_proj(gated(gate, up))


Matmul = Callable[[Array, Array, parallel.Handle], Array]
"""``parallel.expert_matmul``, or a ``functools.partial`` of it with a chosen kernel."""


class Experts(nnx.Module):
    """The routed experts' matrices, stacked on their first dim, which ``axis_name`` may shard.

    The gate_proj and up_proj of checkpoints are one matrix here, the gate's columns first: rows are read once for both,
    and the rows' gradient is one product instead of the sum of two.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs, matmul: Matmul | None = None):
        self.matmul = matmul or parallel.expert_matmul
        experts, dim, hidden = config.num_experts, config.dim, config.expert_hidden
        init = jax.nn.initializers.normal(config.init_std)
        gate, up = (init(rngs.params(), (experts, dim, hidden), jnp.float32) for _ in range(2))
        self.gate_up_proj = nnx.Param(jnp.concatenate([gate, up], axis=-1))
        self.down_proj = nnx.Param(init(rngs.params(), (experts, hidden, dim), jnp.float32))

    def __call__(self, rows: Array, weights_TK: Array, handle: parallel.Handle) -> Array:
        """Apply each row's expert and return each token's weighted sum; rows as ``parallel.dispatch`` returns them."""
        gate_up, down = (kernel[...].astype(rows.dtype) for kernel in (self.gate_up_proj, self.down_proj))
        gate, up = jnp.split(checkpoint_name(self.matmul(rows, gate_up, handle), "hidden"), 2, axis=-1)
        return parallel.combine_product(gated(gate, up), down, weights_TK, handle, matmul=self.matmul)


class Load(NamedTuple):
    """What a router did with this device's tokens.

    Attributes:
      counts: int32 [E], the number of live tokens that chose each expert.
      dropped: int32 [], the number of choices, of live tokens or not, that found no room at their expert.
      balance: float32 [B], see ``sequence_balance``; costs nothing unless used.
      devices: int32 [N], the number of live tokens' choices that each device works on; None if experts lie in order,
        since ``counts`` then tells it.
    """

    counts: Array
    dropped: Array
    balance: Array
    devices: Array | None = None


class MoE(nnx.Module):
    """Mixture of experts: for every token the weighted sum of a few routed experts, plus the shared expert."""

    def __init__(self, config: Config, dispatch: Dispatch, rngs: nnx.Rngs, matmul: Matmul | None = None):
        self.config = config
        self.dispatch = dispatch
        init = jax.nn.initializers.normal(config.init_std)
        self.gate = nnx.Param(init(rngs.params(), (config.dim, config.num_experts), jnp.float32))
        self.experts = Experts(config, rngs, matmul)
        if config.num_shared_experts:
            self.shared_experts = SwiGLU(config, config.num_shared_experts * config.expert_hidden, rngs)

    def __call__(
        self,
        x_BSD: Array,
        bias_E: Array,
        live_BS: Array | None = None,
        copies_EX: Array | None = None,
        *,
        only_live: bool = False,
    ) -> tuple[Array, Load]:
        """Apply the layer to this device's tokens.

        ``jax.checkpoint`` policies may refer to the names "routing", "dispatched", "hidden" and "combined": saving
        the second spares the recomputation its all_to_all.

        Args:
          x_BSD: activations.
          bias_E: float32, the selection bias.
          live_BS: bool, the tokens that the load counts; None counts all. Other tokens are dispatched, too.
          copies_EX: the slots of each expert's copies, this device's part of ``parallel.share_copies``; the experts'
            matrices are then those of this device's slots. None if experts lie in order, one copy each.
          only_live: send the other tokens to no expert, if nobody reads their results.

        Returns:
          An array [B, S, D] of x's dtype, and what the router did.
        """
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        # At less than the highest precision, TPUs multiply float32 in bfloat16 and GPUs in TF32.
        logits_TE = jnp.einsum(
            "td,de->te", x_TD.astype(jnp.float32), self.gate[...], precision=jax.lax.Precision.HIGHEST
        )
        logits_TE = checkpoint_name(logits_TE, "routing")
        topk_TK, weights_TK = checkpoint_name(route(logits_TE, bias_E, self.config), "routing")
        axis, num_slots = self.dispatch.axis_name, self.experts.down_proj.shape[0]
        num_devices = 1 if axis is None else jax.lax.axis_size(axis)
        groups = self.config.num_groups, self.config.top_groups
        if copies_EX is None:
            held_TK, num_held = topk_TK, self.config.num_experts
        else:  # slots do not follow the groups of experts
            held_TK, num_held = parallel.choose_copies(topk_TK, copies_EX), num_slots * num_devices
            groups = 1, 1
        if only_live and live_BS is not None:
            held_TK = jnp.where(live_BS.reshape(-1, 1), held_TK, jnp.int32(num_held))
        handle = checkpoint_name(self.dispatch.plan(held_TK, num_held, groups), "routing")
        rows = checkpoint_name(parallel.dispatch(x_TD, handle, fill=False), "dispatched")
        y_TD = self.experts(rows, weights_TK, handle)
        y_BSD = checkpoint_name(y_TD, "combined").reshape(x_BSD.shape)
        if self.config.num_shared_experts:
            y_BSD = y_BSD + self.shared_experts(x_BSD)
        if live_BS is None:
            live_BS = jnp.ones(x_BSD.shape[:-1], bool)
        nobody, live_T1 = jnp.int32(self.config.num_experts), live_BS.reshape(-1, 1)
        counted_TK = jnp.where(live_T1, topk_TK, nobody)
        scores_BSE = _scores(logits_TE, self.config).reshape(*live_BS.shape, -1)
        load = Load(
            parallel.count(counted_TK, self.config.num_experts),
            handle.dropped,
            sequence_balance(scores_BSE, live_BS, self.config.top_k),
        )
        if copies_EX is not None:
            device_TK = jnp.where(live_T1, held_TK // num_slots, jnp.int32(num_devices))
            load = load._replace(devices=parallel.count(device_TK, num_devices))
        return y_BSD, load
