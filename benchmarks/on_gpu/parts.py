"""The speed of the parts of a layer of DeepSeek-V3 on a GPU: products, attention, grouped products, copies."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.on_gpu.bench import Bench, error
from dualpipe_jax.parallel import mosaic, triton
from dualpipe_jax.parallel.expert_groups import grouped_matmul
from models.cudnn import cudnn_attention

TOKENS, DIM, HIDDEN, EXPERTS = 4096, 7168, 2048, 8

PRODUCTS = {
    "8192 x 8192 x 8192": (8192, 8192, 8192),
    "q_a: 4096 x 7168 x 1536": (4096, 7168, 1536),
    "kv_a: 4096 x 7168 x 576": (4096, 7168, 576),
    "q_b: 4096 x 1536 x 24576": (4096, 1536, 24576),
    "kv_b: 4096 x 512 x 32768": (4096, 512, 32768),
    "o: 4096 x 16384 x 7168": (4096, 16384, 7168),
    "shared expert: 4096 x 7168 x 2048": (4096, 7168, 2048),
    "dw of it: 7168 x 4096 x 2048": (7168, 4096, 2048),
}


def products(bench: Bench) -> None:
    """Time products by shape, of random numbers; and one of constants, whose time is too good."""
    for name, (rows, inner, width) in PRODUCTS.items():
        a, b = bench.normal(0, rows, inner), bench.normal(1, inner, width)
        bench.time(name, jnp.matmul, a, b, flops=2.0 * rows * inner * width, seconds=0.05)
    a = bench.made(lambda: jnp.full((8192, 8192), 1 / 8192, jnp.bfloat16))
    bench.time("8192 x 8192 x 8192, constants", jnp.matmul, a, a, flops=2.0 * 8192**3, seconds=0.05)
    batched = bench.normal(2, EXPERTS, TOKENS, DIM), bench.normal(3, EXPERTS, DIM, HIDDEN)
    flops = 2.0 * EXPERTS * TOKENS * DIM * HIDDEN
    bench.time(
        "8 experts x 4096 equal rows", lambda x, w: jnp.einsum("etd,edf->etf", x, w), *batched, flops=flops
    )
    big = bench.normal(4, 1 << 28, dtype=jnp.float32)
    bench.time("copy of 1 GiB, read and written", lambda x: -x, big, traffic=2.0 * 4 * (1 << 28))
    small = bench.normal(4, 1024, dtype=jnp.float32)
    bench.time("launch: 1,024 numbers", lambda x: -x, small, seconds=0.02)


def attention(bench: Bench) -> None:
    """Time causal attention of MLA's heads, keys of 192 and values of 128: F, and F with B. Positions are the
    dim before heads, as projections make them."""
    heads, keys, values, scale = 128, 192, 128, 0.1
    widths = keys, keys, values, values
    q, k, v, d = (bench.normal(5 + i, 1, TOKENS, heads, width) for i, width in enumerate(widths))
    flops = heads * TOKENS * TOKENS * (keys + values)

    def of(kernel: Any) -> tuple[Any, Any]:
        def forward(q: Any, k: Any, v: Any) -> Any:
            return kernel(*(a.swapaxes(1, 2) for a in (q, k, v))).swapaxes(1, 2)

        def both(q: Any, k: Any, v: Any, d: Any) -> Any:
            out, pull = jax.vjp(forward, q, k, v)
            return out, pull(d)

        return forward, both

    def wide(q: Any, k: Any, v: Any) -> Any:
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, keys - values)))
        return cudnn_attention(q, k, v, scale)[..., :values]

    kernels = {"cuDNN": lambda q, k, v: cudnn_attention(q, k, v, scale), "cuDNN, values padded to 192": wide}
    outs = {}
    for name, kernel in kernels.items():
        forward, both = of(kernel)
        bench.time(f"{name}: F", forward, q, k, v, flops=flops)
        # The backward is 2.5 times the forward's FLOPs: the scores once more, and four gradients.
        outs[name] = bench.time(f"{name}: F and B", both, q, k, v, d, flops=3.5 * flops)
    if not bench.compiles_only:
        ours, padded = (jax.tree.leaves(tree) for tree in outs.values())
        bench.say("cuDNN against padded", errors=[error(a, b) for a, b in zip(ours, padded, strict=True)])


UNEQUAL = np.array([-1000, 1000, 300, -300, -2048, 2048, -7, 7], np.int32) + TOKENS


def grouped(bench: Bench) -> None:
    """Time grouped products of 8 groups of about 4,096 rows: by our kernels for this GPU and in Triton, by
    JAX's kernels, and by ``lax.ragged_dot``."""
    rows = EXPERTS * TOKENS
    x, dy = bench.normal(10, rows, DIM), bench.normal(11, rows, HIDDEN)
    w, sizes = bench.normal(12, EXPERTS, DIM, HIDDEN), bench.given(UNEQUAL)
    flops = 2.0 * rows * DIM * HIDDEN
    name, tiles = _mosaic(bench)
    product, gradient = (functools.partial(made, tiles) for made in (mosaic.product, mosaic.gradient))
    y = bench.time(f"{name}: F", product, x, w, sizes, flops=flops)
    dx = bench.time(f"{name}: dx", functools.partial(product, transpose=True), dy, w, sizes, flops=flops)
    dw = bench.time(f"{name}: dw, float32", gradient, x, dy, sizes, flops=flops)
    with bench.device_context():
        bench.time("triton: F", triton.product, x, w, sizes, flops=flops)
        bench.time("triton: dx", functools.partial(triton.product, transpose=True), dy, w, sizes, flops=flops)
        bench.time("triton: dw, float32", triton.gradient, x, dy, sizes, flops=flops)
    full = flops * float((UNEQUAL // 8).sum()) / rows
    eighth = bench.given(UNEQUAL // 8)
    bench.time(f"{name}: F of a buffer an eighth full", product, x, w, eighth, flops=full)
    if name == "hopper":
        bench.time("jax: F", _jax_product, x, w, sizes, flops=flops)
    if bench.compiles_only:
        return
    if name == "hopper":
        bench.time("jax: dw, bfloat16", _jax_gradient, x, dy, sizes, flops=flops)
    else:  # JAX has no kernel of dw for a Blackwell; this one asks the device how many multiprocessors there are
        bench.time("jax: F", _jax_product_on_blackwell, x, w, sizes, flops=flops)
    wanted = [jax.jit(f)(*args) for f, args in (
        (jax.lax.ragged_dot, (x, w, sizes)),
        (lambda dy, w, s: jax.lax.ragged_dot(dy, w.swapaxes(1, 2), s), (dy, w, sizes)),
        (_dense_gradient, (x, dy, sizes)),
    )]  # fmt: skip
    bench.say(
        "errors", **{n: error(a, b) for n, a, b in zip(("y", "dx", "dw"), (y, dx, dw), wanted, strict=True)}
    )
    bench.time("lax.ragged_dot: F", jax.lax.ragged_dot, x, w, sizes, flops=flops, seconds=0.05)


WALKS = [(stages, snake) for snake in (2, 4, 8) for stages in (3, 4)]


def walks(bench: Bench) -> None:
    """Time other orders of the kernels' tiles, for 8 experts of DeepSeek-V3 and for 64 of V2-Lite."""
    cases = {
        "v3": (EXPERTS * TOKENS, DIM, HIDDEN, UNEQUAL),
        "v2-lite": (24576, 2048, 1408, np.full(64, 384, np.int32)),
    }
    _, tiles = _mosaic(bench)
    for name, (rows, dim, hidden, groups) in cases.items():
        x, dy = bench.normal(10, rows, dim), bench.normal(11, rows, hidden)
        w, sizes = bench.normal(12, len(groups), dim, hidden), bench.given(groups)
        so_far = bench.made(lambda shape=w.shape: jnp.zeros(shape, jnp.float32))
        flops = 2.0 * rows * dim * hidden
        for stages, snake in WALKS:
            walk = mosaic.Walk(stages, snake)
            facts: dict[str, Any] = dict(flops=flops, seconds=0.03, stages=stages, snake=snake)
            by = functools.partial(mosaic._product_of_many_rows, tiles=tiles, walk=walk)
            bench.time(f"{name}: F", by, x, w, sizes, **facts)
            bench.time(f"{name}: dx", functools.partial(by, transpose=True), dy, w, sizes, **facts)
            # Its result is wide, so shared memory has no room for more stages.
            if stages == mosaic.GRADIENT.stages:
                bench.time(
                    f"{name}: dw", functools.partial(_adding, tiles, walk), x, dy, sizes, sums=so_far, **facts
                )


def _adding(tiles: Any, walk: mosaic.Walk, x: Any, dy: Any, sizes: Any, so_far: Any) -> tuple[Any]:
    return (mosaic.add_gradient(tiles, x, dy, sizes, so_far, walk),)


def _mosaic(bench: Bench) -> tuple[str, mosaic.Tiles]:
    """The name of this GPU's kernels, and their tiles."""
    name = "blackwell" if "B200" in bench.device.device_kind else "hopper"
    return name, mosaic.TILES[name]


JAX_TILES: dict[str, Any] = dict(block_m=128, block_n=128, block_k=64, grid_block_n=8)


def _jax_product(x: Any, w: Any, sizes: Any) -> Any:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    with jax.numpy_dtype_promotion("standard"):
        return ragged_dot_mgpu.ragged_dot(x, w, group_sizes=sizes, max_concurrent_steps=5, **JAX_TILES)


def _jax_product_on_blackwell(x: Any, w: Any, sizes: Any) -> Any:
    from jax.experimental.pallas.ops.gpu import blackwell_matmul_mgpu, blackwell_ragged_dot_mgpu

    config = blackwell_ragged_dot_mgpu.TuningConfig(
        tile_m=128,
        tile_n=128,
        tile_k=64,
        max_concurrent_steps=6,
        collective=True,
        grid_tile_width=8,
        grid_minor_dim=blackwell_matmul_mgpu.MatmulDimension.N,
    )
    with jax.numpy_dtype_promotion("standard"):
        return blackwell_ragged_dot_mgpu.ragged_dot_kernel(x, w, sizes, config)


def _jax_gradient(x: Any, dy: Any, sizes: Any) -> Any:
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

    with jax.numpy_dtype_promotion("standard"):
        return transposed_ragged_dot_mgpu.transposed_ragged_dot(
            x, dy, group_sizes=sizes, max_concurrent_steps=4, **JAX_TILES
        )


def _dense_gradient(x: Any, dy: Any, sizes: Any) -> Any:
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(x)), side="right")

    def one(g: Any) -> Any:
        return jnp.einsum(
            "rd,rf->df", jnp.where((group == g)[:, None], x, 0), dy, preferred_element_type=jnp.float32
        )

    return jax.lax.map(one, jnp.arange(len(sizes)))


ODD = {
    "empty groups": (1000, 256, 384, (0, 300, 0, 0, 500, 0)),
    "all empty": (256, 128, 128, (0, 0)),
    "one row each": (64, 128, 256, (1, 1, 1, 1)),
    "narrow widths": (300, 100, 72, (10, 200, 5)),
    "a tail that is not filled": (2048, 512, 256, (64, 1000, 63)),
    "64 groups": (4096, 2048, 1408, (64,) * 64),
}


def shapes(bench: Bench) -> None:
    """Check shapes that the kernels do not take as they are, with NaN past the last group: values and
    gradients against those in float64 on the host."""
    for name, (rows, dim, width, sizes) in ODD.items():
        rng = np.random.default_rng(0)
        x, w, dy = (rng.normal(size=s) for s in ((rows, dim), (len(sizes), dim, width), (rows, width)))
        x[sum(sizes) :], dy[sum(sizes) :] = np.nan, np.nan
        for kernel, dtype in (
            (_mosaic(bench)[0], jnp.bfloat16),
            ("triton", jnp.bfloat16),
            ("triton", jnp.float32),
        ):
            given = (
                *(bench.given(np.asarray(a, dtype)) for a in (x, w, dy)),
                bench.given(np.array(sizes, np.int32)),
            )

            def both(x: Any, w: Any, dy: Any, sizes: Any, kernel: Any = kernel) -> Any:
                with jax.default_matmul_precision("highest"):
                    y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, kernel=kernel), x, w)
                    return y, *pull(dy)

            title = f"{kernel}, {jnp.dtype(dtype).name}: {name}"
            if bench.compiles_only:
                with bench.device_context():
                    bench.time(title, both, *given)
                continue
            found = jax.jit(both)(*given)
            bench.say(title, errors=[error(a, b) for a, b in zip(found, _by_groups(*given), strict=True)])


def _by_groups(x: Any, w: Any, dy: Any, sizes: Any) -> list[np.ndarray]:
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    start = 0
    for g, size in enumerate(np.asarray(sizes)):
        here = slice(start, start + size)
        y[here], dx[here], dw[g] = x[here] @ w[g], dy[here] @ w[g].T, x[here].T @ dy[here]
        start += size
    return [y, dx, dw]
