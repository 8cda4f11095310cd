"""Rates of one device in the parts of a model: products by size, causal attention, products of unequal groups.

The kernels are this library's, or JAX's; a model may use others.
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dualpipe_jax.parallel.expert_groups import KERNELS_BY_DEVICE, gpu_kind, grouped_matmul
from dualpipe_jax.probe.place import Place, seconds
from dualpipe_jax.probe.timing import product_rate


def products(place: Place) -> dict[str, Any]:
    """Operations a second in products of square matrices of several widths; a product's size is in operations."""
    widths = (64, 128, 256, 512) if place.is_small else (512, 1024, 2048, 4096, 8192)
    # Each width does the same work, but at most 1000 products: these take longer than the call's own overhead.
    rates = {
        width: product_rate(place, width, min(1000, 10 * (widths[-1] // width) ** 3)) for width in widths
    }
    return {
        "products": [
            {"width": width, "size": 2 * width**3, "flops_per_second": rate} for width, rate in rates.items()
        ],
        "dtype": place.dtype.name,
    }


def attention(place: Place) -> dict[str, Any]:
    """Operations a second of causal attention, by cuDNN on a GPU, else by JAX's own kernel; half of the scores count.

    A forward has two products, a backward five, as ``inspect.roofline`` counts.
    """
    tokens, heads, width = (256, 2, 64) if place.is_small else (4096, 32, 128)
    kernel: Literal["cudnn", "xla"] = "cudnn" if place.mesh.devices.flat[0].platform == "gpu" else "xla"

    def forward(q: Any, k: Any, v: Any) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)

    def both(q: Any, k: Any, v: Any, dy: Any) -> Any:
        y, pull = jax.vjp(forward, q, k, v)
        return y, pull(dy)

    rng = np.random.default_rng(0)
    drawn = rng.standard_normal((4, 1, tokens, heads, width), np.float32)
    *qkv, dy = (jnp.asarray(a, place.dtype) for a in drawn)
    alone, with_backward = (jax.jit(f, compiler_options=place.options) for f in (forward, both))
    took = seconds(lambda: alone(*qkv))
    rest = seconds(lambda: with_backward(*qkv, dy)) - took
    operations = 2 * heads * tokens**2 * width
    return {
        "forward": operations / took,
        # On a busy machine both calls may take equally long: then the backward gets the forward's rate.
        "backward": 2.5 * operations / rest if rest > 0 else operations / took,
        "kernel": kernel,
        "of": f"{heads} heads of {width}, {tokens} tokens, {place.dtype.name}",
    }


def grouped(place: Place) -> dict[str, Any]:
    """Operations a second of products of eight unequal groups of rows: the forward and both gradients together."""
    rows, dim, hidden = (64, 64, 128) if place.is_small else (4096, 4096, 2048)
    sizes = rows + rows // 8 * np.array([-4, 4, 1, -1, -6, 6, -2, 2], np.int32)
    device = place.mesh.devices.flat[0]
    row = device.platform
    if row == "gpu":
        row = gpu_kind(tuple(map(int, device.compute_capability.split("."))), place.dtype)
    kernel, gradient = KERNELS_BY_DEVICE[row]

    def both(x: Any, w: Any, sizes: Any, dy: Any) -> Any:
        y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, kernel=kernel, gradient=gradient), x, w)
        return y, pull(dy)

    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) / math.sqrt(shape[-1]), place.dtype)

    given = normal(8 * rows, dim), normal(8, dim, hidden), jnp.asarray(sizes), normal(8 * rows, hidden)
    step = jax.jit(both, compiler_options=place.options)
    operations = 3 * 2 * 8 * rows * dim * hidden
    return {
        "flops_per_second": operations / seconds(lambda: step(*given)),
        "kernel": kernel,
        "of": f"8 groups of about {rows} rows, {dim} x {hidden}, {place.dtype.name}",
    }
