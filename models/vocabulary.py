"""Embedding and output projection, the two matrices as large as the vocabulary, sharded over the expert axis; the loss.

Every device of the axis has tokens of its own, so activations are sent, never the matrices. The embedding is sharded
along its width: a device looks up its part of every device's rows, and one all_to_all returns the wanted parts to each
device, B * S * D numbers and no more. The output projection is sharded along the vocabulary: each device computes the
logits of all devices' tokens for its own words, in blocks, and returns only two numbers per token.

Shape suffixes: B batch, S sequence, T tokens, D model dim, V vocabulary (here: this device's part), N devices of the
axis.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from dualpipe_jax.parallel.expert_plan import Axis
from dualpipe_jax.varying import vary_alike

BLOCK = 512
"""The number of a device's tokens whose logits are in memory at once: with 129,280 words they take 265 MB in float32,
for any number of devices."""


def look_up(table_VD: Array, tokens_BS: Array, dtype: jnp.dtype, axis: Axis | None = None) -> Array:
    """Return tokens' rows of the embedding, [B, S, D] in ``dtype``.

    The table's gradient is summed in float32, and is the same to the last bit each time that it is computed.

    Args:
      table_VD: the rows of all words; with an axis, this device's part of their width.
      tokens_BS: int, this device's tokens, each from 0 to V - 1.
      dtype: the dtype of the result.
      axis: the mesh axis or axes over which the width is sharded; None if the table is whole.
    """
    if axis is None:
        return _rows(*vary_alike((table_VD, tokens_BS))).astype(dtype)
    tokens_NBS = lax.all_gather(tokens_BS, axis)
    rows_NBSD = _rows(*vary_alike((table_VD, tokens_NBS))).astype(dtype)
    return lax.all_to_all(rows_NBSD, axis, split_axis=0, concat_axis=3, tiled=True)[0]


@jax.custom_vjp
def _rows(table_VD: Array, tokens: Array) -> Array:
    return table_VD[tokens]


def _rows_fwd(table_VD: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    return _rows(table_VD, tokens), (table_VD, tokens)


def _rows_bwd(saved: tuple[Array, Array], d_rows: Array) -> tuple[Array, None]:
    """Sum each word's gradients in float32 in a fixed order; a GPU's scatter adds in an order that changes every time.

    The tokens are sorted by word, and a scan that starts again at each word has the word's sum at its last token.
    """
    table_VD, tokens = saved
    V, D = table_VD.shape
    words_T = jnp.asarray(tokens, jnp.int32).reshape(-1)  # 16 bits do not hold the places past the table
    order_T = jnp.argsort(words_T, stable=True)
    words_T = words_T[order_T]
    first_T = jnp.concatenate([jnp.ones(1, bool), words_T[1:] != words_T[:-1]])
    wide_TD = d_rows.reshape(-1, D)[order_T].astype(jnp.float32)
    _, sums_TD = lax.associative_scan(_add_within, (first_T[:, None], wide_TD))
    place_T = jnp.where(jnp.roll(first_T, -1), words_T, V + jnp.arange(len(words_T), dtype=jnp.int32))
    # "add" to zeros, not "set": XLA then adds only these rows to the sum over microbatches, not a whole table.
    d_VD = jnp.zeros((V, D), jnp.float32).at[place_T].add(sums_TD, mode="drop", unique_indices=True)
    return d_VD.astype(table_VD.dtype), None


def _add_within(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
    (left_begins, left_sum), (right_begins, right_sum) = left, right
    return left_begins | right_begins, jnp.where(right_begins, right_sum, left_sum + right_sum)


_rows.defvjp(_rows_fwd, _rows_bwd)


def cross_entropy(
    x_TD: Array, kernel_DV: Array, targets_T: Array, axis: Axis | None = None, block: int = BLOCK
) -> Array:
    """Return each token's cross entropy in nats, float32 [T]; forward and backward run in blocks of tokens.

    Logits are float32, from operands of x's dtype. In the backward the operands of the gradients have x's dtype, too,
    while the kernel's gradient is summed in the kernel's dtype. A block's logits are computed again for the backward.

    Args:
      x_TD: the result of the head's norm.
      kernel_DV: float32; with an axis, this device's part of the words.
      targets_T: int; a token whose target is no word gets the log of its partition function.
      axis: the mesh axis or axes over which the words are sharded; None if the kernel is whole.
      block: the largest number of a device's tokens whose logits are in memory at once.
    """
    one_block = jax.checkpoint(functools.partial(_cross_entropy, axis=axis))
    targets_T = targets_T.astype(jnp.int32)  # it is compared with word numbers, which 16 bits do not hold
    T, D = x_TD.shape
    num_blocks = -(-T // block)
    if num_blocks == 1:
        return one_block(x_TD, targets_T, kernel_DV)
    size = -(-T // num_blocks)
    pad = num_blocks * size - T
    x_TD, targets_T = jnp.pad(x_TD, ((0, pad), (0, 0))), jnp.pad(targets_T, (0, pad))
    blocks = x_TD.reshape(num_blocks, size, D), targets_T.reshape(num_blocks, size)
    return lax.map(lambda pair: one_block(*pair, kernel_DV), blocks).reshape(-1)[:T]


def _cross_entropy(x_TD: Array, targets_T: Array, kernel_DV: Array, axis: Axis | None) -> Array:
    first = jnp.int32(0)
    if axis is not None:
        x_TD, targets_T = (lax.all_gather(a, axis, tiled=True) for a in (x_TD, targets_T))
        first = lax.axis_index(axis) * kernel_DV.shape[1]
    logits_TV = project(x_TD, kernel_DV)
    # Compare and sum: the backward of a gather here would be a scatter into [T, V].
    hit_TV = (targets_T - first)[:, None] == jnp.arange(kernel_DV.shape[1], dtype=jnp.int32)
    picked_T = jnp.sum(jnp.where(hit_TV, logits_TV, 0), axis=-1)
    both_2T = jnp.stack([jax.nn.logsumexp(logits_TV, axis=-1), picked_T])
    if axis is None:
        return both_2T[0] - both_2T[1]
    both_2NT = both_2T.reshape(2, lax.axis_size(axis), -1)
    both_2NT = lax.all_to_all(both_2NT, axis, split_axis=1, concat_axis=1)
    return jax.nn.logsumexp(both_2NT[0], axis=0) - jnp.sum(both_2NT[1], axis=0)


@jax.custom_vjp
def project(x_TD: Array, kernel_DV: Array) -> Array:
    """Return logits [T, V] in float32; the matmul and its two gradients take operands of x's dtype."""
    return jnp.einsum("td,dv->tv", x_TD, kernel_DV.astype(x_TD.dtype), preferred_element_type=jnp.float32)


def _project_fwd(x_TD: Array, kernel_DV: Array) -> tuple[Array, tuple[Array, Array]]:
    return project(x_TD, kernel_DV), (x_TD, kernel_DV)


def _project_bwd(saved: tuple[Array, Array], d_TV: Array) -> tuple[Array, Array]:
    x_TD, kernel_DV = saved
    d_TV = d_TV.astype(x_TD.dtype)
    wide = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    dx_TD = wide("tv,dv->td", d_TV, kernel_DV.astype(x_TD.dtype)).astype(x_TD.dtype)
    return dx_TD, wide("td,tv->dv", x_TD, d_TV).astype(kernel_DV.dtype)


project.defvjp(_project_fwd, _project_bwd)
