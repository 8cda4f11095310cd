"""Grouped matmul: rows in groups of unequal sizes, each group with its own matrix.

``lax.ragged_dot`` computes the same, but only a TPU's compiler has a program for it: on CPU and GPU XLA expands
it into one masked matmul per group, G times the work. Here the CPU walks blocks of rows instead: the number of
blocks follows the group sizes at run time, so the work is that of the rows present, plus at most one part-filled
block per group. The GPU kernels in ``mosaic`` and ``triton`` do the same.

Shape suffixes: R rows, G groups, D in, F out; B rows of a block.
"""

import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from dualpipe_jax.arguments import typechecked
from dualpipe_jax.gradient_sum import gradient_sum
from dualpipe_jax.made_once import made_once
from dualpipe_jax.parallel import mosaic, triton
from dualpipe_jax.parallel.group_rows import nonempty_groups
from dualpipe_jax.varying import vary, vary_alike, varying_axes

Kernel = Literal["plain", "ragged", "megablox", "hopper", "blackwell", "triton"]

KERNELS_BY_DEVICE: Mapping[str, tuple[Kernel, Kernel]] = {
    "cpu": ("plain", "plain"),
    "tpu": ("ragged", "megablox"),
    "hopper": ("hopper", "hopper"),
    "blackwell": ("blackwell", "blackwell"),
    "gpu": ("triton", "triton"),
    "old_gpu": ("ragged", "ragged"),
}
"""For each kind of device, the kernel of products and the kernel of the matrices' gradients.

"hopper" and "blackwell" are for types of 16 bits, "gpu" is for all other cases from the A100 on. "old_gpu" is for GPUs
before the A100, which Triton does not support, and for versions of JAX that have no Triton."""


def gpu_kind(capability: tuple[int, ...], dtype: Any) -> str:
    """Return the row of ``KERNELS_BY_DEVICE`` for a GPU and rows of ``dtype``.

    ``capability`` is the GPU's CUDA compute capability, like (9, 0).
    """
    if capability[0] in _MOSAIC and mosaic.supports_dtype(dtype):
        return _MOSAIC[capability[0]]
    return "gpu" if capability >= (8, 0) and triton.is_available() else "old_gpu"


_MOSAIC = {9: "hopper", 10: "blackwell"}
"""The row of ``KERNELS_BY_DEVICE`` for each GPU that ``mosaic`` serves, by the first number of its compute
capability."""
_ROWS = 128
"""Megablox takes only a number of rows that is a multiple of this."""


def multiply_groups(
    rows: Array,
    w_GDF: Array,
    group_sizes_G: Array | None,
    *,
    kernel: Kernel = "plain",
    gradient: Kernel | None = None,
    interpret: bool = False,
) -> Array:
    """Multiply each group of rows by its own matrix.

    Args:
      rows: without group sizes, the rows of equal groups, [G, ..., D]; with group sizes, [R, D].
      w_GDF: one matrix per group, of the rows' dtype.
      group_sizes_G: see ``grouped_matmul``.
      kernel: for unequal groups see ``grouped_matmul``. Equal groups are one batched matmul: with "plain" all dims of
        a group's rows are merged into one, which is faster on CPU; otherwise the dims stay apart, since accelerators
        would copy the rows to merge them.
      gradient, interpret: see ``grouped_matmul``.

    Returns:
      [G, ..., F] or [R, F].

    """
    if group_sizes_G is not None:
        return grouped_matmul(
            rows, w_GDF, group_sizes_G, kernel=kernel, gradient=gradient, interpret=interpret
        )
    if kernel != "plain":
        return jnp.einsum("g...d,gdf->g...f", rows, w_GDF)
    merged_GMD = rows.reshape(rows.shape[0], -1, rows.shape[-1])
    return jnp.einsum("gmd,gdf->gmf", merged_GMD, w_GDF).reshape(*rows.shape[:-1], -1)


@typechecked
def grouped_matmul(
    x_RD: Array,
    w_GDF: Array,
    group_sizes_G: Array,
    *,
    block: int | None = None,
    kernel: Kernel = "plain",
    gradient: Kernel | None = None,
    interpret: bool = False,
) -> Array:
    """Multiply each group of consecutive rows by its own matrix.

    Args:
      x_RD: the rows of group 0, then of group 1, ...; rows past the last group are ignored.
      w_GDF: one matrix per group, of x's dtype.
      group_sizes_G: int32, rows of each group; the sum must not exceed R.
      block: the number of rows that the CPU multiplies at once. By default a power of two between 8 and 64, near a
        quarter of the mean group size if all R rows were filled. Below 8 rows per group on average, products take the
        rows one by one.
      kernel: "plain" walks blocks on CPU and is ``lax.ragged_dot`` elsewhere; "ragged" is ``lax.ragged_dot`` on CPU,
        too; "megablox" is Pallas' kernel for TPU, for R that 128 divides; "hopper" is the kernel of ``mosaic`` for H100
        and H200, "blackwell" its kernel for B200 and GB200, both for 16 bits; "triton" is the kernel of ``triton`` for
        any GPU from the A100 on. ``KERNELS_BY_DEVICE`` has the best kernels for each device.
      gradient: the kernel of the matrices' gradients; None means the same as ``kernel``. Where the given kernel does
        not take the rows, "ragged" is used.
      interpret: for tests on a CPU: run Pallas' kernels for TPU and Triton in interpret mode, and compute in plain JAX
        what the kernels for Hopper and Blackwell compute.

    Returns:
      [R, F] of x's dtype; zeros past the last group. The gradients are exact, accumulated in float32.

    Raises:
      TypeError: the group sizes are not integers, rows and matrices differ in dtype, or "hopper" or "blackwell" is
        given a dtype that does not have 16 bits.
      ValueError: the shapes do not fit together, ``block`` is below 1, megablox does not take this number of rows,
        there is no kernel of that name, or this version of JAX has no Triton.
    """
    gradient = kernel if gradient is None else gradient
    if not jnp.issubdtype(group_sizes_G.dtype, jnp.integer):
        raise TypeError(f"grouped_matmul: group_sizes_G must be integers, got {group_sizes_G.dtype}.")
    if x_RD.dtype != w_GDF.dtype:
        raise TypeError(f"grouped_matmul: x_RD is {x_RD.dtype} and w_GDF {w_GDF.dtype}; they must be equal.")
    R, G = len(x_RD), len(group_sizes_G)
    # A single row is a vector: its product takes an eighth of the time of eight rows, which pack the matrix first.
    one_by_one = block is None and R < 8 * G
    if block is None:
        block = _block_of(R, G)
    if block < 1:
        raise ValueError(f"grouped_matmul: block must be at least 1, got {block}.")
    if kernel == "megablox" and R % _ROWS:
        raise ValueError(
            f"grouped_matmul: megablox takes multiples of {_ROWS} rows, not {R}; try {-(-R // _ROWS) * _ROWS}."
        )
    if kernel in mosaic.TILES and not mosaic.supports_dtype(x_RD.dtype):
        raise TypeError(
            f"grouped_matmul: kernel {kernel!r} takes bfloat16 and float16, not {x_RD.dtype}; convert, or use 'ragged'."
        )
    if kernel == "triton" and not triton.is_available():
        raise ValueError(
            f"grouped_matmul: kernel 'triton' is Pallas' for Triton, which jax {jax.__version__} has no more; use "
            "'ragged'"
        )
    settings = _Settings(kernel, gradient, min(1 if one_by_one else block, R), min(block, R), interpret)
    x_RD, w_GDF, sizes_G = vary_alike((x_RD, w_GDF, group_sizes_G.astype(jnp.int32)))
    return _grouped(settings, x_RD, w_GDF, transposed_for_gradient(w_GDF, kernel), sizes_G)


def transposed_for_gradient(w_GDF: Array, kernel: Kernel) -> Array | None:
    """Return the matrices transposed, [G, F, D], for the gradients of rows; None if the kernel reads [G, D, F].

    A TPU's kernel of ``lax.ragged_dot`` takes one order only: without this copy, XLA makes one in every backward.
    """
    return made_once(w_GDF.swapaxes(1, 2)) if kernel == "ragged" else None


def _block_of(num_rows: int, num_groups: int) -> int:
    """Return a power of two between 8 and 64, near a quarter of the mean group size if all rows were filled."""
    block = 8
    while block < 64 and 4 * 2 * block <= num_rows // max(num_groups, 1):
        block *= 2
    return block


class _Settings(NamedTuple):
    """The settings of one grouped matmul.

    Attributes:
      product: the kernel of products.
      gradient: the kernel of the matrices' gradients.
      product_block: the number of rows that the CPU multiplies at once in a product.
      gradient_block: the number of rows that the CPU multiplies at once in a gradient of the matrices.
      interpret: see ``grouped_matmul``.
    """

    product: Kernel
    gradient: Kernel
    product_block: int
    gradient_block: int
    interpret: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(settings: _Settings, x_RD: Array, w_GDF: Array, w_GFD: Array | None, sizes_G: Array) -> Array:
    del w_GFD  # used in the backward only
    return _multiply(settings, x_RD, w_GDF, sizes_G)


def _grouped_fwd(settings: _Settings, x_RD: Array, w_GDF: Array, w_GFD: Array | None, sizes_G: Array):
    kept = (w_GDF, None) if w_GFD is None else (None, w_GFD)
    return _grouped(settings, x_RD, w_GDF, w_GFD, sizes_G), (x_RD, *kept, sizes_G)


def _grouped_bwd(settings: _Settings, saved: tuple[Array, Array | None, Array | None, Array], dy_RF: Array):
    x_RD, w_GDF, w_GFD, sizes_G = saved
    if w_GFD is not None:
        dx_RD = _multiply(settings, dy_RF, w_GFD, sizes_G)
    else:
        assert w_GDF is not None
        dx_RD = _multiply(settings, dy_RF, w_GDF, sizes_G, transpose=True)
    return dx_RD, _matrix_gradient(settings, x_RD, dy_RF, sizes_G).astype(x_RD.dtype), None, None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)


def _multiply(
    settings: _Settings, x_RD: Array, w_GDF: Array, sizes_G: Array, transpose: bool = False
) -> Array:
    """Multiply rows by their group's matrix, or by its transpose."""
    if settings.product in mosaic.TILES:
        tiles = mosaic.TILES[settings.product]
        return mosaic.product(tiles, x_RD, w_GDF, sizes_G, transpose=transpose, emulate=settings.interpret)
    if settings.product == "triton":
        return triton.product(x_RD, w_GDF, sizes_G, transpose=transpose, interpret=settings.interpret)
    if transpose:
        w_GDF = w_GDF.swapaxes(1, 2)
    if settings.product == "ragged":
        return lax.ragged_dot(x_RD, w_GDF, sizes_G)
    if settings.product == "megablox":
        return _by_megablox(settings.interpret, x_RD, w_GDF, sizes_G)
    blocks = functools.partial(_by_blocks, settings.product_block)
    return lax.platform_dependent(x_RD, w_GDF, sizes_G, cpu=blocks, default=lax.ragged_dot)


def _matrix_gradient(settings: _Settings, x_RD: Array, dy_RF: Array, sizes_G: Array) -> Array:
    """Return the gradient of the matrices, float32 [G, D, F]."""
    if settings.gradient in mosaic.TILES and mosaic.supports_dtype(x_RD.dtype):
        return mosaic.gradient(
            mosaic.TILES[settings.gradient], x_RD, dy_RF, sizes_G, emulate=settings.interpret
        )
    if settings.gradient == "triton":
        return triton.gradient(x_RD, dy_RF, sizes_G, interpret=settings.interpret)
    if settings.gradient == "megablox" and x_RD.shape[0] % _ROWS == 0:
        return _gradient_by_megablox(settings.interpret, x_RD, dy_RF, sizes_G)
    if settings.gradient != "plain":
        return _gradient_by_ragged_dot(x_RD, dy_RF, sizes_G)
    blocks = functools.partial(_gradient_by_blocks, settings.gradient_block)
    return lax.platform_dependent(x_RD, dy_RF, sizes_G, cpu=blocks, default=_gradient_by_ragged_dot)


def _gradient_by_ragged_dot(x_RD: Array, dy_RF: Array, sizes_G: Array) -> Array:
    ragged = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return lax.ragged_dot_general(x_RD, dy_RF, sizes_G, ragged, preferred_element_type=jnp.float32)


def _by_megablox(interpret: bool, x_RD: Array, w_GDF: Array, sizes_G: Array) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    tiles = _tiles(x_RD.shape, w_GDF.shape[2])
    with jax.numpy_dtype_promotion("standard"):  # gmm mixes bools and integers
        y_RF = gmm(x_RD, w_GDF, sizes_G, x_RD.dtype, tiles, interpret=interpret)
    # gmm does not write tiles without rows of a group: they may hold anything.
    filled_R = jnp.arange(x_RD.shape[0]) < jnp.sum(sizes_G)
    return jnp.where(filled_R[:, None], y_RF, 0)


def _gradient_by_megablox(interpret: bool, x_RD: Array, dy_RF: Array, sizes_G: Array) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tiles, shape = _tiles(x_RD.shape, dy_RF.shape[1]), (len(sizes_G), x_RD.shape[1], dy_RF.shape[1])
    so_far = gradient_sum(shape, varying_like=x_RD)
    with jax.numpy_dtype_promotion("standard"):
        return tgmm(x_RD.T, dy_RF, sizes_G, jnp.float32, tiles, existing_out=so_far, interpret=interpret)


def _tiles(shape: tuple[int, ...], width: int) -> tuple[int, int, int]:
    rows = next(size for size in (512, 256, _ROWS) if shape[0] % size == 0)
    return rows, min(shape[1], 1024), min(width, 1024)


def _by_blocks(block: int, x_RD: Array, w_GDF: Array, sizes_G: Array) -> Array:
    # The slice of a matrix is a copy: none is made for a group without rows.
    groups_G, starts_G, ends_G = nonempty_groups(sizes_G, len(sizes_G))

    def group(place, y_RF):
        start, end = starts_G[place], ends_G[place]
        w_DF = w_GDF[groups_G[place]]

        def one(b, y_RF):
            read, here_B = _window(block, x_RD.shape[0], start, end, b)
            y_BF = lax.dynamic_slice_in_dim(x_RD, read, block) @ w_DF
            # The window may reach into other groups: their rows stay as they are.
            old_BF = lax.dynamic_slice_in_dim(y_RF, read, block)
            return lax.dynamic_update_slice_in_dim(
                y_RF, jnp.where(here_B[:, None], y_BF, old_BF), read, axis=0
            )

        return lax.fori_loop(0, -((start - end) // block), one, y_RF)

    zeros_RF = jnp.zeros((x_RD.shape[0], w_GDF.shape[2]), x_RD.dtype)
    num_filled = jnp.sum(sizes_G > 0, dtype=jnp.int32)
    return lax.fori_loop(0, num_filled, group, vary(zeros_RF, varying_axes(x_RD)))


def _gradient_by_blocks(block: int, x_RD: Array, dy_RF: Array, sizes_G: Array) -> Array:
    ends_G = jnp.cumsum(sizes_G)

    def group(g):
        end, size = ends_G[g], sizes_G[g]

        def one(b, dw_DF):
            start, here_B = _window(block, x_RD.shape[0], end - size, end, b)
            x_BD = lax.dynamic_slice_in_dim(x_RD, start, block)
            dy_BF = lax.dynamic_slice_in_dim(dy_RF, start, block)
            # Both operands are masked: rows past the groups may hold anything, and 0 * nan is nan.
            x_BD, dy_BF = (jnp.where(here_B[:, None], rows, 0) for rows in (x_BD, dy_BF))
            return dw_DF + jnp.einsum("bd,bf->df", x_BD, dy_BF, preferred_element_type=jnp.float32)

        zeros_DF = jnp.zeros((x_RD.shape[1], dy_RF.shape[1]), jnp.float32)
        return lax.fori_loop(0, -(-size // block), one, vary(zeros_DF, varying_axes(x_RD)))

    return lax.map(group, jnp.arange(sizes_G.shape[0]))


def _window(block: int, num_rows: int, start: Array, end: Array, b: Array) -> tuple[Array, Array]:
    """Return the first row that is read for block b of the group start..end, and a mask [B] of its own rows."""
    first = start + b * block
    # Near the end of the buffer the window is moved back, as dynamic_slice would move it: count no row twice.
    read = jnp.minimum(first, num_rows - block)
    row_B = read + jnp.arange(block, dtype=read.dtype)
    return read, (row_B >= first) & (row_B < end)
