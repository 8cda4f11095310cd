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
            exponent = -126
            while 448.0 * 2.0**exponent < float(finite.max(initial=0)):
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


def product_by_blocks(a, b):
    """Sum over blocks of 128 of what they sum over, in float64; a and b in eight bits already."""
    blocks = range(0, a.shape[1], 128)
    return sum(a[:, k : k + 128].astype(np.float64) @ b[k : k + 128].astype(np.float64) for k in blocks)


def matmul_by_loops(x, w, dy):
    """y, dx and dw of one group, each operand in its tiles."""
    x8, w8 = by_loops(x, ROW)[2], by_loops(w, SQUARE)[2]
    dx = product_by_blocks(by_loops(dy, ROW)[2], w8.T)
    dw = product_by_blocks(by_loops(x8, COLUMN)[2].T, by_loops(dy, COLUMN)[2])
    return product_by_blocks(x8, w8), dx, dw


D, F = 200, 150
MATRICES = 3


def operands(num_rows, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (num_rows, D), (MATRICES, D, F), (num_rows, F)
    return [(rng.normal(size=s) * np.exp(rng.normal(size=s))).astype(np.float32) for s in shapes]


def products(x, w, dy, sizes=None):
    y, pull = jax.vjp(lambda x, w: float8_matmul(x, w, sizes), x, w)
    return y, *pull(dy)


jitted = jax.jit(products)


def close(got, wanted):
    for g, w in zip(got, wanted, strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=2e-6 * np.abs(w).max())


def test_three_products_of_equal_groups():
    x, w, dy = operands(MATRICES * 140)
    x, dy = x.reshape(MATRICES, 140, D), dy.reshape(MATRICES, 140, F)
    found = jitted(x, w, dy)
    wanted = [np.stack(parts) for parts in zip(*map(matmul_by_loops, x, w, dy), strict=True)]
    close(found, wanted)
    assert [a.shape for a in wanted] == [dy.shape, x.shape, w.shape]


@pytest.mark.parametrize("sizes", [(150, 0, 130), (1, 200, 129), (0, 0, 0), (330, 0, 0)])
def test_three_products_of_unequal_groups(sizes):
    """Rows past the last group are ignored, whatever they are."""
    x, w, dy = operands(330, 1)
    filled, ends = sum(sizes), np.cumsum(sizes)
    x[filled:], dy[filled:] = np.nan, np.inf
    wanted = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    for g, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        rows = slice(end - size, end)
        if size:
            wanted[0][rows], wanted[1][rows], wanted[2][g] = matmul_by_loops(x[rows], w[g], dy[rows])
    close(jitted(x, w, dy, jnp.asarray(sizes, jnp.int32)), wanted)


def test_experts_take_the_groups_that_arrived():
    """Without a gradient."""
    handle = jax.jit(plan_of("dropless", axis_name=None))(choices(T))
    x, w = operands(T * K, 3)[0], np.resize(operands(1, 4)[1], (E, D, F))
    found = jax.jit(functools.partial(expert_matmul, kernel="float8"))(x, w, handle)
    groups = zip(np.split(x, np.cumsum(handle.group_sizes_L)[:-1]), w, strict=True)
    wanted = [
        product_by_blocks(by_loops(rows, ROW)[2], by_loops(matrix, SQUARE)[2]) for rows, matrix in groups
    ]
    close([found], [np.concatenate(wanted)])


def test_bfloat16_in_bfloat16_out():
    x, w, dy = (jnp.asarray(a, jnp.bfloat16) for a in operands(20, 2))
    found = jax.eval_shape(products, x, w, dy, jnp.asarray([5, 6, 9], jnp.int32))
    assert [a.dtype for a in found] == [jnp.bfloat16] * 3


# ------------------------------------------------------------------------------------------ refusals


def device(platform, kind, **more):
    return types.SimpleNamespace(platform=platform, device_kind=kind, **more)


def test_devices_without_the_type_are_refused():
    for matmul in (False, True):
        check_float8(jax.devices()[0], matmul=matmul)
        check_float8(device("gpu", "NVIDIA H100 80GB HBM3", compute_capability="9.0"), matmul=matmul)
        check_float8(device("gpu", "NVIDIA L4", compute_capability="8.9"), matmul=matmul)
        check_float8(device("tpu", "TPU7x"), matmul=matmul)
        with pytest.raises(
            ValueError, match=r"A100.* has compute capability 8\.0, and e4m3 takes 8\.9 or above"
        ):
            check_float8(device("gpu", "NVIDIA A100-SXM4-80GB", compute_capability="8.0"), matmul=matmul)
    check_float8(device("tpu", "TPU v5"), matmul=False)
    with pytest.raises(ValueError, match="matrix units of TPU v5 take no e4m3.*Payloads may be float8 there"):
        check_float8(device("tpu", "TPU v5"), matmul=True)


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
        ValueError, match=r"x \(6, 4\) in 3 groups asks for w of shape \(3, 4, F\), got \(3, 5, 2\)"
    ):
        float8_matmul(x, w, sizes)
    with pytest.raises(ValueError, match="x is float32 and w bfloat16; they must be alike"):
        float8_matmul(x, np.ones((3, 4, 2), jnp.bfloat16), sizes)
