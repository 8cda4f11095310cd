"""Tiles on a Blackwell GPU (B200, GB200): one warpgroup multiplies what another loads, a third writes the results.

The tensor cores sum in a memory of their own, which has room for two tiles: while one is written the next is computed.
Both operands come from shared memory, so rows that do not belong to the tile are set to zero there, by a fourth
warpgroup, before the product begins.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from dualpipe_jax.parallel.tiles import (
    HALVES,
    LANES,
    Blocks,
    Slots,
    TileProgram,
    for_each_tile,
    is_edge,
    load_tiles,
    slot_of,
    zero_outside,
)

SMS = 148
"""Multiprocessors of a B200."""

_WRITES, _LOADS, _MULTIPLIES, _MASKS = range(4)
_SUMS = 2
"""The number of tiles whose sums fit into the tensor cores' memory."""


def warpgroups(masks: bool) -> int:
    """See ``Tiles``."""
    return 4 if masks else 3


def slots(blocks: Blocks, masks: bool = False) -> Slots:
    """See ``Tiles``. ``more`` holds the sums; for each sum a barrier passed when it is computed and one passed when it
    is written; with ``masks``, for each slot a barrier passed when its blocks are masked."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def by_tensor_cores(number: int) -> Any:
        return plgpu.Barrier(num_arrivals=1, num_barriers=number, orders_tensor_core=True)

    sums = plgpu.TMEM((LANES, _SUMS * HALVES * LANES), jnp.float32)
    masked = (plgpu.Barrier(num_arrivals=1, num_barriers=blocks.number),) if masks else ()
    more = sums, by_tensor_cores(_SUMS), by_tensor_cores(_SUMS), *masked
    both = tuple(HALVES * size if size == LANES else size for size in blocks.right)
    return Slots.of(blocks, both, by_tensor_cores(blocks.number), more)


def compute_tiles(slots: Slots, program: TileProgram) -> None:
    """See ``Tiles``."""
    own = lax.axis_index("warpgroup")
    parts = {_WRITES: _write, _LOADS: load_tiles, _MULTIPLIES: _multiply}
    if program.row_bounds is not None:
        parts[_MASKS] = _mask
    for number, part in parts.items():
        pl.when(own == number)(functools.partial(part, slots, program))


def _sum_of(tiles: Array) -> Array:
    """Return the index of a tile's sum, given the number of tiles before the tile."""
    return lax.rem(tiles, jnp.int32(_SUMS))


def _columns(slots: Slots, tiles: Array, column: int, columns: int) -> Any:
    return slots.more[0].at[:, pl.ds(_sum_of(tiles) * HALVES * LANES + column, columns)]


def _mask(slots: Slots, program: TileProgram) -> None:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    row_bounds, masked = program.row_bounds, slots.more[3]
    assert row_bounds is not None

    def mask_tile(tile: Any, done: Array, _: Array) -> None:
        def one_step(step: Array, carry: None) -> None:
            slot = slot_of(slots, done + step)
            plgpu.barrier_wait(slots.arrived.at[slot])
            first, past = row_bounds(tile, step)

            @pl.when(is_edge(first, past))
            def _() -> None:
                for block in (slots.left.at[slot], slots.right.at[slot]):
                    zero_outside(block, first, past)
                plgpu.commit_smem()

            plgpu.barrier_arrive(masked.at[slot])

        lax.fori_loop(0, tile.steps, one_step, None)

    for_each_tile(program, mask_tile)


def _multiply(slots: Slots, program: TileProgram) -> None:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    _, made, written, *masked = slots.more
    (ready,) = masked or [slots.arrived]

    def multiply_tile(tile: Any, done: Array, tiles: Array) -> None:
        def one_step(step: Array, carry: None) -> None:
            slot = slot_of(slots, done + step)
            plgpu.barrier_wait(ready.at[slot])
            operands = program.operands(slot, slots.right.at[slot])
            plgpu.tcgen05_mma(_columns(slots, tiles, 0, HALVES * LANES), *operands, accumulate=step > 0)
            plgpu.tcgen05_commit_arrive(slots.taken.at[slot])

        @pl.when(tile.steps > 0)
        def _() -> None:
            before = written.at[_sum_of(tiles)]
            pl.when(tiles >= _SUMS)(functools.partial(plgpu.barrier_wait, before))
            lax.fori_loop(0, tile.steps, one_step, None)
            plgpu.tcgen05_commit_arrive(made.at[_sum_of(tiles)])

    for_each_tile(program, multiply_tile)


def _write(slots: Slots, program: TileProgram) -> None:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    _, made, written, *_ = slots.more

    def write_tile(tile: Any, done: Array, tiles: Array) -> None:
        def write_half(half: int) -> None:
            def put(ref: Any, column: int) -> None:
                columns = _columns(slots, tiles, half * LANES + column, ref.shape[1])
                ref[...] = plgpu.async_load_tmem(columns, layout=plgpu.Layout.TCGEN05).astype(ref.dtype)

            program.write(tile, half, put)

        @pl.when(tile.steps > 0)
        def _() -> None:
            plgpu.barrier_wait(made.at[_sum_of(tiles)])
            for half in range(HALVES):
                write_half(half)
            plgpu.wait_load_tmem()
            plgpu.barrier_arrive(written.at[_sum_of(tiles)])

    for_each_tile(program, write_tile)
    plgpu.wait_smem_to_gmem(0)
