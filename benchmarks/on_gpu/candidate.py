"""A candidate for ``parallel.hopper``'s product, which skips tiles of rows that no group fills.

It is right in Pallas' simulator, and was not run on a GPU yet.

JAX's kernel multiplies every tile of the buffer, filled or not, and finds a tile's group by comparing it with each.
Here a table, computed before the kernel, says of each tile which group it is of and which rows; a tile without rows
loads and multiplies nothing. So a buffer that is an eighth full should take an eighth of the time. It becomes the
product once ``scripts/bench gpu --parts grouped`` has found it right and no slower.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from dualpipe_jax.parallel.hopper import LANES, SMS, Walk, transposed, write_rows

_WALK = Walk()
_INNER = 64
"""Numbers of a row that are multiplied at once."""


def tiles_of(num_rows: int, sizes_G: Array) -> tuple[Array, Array, Array, Array]:
    """For each tile its group, its block of rows, and the rows that are the group's: from, and up to.

    A block in which groups meet has a tile for each. Tiles that are left over have no rows.
    """
    ends_G = jnp.cumsum(sizes_G)
    starts_G = ends_G - sizes_G
    first_G = starts_G // LANES
    number_G = jnp.where(sizes_G > 0, (ends_G - 1) // LANES - first_G + 1, 0)
    past_G = jnp.cumsum(number_G)
    tile_T = jnp.arange(-(-num_rows // LANES) + len(sizes_G) - 1, dtype=jnp.int32)
    group_T = jnp.minimum(jnp.searchsorted(past_G, tile_T, side="right"), len(sizes_G) - 1).astype(jnp.int32)
    block_T = first_G[group_T] + tile_T - (past_G - number_G)[group_T]
    is_one_T = tile_T < past_G[-1]
    block_T = jnp.where(is_one_T, block_T, 0)
    begin_T = jnp.maximum(starts_G[group_T], block_T * LANES)
    end_T = jnp.minimum(ends_G[group_T], (block_T + 1) * LANES)
    return group_T, block_T, jnp.where(is_one_T, begin_T, 0), jnp.where(is_one_T, end_T, 0)


def product(
    x_RD: Array, w_GDF: Array, sizes_G: Array, *, transpose: bool = False, walk: Walk = _WALK
) -> Array:
    """As ``hopper.product``, for widths that ``LANES`` divides; rows of no group are not written."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    R, D = x_RD.shape
    F = w_GDF.shape[1 if transpose else 2]
    table = tiles_of(R, sizes_G)
    tiles = len(table[0]), F // LANES

    def kernel(group_ref: Any, block_ref: Any, begin_ref: Any, end_ref: Any, x: Any, w: Any, y: Any) -> None:
        @plgpu.nd_loop((tiles[0] * tiles[1],), collective_axes="sm")
        def one_tile(loop: Any) -> None:
            r, f = plgpu.planar_snake(loop.index[0], tiles, 1, walk.snake)
            group, block, begin, end = group_ref[r], block_ref[r], begin_ref[r], end_ref[r]

            def multiply(sum_ref: Any) -> Array:
                def one_block(_: Any, x_RK: Any, w_block: Any) -> None:
                    plgpu.wgmma(sum_ref, x_RK, transposed(w_block) if transpose else w_block)

                w_shape = (LANES, _INNER) if transpose else (_INNER, LANES)

                @pl.when(end > begin)
                def _() -> None:
                    plgpu.emit_pipeline(
                        one_block,
                        grid=(D // _INNER,),
                        in_specs=[
                            plgpu.BlockSpec((LANES, _INNER), lambda k: (block, k), delay_release=1),
                            plgpu.BlockSpec(
                                w_shape, lambda k: (f, k) if transpose else (k, f), delay_release=1
                            ),
                        ],
                        max_concurrent_steps=walk.stages,
                    )(x, w.at[group])

                return sum_ref[...]

            total = pl.run_scoped(multiply, plgpu.ACC((LANES, LANES)))

            before = block * LANES
            write_rows(total.astype(x_RD.dtype), y, before, f, begin - before, end - begin)

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((R, F), x_RD.dtype),
        grid=(SMS,),
        grid_names=("sm",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    with jax.numpy_dtype_promotion("standard"):
        return run(*table, x_RD, w_GDF)
