"""Cross entropy of a large vocabulary: from hidden states to the loss, a block of tokens at a time.

Shape suffixes: T tokens, D model dim, V vocab.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array

BLOCK = 512
"""Tokens whose logits stand at once: 265 MB of float32 for V3's 129,280 words."""


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
      block: tokens whose logits stand at once.

    """
    losses = token_losses(x, kernel_DV, targets, block)
    if valid is None:
        return jnp.mean(losses)
    weights = jnp.asarray(valid).astype(jnp.float32)
    total = jnp.sum(weights)
    return jnp.sum(losses * weights) / jnp.where(total == 0, 1, total)


def token_losses(x: Array, kernel_DV: Array, targets: Array, block: int = BLOCK) -> Array:
    """Return every token's cross entropy in nats, float32 [...]; arguments as ``cross_entropy_in_blocks``.

    The backward computes a block's logits again, and multiplies their gradient in x's dtype: in bfloat16 both
    of its matmuls take bfloat16. The kernel's gradient is summed in float32, whatever its own dtype.
    """
    return _token_losses(*_vary_alike(x, kernel_DV, jnp.asarray(targets)), block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _token_losses(x: Array, kernel_DV: Array, targets: Array, block: int) -> Array:
    return _forward(x, kernel_DV, targets, block)[0]


def _forward(x: Array, kernel_DV: Array, targets: Array, block: int) -> tuple[Array, tuple[Array, ...]]:
    narrow_DV = kernel_DV.astype(x.dtype)

    def one(rows: tuple[Array, Array]) -> tuple[Array, Array]:
        x_TD, targets_T = rows
        logits_TV = _logits(x_TD, narrow_DV)
        log_sum_T = jax.nn.logsumexp(logits_TV, axis=-1)
        picked_T = jnp.sum(jnp.where(_hit(targets_T, logits_TV), logits_TV, 0), axis=-1)
        return log_sum_T - picked_T, log_sum_T

    blocks = _blocks((x.reshape(-1, x.shape[-1]), targets.reshape(-1)), block)
    losses, log_sums = (_whole(a, targets.shape) for a in jax.lax.map(one, blocks))
    return losses, (x, kernel_DV, targets, log_sums)


def _backward(block: int, saved: tuple[Array, ...], d_losses: Array) -> tuple[Array, Array, None]:
    x, kernel_DV, targets, log_sums = saved
    narrow_DV = kernel_DV.astype(x.dtype)

    def one(d_kernel_DV: Array, rows: tuple[Array, ...]) -> tuple[Array, Array]:
        x_TD, targets_T, log_sum_T, d_T = rows
        logits_TV = _logits(x_TD, narrow_DV)
        probs_TV = jnp.exp(logits_TV - log_sum_T[:, None])
        d_logits_TV = (probs_TV - _hit(targets_T, logits_TV).astype(jnp.float32)) * d_T[:, None]
        d_logits_TV = d_logits_TV.astype(x.dtype)
        d_x_TD = jnp.einsum("tv,dv->td", d_logits_TV, narrow_DV, preferred_element_type=jnp.float32)
        more_DV = jnp.einsum("td,tv->dv", x_TD, d_logits_TV, preferred_element_type=jnp.float32)
        return d_kernel_DV + more_DV, d_x_TD.astype(x.dtype)

    flat = x.reshape(-1, x.shape[-1]), *(a.reshape(-1) for a in (targets, log_sums, d_losses))
    zeros_DV, _ = _vary_alike(jnp.zeros_like(kernel_DV, jnp.float32), kernel_DV)
    d_kernel_DV, d_x = jax.lax.scan(one, zeros_DV, _blocks(flat, block))
    return _whole(d_x, x.shape), d_kernel_DV.astype(kernel_DV.dtype), None


_token_losses.defvjp(_forward, _backward)


def _logits(x_TD: Array, kernel_DV: Array) -> Array:
    return jnp.einsum("td,dv->tv", x_TD, kernel_DV, preferred_element_type=jnp.float32)


def _hit(targets_T: Array, logits_TV: Array) -> Array:
    # Compare: the backward of a gather here would be a scatter into [T, V].
    return targets_T[:, None] == jnp.arange(logits_TV.shape[-1], dtype=targets_T.dtype)


def _blocks(arrays: tuple[Array, ...], block: int) -> tuple[Array, ...]:
    """Cut [T, ...] into [N, block, ...], zeros behind the last token."""
    length = arrays[0].shape[0]
    block = min(block, length)
    number = -(-length // block)

    def cut(a: Array) -> Array:
        padded = jnp.pad(a, ((0, number * block - length), *((0, 0),) * (a.ndim - 1)))
        return padded.reshape(number, block, *a.shape[1:])

    return tuple(cut(a) for a in arrays)


def _whole(blocks: Array, shape: tuple[int, ...]) -> Array:
    """Put blocks together again, without the zeros."""
    return blocks.reshape(-1)[: math.prod(shape)].reshape(shape)


def _vary_alike(*arrays: Array) -> tuple[Array, ...]:
    """Inside ``shard_map``, cast all to vary over the axes that any does: gradients then have their types."""
    axes = [frozenset(jax.typeof(array).manual_axis_type.varying) for array in arrays]
    missing = [tuple(sorted(frozenset().union(*axes) - own)) for own in axes]
    return tuple(
        jax.lax.pcast(array, more, to="varying") if more else array
        for array, more in zip(arrays, missing, strict=True)
    )
