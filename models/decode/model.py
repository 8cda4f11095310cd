"""The model as functions of its weights, a cache and new tokens.

Shape suffixes: B rows, S new tokens of a row, D model dim, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from dualpipe_jax.functional import Tree, pure_nnx
from models.attention import RMSNorm
from models.blocks import Block, DenseBlock, Merge
from models.config import Config
from models.decode.attention import cached_attention
from models.decode.cache import Rows
from models.kernels import AUTO, Kernels
from models.moe import Dispatch
from models.transformer import head_kernel
from models.vocabulary import look_up, project


@dataclasses.dataclass(frozen=True, eq=False)
class Decoder:
    """What ``decoder`` returns; its functions are pure, for ``jax.jit``, where the cache may be donated.

    Attributes:
      config: the model's numbers.
      prepare: ``prepare(params) -> weights``, from params of one stage; matrices in the compute dtype, the router's
        in float32.
      forward: ``forward(weights, cache, rows) -> (x [B, S, D], cache)``, what leaves the last layer.
      draft: ``draft(weights, cache, rows, x) -> (x, cache)``, through the first module of multi-token prediction. A
        row's tokens are those that follow x's.
      logits: ``logits(weights, x [..., D]) -> [..., V]`` in float32, of what ``forward`` returned.
      draft_logits: the same of what ``draft`` returned.

    """

    config: Config
    prepare: Callable[[Tree], Tree]
    forward: Callable[[Tree, Array, Rows], tuple[Array, Array]]
    draft: Callable[[Tree, Array, Rows, Array], tuple[Array, Array]]
    logits: Callable[[Tree, Array], Array]
    draft_logits: Callable[[Tree, Array], Array]


@functools.cache  # who asks for the same gets the same, and with it what jax.jit has compiled of it
def decoder(
    config: Config,
    *,
    kernels: Kernels = AUTO,
    absorbed: bool | None = None,
    mtp_after_norm: bool = False,
    platform: str | None = None,
) -> Decoder:
    """Build the model for serving on one device.

    Args:
      config: the numbers.
      kernels: what computes the experts' matmuls.
      absorbed: the form of attention; see ``cached_attention``.
      mtp_after_norm: as in ``models.deepseek``, for drafts: published weights want it, our own default does not.
      platform: "cpu", "gpu" or "tpu"; None is JAX's default backend.

    """
    backend = platform or jax.default_backend()
    matmul = kernels.multiply(backend if backend in ("cpu", "tpu") else "gpu")
    dense = pure_nnx(lambda rngs: _Cached(DenseBlock(config, rngs), absorbed)).apply
    block = pure_nnx(lambda rngs: _Cached(Block(config, Dispatch(), rngs, matmul=matmul), absorbed)).apply
    merge = pure_nnx(lambda rngs: Merge(config, rngs)).apply
    norm = pure_nnx(lambda rngs: RMSNorm(config.dim, config.norm_eps)).apply

    def embed(weights: Tree, rows: Rows) -> Array:
        return look_up(weights["embed_tokens"], jnp.asarray(rows.tokens), config.compute_dtype)

    def forward(weights: Tree, cache: Array, rows: Rows) -> tuple[Array, Array]:
        x_BSD = embed(weights, rows)
        for layer, own in enumerate(weights["layers"]):
            run = dense if own["bias"] is None else block
            x_BSD, cache = run({"block": own["block"]}, x_BSD, cache, layer, rows, own["bias"])
        return x_BSD, cache

    def draft(weights: Tree, cache: Array, rows: Rows, x_BSD: Array) -> tuple[Array, Array]:
        own = weights["mtp"][0]
        heard_BSD = norm(weights["norm"], x_BSD) if mtp_after_norm else x_BSD
        x_BSD = merge(own["merge"], embed(weights, rows), heard_BSD)
        return block({"block": own["block"]}, x_BSD, cache, config.num_layers, rows, own["bias"])

    def words(weights: Tree, normed: Array) -> Array:
        flat = project(normed.reshape(-1, config.dim), head_kernel(config, weights))
        return flat.reshape(*normed.shape[:-1], config.vocab)

    return Decoder(
        config,
        jax.jit(lambda params: _prepare(config, params)),
        forward,
        draft,
        lambda weights, x: words(weights, norm(weights["norm"], x)),
        lambda weights, x: words(weights, norm(weights["mtp"][0]["norm"], x)),
    )


class _Cached(nnx.Module):
    """A block whose attention hears a cache."""

    def __init__(self, block: Block | DenseBlock, absorbed: bool | None):
        self.block = block
        self.absorbed = absorbed

    def __call__(
        self, x_BSD: Array, cache: Array, layer: int, rows: Rows, bias_E: Array | None
    ) -> tuple[Array, Array]:
        block: Any = self.block
        heard_BSD, cache = cached_attention(
            block.self_attn, block.input_layernorm(x_BSD), cache, layer, rows, self.absorbed
        )
        x_BSD = x_BSD + heard_BSD
        normed_BSD = block.post_attention_layernorm(x_BSD)
        y_BSD = block.mlp(normed_BSD) if bias_E is None else block.mlp(normed_BSD, bias_E)[0]
        return x_BSD + y_BSD, cache


def _prepare(config: Config, params: Tree) -> Tree:
    num_stages = len(params["stages"]["routing"]["row"])
    if num_stages != 1:
        raise ValueError(
            f"decoder: params are of {num_stages} stages, must be of 1: deepseek(config, 1).init"
        )
    shared, own = params["shared"], jax.tree.map(lambda leaf: leaf[0], params["stages"])
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

    return jax.tree_util.tree_map_with_path(cast, weights)
