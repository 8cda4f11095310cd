"""The model as functions of its weights, a cache and new tokens.

Shape suffixes: B rows, S new tokens of a row, D model dim, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from dualpipe_jax.functional import Tree, pure_nnx
from models.attention import RMSNorm
from models.blocks import Block, DenseBlock, Merge
from models.config import Config
from models.decode.attention import PerHeadProjection, cached_attention, split_by_head
from models.decode.cache import Rows
from models.kernels import AUTO, Kernels
from models.lazy import Lazy, is_lazy
from models.moe import Dispatch
from models.stages import head_kernel, only_stage
from models.vocabulary import look_up, project


class LayerOutputs(NamedTuple):
    """What layers return besides activations.

    Attributes:
      latents: the new tokens' latents, an array [B, S, L] for each layer, for ``cache.write``; L is the width
        of a cached position.
      counts: an int32 array [E] for each layer with experts: how many of the rows' tokens chose each expert.
    """

    latents: tuple[Array, ...]
    counts: tuple[Array, ...]

    def __add__(self, other: Any) -> "LayerOutputs":
        return LayerOutputs(self.latents + other.latents, self.counts + other.counts)


Before = tuple[Rows, Sequence[Array]]
"""Other rows that are not in the cache yet, and each layer's latents of them; see ``cached_attention``."""


@dataclasses.dataclass(frozen=True, eq=False)
class Decoder:
    """A model for serving, made by ``decoder``.

    Its functions are pure: for ``jax.jit``, and for ``jax.shard_map`` where experts are sharded over an axis.

    Attributes:
      config: the model's configuration.
      dispatch: how tokens travel to experts.
      platform: the platform that the model is built for, "cpu", "gpu" or "tpu".
      prepare: ``prepare(params) -> weights``, from the params of a one-stage pipeline; matrices in the
        compute dtype, the router's in float32, and ``kv_b_proj`` as ``HeadWeights`` of
        ``models.decode.attention``. From lazy params (``models.lazy``) it makes lazy weights.
      forward: ``forward(weights, cache, rows, before=None) -> (x [B, S, D], LayerOutputs)``, where x is the output of
        the last layer. It only reads the cache; ``write`` adds to it.
      draft: ``draft(weights, cache, rows, x, before=None) -> (x, LayerOutputs)``, through the first module of
        multi-token prediction, whose layer comes after the model's. The tokens of ``rows`` are those that
        follow x's tokens.
      logits: ``logits(weights, x [..., D]) -> [..., V]`` in float32, from the x that ``forward`` returned.
      draft_logits: the same, from the x that ``draft`` returned.
      fresh: ``fresh() -> Decoder``, the same model for rows that all start at position 0; see
        ``cached_attention``.
      numerics: what latents depend on besides config and weights, order of sums aside: eight bits, dropped
        assignments, and what drafts read.
    """

    config: Config
    dispatch: Dispatch
    platform: str
    prepare: Callable[[Tree], Tree]
    forward: Callable[..., tuple[Array, LayerOutputs]]
    draft: Callable[..., tuple[Array, LayerOutputs]]
    logits: Callable[[Tree, Array], Array]
    draft_logits: Callable[[Tree, Array], Array]
    fresh: Callable[[], "Decoder"]
    numerics: tuple[object, ...]


# Equal arguments return the same object, and with it what jax.jit has compiled of its functions.
@functools.cache
def decoder(
    config: Config,
    *,
    dispatch: Dispatch = Dispatch(),  # noqa: B008
    kernels: Kernels = AUTO,
    absorbed: bool | None = None,
    fresh: bool = False,
    mtp_after_norm: bool = False,
    platform: str | None = None,
) -> Decoder:
    """Build the model for serving.

    Args:
      config: the model's configuration.
      dispatch: how tokens travel to experts; by default all experts are on one device, and no token is
        dropped.
      kernels: the kernels that compute the experts' matmuls and, where ``fresh`` allows it, attention.
      absorbed: the form of attention; see ``cached_attention``.
      fresh: promises that all rows start at 0; see ``cached_attention``.
      mtp_after_norm: whether drafts read the hidden state after the final norm, as in ``models.deepseek``:
        True for published weights, False for our own models as they are trained by default.
      platform: "cpu", "gpu" or "tpu"; None is JAX's default backend.
    """
    platform = platform or jax.default_backend()
    attend, matmul = kernels.attend(platform), kernels.multiply(platform)
    attention = functools.partial(cached_attention, absorbed=absorbed, fresh=fresh, kernel=platform == "gpu")
    dense = pure_nnx(lambda rngs: _Cached(DenseBlock(config, rngs, attend), attention)).apply
    block = pure_nnx(lambda rngs: _Cached(Block(config, dispatch, rngs, attend, matmul), attention)).apply
    merge = pure_nnx(lambda rngs: Merge(config, rngs)).apply
    norm = pure_nnx(lambda rngs: RMSNorm(config.dim, config.norm_eps)).apply

    def embed(weights: Tree, rows: Rows) -> Array:
        return look_up(weights["embed_tokens"], jnp.asarray(rows.tokens), config.compute_dtype)

    def run(
        own: Tree, x_BSD: Array, cache: Array, layer: int, rows: Rows, before: Before | None
    ) -> tuple[Array, LayerOutputs]:
        module = dense if own["bias"] is None else block
        layer_before = None if before is None else (before[0], before[1][layer])
        # Each device of the experts' axis has a table of its own: the only row of its shard.
        copies_EX = own["copies"][0] if "copies" in own else None
        return module(
            {"block": own["block"]}, x_BSD, cache, layer, rows, layer_before, own["bias"], copies_EX
        )

    def forward(
        weights: Tree, cache: Array, rows: Rows, before: Before | None = None
    ) -> tuple[Array, LayerOutputs]:
        x_BSD, made = embed(weights, rows), LayerOutputs((), ())
        for layer, own in enumerate(weights["layers"]):
            x_BSD, more = run(own, x_BSD, cache, layer, rows, before)
            made += more
        return x_BSD, made

    def draft(
        weights: Tree, cache: Array, rows: Rows, x_BSD: Array, before: Before | None = None
    ) -> tuple[Array, LayerOutputs]:
        own = weights["mtp"][0]
        hidden_BSD = norm(weights["norm"], x_BSD) if mtp_after_norm else x_BSD
        x_BSD = merge(own["merge"], embed(weights, rows), hidden_BSD)
        return run(own, x_BSD, cache, config.num_layers, rows, before)

    def to_logits(weights: Tree, normed: Array) -> Array:
        flat = project(normed.reshape(-1, config.dim), head_kernel(config, weights))
        return flat.reshape(*normed.shape[:-1], config.vocab)

    jitted_prepare = jax.jit(lambda params: _prepare(config, params))

    def prepare(params: Tree) -> Tree:
        return _prepare(config, params) if is_lazy(params) else jitted_prepare(params)

    return Decoder(
        config,
        dispatch,
        platform,
        prepare,
        forward,
        draft,
        lambda weights, x: to_logits(weights, norm(weights["norm"], x)),
        lambda weights, x: to_logits(weights, norm(weights["mtp"][0]["norm"], x)),
        functools.partial(
            decoder,
            config,
            dispatch=dispatch,
            kernels=kernels,
            absorbed=absorbed,
            fresh=True,
            mtp_after_norm=mtp_after_norm,
            platform=platform,
        ),
        (kernels.matmul == "float8", dispatch.payload, dispatch.factor, mtp_after_norm),
    )


class _Cached(nnx.Module):
    """A block whose attention reads a cache."""

    def __init__(self, block: Block | DenseBlock, attention: Callable[..., tuple[Array, Array]]):
        self_attn: Any = block.self_attn
        self_attn.kv_b_proj = PerHeadProjection(self_attn.config)
        self.block = block
        self.attention = attention

    def __call__(
        self,
        x_BSD: Array,
        cache: Array,
        layer: int,
        rows: Rows,
        before: tuple[Rows, Array] | None,
        bias_E: Array | None,
        copies_EX: Array | None,
    ) -> tuple[Array, LayerOutputs]:
        block: Any = self.block
        hidden_BSD, latents_BSL = self.attention(
            block.self_attn, block.input_layernorm(x_BSD), cache, layer, rows, before
        )
        x_BSD = x_BSD + hidden_BSD
        normed_BSD = block.post_attention_layernorm(x_BSD)
        if bias_E is None:
            return x_BSD + block.mlp(normed_BSD), LayerOutputs((latents_BSL,), ())
        y_BSD, load = block.mlp(normed_BSD, bias_E, rows.live, copies_EX, only_live=True)
        return x_BSD + y_BSD, LayerOutputs((latents_BSL,), (load.counts,))


_HIDDEN_MULTIPLE = 256
"""The hidden dim of a dense layer is padded to a multiple of this. On a GPU, XLA splits the sum over a
matrix's many rows among multiprocessors; if the rows do not divide evenly, it copies the matrix in every
step. For the 10,944 rows of V2-Lite that took 28 us of a step's 1,152 us."""


def _pad_hidden(mlp: Tree) -> Tree:
    """A dense layer's matrices, with the hidden dim padded with zeros, which do not change the layer's output."""
    hidden = mlp["down_proj"]["kernel"].shape[0]
    missing = -hidden % _HIDDEN_MULTIPLE
    if missing > hidden // 64:  # a small layer would consist mostly of padding
        return mlp

    def padded(dim: int) -> Callable[[Any], Any]:
        edges = [(0, missing * (d == dim)) for d in range(2)]
        return lambda kernel: (np if isinstance(kernel, np.ndarray) else jnp).pad(kernel, edges)

    def one(name: str, kernel: Any) -> Any:
        pad = padded(0 if name == "down_proj" else 1)
        return kernel.map(pad) if isinstance(kernel, Lazy) else pad(kernel)

    return {name: {"kernel": one(name, own["kernel"])} for name, own in mlp.items()}


def _prepare(config: Config, params: Tree) -> Tree:
    own, shared = only_stage(params, "decoder"), params["shared"]
    routed = [
        {"block": block, "bias": bias}
        for block, bias in zip(own["layers"], own["routing"]["bias"], strict=True)
    ]
    merges = [{name: module[name] for name in ("enorm", "hnorm", "eh_proj")} for module in shared["mtp"]]
    ahead = zip(routed[config.num_moe_layers :], merges, shared["mtp"], strict=True)
    weights = {name: shared[name] for name in ("embed_tokens", "norm", "lm_head") if name in shared}
    weights |= {
        "layers": [{"block": block, "bias": None} for block in shared["layers"]]
        + routed[: config.num_moe_layers],
        "mtp": [row | {"merge": merge, "norm": module["norm"]} for row, merge, module in ahead],
    }

    def cast(path: Any, leaf: Array) -> Array:
        is_router = getattr(path[-1], "key", None) == "gate"
        return leaf if leaf.ndim < 2 or is_router else leaf.astype(config.compute_dtype)

    def with_layout(own: Tree) -> Tree:
        block = own["block"]
        attention = block["self_attn"]
        heads = split_by_head(config, attention["kv_b_proj"]["kernel"])
        mlp = _pad_hidden(block["mlp"]) if own["bias"] is None else block["mlp"]
        return own | {"block": block | {"self_attn": attention | {"kv_b_proj": heads}, "mlp": mlp}}

    weights = jax.tree_util.tree_map_with_path(cast, weights)
    return weights | {name: [with_layout(own) for own in weights[name]] for name in ("layers", "mtp")}
