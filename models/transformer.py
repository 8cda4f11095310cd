"""DeepSeek's model as the three plain functions of a pipeline.

The token embedding and the dense blocks are ``embed``, the blocks with experts are shared out over equal
stages, the final norm, the output projection and the cross entropy are ``head_loss``. Multi-token
prediction is not built; a checkpoint's names map one to one, see ``Block``.

Shape suffixes: B batch, S sequence, D model dim, V vocab, E experts, P stages, L layers of a stage.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from models.attention import Attention, RMSNorm, linear
from models.config import Config
from models.functional import Functions, Pure, Tree, pure_nnx, unstack
from models.moe import Dispatch, MoE, SwiGLU, update_bias

SCAN_ABOVE = 2
"""With more layers in a stage than this, they are scanned: compile time stays flat."""


class Model(NamedTuple):
    """What ``deepseek`` returns.

    Attributes:
      functions: embed, stage and head_loss; see ``Functions``.
      init: ``init(key) -> params``, float32; the same weights for every number of stages.
      param_specs: for each leaf of params, *without* the stage dim, how it lies on the expert axis.

    """

    functions: Functions
    init: Callable[[Array], Tree]
    param_specs: Tree


class DenseBlock(nnx.Module):
    """x + attention, then x + SwiGLU, each behind its norm."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config, rngs)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = SwiGLU(config, config.dense_hidden, rngs)

    def __call__(self, x_BSD: Array) -> Array:
        """Apply the block."""
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD))
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class Block(nnx.Module):
    """x + attention, then x + mixture of experts, each behind its norm.

    Attributes are named as in published checkpoints, ``model.layers.N.<name>``; experts are stacked.
    """

    def __init__(self, config: Config, dispatch: Dispatch, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config, rngs)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = MoE(config, dispatch, rngs)

    def __call__(self, x_BSD: Array, bias_E: Array) -> tuple[Array, Array, Array]:
        """Apply the block; returns x, the router's counts [E] and the number of dropped assignments."""
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD))
        y_BSD, counts_E, dropped = self.mlp(self.post_attention_layernorm(x_BSD), bias_E)
        return x_BSD + y_BSD, counts_E, dropped


class Embed(nnx.Module):
    """Token embedding and the dense blocks."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        init = jax.nn.initializers.normal(config.init_std)
        self.embed_tokens = nnx.Param(init(rngs.params(), (config.vocab, config.dim), jnp.float32))
        self.layers = nnx.List([DenseBlock(config, rngs) for _ in range(config.num_dense_layers)])
        self.dtype = config.compute_dtype

    def __call__(self, tokens_BS: Array) -> Array:
        """Look tokens up and run the dense blocks: [B, S, D] in the compute dtype."""
        x_BSD = self.embed_tokens[...][tokens_BS].astype(self.dtype)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return x_BSD


class Head(nnx.Module):
    """Final norm and output projection."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.lm_head = linear(config, config.dim, config.vocab, rngs)

    def __call__(self, x_BSD: Array) -> Array:
        """Return float32 logits [B, S, V]."""
        x_BSD = self.norm(x_BSD)
        kernel_DV = self.lm_head.kernel[...].astype(x_BSD.dtype)
        return jnp.einsum("bsd,dv->bsv", x_BSD, kernel_DV, preferred_element_type=jnp.float32)


def cross_entropy(logits_BSV: Array, targets_BS: Array) -> Array:
    """Return the mean cross entropy per token in nats, computed in float32."""
    logits_BSV = logits_BSV.astype(jnp.float32)
    targets_BS = jnp.asarray(targets_BS)
    # Compare and sum: the backward of a gather here would be a scatter into [B, S, V].
    hit_BSV = targets_BS[..., None] == jnp.arange(logits_BSV.shape[-1], dtype=targets_BS.dtype)
    picked_BS = jnp.sum(jnp.where(hit_BSV, logits_BSV, 0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits_BSV, axis=-1) - picked_BS)


def deepseek(
    config: Config,
    num_stages: int,
    *,
    ep_axis: str | None = None,
    dispatch: Literal["capacity", "dropless"] = "dropless",
    capacity_factor: float | None = None,
    remat: Callable[..., Any] | None = None,
) -> Model:
    """Build the model for ``num_stages`` pipeline stages.

    Tokens and targets are int [B, S]; targets are the tokens that follow. The params are::

        {"embed": ..., "head": ...,
         "stages": {"layers": weights [P, L, ...],
                    "routing": {"bias": float32 [P, L, E], "stage": int32 [P]}}}

    The routing part is state, not weights: its gradient is zero (the bias) or float0 (the stage's own
    index), and it belongs into the checkpoint but not into the optimizer; see ``update_routing``. A stage
    returns ``(x, aux)`` with ``aux = {"counts": int32 [P, L, E], "dropped": int32 []}``, counts zero but in
    its own row: summed over microbatches, stages and devices, aux says how often every expert was chosen.

    Args:
      config: the model.
      num_stages: P; must divide the layers that have experts.
      ep_axis: the mesh axis over which experts are sharded; the functions then run inside ``shard_map``,
        where an expert's leaf holds E / N of them and B is this device's part of the microbatch.
      dispatch: see ``models.moe.Dispatch``.
      capacity_factor: its factor; None drops nothing.
      remat: a ``jax.checkpoint`` policy for each layer, such as
        ``jax.checkpoint_policies.nothing_saveable``; None to keep what the backward needs.

    Raises:
      ValueError: the layers do not divide into the stages.

    """
    _check_stages(config, num_stages)
    block = pure_nnx(lambda rngs: Block(config, Dispatch(dispatch, capacity_factor, ep_axis), rngs))
    embed = pure_nnx(lambda rngs: Embed(config, rngs))
    head = pure_nnx(lambda rngs: Head(config, rngs))
    embed_apply = embed.apply if remat is None else jax.checkpoint(embed.apply, policy=remat)

    def head_loss(params: Tree, x_BSD: Array, targets_BS: Array) -> Array:
        return cross_entropy(head.apply(params, x_BSD), targets_BS)

    def init(key: Array) -> Tree:
        embed_key, layers_key, head_key = jax.random.split(key, 3)
        shape = (num_stages, config.num_moe_layers // num_stages)
        layers = jax.vmap(block.init)(jax.random.split(layers_key, config.num_moe_layers))
        routing = {
            "bias": jnp.zeros((*shape, config.num_experts), jnp.float32),
            "stage": jnp.arange(num_stages, dtype=jnp.int32),
        }
        return {
            "embed": embed.init(embed_key),
            "stages": {
                "layers": jax.tree.map(lambda w: w.reshape(*shape, *w.shape[1:]), layers),
                "routing": routing,
            },
            "head": head.init(head_key),
        }

    functions = Functions(embed_apply, _stage_function(block, num_stages, remat), head_loss)
    return Model(functions, init, _param_specs(init, ep_axis))


def update_routing(params: Tree, aux: Tree, rate: float | Array, *, center: bool = False) -> Tree:
    """Return params with every layer's selection bias moved by the counts of one whole step.

    Args:
      params: as ``deepseek``'s init made them.
      aux: the stages' auxiliary outputs, summed over microbatches, stages and all devices of the mesh.
      rate: see ``models.moe.update_bias``.
      center: the same.

    """
    routing = params["stages"]["routing"]
    routing = routing | {"bias": update_bias(routing["bias"], aux["counts"], rate, center=center)}
    return params | {"stages": params["stages"] | {"routing": routing}}


def _check_stages(config: Config, num_stages: int) -> None:
    layers = config.num_moe_layers
    if num_stages < 1 or layers < 1 or layers % num_stages:
        counts = ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0)
        raise ValueError(
            f"deepseek: {config.num_layers} layers less {config.num_dense_layers} dense ones leave {layers} "
            f"with experts, which {num_stages} stages cannot share equally. Numbers of stages that work: "
            f"{counts or 'none'}."
        )


def _stage_function(block: Pure, num_stages: int, remat: Callable[..., Any] | None) -> Callable[..., Any]:
    def layer(x_BSD: Array, weights: Tree, bias_E: Array) -> tuple[Array, tuple[Array, Array]]:
        x_BSD, counts_E, dropped = block.apply(weights, x_BSD, bias_E)
        return x_BSD, (counts_E, dropped)

    def stage(params: Tree, x_BSD: Array) -> tuple[Array, Tree]:
        routing = params["routing"]
        stacked = (params["layers"], jax.lax.stop_gradient(routing["bias"]))
        num_layers = routing["bias"].shape[0]
        scanned = num_layers > SCAN_ABOVE
        # A scan's iterations cannot be merged, so there the barriers of prevent_cse only cost.
        run = layer if remat is None else jax.checkpoint(layer, policy=remat, prevent_cse=not scanned)
        if scanned:
            x_BSD, (counts_LE, dropped_L) = jax.lax.scan(lambda x, leaf: run(x, *leaf), x_BSD, stacked)
        else:
            outs = []
            for weights, bias_E in unstack(stacked):
                x_BSD, out = run(x_BSD, weights, bias_E)
                outs.append(out)
            counts_LE, dropped_L = (jnp.stack(parts) for parts in zip(*outs, strict=True))
        own_P = jnp.arange(num_stages, dtype=jnp.int32) == routing["stage"]
        counts_PLE = jnp.where(own_P[:, None, None], counts_LE, 0)
        return x_BSD, {"counts": counts_PLE, "dropped": jnp.sum(dropped_L, dtype=jnp.int32)}

    return stage


def _param_specs(init: Callable[[Array], Tree], ep_axis: str | None) -> Tree:
    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        del leaf
        routed = any(getattr(key, "key", None) == "experts" for key in path)
        # The leaves are [L, E, ...] once the stage dim is gone.
        return PartitionSpec(None, ep_axis) if routed and ep_axis else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, jax.eval_shape(init, jax.random.key(0)))
