"""Eight bits: tiles by plain loops in NumPy and ml_dtypes, what dispatch sends, and matmuls block by block."""

import functools
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpipe_jax.parallel import check_float8, combine, dispatch, expert_matmul, plan_capacity, plan_dropless
from dualpipe_jax.parallel.float8 import decode, dequantize, encode, quantize
from dualpipe_jax.parallel.float8_matmul import float8_matmul
from dualpipe_jax.split import split_backward
from dualpipe_jax.split.hoist import hoist
from tests.parallel import expert_layers
from tests.parallel.expert_layers import K, on_devices
from tests.quick import ALIKE

E4M3 = ml_dtypes.float8_e4m3fn
ROW, COLUMN, SQUARE = (1, 128), (128, 1), (128, 128)
T, E = 16, 8  # T tokens per device
plan_of = functools.partial(expert_layers.plan_of, num_experts=E)
choices = functools.partial(expert_layers.choices, num_experts=E)


def by_loops(x, tile):
    """Tile after tile: e4m3 values and scales; and the numbers that they stand for."""
    x = np.asarray(x, np.float32)
    values, rounded = np.zeros(x.shape, E4M3), np.zeros(x.shape, np.float32)
    starts = [range(0, size, side) for size, side in zip(x.shape, tile, strict=True)]
    scales = np.zeros([len(s) for s in starts], np.float32)
    for a, row in enumerate(starts[0]):
        for b, column in enumerate(starts[1]):
            here = slice(row, row + tile[0]), slice(column, column + tile[1])
            finite = np.abs(x[here][np.isfinite(x[here])])
            largest, exponent = float(finite.max(initial=0)), -126
            while 448.0 * 2.0**exponent < largest:
                exponent += 1
            scales[a, b] = scale = np.float32(2.0**exponent)
            with np.errstate(invalid="ignore"):
                values[here] = (x[here] * (np.float32(1) / scale)).astype(E4M3)
            rounded[here] = values[here].astype(np.float32) * scale
    return values, scales, rounded


def rounded(x, tile=ROW):
    """What x is in eight bits, in its own dtype; any leading dims."""
    flat = np.asarray(x, np.float32).reshape(-1, x.shape[-1])
    return by_loops(flat, tile)[2].reshape(x.shape).astype(x.dtype)


def uneven(shape, seed=0):
    """Numbers of many magnitudes, zeros and a whole tile of them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-14, 14, shape)) * (rng.random(shape) < 0.9)
    x[: min(2, len(x)), :128] = 0
    return x.astype(np.float32)


@pytest.mark.parametrize(
    "shape, tile",
    [
        ((3, 5), ROW),
        ((256, 300), COLUMN),
        ((130, 256), SQUARE),
        ((256, 300), ROW),
        ((130, 256), COLUMN),
        ((3, 5), SQUARE),
    ],
)
def test_tiles_are_those_of_a_plain_loop(shape, tile):
    @jax.jit
    def there_and_back(x):
        found = quantize(x, tile)
        return found, dequantize(found, tile, jnp.float32)

    for x in (uneven(shape), uneven(shape, 1).astype(ml_dtypes.bfloat16)):
        (found, again), (values, scales, back) = there_and_back(x), by_loops(x, tile)
        np.testing.assert_array_equal(found.scales, scales)
        np.testing.assert_array_equal(np.asarray(found.values).view(np.uint8), values.view(np.uint8))
        np.testing.assert_array_equal(again, back)


def test_leading_dims_are_so_many_arrays():
    x = np.stack([uneven((130, 140), seed) for seed in range(3)])
    found = jax.jit(quantize, static_argnums=1)(x, SQUARE)
    for k in range(3):
        values, scales, _ = by_loops(x[k], SQUARE)
        np.testing.assert_array_equal(found.scales[k], scales)
        np.testing.assert_array_equal(np.asarray(found.values[k], np.float32), values.astype(np.float32))


@jax.jit
def there_and_back(x):
    return decode(encode(x), x.shape[-1], x.dtype)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.floats(-100, 100))
def test_a_number_is_off_by_a_sixteenth_of_itself_or_by_little_of_the_largest(seed, exponent):
    x = (uneven((4, 200), seed) * 2.0**exponent).astype(np.float32)
    back = np.asarray(there_and_back(x), np.float64)
    largest = np.repeat([[np.abs(t).max() for t in np.split(row, [128])] for row in x], [128, 72], axis=1)
    bound = np.maximum(np.abs(x.astype(np.float64)) / 16, largest * 2.0**-17 + 2.0**-136)
    assert np.all(np.abs(back - x) <= bound)
    assert np.all((np.sign(back) == np.sign(x)) | (back == 0))


def test_what_is_no_number_stays_none_and_spares_its_neighbours():
    x = np.array([[1.5, np.nan, -3.0, np.inf, -np.inf, 0.4375], [0.0, -0.0, 0.0, 0.0, 0.0, 0.0]], np.float32)
    back = np.asarray(there_and_back(x))
    np.testing.assert_array_equal(back[0], [1.5, np.nan, -3.0, np.nan, np.nan, 0.4375])
    np.testing.assert_array_equal(back[1], 0)


def test_a_row_is_a_byte_a_number_and_one_a_tile():
    for dim, width in [(1, 2), (127, 128), (128, 129), (129, 131), (256, 258), (7168, 7224)]:
        sent = jax.eval_shape(encode, jax.ShapeDtypeStruct((3, dim), jnp.bfloat16))
        assert sent.dtype == jnp.uint8 and sent.shape == (3, width)
    for dim in (1, 129):
        x = uneven((3, dim)).astype(jnp.bfloat16)
        once = there_and_back(x)
        np.testing.assert_array_equal(once, rounded(x))
        np.testing.assert_array_equal(there_and_back(once), once)
    nothing = jax.jit(decode, static_argnums=(1, 2))(np.zeros((3, 131), np.uint8), 129, jnp.bfloat16)
    np.testing.assert_array_equal(nothing, np.zeros((3, 129)))


# ------------------------------------------------------------------------------------------ dispatch


def both_ways(handle, plain, x, weights, d_x, d_out):
    """Dispatch, combine, and their gradients for the cotangents given."""
    rows, back = jax.vjp(lambda x: dispatch(x, handle), x)
    out, pull = jax.vjp(lambda y, w: combine(y, w, handle), dispatch(jnp.sin(x), plain), weights)
    return rows, back(dispatch(d_x, plain))[0], out, *pull(d_out)


@pytest.mark.parametrize(
    "method, bound, num_ep, check_vma",
    [
        ("capacity", 4, 1, True),
        ("dropless", 0.7, 4, False),
        pytest.param("capacity", None, 4, False, marks=pytest.mark.slow),
        pytest.param("dropless", None, 2, True, marks=pytest.mark.slow),
    ],
)
def test_what_goes_out_is_rounded_and_what_comes_back_is_not(num_ep, check_vma, method, bound):
    """Exactly: rounded tokens reach the experts; the backward of dispatch is a plain combine with unit weights; that
    of combine brings rounded gradients; nothing else differs from plain payloads."""
    rng, D = np.random.default_rng(1), 136
    x, d_x, d_out = (uneven((num_ep * T, D), seed) for seed in range(3))
    args = x, rng.normal(size=(num_ep * T, K)).astype(np.float32), d_x, d_out, choices(num_ep * T)

    def run(*args):
        *args, topk = args
        ours, plain = (plan_of(method, payload=payload, bound=bound)(topk) for payload in ("float8", "plain"))
        return both_ways(ours, plain, *args), both_ways(plain, plain, *args)

    ours, plain = jax.device_get(on_devices(num_ep, run, check_vma, compiler_options=ALIKE)(*args))
    np.testing.assert_array_equal(ours[0], rounded(plain[0]))
    assert np.any(ours[0] != plain[0])
    np.testing.assert_array_equal(ours[3], rounded(plain[3]))
    assert np.any(ours[3] != plain[3])
    for k in (1, 2, 4):
        np.testing.assert_array_equal(ours[k], plain[k])


@pytest.mark.parametrize("method", ["capacity", pytest.param("dropless", marks=pytest.mark.slow)])
def test_bytes_on_the_wire_are_a_little_over_half_of_bfloat16(method):
    """Of the compiled program: dispatch and the backward of combine shrink, the other two stay."""
    from dualpipe_jax.inspect import read
    from dualpipe_jax.inspect.collectives import collectives

    D, num_ep = 512, 2
    x, weights, topk = (
        np.ones((num_ep * T, D), jnp.bfloat16),
        np.ones((num_ep * T, K), np.float32),
        choices(num_ep * T),
    )

    def payloads(payload):
        def loss(x, weights, topk):
            handle = plan_of(method, payload=payload)(topk)
            return jnp.sum(jnp.sin(combine(jnp.sin(dispatch(x, handle)), weights, handle)))[None]

        run = on_devices(num_ep, loss)
        module = read(jax.jit(jax.grad(lambda *args: jnp.sum(run(*args)))).lower(x, weights, topk).compile())
        found = [
            (arrays[0].dtype, pair.payload)
            for computation in module.computations.values()
            for pair in collectives(module, computation)
            if pair.kind == "all-to-all" and (arrays := pair.issued.arrays)[0].dims[-1] >= D
        ]
        assert len(found) == 4
        return sorted(found)

    coded, plain = payloads("float8"), payloads("plain")
    rows = plain[0][1] // (D * {"bf16": 2, "f32": 4}[plain[0][0]])  # XLA:CPU may send bfloat16 as float32
    assert [pair for pair in coded if pair[0] == "u8"] == [("u8", rows * (D + D // 128))] * 2
    assert [pair for pair in coded if pair[0] != "u8"] == plain[:2]


# ------------------------------------------------------------------------------------------- matmuls


def product_by_blocks(a, a_scales, b, b_scales):
    """Sum over blocks of 128, in float64, of the product of what is in eight bits times two scales: [M, K] @ [K, N]."""
    total = np.zeros((a.shape[0], b.shape[1]))
    for k, first in enumerate(range(0, a.shape[1], 128)):
        block = slice(first, first + 128)
        product = a[:, block].astype(np.float64) @ b[block].astype(np.float64)
        total += product * a_scales[:, k, None] * b_scales[k]
    return total


def columns(scales, width):
    """A scale for each column of a matrix in square tiles."""
    return np.repeat(scales, 128, axis=1)[:, :width]


def rows_by_matrix(x, w):
    """Rows in tiles of 1 x 128 by a matrix in tiles of 128 x 128, or by its transpose."""
    (x8, x_scales, _), (w8, w_scales) = by_loops(x, ROW), w
    return product_by_blocks(x8, x_scales, w8, columns(w_scales, w8.shape[1]))


def gradient_by_blocks(x, dy, here=slice(None)):
    """dw of some of the rows; scales are of 128 rows of all, whoever's they are."""
    (x8, x_scales, _), (dy8, dy_scales, _) = by_loops(by_loops(x, ROW)[2], COLUMN), by_loops(dy, COLUMN)
    mine = np.zeros((len(x), 1), x8.dtype)
    mine[here] = 1
    with np.errstate(invalid="ignore"):
        return product_by_blocks(np.where(mine, x8, mine).T, x_scales.T, np.where(mine, dy8, mine), dy_scales)


def matmul_by_loops(x, w, dy):
    """y, dx and dw of one group, each operand in its tiles."""
    w8, w_scales, _ = by_loops(w, SQUARE)
    return (
        rows_by_matrix(x, (w8, w_scales)),
        rows_by_matrix(dy, (w8.T, w_scales.T)),
        gradient_by_blocks(x, dy),
    )


def groups_by_loops(x, w, dy, sizes):
    """The same of unequal groups; zeros past the last one."""
    wanted = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    filled = sum(sizes)
    for g, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        rows = slice(end - size, end)
        if size:
            wanted[0][rows], wanted[1][rows], _ = matmul_by_loops(x[rows], w[g], dy[rows])
            wanted[2][g] = gradient_by_blocks(x[:filled], dy[:filled], rows)
    return wanted


D, F = 200, 150
MATRICES = 3
SIZES = [(150, 0, 130), (1, 200, 129), (0, 0, 0), (330, 0, 0)]


def operands(num_rows, seed=0, most=8):
    """Columns are of magnitudes so different that a tile of rows rounds many numbers to zero, one of columns none."""
    rng = np.random.default_rng(seed)
    shapes = (num_rows, D), (MATRICES, D, F), (num_rows, F)
    x, w, dy = (rng.normal(size=s) * np.exp(rng.normal(size=s)) for s in shapes)
    d, f = (np.exp2(rng.integers(-most, most + 1, size)) for size in (D, F))
    return [a.astype(np.float32) for a in (x * d, w / d[:, None] / f, dy * f)]


def products(x, w, dy, sizes=None, **how):
    y, pull = jax.vjp(lambda x, w: float8_matmul(x, w, sizes, **how), x, w)
    return y, *pull(dy)


jitted = jax.jit(
    products,
    static_argnames=("kernel", "gradient", "interpret"),
    # With YNNPACK XLA sums gradients of bfloat16 matrices in bfloat16 on a CPU, from JAX 0.11 on.
    compiler_options={"xla_cpu_experimental_ynn_fusion_type": ""},
)


def close(got, wanted, magnitudes, rtol=0.0):
    """Magnitudes are the same sums of absolute values: what float32 may lose is a part of these."""
    for g, w, m in zip(got, wanted, magnitudes, strict=True):
        assert g.shape == w.shape == m.shape
        bound = 2e-6 * np.minimum(m, np.abs(w).max()) + rtol * np.abs(w)
        assert np.all(np.abs(np.asarray(g, np.float64) - w) <= bound)


ROUNDED = 2.0**-8
"""By so much of itself a number is off at most, once it is rounded to bfloat16."""


def equal_by_loops(x, w, dy):
    """The same of equal groups, whose rows may have several dims."""
    wanted = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    for place in np.ndindex(x.shape[:-2]):
        wanted[0][place], wanted[1][place], dw = matmul_by_loops(x[place], w[place[0]], dy[place])
        wanted[2][place[0]] += dw
    return wanted


@pytest.mark.thin(3)
@pytest.mark.parametrize("middle", [(140,), (2, 70)])
@pytest.mark.parametrize("kernel", ["plain", "hopper"])
def test_three_products_of_equal_groups(kernel, middle):
    """Dims of a group's rows are kept apart, or not: each has tiles of its own."""
    x, w, dy = operands(MATRICES * 140)
    given = x.reshape(MATRICES, *middle, D), w, dy.reshape(MATRICES, *middle, F)
    close(jitted(*given, kernel=kernel), equal_by_loops(*given), equal_by_loops(*map(np.abs, given)))


@pytest.mark.parametrize("middle", [(140,), (2, 70)])
def test_a_hopper_takes_equal_groups_as_rows_of_one_array(middle):
    """Its kernel in eight bits, in plain JAX."""
    given = [jnp.asarray(a, jnp.bfloat16) for a in operands(MATRICES * 140)]
    given[0], given[2] = (a.reshape(MATRICES, *middle, a.shape[-1]) for a in (given[0], given[2]))
    wide = [np.asarray(a, np.float32) for a in given]
    found = jitted(*given, kernel="hopper", interpret=True)
    close(found, equal_by_loops(*wide), equal_by_loops(*map(np.abs, wide)), ROUNDED)


@pytest.mark.thin(3)
@pytest.mark.parametrize("sizes", SIZES)
def test_three_products_of_unequal_groups(sizes):
    """Rows past the last group are ignored, whatever they are."""
    x, w, dy = operands(330, 1)
    x[sum(sizes) :], dy[sum(sizes) :] = np.nan, np.inf
    x[sum(sizes) + 1 :], dy[sum(sizes) + 1 :] = 1e30, -1e30
    magnitudes = groups_by_loops(*map(np.abs, (x, w, dy)), sizes)
    close(jitted(x, w, dy, jnp.asarray(sizes, jnp.int32)), groups_by_loops(x, w, dy, sizes), magnitudes)


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    "kernel, dtype, sizes",
    [
        ("plain", jnp.bfloat16, SIZES[0]),
        ("ragged", jnp.bfloat16, SIZES[1]),
        ("hopper", jnp.bfloat16, SIZES[0]),
        ("hopper", jnp.bfloat16, SIZES[1]),
        ("hopper", jnp.float16, SIZES[0]),
    ],
)
def test_three_products_in_sixteen_bits_are_those_rounded_once(kernel, dtype, sizes):
    """By any program for groups, here that of a Hopper in plain JAX, too: what is decoded to bfloat16 is exact."""
    given = [jnp.asarray(a, dtype) for a in operands(330, 4, most=2 if dtype == jnp.float16 else 8)]
    wide = [np.asarray(a, np.float32) for a in given]
    found = jitted(*given, jnp.asarray(sizes, jnp.int32), kernel=kernel, interpret=True)
    close(found, groups_by_loops(*wide, sizes), groups_by_loops(*map(np.abs, wide), sizes), ROUNDED)


def test_what_is_no_number_gives_none_in_its_row_alone():
    x, w, dy = operands(20, 5)
    x[3, 7], x[12, 0], dy[5, 2] = np.inf, np.nan, -np.inf
    sizes = jnp.asarray([5, 6, 9], jnp.int32)
    y, dx, dw = (np.isnan(a) for a in jitted(x, w, dy, sizes))
    np.testing.assert_array_equal(np.argwhere(y.all(1))[:, 0], [3, 12])
    np.testing.assert_array_equal(np.argwhere(dx.all(1))[:, 0], [5])
    assert y.sum() == 2 * F and dx.sum() == D
    assert dw[0, 7].all() and dw[1, :, 2].all() and dw[2, 0].all() and dw.sum() == 2 * F + D


def test_experts_take_the_groups_that_arrived():
    """Without a gradient."""
    handle = jax.jit(plan_of("dropless", axis_name=None))(choices(T))
    x, w = operands(T * K, 3)[0], np.resize(operands(1, 4)[1], (E, D, F))
    found = jax.jit(functools.partial(expert_matmul, float8=True))(x, w, handle)
    pairs = list(zip(np.split(x, np.cumsum(handle.group_sizes_L)[:-1]), w, strict=True))
    wanted, magnitudes = (
        np.concatenate([rows_by_matrix(of(rows), by_loops(of(matrix), SQUARE)[:2]) for rows, matrix in pairs])
        for of in (np.asarray, np.abs)
    )
    close([found], [wanted], [magnitudes])


def test_what_float16_cannot_hold_rounded_is_multiplied_all_the_same():
    """Its largest number, 65504, rounds to 65536."""
    x = np.zeros((1, 1, 2), np.float16)
    x[..., 0] = np.finfo(np.float16).max
    y = jax.jit(float8_matmul)(x, np.full((1, 2, 3), 0.25, np.float16))
    assert y.dtype == np.float16
    np.testing.assert_array_equal(y, np.full((1, 1, 3), 16384))


@pytest.mark.parametrize("kernel, read_turned_over", [("plain", False), ("hopper", True)])
def test_a_step_rounds_matrices_once(kernel, read_turned_over):
    """And not each microbatch again, forward and backward."""
    x, w, _ = (jnp.asarray(a, jnp.bfloat16) for a in operands(6 * MATRICES))
    multiply = functools.partial(float8_matmul, kernel=kernel, interpret=True)
    hoisted = hoist(lambda p, x: multiply(x, p), w, x.reshape(MATRICES, 6, D))
    made = {(value.shape, value.dtype.name) for value in hoisted.values}
    kept, turned = (MATRICES, D, F), (MATRICES, F, D)
    eight_bits = {shape for shape, dtype in made if dtype == "float8_e4m3fn"}
    assert eight_bits == ({kept, turned} if read_turned_over else {kept})
    assert {dtype for _, dtype in made} == {"float8_e4m3fn", "float32"}
    rounded = hoisted.prelude(w)
    for value, by_loop in zip(rounded[0], w, strict=True):
        np.testing.assert_array_equal(value, by_loops(np.asarray(by_loop, np.float32), SQUARE)[0])


@pytest.mark.parametrize("equal", [True, False])
def test_gradients_of_matrices_are_summed_before_they_are_rounded(equal):
    """As those of plain products: the split hands them over in float32, in which microbatches' are summed."""
    x, w, dy = (jnp.asarray(a, jnp.bfloat16) for a in operands(6 * MATRICES, 6))
    sizes = None if equal else jnp.asarray([5, 6, 7], jnp.int32)
    x, dy = (a.reshape(MATRICES, -1, a.shape[-1]) for a in (x, dy)) if equal else (x, dy)
    split = split_backward(lambda w, x: float8_matmul(x, w, sizes), sums=[jnp.float32])

    @jax.jit
    def gradient(w, x, dy):
        _, residuals = split.forward(w, x)
        stash = split.backward_input(w, x, residuals, dy)[1]
        return split.backward_weight(w, x, residuals, stash)

    dw = gradient(w, x, dy)
    parts = [np.asarray(a, np.float32) for a in (x, w, dy)]
    wanted, magnitudes = (
        (equal_by_loops(*given) if equal else groups_by_loops(*given, (5, 6, 7)))[2]
        for given in (parts, [*map(np.abs, parts)])
    )
    assert dw.dtype == jnp.float32
    close([dw], [wanted], [magnitudes])


# ------------------------------------------------------------------------------------------ refusals


def device(platform, kind, **more):
    return types.SimpleNamespace(platform=platform, device_kind=kind, **more)


def test_devices_without_the_type_are_refused():
    check_float8(jax.devices()[0])
    check_float8(device("gpu", "NVIDIA H100 80GB HBM3", compute_capability="9.0"))
    check_float8(device("gpu", "NVIDIA L4", compute_capability="8.9"))
    check_float8(device("gpu", "one that tells none"))
    check_float8(device("tpu", "TPU v5"))
    with pytest.raises(ValueError, match=r"A100.* has compute capability 8\.0, and e4m3 takes 8\.9 or above"):
        check_float8(device("gpu", "NVIDIA A100-SXM4-80GB", compute_capability="8.0"))


def test_errors_say_what_does_not_fit():
    topk = choices(T)
    for plan in (plan_capacity, plan_dropless):
        with pytest.raises(
            ValueError, match=rf"{plan.__name__}\(\) parameter payload='fp8' .*'plain', 'float8'"
        ):
            plan(topk, E, payload="fp8")
    x, w = np.ones((6, 4), np.float32), np.ones((3, 5, 2), np.float32)
    sizes = np.array([1, 2, 3], np.int32)
    with pytest.raises(
        ValueError, match=r"rows \(6, 4\) in 3 groups ask for w of shape \(3, 4, F\), got \(3, 5, 2\)"
    ):
        float8_matmul(x, w, sizes)
    with pytest.raises(ValueError, match="rows are float32 and w bfloat16; they must be alike"):
        float8_matmul(x, np.ones((3, 4, 2), jnp.bfloat16), sizes)
