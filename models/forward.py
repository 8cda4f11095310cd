"""The whole model at once, without a pipeline: logits for every token.

Shape suffixes as in ``models.transformer``.
"""

import jax.numpy as jnp
from jax import Array

from dualpipe_jax.contract import At
from dualpipe_jax.functional import Tree
from models.config import Config
from models.kernels import AUTO, Kernels
from models.stages import head_kernel, only_stage
from models.transformer import deepseek
from models.vocabulary import project


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
      positions: int [B, S], the position of each token in its document; None counts along S.
      segment_ids: int [B, S], the document of each token, which attends to no other document. Padding is a document of
        its own.
      kernels: the programs that compute attention and the experts' matmuls.

    Returns:
      float32 [B, S, V]; position s has the logits of the token that follows it.

    Raises:
      ValueError: params have several stages.
    """
    own = only_stage(params, "logits")
    batch = {"inputs": tokens, "positions": positions, "segment_ids": segment_ids}
    at = At({name: a for name, a in batch.items() if a is not None}, jnp.int32(0), jnp.int32(0), None)
    model = deepseek(config, 1, balance_factor=0, kernels=kernels)
    x_BSD = model.staged.kinds["only"](own, params["shared"], None, at).x
    x_TD = x_BSD.reshape(-1, config.dim)
    return project(x_TD, head_kernel(config, params["shared"])).reshape(*tokens.shape, config.vocab)
