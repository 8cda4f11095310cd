"""The cost of gradients of the experts' matrices on a TPU that is not here: by their kernels, and as dense products.

megablox is a Pallas kernel: the compiler prices it by the cost that its author states. The dense product of
as many rows, an equal share for each expert, is priced by the compiler itself. Experts are DeepSeek-V3's: a
device has four of them, and rows for 1.25 times an even load, as a dropless pair on 64 devices has.

    python benchmarks/matrix_gradients.py
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import Array, lax
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import models
from dualpipe_jax.command.output import show
from dualpipe_jax.inspect import overlap, recommended_compiler_options
from dualpipe_jax.inspect.rates import tpu_rates
from dualpipe_jax.inspect.target import Target
from dualpipe_jax.present.table import Table

Product = Callable[[Array, Array, Array, Array], Array]
"""A function of rows [R, D], gradients of the product's results [R, F], the number of rows of each expert
[G], and sums so far [G, D, F]; it returns the new sums."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options for the device, its experts and its rows."""

    target: str = "v5p:2x2x1"
    """One host's devices, of which one is used."""
    experts: int = 4
    """The number of experts of a device."""
    rows: int = 20480
    """The number of rows of a device: 1.25 times 2048 tokens times 8 experts for each token."""


# The first two are what ``grouped_matmul`` does for a gradient that is added to its sum, as in a step.
# Differentiated by itself it has no sum, and the separate addition is half as much work again.
def megablox(x_RD: Array, dy_RF: Array, sizes_G: Array, sum_GDF: Array) -> Array:
    with jax.numpy_dtype_promotion("standard"):
        return tgmm(x_RD.T, dy_RF, sizes_G, jnp.float32, (512, 1024, 1024), existing_out=sum_GDF)


def ragged(x_RD: Array, dy_RF: Array, sizes_G: Array, sum_GDF: Array) -> Array:
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return sum_GDF + lax.ragged_dot_general(x_RD, dy_RF, sizes_G, numbers, preferred_element_type=jnp.float32)


def dense(x_RD: Array, dy_RF: Array, sizes_G: Array, sum_GDF: Array) -> Array:
    x_GTD, dy_GTF = (rows.reshape(len(sizes_G), -1, rows.shape[-1]) for rows in (x_RD, dy_RF))
    return sum_GDF + jnp.einsum("gtd,gtf->gdf", x_GTD, dy_GTF, preferred_element_type=jnp.float32)


PRODUCTS = {
    "megablox, as its author states": megablox,
    "the compiler's own grouped kernel": ragged,
    "a dense product of as many rows": dense,
}


def cycles_of(target: Target, product: Product, rows: int, dim: int, width: int, experts: int) -> float:
    """The cycles of one gradient that is added to its float32 sum."""
    lies = NamedSharding(Mesh(np.array(target.devices())[:1], ("one",)), PartitionSpec())
    shapes = ((rows, dim), jnp.bfloat16), ((rows, width), jnp.bfloat16), ((experts,), jnp.int32)
    given = (*shapes, ((experts, dim, width), jnp.float32))
    structs = [jax.ShapeDtypeStruct(shape, dtype, sharding=lies) for shape, dtype in given]
    lowered = jax.jit(product, donate_argnums=3).lower(*structs)
    options = recommended_compiler_options("tpu", target.generation)
    compiled = lowered.compile(options)
    report = overlap(compiled, rates=tpu_rates(target.generation))
    return max(report.computations.values(), key=lambda time: time.cycles).cycles


def main(options: Options) -> None:
    """Compile each product, and print its cost."""
    target, config = Target.parse(options.target), models.v3()
    matrices = {
        "gate and up": (config.dim, 2 * config.expert_hidden),
        "down": (config.expert_hidden, config.dim),
    }
    table = []
    for name, product in PRODUCTS.items():
        cycles = [
            cycles_of(target, product, options.rows, dim, width, options.experts)
            for dim, width in matrices.values()
        ]
        table.append((name, *(f"{number / 1e6:.2f}" for number in (*cycles, sum(cycles)))))
    show("", Table(("a layer's gradients, Mcycles", *matrices, "both"), tuple(table)))


if __name__ == "__main__":
    main(tyro.cli(Options))
