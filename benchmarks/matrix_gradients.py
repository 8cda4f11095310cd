"""What gradients of the experts' matrices take on a TPU that is not here: by their kernels, and as dense products.

megablox is a kernel of Pallas: the compiler prices it by what its author states. Its rows times its dims as a dense
product, an equal share of the rows for each expert, the compiler prices itself. Experts are DeepSeek-V3's: a device has
four, and rows for 1.25 times an even load, which is what a dropless pair on 64 devices has.

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
"""From rows [R, D], gradients of what was made of them [R, F], rows of each expert [G], and sums so far [G, D, F]."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Which device, and how much of it."""

    target: str = "v5p:2x2x1"
    """One host's devices, of which one is used."""
    experts: int = 4
    """Of a device."""
    rows: int = 20480
    """Of a device: 1.25 times 2048 tokens times 8 experts of each."""


# The first two are what ``grouped_matmul`` does for a gradient that has its sum, as in a step. Differentiated by
# itself it has none, and adding it is half as much work again.
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
    """Cycles of one gradient, added to its float32 sum."""
    lies = NamedSharding(Mesh(np.array(target.devices())[:1], ("one",)), PartitionSpec())
    shapes = ((rows, dim), jnp.bfloat16), ((rows, width), jnp.bfloat16), ((experts,), jnp.int32)
    given = (*shapes, ((experts, dim, width), jnp.float32))
    structs = [jax.ShapeDtypeStruct(shape, dtype, sharding=lies) for shape, dtype in given]
    lowered = jax.jit(product, donate_argnums=3).lower(*structs)
    compiled = lowered.compile(recommended_compiler_options("tpu", target.generation))
    report = overlap(compiled, rates=tpu_rates(target.generation))
    return max(report.computations.values(), key=lambda time: time.cycles).cycles


def main(options: Options) -> None:
    """Compile each, and print what it costs."""
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
