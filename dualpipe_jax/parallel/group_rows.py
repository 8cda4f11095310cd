"""Tables of where groups of consecutive rows lie, for the kernels of grouped products.

All are computed by comparisons and sums: a running sum or a sort is several kernels, and in a program of few rows each
kernel counts.

Shape suffixes: R rows, G groups, S groups that have rows, T walks of a tile of rows.
"""

import jax.numpy as jnp
from jax import Array


def group_starts(sizes_G: Array) -> Array:
    """Return the first row of each group, int32 [G]: the sum of the sizes of all groups before it."""
    number_G = jnp.arange(len(sizes_G), dtype=jnp.int32)
    earlier_GG = number_G < number_G[:, None]
    return jnp.sum(jnp.where(earlier_GG, sizes_G, 0), axis=1, dtype=jnp.int32)


def nonempty_groups(sizes_G: Array, most: int) -> tuple[Array, Array, Array]:
    """List the groups that have rows.

    Returns:
      Three arrays int32 [most]: the group, its first row and the row past its last. Entries after the last group that
      has rows are zeros, which is a group without rows.
    """
    number_G = jnp.arange(len(sizes_G), dtype=jnp.int32)
    filled_G = (sizes_G > 0).astype(jnp.int32)
    starts_G, place_G = group_starts(sizes_G), group_starts(filled_G)
    here_SG = (place_G == jnp.arange(most, dtype=jnp.int32)[:, None]) & (filled_G > 0)
    taken = [
        jnp.sum(jnp.where(here_SG, a, 0), axis=1, dtype=jnp.int32)
        for a in (number_G, starts_G, starts_G + sizes_G)
    ]
    return taken[0], taken[1], taken[2]


def group_tiles(sizes_G: Array, tile: int, num_rows: int) -> tuple[Array, Array, Array, Array]:
    """List the tiles of rows of each group, one group after the other; a tile with rows of n groups is listed n times.

    Args:
      sizes_G: int32, the number of rows of each group.
      tile: the number of rows of a tile.
      num_rows: R.

    Returns:
      Four arrays int32 [T], T being the largest possible number of walks: the group, the index of the tile, the group's
      first row and the row past its last. In entries after the last walk these two rows are equal.
    """
    G = len(sizes_G)
    most = -(-num_rows // tile) + G - 1
    starts_G = group_starts(sizes_G)
    ends_G = starts_G + sizes_G
    first_G = starts_G // tile
    num_G = jnp.where(sizes_G > 0, (ends_G - 1) // tile - first_G + 1, 0)
    before_G = group_starts(num_G)
    walk_T = jnp.arange(most, dtype=jnp.int32)
    group_T = jnp.sum(before_G + num_G <= walk_T[:, None], axis=1, dtype=jnp.int32)
    is_one_T = group_T < G
    group_T = jnp.minimum(group_T, G - 1)
    block_T = first_G[group_T] + walk_T - before_G[group_T]
    start_T, end_T = (jnp.where(is_one_T, a[group_T], 0) for a in (starts_G, ends_G))
    return group_T, jnp.where(is_one_T, block_T, 0), start_T, end_T
