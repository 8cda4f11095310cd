"""Tiles on a Hopper GPU (H100, H200): two warpgroups multiply half a tile each, and a third one loads for them.

Each of the two sums its half in its registers, and writes it before it goes on to the next tile.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from dualpipe_jax.parallel.tiles import (
    HALVES,
    LANES,
    ROWS,
    Blocks,
    Slots,
    TileProgram,
    for_each_tile,
    is_edge,
    load_tiles,
    slot_of,
    zero_outside,
)

SMS = 132
"""Multiprocessors of an H100 SXM and of an H200."""

_LOADS = HALVES
"""The warpgroup that loads; those before it multiply."""
_REGISTERS, _REGISTERS_SCALED = (40, 232), (72, 216)
"""The number of registers of a thread that starts copies, which needs few, and of a thread that multiplies, which gets
the rest. Sums of numbers in eight bits need fewer: with these ptxas spills no register for the widths of DeepSeek-V3.
"""


def warpgroups(masks: bool) -> int:
    """See ``Tiles``."""
    del masks  # the warpgroups that multiply also mask
    return HALVES + 1


def slots(blocks: Blocks, masks: bool = False) -> Slots:
    """See ``Tiles``."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    taken = plgpu.Barrier(num_arrivals=HALVES, num_barriers=blocks.number)
    more = (plgpu.Barrier(num_arrivals=HALVES),) if masks else ()
    return Slots.of(blocks, (HALVES, *blocks.right), taken, more)


def compute_tiles(slots: Slots, program: TileProgram) -> None:
    """See ``Tiles``."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    own = lax.axis_index("warpgroup")
    add_up, registers = (_sum, _REGISTERS) if program.scales is None else (_scaled_sums, _REGISTERS_SCALED)

    @pl.when(own == _LOADS)
    def _() -> None:
        plgpu.set_max_registers(registers[0], action="decrease")
        load_tiles(slots, program)

    @pl.when(own < HALVES)
    def _() -> None:
        plgpu.set_max_registers(registers[1], action="increase")

        def make_tile(tile: Any, done: Array, _: Array) -> None:
            sums = add_up(slots, program, tile, done, own)

            def put(ref: Any, column: int) -> None:
                for first, rows in zip(range(0, LANES, LANES // len(sums)), sums, strict=True):
                    columns = rows[:, column : column + ref.shape[1]]
                    ref[first : first + len(rows)] = columns.astype(ref.dtype)

            pl.when(tile.steps > 0)(lambda: program.write(tile, own, put))

        for_each_tile(program, make_tile)
        plgpu.wait_smem_to_gmem(0)


def _sum(slots: Slots, program: TileProgram, tile: Any, done: Array, own: Array) -> list[Array]:
    """Return the sums of half a tile: while the products of one step run, those of the next step are started."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def give_back(step: Array) -> None:
        plgpu.barrier_arrive(slots.taken.at[slot_of(slots, done + step)])

    def add_up(sum_ref: Any) -> Array:
        def one_step(step: Array, _: None) -> None:
            slot = slot_of(slots, done + step)
            plgpu.barrier_wait(slots.arrived.at[slot])
            if program.row_bounds is not None:
                _mask(slots, slot, own, *program.row_bounds(tile, step))
            plgpu.wgmma(sum_ref, *program.operands(slot, slots.right.at[slot, own]))
            plgpu.wgmma_wait(1)  # waits for the product before this one, whose slot is then free
            pl.when(step > 0)(functools.partial(give_back, step - 1))

        lax.fori_loop(0, tile.steps, one_step, None)
        return sum_ref[...]

    made = pl.run_scoped(add_up, plgpu.ACC((LANES, LANES)))
    pl.when(tile.steps > 0)(functools.partial(give_back, tile.steps - 1))
    return [made]


def _scaled_sums(slots: Slots, program: TileProgram, tile: Any, done: Array, own: Array) -> list[Array]:
    """Return the sums of half a tile of numbers in eight bits, in two parts of ``ROWS`` rows.

    The products of each step are summed alone, then scaled and added up. The registers suffice for one part at a time;
    while one part is scaled, the other warpgroup multiplies.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    find_scales, shape = program.scales, (ROWS, LANES)
    assert find_scales is not None
    places = range(0, LANES, ROWS)

    def one_step(step: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        slot = slot_of(slots, done + step)
        scales = find_scales(tile, step, own)  # these loads run while the blocks arrive
        plgpu.barrier_wait(slots.arrived.at[slot])
        left, right = program.operands(slot, slots.right.at[slot, own])

        def more(before: Array, first: int, scales: Array) -> Array:
            def multiply(sum_ref: Any) -> Array:
                plgpu.wgmma(sum_ref, left.at[pl.ds(first, ROWS)], right)
                return sum_ref[...]

            made = pl.run_scoped(multiply, plgpu.ACC(shape))
            own_scales = plgpu.layout_cast(scales, plgpu.Layout.WGMMA.reduce(1))
            return before + made * lax.broadcast_in_dim(own_scales, shape, (0,))

        sums = tuple(more(*given) for given in zip(sums, places, scales, strict=True))
        plgpu.barrier_arrive(slots.taken.at[slot])
        return sums

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    return list(lax.fori_loop(0, tile.steps, one_step, (zeros,) * len(places)))


def _mask(slots: Slots, slot: Array, half: Array, first: Array, past: Array) -> None:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    (masked,) = slots.more

    @pl.when(is_edge(first, past))
    def _() -> None:
        zero_outside(slots.right.at[slot, half], first, past)
        pl.when(half == 0)(functools.partial(zero_outside, slots.left.at[slot], first, past))
        plgpu.commit_smem()
        plgpu.barrier_arrive(masked)  # both halves multiply the same left side
        plgpu.barrier_wait(masked)
