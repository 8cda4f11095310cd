"""The results of the kernels of ``mosaic`` in plain JAX, to test padding and masks where there is no GPU.

Shape suffixes: those of ``mosaic``; B blocks of K rows.
"""

import jax
import jax.numpy as jnp
from jax import Array

from dualpipe_jax.parallel.tiles import ROWS


def product(x_RD: Array, w_GDF: Array, sizes_G: Array, transpose: bool) -> Array:
    """Compute what the product's kernel writes; rows of no group, which it does not write, are NaN here."""
    matrices = w_GDF.swapaxes(1, 2) if transpose else w_GDF
    ends_G = jnp.cumsum(sizes_G)
    row_R = jnp.arange(x_RD.shape[0], dtype=jnp.int32)
    y_RF = jnp.full((x_RD.shape[0], matrices.shape[2]), jnp.nan, jnp.float32)
    for group in range(len(matrices)):
        here_R = (row_R >= ends_G[group] - sizes_G[group]) & (row_R < ends_G[group])
        whole_RF = jnp.matmul(x_RD, matrices[group], preferred_element_type=jnp.float32)
        y_RF = jnp.where(here_R[:, None], whole_RF, y_RF)
    return y_RF.astype(x_RD.dtype)


def add_gradient(x_RD: Array, dy_RF: Array, sizes_G: Array, so_far_GDF: Array) -> Array:
    """Compute what the gradient's kernel writes, block by block, masking the first and the last block of each group.

    Blocks are read whole. A block may reach past the rows, where it reads zeros.
    """
    past = -len(x_RD) % ROWS
    x_BKD, dy_BKF = (jnp.pad(a, ((0, past), (0, 0))).reshape(-1, ROWS, a.shape[1]) for a in (x_RD, dy_RF))
    ends_G = jnp.cumsum(sizes_G)
    block_B = jnp.arange(len(x_BKD), dtype=jnp.int32)
    row_BK = block_B[:, None] * ROWS + jnp.arange(ROWS, dtype=jnp.int32)

    def one(start: Array, end: Array) -> Array:
        first, last = start // ROWS, (end + ROWS - 1) // ROWS - 1
        edge_B = (block_B == first) | (block_B == last)
        inside_BK = jnp.where(edge_B[:, None], (row_BK >= start) & (row_BK < end), True)
        walked_BK = inside_BK & ((block_B >= first) & (block_B <= last) & (end > start))[:, None]
        x, dy = (jnp.where(walked_BK[..., None], a, jnp.zeros_like(a)) for a in (x_BKD, dy_BKF))
        return jnp.einsum("bkd,bkf->df", x, dy, preferred_element_type=jnp.float32)

    return so_far_GDF + jax.vmap(one)(ends_G - sizes_G, ends_G)
