"""Where groups of consecutive rows lie: tables that grouped products' kernels go by.

All are compared and summed, where a running sum or a sort are several kernels: in a program of few rows each counts.

Shape suffixes: R rows, G groups, S groups that have rows, T walks of a tile of rows.
"""

import jax.numpy as jnp
from jax import Array


def starts(sizes_G: Array) -> Array:
    """The sum of all sizes before each, int32 [G]."""
    number_G = jnp.arange(len(sizes_G), dtype=jnp.int32)
    earlier_GG = number_G < number_G[:, None]
    return jnp.sum(jnp.where(earlier_GG, sizes_G, 0), axis=1, dtype=jnp.int32)


def filled(sizes_G: Array, most: int) -> tuple[Array, Array, Array]:
    """The groups that have rows, and where these begin and end, int32 [most]; behind them groups of none."""
    number_G = jnp.arange(len(sizes_G), dtype=jnp.int32)
    filled_G = (sizes_G > 0).astype(jnp.int32)
    starts_G, place_G = starts(sizes_G), starts(filled_G)
    here_SG = (place_G == jnp.arange(most, dtype=jnp.int32)[:, None]) & (filled_G > 0)
    taken = [
        jnp.sum(jnp.where(here_SG, a, 0), axis=1, dtype=jnp.int32)
        for a in (number_G, starts_G, starts_G + sizes_G)
    ]
    return taken[0], taken[1], taken[2]


def walks(sizes_G: Array, tile: int, num_rows: int) -> tuple[Array, Array, Array, Array]:
    """Each group's tiles of rows, one group after the other.

    Args:
      sizes_G: int32, rows of each group.
      tile: rows of a tile.
      num_rows: R.

    Returns:
      int32 [T], T being as many as there can be: the group, the number of the tile, and where the group's rows begin
      and end; behind the last walk they end where they begin.
    """
    G = len(sizes_G)
    most = -(-num_rows // tile) + G - 1
    starts_G = starts(sizes_G)
    ends_G = starts_G + sizes_G
    first_G = starts_G // tile
    num_G = jnp.where(sizes_G > 0, (ends_G - 1) // tile - first_G + 1, 0)
    before_G = starts(num_G)
    walk_T = jnp.arange(most, dtype=jnp.int32)
    group_T = jnp.sum(before_G + num_G <= walk_T[:, None], axis=1, dtype=jnp.int32)
    is_one_T = group_T < G
    group_T = jnp.minimum(group_T, G - 1)
    block_T = first_G[group_T] + walk_T - before_G[group_T]
    start_T, end_T = (jnp.where(is_one_T, a[group_T], 0) for a in (starts_G, ends_G))
    return group_T, jnp.where(is_one_T, block_T, 0), start_T, end_T
