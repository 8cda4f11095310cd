"""Tiles of products on a GPU: what the kernels of ``mosaic`` say of theirs, and what all GPUs that make them share.

A tile has ``LANES`` rows and twice as many columns. One warpgroup loads the blocks that are multiplied for it, and runs
ahead as far as there are slots, into the next tile while a result is written, so no tile waits for its first blocks.
The two halves share the blocks of the left side: so a tile loads a quarter less than two narrow ones do. How blocks are
multiplied differs by GPU: see ``hopper_tiles`` and ``blackwell_tiles``.
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
"""Half of a tile has so many rows and columns."""
ROWS = 64
"""Rows that a gradient's kernel multiplies at once."""
BYTES = 128
"""Of a row, what a product's kernel multiplies at once."""
HALVES = 2
"""Halves of a tile's columns."""


class Blocks(NamedTuple):
    """What a kernel multiplies at once, and hands on to memory at once.

    Attributes:
      number: how many are on their way from memory at once.
      dtype: of both sides.
      left: the shape of a block of the left side.
      right: the shape of a block of the right side, of one half.
      result: the shape and dtype of a piece of a result.
    """

    number: int
    dtype: Any
    left: tuple[int, int]
    right: tuple[int, int]
    result: jax.ShapeDtypeStruct


class Slots(NamedTuple):
    """A kernel's shared memory and barriers; where it is declared, their types.

    Attributes:
      left: blocks of the left side, [slots, ...].
      right: blocks of the right side, [slots, HALVES, ...] or those of both halves in one, [slots, ...].
      result: a piece of each half's result, on its way to memory, [HALVES, ...].
      arrived: a barrier for each slot, at which its copies arrive.
      taken: a barrier for each slot, passed when what is in it is multiplied.
      more: what the GPU's ``walk`` has besides.
    """

    left: Any
    right: Any
    result: Any
    arrived: Any
    taken: Any
    more: tuple[Any, ...]

    @classmethod
    def of(cls, blocks: Blocks, right: tuple[int, ...], taken: Any, more: tuple[Any, ...]) -> "Slots":
        """The types for a kernel's blocks, by the shape of what a slot has of the right side, and the GPU's own."""
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
        """The blocks of the right side: the first of the tile's columns, their number, and where they lie."""
        if len(self.right.shape) == 3:
            return [(0, HALVES * LANES, self.right.at[slot])]
        return [(half * LANES, LANES, self.right.at[slot, half]) for half in range(HALVES)]


class Walked(NamedTuple):
    """What a kernel says of its tiles.

    Attributes:
      number: how many tiles there are, for all multiprocessors together.
      find: gives a tile by its number; its ``steps``, int32, are how many blocks are multiplied for it, 0 if it is
        passed over.
      load: starts the copies of a tile's step into a slot.
      operands: the left side that lies in a slot, [LANES, numbers], and a block of the right side as it is multiplied,
        [numbers, columns].
      write: starts the copies of a tile's half to where its result belongs. It is given a function that puts columns of
        that half, from one column on, into a block of shared memory, [LANES, columns], in its dtype.
      inside: of a kernel that sums over rows: the first of a step's rows that is the tile's, and the one past its last.
      scales: of a kernel of numbers in eight bits: what a step's products of a tile's half are multiplied by, float32
        [ROWS] for each ``ROWS`` of its rows.
    """

    number: int
    find: Callable[[Array], Any]
    load: Callable[[Any, Array, Array], None]
    operands: Callable[[Array, Any], tuple[Any, Any]]
    write: Callable[[Any, Any, Callable[[Any, int], None]], None]
    inside: Callable[[Any, Array], tuple[Array, Array]] | None = None
    scales: Callable[[Any, Array, Array], list[Array]] | None = None


class Tiles(Protocol):
    """How a GPU makes tiles: ``hopper_tiles`` and ``blackwell_tiles``."""

    @property
    def SMS(self) -> int:
        """Multiprocessors, each of which walks its share of the tiles."""

    def warpgroups(self, masks: bool) -> int:
        """Warpgroups of a multiprocessor that ``walk`` shares the work out to; ``masks``: there is an ``inside``."""

    def slots(self, blocks: Blocks, masks: bool = False) -> Slots:
        """The types of what ``walk`` needs, see ``Slots.of``."""

    def walk(self, slots: Slots, walked: Walked) -> None:
        """In a kernel that ``run`` runs with slots: make all tiles, each on one multiprocessor."""


def on_tiles(walked: Walked, one: Callable[[Any, Array, Array], None]) -> Array:
    """Call a function on each tile of this multiprocessor, with the steps and the tiles that came before it.

    Returns:
      how many steps all had; a tile without steps is not counted.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    none = jnp.int32(0)

    @plgpu.nd_loop((walked.number,), collective_axes="sm", init_carry=(none, none))
    def done(loop: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        tile = walked.find(loop.index[0])
        steps, tiles = carry
        one(tile, steps, tiles)
        return steps + tile.steps, tiles + (tile.steps > 0).astype(jnp.int32)

    return done[0]


def slot_of(slots: Slots, step: Array) -> Array:
    """The slot of a step, which is counted over all tiles."""
    return lax.rem(step, jnp.int32(slots.left.shape[0]))


def load_tiles(slots: Slots, walked: Walked) -> None:
    """The part of the warpgroup that loads."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    number = slots.left.shape[0]

    def load_tile(tile: Any, done: Array, _: Array) -> None:
        def one_step(step: Array, _: None) -> None:
            slot = slot_of(slots, done + step)
            pl.when(done + step >= number)(functools.partial(plgpu.barrier_wait, slots.taken.at[slot]))
            walked.load(tile, step, slot)

        lax.fori_loop(0, tile.steps, one_step, None)

    done = on_tiles(walked, load_tile)
    for slot in range(number):  # no kernel ends before what it has loaded is taken
        pl.when(slot < done)(functools.partial(plgpu.barrier_wait, slots.taken.at[slot]))


def is_edge(first: Array, past: Array) -> Array:
    """Whether some of a block's rows are not between these."""
    return (first > 0) | (past < ROWS)


def zero_outside(ref: Any, first: Array, past: Array) -> None:
    """In a block of ``ROWS`` rows in shared memory, put zeros where rows are not between these.

    Both sides of a product need it: what lies past the groups may be anything, and 0 * nan is nan.
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
    """Run a kernel on all multiprocessors, over whose axis "sm" it shares out its tiles.

    Args:
      kernel: of references to the arrays, to what it makes, and to its scratch; its warpgroups are axis "warpgroup".
      made: the type of its result.
      arrays: its operands.
      sms: the number of multiprocessors.
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
        grid=(sms,),
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


def loaded(ref: Any) -> Array:
    """What lies in a piece of global memory, in registers; jax 0.10 asks for an index, which newer ones do not take."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    place = inspect.signature(plgpu.load).parameters.get("idx")
    index = [(...,)] if place is not None and place.default is inspect.Parameter.empty else []
    return plgpu.load(ref, *index, optimized=False)
