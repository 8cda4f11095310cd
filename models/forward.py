"""The whole model at once, without a pipeline: logits for every token.

Shape suffixes as in ``models.transformer``.
"""

import jax
from jax import Array

from models.config import Config
from models.functional import Tree, pure_nnx, unstack
from models.kernels import AUTO, Kernels
from models.moe import Dispatch
from models.transformer import Block, Embed, Head, default_platform


def logits(
    config: Config,
    params: Tree,
    tokens: Array,
    *,
    positions: Array | None = None,
    segment_ids: Array | None = None,
    kernels: Kernels = AUTO,
) -> Array:
    """Run the model on whole sequences.

    Under ``jax.jit`` the configuration is static:
    ``jax.jit(logits, static_argnums=0)(config, params, tokens)``.

    Args:
      config: the model.
      params: as ``deepseek(config, 1).init`` makes them, or ``weights.load`` reads them.
      tokens: int [B, S].
      positions: int [B, S], where in its document each token stands; None counts along S.
      segment_ids: int [B, S], which document each token belongs to: it hears no other. Padding is one of its
        own.
      kernels: what computes attention and the experts' matmuls.

    Returns:
      float32 [B, S, V]; at s, of the token that follows.

    Raises:
      ValueError: params are of several stages.

    """
    layers, routing = params["stages"]["layers"], params["stages"]["routing"]
    num_stages = len(routing["stage"])
    if num_stages != 1:
        raise ValueError(f"logits: params are of {num_stages} stages, must be of 1: deepseek(config, 1).init")
    platform = default_platform()
    attend, matmul = kernels.attend(platform), kernels.multiply(platform)
    embed = pure_nnx(lambda rngs: Embed(config, rngs, attend))
    block = pure_nnx(lambda rngs: Block(config, Dispatch(), rngs, attend, matmul))
    head = pure_nnx(lambda rngs: Head(config, rngs))

    def layer(x_BSD: Array, leaves: tuple[Tree, Array]) -> tuple[Array, None]:
        weights, bias_E = leaves
        return block.apply(weights, x_BSD, bias_E, positions, segment_ids)[0], None

    x_BSD = embed.apply(params["embed"], tokens, positions, segment_ids)
    x_BSD, _ = jax.lax.scan(layer, x_BSD, unstack((layers, routing["bias"]))[0])
    table = params["embed"]["embed_tokens"] if config.tie_embeddings else None
    return head.apply(params["head"], x_BSD, table)
