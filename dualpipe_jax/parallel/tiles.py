"""Tiles of products on a GPU: how the kernels of ``mosaic`` describe their tiles, and the code that all GPUs share.

A tile has ``LANES`` rows and twice as many columns. One warpgroup loads the blocks that are multiplied for the tile. It
runs ahead as far as there are slots, into the next tile while a result is written, so no tile waits for its first
blocks. The two halves share the blocks of the left side, so a tile loads a quarter less than two tiles of half its
width. How blocks are multiplied differs by GPU: see ``hopper_tiles`` and ``blackwell_tiles``.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

LANES = 128
"""The number of rows, and of columns, of half a tile."""
ROWS = 64
"""The number of rows that a gradient's kernel multiplies at once."""
BYTES = 128
"""The number of bytes of a row that a product's kernel multiplies at once."""
HALVES = 2
"""The number of parts into which a tile's columns are divided."""


class Blocks(NamedTuple):
    """The blocks that a kernel multiplies at once, and the pieces of a result that it writes at once.

    Attributes:
      number: the number of blocks of each side that are loaded at once.
      dtype: the dtype of both sides.
      left: the shape of a block of the left side.
      right: the shape of a block of the right side, for one half.
      result: the shape and dtype of a piece of a result.
    """

    number: int
    dtype: Any
    left: tuple[int, int]
    right: tuple[int, int]
    result: jax.ShapeDtypeStruct


class Slots(NamedTuple):
    """A kernel's shared memory and barriers; where the kernel is declared, their types.

    Attributes:
      left: blocks of the left side, [slots, ...].
      right: blocks of the right side, [slots, HALVES, ...], or [slots, ...] with both halves in one block.
      result: a piece of each half's result, which is being written to memory, [HALVES, ...].
      arrived: a barrier for each slot, passed when its copies have arrived.
      taken: a barrier for each slot, passed when its blocks have been multiplied.
      more: further memory and barriers that the GPU's ``compute_tiles`` needs.
    """

    left: Any
    right: Any
    result: Any
    arrived: Any
    taken: Any
    more: tuple[Any, ...]

    @classmethod
    def of(cls, blocks: Blocks, right: tuple[int, ...], taken: Any, more: tuple[Any, ...]) -> "Slots":
        """Return the types for a kernel's blocks.

        ``right`` is the shape of a slot's blocks of the right side; ``taken`` and ``more`` are the GPU's own types.
        """
        from jax.experimental.pallas import mosaic_gpu as plgpu

        num_copies = 1 if len(right) == 2 else HALVES
        return cls(
            plgpu.SMEM((blocks.number, *blocks.left), blocks.dtype),
            plgpu.SMEM((blocks.number, *right), blocks.dtype),
            plgpu.SMEM((HALVES, *blocks.result.shape), blocks.result.dtype),
            plgpu.Barrier(num_arrivals=1 + num_copies, num_barriers=blocks.number),
            taken,
            more,
        )

    def right_blocks(self, slot: Array) -> list[tuple[int, int, Any]]:
        """List the blocks of the right side in a slot: each one's first column in the tile, its columns, its memory."""
        if len(self.right.shape) == 3:
            return [(0, HALVES * LANES, self.right.at[slot])]
        return [(half * LANES, LANES, self.right.at[slot, half]) for half in range(HALVES)]


class TileProgram(NamedTuple):
    """A kernel's description of its tiles.

    Attributes:
      num_tiles: the number of tiles, for all multiprocessors together.
      find: returns a tile by its index. The tile's ``steps``, int32, is the number of blocks that are multiplied for
        it, 0 if the tile is skipped.
      load: starts the copies of a tile's step into a slot.
      operands: takes a slot and the slot's block of the right side; returns the operands as they are multiplied, the
        left side [LANES, numbers] and the right side [numbers, columns].
      write: starts the copies of a tile's half to the place of its result. Its last argument is a function that writes
        columns of that half, from a given column on, into a block of shared memory, [LANES, columns], in the block's
        dtype.
      row_bounds: for a kernel that sums over rows: returns the first of a step's rows that belongs to the tile, and the
        row past the last; None for other kernels.
      scales: for a kernel of numbers in eight bits: returns the factors of a step's products for a tile's half, one
        float32 [ROWS] for each ``ROWS`` of its rows; None for other kernels.
    """

    num_tiles: int
    find: Callable[[Array], Any]
    load: Callable[[Any, Array, Array], None]
    operands: Callable[[Array, Any], tuple[Any, Any]]
    write: Callable[[Any, Any, Callable[[Any, int], None]], None]
    row_bounds: Callable[[Any, Array], tuple[Array, Array]] | None = None
    scales: Callable[[Any, Array, Array], list[Array]] | None = None


class Tiles(Protocol):
    """How a GPU computes tiles: the modules ``hopper_tiles`` and ``blackwell_tiles``."""

    @property
    def SMS(self) -> int:
        """The number of multiprocessors; each computes its share of the tiles."""

    def warpgroups(self, masks: bool) -> int:
        """Return the number of warpgroups per multiprocessor that ``compute_tiles`` needs.

        ``masks`` says whether ``row_bounds`` is given.
        """

    def slots(self, blocks: Blocks, masks: bool = False) -> Slots:
        """Return the types of the memory and barriers that ``compute_tiles`` needs, see ``Slots.of``."""

    def compute_tiles(self, slots: Slots, program: TileProgram) -> None:
        """In a kernel that ``run`` runs with slots: compute all tiles, each on one multiprocessor."""


def for_each_tile(program: TileProgram, one: Callable[[Any, Array, Array], None]) -> Array:
    """Call a function on each tile of this multiprocessor, with the numbers of steps and of tiles before it.

    Tiles without steps do not count as tiles.

    Returns:
      The number of steps of all tiles, int32.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    none = jnp.int32(0)

    @plgpu.nd_loop((program.num_tiles,), collective_axes="sm", init_carry=(none, none))
    def done(loop: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        tile = program.find(loop.index[0])
        steps, tiles = carry
        one(tile, steps, tiles)
        return steps + tile.steps, tiles + (tile.steps > 0).astype(jnp.int32)

    return done[0]


def slot_of(slots: Slots, step: Array) -> Array:
    """Return the slot of a step; steps are counted over all tiles of a multiprocessor."""
    return lax.rem(step, jnp.int32(slots.left.shape[0]))


def load_tiles(slots: Slots, program: TileProgram) -> None:
    """Load the blocks of all tiles: the work of the warpgroup that loads."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    number = slots.left.shape[0]

    def load_tile(tile: Any, done: Array, _: Array) -> None:
        def one_step(step: Array, _: None) -> None:
            slot = slot_of(slots, done + step)
            pl.when(done + step >= number)(functools.partial(plgpu.barrier_wait, slots.taken.at[slot]))
            program.load(tile, step, slot)

        lax.fori_loop(0, tile.steps, one_step, None)

    done = for_each_tile(program, load_tile)
    for slot in range(number):  # a kernel must not end before all that it has loaded is multiplied
        pl.when(slot < done)(functools.partial(plgpu.barrier_wait, slots.taken.at[slot]))


def is_edge(first: Array, past: Array) -> Array:
    """Return whether a block of ``ROWS`` rows has rows before ``first`` or from ``past`` on."""
    return (first > 0) | (past < ROWS)


def zero_outside(ref: Any, first: Array, past: Array) -> None:
    """Put zeros into the rows before ``first`` and from ``past`` on of a block of ``ROWS`` rows in shared memory.

    Both sides of a product need it: rows past the groups may hold anything, and 0 * nan is nan.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    row_KL = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, ref.shape, 0), plgpu.Layout.WGMMA)
    ref[...] = jnp.where((row_KL >= first) & (row_KL < past), ref[...], jnp.zeros_like(ref[...]))


def run(
    kernel: Callable[..., None],
    made: Any,
    *arrays: Array,
    sms: int,
    scratch: Sequence[Any] = (),
    warpgroups: int = 1,
) -> Any:
    """Run a kernel on all multiprocessors; it divides its tiles among them over the axis "sm".

    Args:
      kernel: a function of references to the arrays, to the result, and to the scratch; its warpgroups are the axis
        "warpgroup".
      made: the shape and dtype of the result.
      arrays: the operands.
      sms: the number of multiprocessors.
      scratch: the types of the kernel's shared memory and barriers, also as ``Slots``.
      warpgroups: the number of warpgroups of a multiprocessor.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    threads: dict[str, Any] = (
        {} if warpgroups == 1 else {"num_threads": warpgroups, "thread_name": "warpgroup"}
    )
    on_all = plgpu.kernel(
        kernel,
        out_type=made,
        scratch_types=scratch,
        grid=(sms,),
        grid_names=("sm",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **threads,
    )
    with jax.numpy_dtype_promotion("standard"):
        return on_all(*arrays)


def transposed(ref: Any) -> Any:
    """Return a transposed view of a block in shared memory; jax 0.11 has a method in place of a function."""
    if hasattr(ref, "transpose"):
        return ref.transpose((1, 0))
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.transpose_ref(ref, (1, 0))


def loaded(ref: Any) -> Array:
    """Load a piece of global memory into registers; jax 0.10 needs an index, which newer versions do not take."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    place = inspect.signature(plgpu.load).parameters.get("idx")
    index = [(...,)] if place is not None and place.default is inspect.Parameter.empty else []
    return plgpu.load(ref, *index, optimized=False)
