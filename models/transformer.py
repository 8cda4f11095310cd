"""DeepSeek's model as the three plain functions of a pipeline.

The token embedding and the dense blocks are ``embed``, the blocks with experts are shared out over
stages, the final norm, the output projection and the cross entropy are ``head_loss``. Modules of
multi-token prediction are built (``Prediction``) but not trained; a checkpoint's names map one to one, see
``models.weights.names``.

Shape suffixes: B batch, S sequence, D model dim, V vocab, E experts, P stages, L layers of a stage.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from models.attention import Attend, Attention, RMSNorm, linear
from models.config import Config
from models.functional import Functions, Pure, Tree, num_params, pure_nnx, unstack
from models.kernels import AUTO, Kernels
from models.moe import Dispatch, Matmul, MoE, SwiGLU, update_bias
from models.sharing import check_shares, places_of, share_layers

SCAN_ABOVE = 2
"""On CPU, with more layers in a stage than this, they are scanned: compile time stays flat."""


class Model(NamedTuple):
    """What ``deepseek`` returns.

    Attributes:
      functions: embed, stage and head_loss; see ``Functions``.
      init: ``init(key) -> params``, float32; the same weights for every number of stages.
      param_specs: for each leaf of params, *without* the stage dim, how it lies on the expert axis.
      places: int32 [P, L], which of the layers with experts stands where; -1 in an empty place, whose weights
        are zeros that no gradient moves.

    """

    functions: Functions
    init: Callable[[Array], Tree]
    param_specs: Tree
    places: np.ndarray


class DenseBlock(nnx.Module):
    """x + attention, then x + SwiGLU, each behind its norm."""

    def __init__(self, config: Config, rngs: nnx.Rngs, attend: Attend | None = None):
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config, rngs, attend)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = SwiGLU(config, config.dense_hidden, rngs)

    def __call__(
        self, x_BSD: Array, positions_BS: Array | None = None, segment_ids_BS: Array | None = None
    ) -> Array:
        """Apply the block; positions and segments as ``Attention`` takes them."""
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), positions_BS, segment_ids_BS)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class Block(nnx.Module):
    """x + attention, then x + mixture of experts, each behind its norm.

    Attributes are named as in published checkpoints, ``model.layers.N.<name>``; experts are stacked.
    """

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
        positions_BS: Array | None = None,
        segment_ids_BS: Array | None = None,
    ) -> tuple[Array, Array, Array]:
        """Apply the block; positions and segments as ``Attention`` takes them.

        Returns:
          x, the router's counts [E] and the number of dropped assignments.

        """
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), positions_BS, segment_ids_BS)
        y_BSD, load = self.mlp(self.post_attention_layernorm(x_BSD), bias_E)
        return x_BSD + y_BSD, load.counts, load.dropped


class Embed(nnx.Module):
    """Token embedding and the dense blocks."""

    def __init__(self, config: Config, rngs: nnx.Rngs, attend: Attend | None = None):
        init = jax.nn.initializers.normal(config.init_std)
        self.embed_tokens = nnx.Param(init(rngs.params(), (config.vocab, config.dim), jnp.float32))
        self.layers = nnx.List([DenseBlock(config, rngs, attend) for _ in range(config.num_dense_layers)])
        self.dtype = config.compute_dtype

    def __call__(
        self, tokens_BS: Array, positions_BS: Array | None = None, segment_ids_BS: Array | None = None
    ) -> Array:
        """Look tokens up and run the dense blocks: [B, S, D] in the compute dtype."""
        x_BSD = self.embed_tokens[...][tokens_BS].astype(self.dtype)
        for layer in self.layers:
            x_BSD = layer(x_BSD, positions_BS, segment_ids_BS)
        return x_BSD


class Head(nnx.Module):
    """Final norm and output projection, which a tied one borrows from the embedding."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.norm = RMSNorm(config.dim, config.norm_eps)
        if not config.tie_embeddings:
            self.lm_head = linear(config, config.dim, config.vocab, rngs)

    def __call__(self, x_BSD: Array, table_VD: Array | None = None) -> Array:
        """Return float32 logits [B, S, V]; a tied head needs the embedding's table."""
        x_BSD = self.norm(x_BSD)
        kernel_DV = (self.lm_head.kernel[...] if table_VD is None else table_VD.T).astype(x_BSD.dtype)
        return jnp.einsum("bsd,dv->bsv", x_BSD, kernel_DV, preferred_element_type=jnp.float32)


class Prediction(nnx.Module):
    """A module of multi-token prediction: a block on the norms of [next token's embedding, hidden state].

    Attributes are named as in published checkpoints, but for ``norm``, which is ``shared_head.norm`` there, and
    the block's own, which stand beside the others there.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.enorm = RMSNorm(config.dim, config.norm_eps)
        self.hnorm = RMSNorm(config.dim, config.norm_eps)
        self.eh_proj = linear(config, 2 * config.dim, config.dim, rngs)
        self.block = Block(config, Dispatch(), rngs)
        self.norm = RMSNorm(config.dim, config.norm_eps)

    def __call__(
        self,
        next_BSD: Array,
        h_BSD: Array,
        bias_E: Array,
        positions_BS: Array | None = None,
        segment_ids_BS: Array | None = None,
    ) -> Array:
        """Return the hidden state from which the head predicts one token further, behind its norm."""
        both_BSD = jnp.concatenate([self.enorm(next_BSD), self.hnorm(h_BSD)], axis=-1)
        x_BSD, _, _ = self.block(self.eh_proj(both_BSD), bias_E, positions_BS, segment_ids_BS)
        return self.norm(x_BSD)


def init_predictions(config: Config, key: Array) -> Tree:
    """Make the parameters of all modules of multi-token prediction: leaves [K, ...], K of them."""
    one = pure_nnx(lambda rngs: Prediction(config, rngs))
    bias = jnp.zeros((config.num_mtp_layers, config.num_experts), jnp.float32)
    layers = jax.vmap(one.init)(jax.random.split(key, config.num_mtp_layers))
    return {"layers": layers, "routing": {"bias": bias}}


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
    layers_per_stage: Sequence[int] | None = None,
    unroll: bool | None = None,
    kernels: Kernels = AUTO,
    platform: Literal["cpu", "gpu", "tpu"] | None = None,
) -> Model:
    """Build the model for ``num_stages`` pipeline stages.

    Tokens and targets are int [B, S]; targets are the tokens that follow. The params are::

        {"embed": ..., "head": ...,
         "stages": {"layers": weights [P, L, ...],
                    "routing": {"bias": float32 [P, L, E], "stage": int32 [P]}},
         "mtp": {"layers": weights [K, ...], "routing": {"bias": float32 [K, E]}}}  # with num_mtp_layers K

    The routing part is state, not weights: its gradient is zero (the bias) or float0 (the stage's own
    index), and it belongs into the checkpoint but not into the optimizer; see ``update_routing``. A stage
    returns ``(x, aux)`` with ``aux = {"counts": int32 [P, L, E], "dropped": int32 []}``, counts zero but in
    its own row: summed over microbatches, stages and devices, aux says how often every expert was chosen.

    All stages run one program, so all have L places, as many as the deepest has layers. An empty place is run
    and its result thrown away, which costs ``places.size / num_moe_layers`` of the stages' time (58 layers on
    16 stages: 64 / 58, ten percent) and, on ranks that have one, the memory of a layer (``num_padding``). It
    is not skipped, because a pair's collectives must stand outside of branches to lie under each other's work.

    Args:
      config: the model.
      num_stages: P.
      ep_axis: the mesh axis over which experts are sharded; the functions then run inside ``shard_map``,
        where an expert's leaf holds E / N of them and B is this device's part of the microbatch.
      dispatch: see ``models.moe.Dispatch``.
      capacity_factor: its factor; None drops nothing.
      remat: a ``jax.checkpoint`` policy for each layer, such as
        ``jax.checkpoint_policies.nothing_saveable``; None to keep what the backward needs.
      layers_per_stage: how many of the layers that have experts each stage has; by default equal shares, as
        far as possible: see ``share_layers``.
      unroll: whether a stage's layers are written out one by one, or scanned. A fused pair needs them written
        out, for what is inside a scan overlaps with nothing. None: written out unless the platform is "cpu",
        where a scan of more than ``SCAN_ABOVE`` layers compiles faster.
      kernels: what computes attention and the experts' matmuls.
      platform: what the functions will be compiled for, which decides whatever is left open above; None is
        JAX's default backend.

    Raises:
      ValueError: there is no stage or no layer with experts, or the shares do not add up.

    """
    places = _places(config, num_stages, layers_per_stage)
    platform = platform or default_platform()
    attend, matmul = kernels.attend(platform), kernels.multiply(platform)
    tokens = Dispatch(dispatch, capacity_factor, ep_axis)
    block = pure_nnx(lambda rngs: Block(config, tokens, rngs, attend, matmul))
    embed = pure_nnx(lambda rngs: Embed(config, rngs, attend))
    head = pure_nnx(lambda rngs: Head(config, rngs))
    embed_apply = embed.apply if remat is None else jax.checkpoint(embed.apply, policy=remat)

    def head_loss(params: Tree, x_BSD: Array, targets_BS: Array) -> Array:
        if config.tie_embeddings:
            raise ValueError(
                "deepseek: a head tied to the embedding has no weights of its own, and a pipeline's last stage "
                "has no embedding. Use models.logits, or tie_embeddings=False with lm_head a copy."
            )
        return cross_entropy(head.apply(params, x_BSD), targets_BS)

    def init(key: Array) -> Tree:
        embed_key, layers_key, head_key = jax.random.split(key, 3)
        layers = jax.vmap(block.init)(jax.random.split(layers_key, config.num_moe_layers))
        routing = {
            "bias": jnp.zeros((*places.shape, config.num_experts), jnp.float32),
            "stage": jnp.arange(num_stages, dtype=jnp.int32),
        }
        params = {
            "embed": embed.init(embed_key),
            "stages": {
                "layers": jax.tree.map(lambda w: _into_places(w, places), layers),
                "routing": routing,
            },
            "head": head.init(head_key),
        }
        if config.num_mtp_layers:
            params["mtp"] = init_predictions(config, jax.random.fold_in(key, 1))
        return params

    scanned = platform == "cpu" and places.shape[1] > SCAN_ABOVE if unroll is None else not unroll
    functions = Functions(embed_apply, _stage_function(block, places, remat, scanned), head_loss)
    return Model(functions, init, _param_specs(init, ep_axis), places)


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


def num_padding(model: Model) -> int:
    """Count the parameters of empty places: zeros that ``num_params`` counts and the model does not have."""
    layers = jax.eval_shape(model.init, jax.random.key(0))["stages"]["layers"]
    return num_params(layers) // model.places.size * int(np.sum(model.places < 0))


def _places(config: Config, num_stages: int, shares: Sequence[int] | None) -> np.ndarray:
    layers = config.num_moe_layers
    if num_stages < 1 or layers < 1:
        raise ValueError(
            f"deepseek: {config.num_layers} layers less {config.num_dense_layers} dense ones leave {layers} "
            f"with experts for {num_stages} stages; at least one of each is needed."
        )
    if shares is None:
        shares = share_layers(layers, num_stages)
    check_shares(shares, layers, num_stages)
    return places_of(shares)


def _into_places(layers: Array, places: np.ndarray) -> Array:
    if np.all(places >= 0):
        return layers.reshape(*places.shape, *layers.shape[1:])
    return jnp.take(layers, np.where(places < 0, len(layers), places), axis=0, mode="fill", fill_value=0)


def default_platform() -> Literal["cpu", "gpu", "tpu"]:
    """Return what JAX compiles for unless it is told otherwise."""
    name = jax.default_backend()
    return "tpu" if name == "tpu" else "cpu" if name == "cpu" else "gpu"


def _stage_function(
    block: Pure, places: np.ndarray, remat: Callable[..., Any] | None, scanned: bool
) -> Callable[..., Any]:
    def layer(x_BSD: Array, weights: Tree, bias_E: Array) -> tuple[Array, tuple[Array, Array]]:
        y_BSD, counts_E, dropped = block.apply(weights, x_BSD, bias_E)
        return y_BSD, (counts_E, dropped)

    # A scan's iterations cannot be merged, so there the barriers of prevent_cse only cost.
    kept = layer if remat is None else jax.checkpoint(layer, policy=remat, prevent_cse=not scanned)

    always_L = np.all(places >= 0, axis=0)

    def run(x_BSD: Array, leaves: tuple[Tree, Array], filled: Array | None) -> tuple[Array, Tree]:
        y_BSD, counts = kept(x_BSD, *leaves)
        if filled is None:
            return y_BSD, counts
        return jnp.where(filled, y_BSD, x_BSD), jax.tree.map(lambda n: jnp.where(filled, n, 0), counts)

    def stage(params: Tree, x_BSD: Array) -> tuple[Array, Tree]:
        routing = params["routing"]
        own_P = jnp.arange(len(places), dtype=jnp.int32) == routing["stage"]
        filled_L = jnp.any(own_P[:, None] & (places >= 0), axis=0)
        stacked = (params["layers"], jax.lax.stop_gradient(routing["bias"]))
        if scanned:
            flags_L = None if np.all(always_L) else filled_L
            x_BSD, (counts_LE, dropped_L) = jax.lax.scan(
                lambda x, leaves: run(x, *leaves), x_BSD, (stacked, flags_L)
            )
        else:
            outs = []
            for place, leaves in enumerate(unstack(stacked)):
                x_BSD, out = run(x_BSD, leaves, None if always_L[place] else filled_L[place])
                outs.append(out)
            counts_LE, dropped_L = (jnp.stack(parts) for parts in zip(*outs, strict=True))
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
