"""The modules of a DeepSeek model, each named as in published checkpoints.

Shape suffixes: B batch, S sequence, D model dim, E experts.
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from models.attention import Attend, Attention, RMSNorm, linear
from models.config import Config
from models.moe import Dispatch, Load, Matmul, MoE, SwiGLU


class DenseBlock(nnx.Module):
    """x + attention, then x + SwiGLU, each with a norm before it."""

    def __init__(self, config: Config, rngs: nnx.Rngs, attend: Attend | None = None):
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config, rngs, attend)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = SwiGLU(config, config.dense_hidden, rngs, "dense_hidden")

    def __call__(self, x_BSD: Array, positions_BS: Array | None, segment_ids_BS: Array | None) -> Array:
        """Apply the block; positions and segments as ``Attention`` takes them."""
        attended_BSD = self.self_attn(self.input_layernorm(x_BSD), positions_BS, segment_ids_BS)
        x_BSD = checkpoint_name(x_BSD + attended_BSD, "middle")
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class Block(nnx.Module):
    """x + attention, then x + mixture of experts, each with a norm before it; experts are stacked."""

    def __init__(
        self,
        config: Config,
        dispatch: Dispatch,
        rngs: nnx.Rngs,
        attend: Attend | None = None,
        matmul: Matmul | None = None,
    ):
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config, rngs, attend)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = MoE(config, dispatch, rngs, matmul)

    def __call__(
        self,
        x_BSD: Array,
        bias_E: Array,
        positions_BS: Array | None,
        segment_ids_BS: Array | None,
        live_BS: Array | None,
        copies_EX: Array | None = None,
    ) -> tuple[Array, Load]:
        """Apply the block; positions and segments as ``Attention`` takes them, the other arguments as ``MoE`` does."""
        attended_BSD = self.self_attn(self.input_layernorm(x_BSD), positions_BS, segment_ids_BS)
        x_BSD = checkpoint_name(x_BSD + attended_BSD, "middle")
        y_BSD, load = self.mlp(self.post_attention_layernorm(x_BSD), bias_E, live_BS, copies_EX)
        return x_BSD + y_BSD, load


class Merge(nnx.Module):
    """The part of a multi-token prediction module before its block: two norms and a projection.

    The embedding comes first, as in published weights; the paper writes the hidden state first.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.enorm = RMSNorm(config.dim, config.norm_eps)
        self.hnorm = RMSNorm(config.dim, config.norm_eps)
        self.eh_proj = linear(config, 2 * config.dim, config.dim, rngs)

    def __call__(self, embedded_BSD: Array, hidden_BSD: Array) -> Array:
        """Merge the embedding of a later token into the hidden state of this one; [B, S, D]."""
        both = jnp.concatenate([self.enorm(embedded_BSD), self.hnorm(hidden_BSD)], axis=-1)
        return self.eh_proj(both)
