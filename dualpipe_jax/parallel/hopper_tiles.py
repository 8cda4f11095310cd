"""Tiles of products on a Hopper GPU: two warpgroups multiply what a third one loads.

The third runs ahead as far as there are slots, into the next tile while a result is written, so no tile waits for its
first blocks. The two share the blocks of the left side, and each has its own of the right side and half of the tile's
columns: so a tile loads a quarter less than two narrow ones do.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

LANES = 128
"""Half of a tile has so many rows and columns."""
ROWS = 64
"""Rows that a gradient's kernel multiplies at once, and numbers of a row that a product's does: 128 bytes."""
HALVES = 2
"""Warpgroups that multiply; the one with this number loads."""
SMS = 132
"""Multiprocessors of an H100 SXM and of an H200, each of which walks its share of the tiles."""

_TO_LOAD, _TO_MULTIPLY = 40, 232
"""Registers of a thread: one that starts copies needs few, and the others get what it leaves."""


class Slots(NamedTuple):
    """A kernel's shared memory and barriers; where it is declared, their types.

    Attributes:
      left: blocks of the left side, [slots, ...].
      right: blocks of the right side, [slots, HALVES, ...].
      result: a piece of each half's result, on its way to memory, [HALVES, ...].
      arrived: a barrier for each slot, at which its copies arrive, one to ``left`` and one for each half.
      taken: a barrier for each slot, at which both halves arrive when they have multiplied what is in it.
      more: what else a kernel has.
    """

    left: Any
    right: Any
    result: Any
    arrived: Any
    taken: Any
    more: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        number: int,
        dtype: Any,
        left: tuple[int, int],
        right: tuple[int, int],
        result: jax.ShapeDtypeStruct,
        *more: Any,
    ) -> "Slots":
        """The types for so many slots, by the shapes of blocks, and the shape and dtype of a piece of a result."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return cls(
            plgpu.SMEM((number, *left), dtype),
            plgpu.SMEM((number, HALVES, *right), dtype),
            plgpu.SMEM((HALVES, *result.shape), result.dtype),
            plgpu.Barrier(num_arrivals=1 + HALVES, num_barriers=number),
            plgpu.Barrier(num_arrivals=HALVES, num_barriers=number),
            more,
        )


def walk_tiles(
    slots: Slots,
    num_tiles: int,
    find: Callable[[Array], Any],
    load: Callable[[Any, Array, Array], None],
    multiply: Callable[[Any, Array, Array, Array, Any], None],
    write: Callable[[Any, Array, Array], None],
) -> None:
    """In a kernel that ``run`` runs with slots: make all tiles, each on one multiprocessor.

    Args:
      slots: the kernel's.
      num_tiles: of all multiprocessors.
      find: gives a tile by its number; its ``steps``, int32, are how many blocks are multiplied for it, 0 if it is
        passed over.
      load: starts the copies of a tile's step into a slot.
      multiply: multiplies what is in a slot, of a tile's step and for one half, and adds it to a reference.
      write: starts the copies of a tile's half, [LANES, LANES] in float32, from where they are on their way.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    number = slots.left.shape[0]
    own = lax.axis_index("warpgroup")

    def slot_of(step: Array) -> Array:
        return lax.rem(step, jnp.int32(number))

    def on_tiles(one: Callable[[Any, Array], None]) -> Array:
        """How many steps all tiles had; each is given those before it."""

        @plgpu.nd_loop((num_tiles,), collective_axes="sm", init_carry=jnp.int32(0))
        def done(loop: Any, carry: Array) -> Array:
            tile = find(loop.index[0])
            one(tile, carry)
            return carry + tile.steps

        return done

    @pl.when(own == HALVES)
    def _() -> None:
        plgpu.set_max_registers(_TO_LOAD, action="decrease")

        def load_tile(tile: Any, done: Array) -> None:
            def one_step(step: Array, _: None) -> None:
                slot = slot_of(done + step)
                pl.when(done + step >= number)(functools.partial(plgpu.barrier_wait, slots.taken.at[slot]))
                load(tile, step, slot)

            lax.fori_loop(0, tile.steps, one_step, None)

        done = on_tiles(load_tile)
        for slot in range(number):  # no kernel ends before what it has loaded is taken
            pl.when(slot < done)(functools.partial(plgpu.barrier_wait, slots.taken.at[slot]))

    @pl.when(own < HALVES)
    def _() -> None:
        plgpu.set_max_registers(_TO_MULTIPLY, action="increase")

        def make_tile(tile: Any, done: Array) -> None:
            def give_back(step: Array) -> None:
                plgpu.barrier_arrive(slots.taken.at[slot_of(done + step)])

            def add_up(sum_ref: Any) -> Array:
                def one_step(step: Array, _: None) -> None:
                    slot = slot_of(done + step)
                    plgpu.barrier_wait(slots.arrived.at[slot])
                    multiply(tile, step, slot, own, sum_ref)
                    plgpu.wgmma_wait(1)  # for the product before this one: so its slot is free
                    pl.when(step > 0)(functools.partial(give_back, step - 1))

                lax.fori_loop(0, tile.steps, one_step, None)
                return sum_ref[...]

            made = pl.run_scoped(add_up, plgpu.ACC((LANES, LANES)))

            @pl.when(tile.steps > 0)
            def _() -> None:
                give_back(tile.steps - 1)
                write(tile, own, made)

        on_tiles(make_tile)
        plgpu.wait_smem_to_gmem(0)


def run(
    kernel: Callable[..., None], made: Any, *arrays: Array, scratch: Sequence[Any] = (), warpgroups: int = 1
) -> Any:
    """Run a kernel on all multiprocessors, over whose axis "sm" it shares out its tiles.

    Args:
      kernel: of references to the arrays, to what it makes, and to its scratch; its warpgroups are axis "warpgroup".
      made: the type of its result.
      arrays: its operands.
      scratch: what it has of shared memory and barriers, types or ``Slots``.
      warpgroups: of a multiprocessor.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    threads: dict[str, Any] = (
        {} if warpgroups == 1 else {"num_threads": warpgroups, "thread_name": "warpgroup"}
    )
    on_all = plgpu.kernel(
        kernel,
        out_type=made,
        scratch_types=scratch,
        grid=(SMS,),
        grid_names=("sm",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **threads,
    )
    with jax.numpy_dtype_promotion("standard"):
        return on_all(*arrays)


def transposed(ref: Any) -> Any:
    """A view of a block in shared memory, by the method that jax 0.11 has in place of a function."""
    if hasattr(ref, "transpose"):
        return ref.transpose((1, 0))
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.transpose_ref(ref, (1, 0))
