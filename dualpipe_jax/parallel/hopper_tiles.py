"""Tiles on a Hopper GPU (H100, H200): two warpgroups multiply what a third one loads, a half of the tile each.

Each sums its half in its registers, and writes it before it goes on to the next tile.
"""

import functools
from typing import Any

from jax import Array, lax
from jax.experimental import pallas as pl

from dualpipe_jax.parallel.tiles import (
    HALVES,
    LANES,
    Blocks,
    Slots,
    Walked,
    is_edge,
    load_tiles,
    on_tiles,
    slot_of,
    zero_outside,
)

SMS = 132
"""Multiprocessors of an H100 SXM and of an H200."""

_LOADS = HALVES
"""The warpgroup that loads; those before it multiply."""
_TO_LOAD, _TO_MULTIPLY = 40, 232
"""Registers of a thread: one that starts copies needs few, and the others get what it leaves."""


def warpgroups(masks: bool) -> int:
    """See ``Tiles``."""
    del masks  # who multiplies does it
    return HALVES + 1


def slots(blocks: Blocks, masks: bool = False) -> Slots:
    """See ``Tiles``."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    taken = plgpu.Barrier(num_arrivals=HALVES, num_barriers=blocks.number)
    more = (plgpu.Barrier(num_arrivals=HALVES),) if masks else ()
    return Slots.of(blocks, (HALVES, *blocks.right), taken, more)


def walk(slots: Slots, walked: Walked) -> None:
    """See ``Tiles``."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    own = lax.axis_index("warpgroup")

    @pl.when(own == _LOADS)
    def _() -> None:
        plgpu.set_max_registers(_TO_LOAD, action="decrease")
        load_tiles(slots, walked)

    @pl.when(own < HALVES)
    def _() -> None:
        plgpu.set_max_registers(_TO_MULTIPLY, action="increase")

        def make_tile(tile: Any, done: Array, tiles: Array) -> None:
            def give_back(step: Array) -> None:
                plgpu.barrier_arrive(slots.taken.at[slot_of(slots, done + step)])

            def add_up(sum_ref: Any) -> Array:
                def one_step(step: Array, _: None) -> None:
                    slot = slot_of(slots, done + step)
                    plgpu.barrier_wait(slots.arrived.at[slot])
                    if walked.inside is not None:
                        _mask(slots, slot, own, *walked.inside(tile, step))
                    plgpu.wgmma(sum_ref, *walked.operands(slot, slots.right.at[slot, own]))
                    plgpu.wgmma_wait(1)  # for the product before this one: so its slot is free
                    pl.when(step > 0)(functools.partial(give_back, step - 1))

                lax.fori_loop(0, tile.steps, one_step, None)
                return sum_ref[...]

            made = pl.run_scoped(add_up, plgpu.ACC((LANES, LANES)))

            @pl.when(tile.steps > 0)
            def _() -> None:
                give_back(tile.steps - 1)
                walked.write(tile, own, lambda column, columns: made[:, column : column + columns])

        on_tiles(walked, make_tile)
        plgpu.wait_smem_to_gmem(0)


def _mask(slots: Slots, slot: Array, half: Array, first: Array, past: Array) -> None:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    (masked,) = slots.more

    @pl.when(is_edge(first, past))
    def _() -> None:
        zero_outside(slots.right.at[slot, half], first, past)
        pl.when(half == 0)(functools.partial(zero_outside, slots.left.at[slot], first, past))
        plgpu.commit_smem()
        plgpu.barrier_arrive(masked)  # the other half multiplies the left side, too
        plgpu.barrier_wait(masked)
