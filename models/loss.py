"""Cross entropy of a large vocabulary: from hidden states to the loss, a block of words at a time.

Shape suffixes: T tokens, D model dim, V vocab, W words of a block.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.varying import vary_alike

BLOCK = 16384
"""Words whose logits stand at once: 268 MB of float32 for 4096 tokens, an eighth of V3's vocabulary."""


@typechecked
def cross_entropy_in_blocks(
    x: Array, kernel_DV: Array, targets: Array, valid: Array | None = None, *, block: int = BLOCK
) -> Array:
    """Return the mean cross entropy per valid token in nats, float32; 0 if there is none.

    As ``transformer.cross_entropy`` of the logits ``x @ kernel_DV``, which never stand whole.

    Args:
      x: hidden states [..., D], behind the last norm, in the compute dtype.
      kernel_DV: the output projection; it is multiplied in x's dtype.
      targets: int [...], the words to be predicted.
      valid: bool [...] or weights, which tokens count; None is all.
      block: words whose logits stand at once.
    """
    if x.shape != (*targets.shape, kernel_DV.shape[0]):
        raise ValueError(
            f"cross_entropy_in_blocks: x must be of shape [..., D] for targets {list(targets.shape)} and "
            f"kernel_DV {list(kernel_DV.shape)}, got {list(x.shape)}."
        )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(f"cross_entropy_in_blocks: targets must be integers, got {targets.dtype}.")
    if valid is not None and valid.shape != targets.shape:
        raise ValueError(
            f"cross_entropy_in_blocks: valid must be of the shape of targets, {list(targets.shape)}, got "
            f"{list(valid.shape)}."
        )
    if block < 1:
        raise ValueError(f"cross_entropy_in_blocks: block must be at least 1, got {block}.")
    x, kernel_DV, targets = vary_alike((x, kernel_DV, jnp.asarray(targets)))
    losses_T = _token_losses(x.reshape(-1, x.shape[-1]), kernel_DV, targets.reshape(-1), block)
    losses = losses_T.reshape(targets.shape)
    if valid is None:
        return jnp.mean(losses)
    weights = jnp.asarray(valid).astype(jnp.float32)
    total = jnp.sum(weights)
    return jnp.sum(losses * weights) / jnp.where(total == 0, 1, total)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _token_losses(x_TD: Array, kernel_DV: Array, targets_T: Array, block: int) -> Array:
    """Every token's cross entropy in nats, float32 [T].

    The backward computes a block's logits again, and multiplies their gradient in x's dtype: in bfloat16 both
    of its matmuls take bfloat16, and sum in float32. Blocks are of words, not of tokens, so that the kernel's
    gradient, the largest array here, is written once.
    """
    return _forward(x_TD, kernel_DV, targets_T, block)[0]


def _forward(x_TD: Array, kernel_DV: Array, targets_T: Array, block: int) -> tuple[Array, tuple[Array, ...]]:
    def one(carry: tuple[Array, Array, Array], number: Array) -> tuple[tuple[Array, Array, Array], None]:
        highest_T, sum_T, picked_T = carry
        logits_TW, words_W, _ = _logits(x_TD, kernel_DV, number, block)
        new_T = jnp.maximum(highest_T, jnp.max(logits_TW, axis=-1))
        sum_T = sum_T * jnp.exp(highest_T - new_T) + jnp.sum(jnp.exp(logits_TW - new_T[:, None]), axis=-1)
        hit_TW = _hit(targets_T, words_W) & (logits_TW > -jnp.inf)
        return (new_T, sum_T, picked_T + jnp.sum(jnp.where(hit_TW, logits_TW, 0), axis=-1)), None

    zeros_T, _ = vary_alike((jnp.zeros(x_TD.shape[0], jnp.float32), x_TD))
    start = zeros_T - jnp.inf, zeros_T, zeros_T
    (highest_T, sum_T, picked_T), _ = jax.lax.scan(one, start, _numbers(kernel_DV, block))
    log_sum_T = highest_T + jnp.log(sum_T)
    return log_sum_T - picked_T, (x_TD, kernel_DV, targets_T, log_sum_T)


def _backward(block: int, saved: tuple[Array, ...], d_T: Array) -> tuple[Array, Array, None]:
    x_TD, kernel_DV, targets_T, log_sum_T = saved

    def one(carry: tuple[Array, Array], number: Array) -> tuple[tuple[Array, Array], None]:
        d_x_TD, d_kernel_DV = carry
        logits_TW, words_W, kernel_DW = _logits(x_TD, kernel_DV, number, block)
        hit_TW = _hit(targets_T, words_W) & (logits_TW > -jnp.inf)
        d_TW = (jnp.exp(logits_TW - log_sum_T[:, None]) - hit_TW.astype(jnp.float32)) * d_T[:, None]
        d_TW = d_TW.astype(x_TD.dtype)
        d_x_TD = d_x_TD + jnp.einsum("tw,dw->td", d_TW, kernel_DW, preferred_element_type=jnp.float32)
        more_DW = jnp.einsum("td,tw->dw", x_TD, d_TW, preferred_element_type=jnp.float32)
        # Added, for the last block begins among the words of the one before, where its own part is zero.
        there_DW = jax.lax.dynamic_slice_in_dim(d_kernel_DV, words_W[0], len(words_W), axis=1)
        more_DW = there_DW + more_DW.astype(there_DW.dtype)
        return (d_x_TD, jax.lax.dynamic_update_slice_in_dim(d_kernel_DV, more_DW, words_W[0], axis=1)), None

    zeros = jnp.zeros_like(x_TD, jnp.float32), jnp.zeros_like(kernel_DV)
    d_x_TD, d_kernel_DV, _, _ = vary_alike((*zeros, x_TD, kernel_DV))
    start = d_x_TD, d_kernel_DV
    (d_x_TD, d_kernel_DV), _ = jax.lax.scan(one, start, _numbers(kernel_DV, block))
    return d_x_TD.astype(x_TD.dtype), d_kernel_DV, None


_token_losses.defvjp(_forward, _backward)


def _numbers(kernel_DV: Array, block: int) -> Array:
    return jnp.arange(math.ceil(kernel_DV.shape[1] / block), dtype=jnp.int32)


def _logits(x_TD: Array, kernel_DV: Array, number: Array, block: int) -> tuple[Array, Array, Array]:
    """A block's logits, float32, -inf for words of the block before; its words, and its kernel in x's dtype."""
    vocab = kernel_DV.shape[1]
    block = min(block, vocab)
    first = jnp.minimum(number * block, vocab - block)
    words_W = first + jnp.arange(block, dtype=jnp.int32)
    kernel_DW = jax.lax.dynamic_slice_in_dim(kernel_DV, first, block, axis=1).astype(x_TD.dtype)
    logits_TW = jnp.einsum("td,dw->tw", x_TD, kernel_DW, preferred_element_type=jnp.float32)
    return jnp.where(words_W >= number * block, logits_TW, -jnp.inf), words_W, kernel_DW


def _hit(targets_T: Array, words_W: Array) -> Array:
    # Compare: the backward of a gather here would be a scatter into [T, V].
    return targets_T[:, None] == words_W.astype(targets_T.dtype)
