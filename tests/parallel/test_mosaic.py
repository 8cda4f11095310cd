"""The grouped matmul's kernels for Hopper and Blackwell GPUs, and what those in Triton have in common with them.

They run on such GPUs only. What runs here: their padding and masks, around plain JAX that computes, tile by tile, what
they write (NaN where they write nothing); the kernels themselves in Pallas' simulator of a GPU, whose newer version
finds races as well; their traces, in which the split must find them; and their compilation for an H100 and a B200,
where the compiler is installed.
"""

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dualpipe_jax.inspect.target import MissingCompiler, Target
from dualpipe_jax.parallel import blackwell_tiles, hopper_tiles, mosaic, triton
from dualpipe_jax.parallel.expert_groups import grouped_matmul
from dualpipe_jax.parallel.float8 import Tiled
from dualpipe_jax.parallel.float8_matmul import float8_matmul
from dualpipe_jax.parallel.group_rows import nonempty_groups
from dualpipe_jax.split import split_backward
from tests.jaxprs import named
from tests.parallel.test_expert_groups import by_groups, gradients_by_groups
from tests.simulated_gpu import simulated

CASES = {
    "as they are": (256, 128, 256, (100, 28, 128)),
    "empty groups": (200, 128, 128, (0, 30, 0, 0, 64, 0)),
    "all empty": (128, 128, 128, (0, 0)),
    "fewer rows than a tile": (5, 128, 128, (2, 1)),
    "narrow widths": (300, 100, 72, (10, 200, 5)),
    "blocks that begin and end in a group": (192, 128, 128, (63, 1, 64, 2)),
}
"""Rows, widths and sizes; rows past them are NaN."""


def arrays(rows, dim, width, sizes, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    x, w, dy = (rng.normal(size=s) for s in ((rows, dim), (len(sizes), dim, width), (rows, width)))
    x[sum(sizes) :], dy[sum(sizes) :] = np.nan, np.nan
    return *(jnp.asarray(a, dtype) for a in (x, w, dy)), jnp.asarray(sizes, jnp.int32)


def value_and_gradients(x, w, dy, sizes, kernel="hopper", **how):
    y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, kernel=kernel, **how), x, w)
    return y, *pull(dy)


def check_values_and_gradients(got, given, **tolerance):
    """Against those of a loop over groups, in float64."""
    x, w, dy = (np.asarray(a, np.float64) for a in given[:3])
    sizes = np.asarray(given[3])
    exact = by_groups(x, w, sizes), *gradients_by_groups(x, w, sizes, dy)
    for found, wanted in zip(got, exact, strict=True):
        assert found.dtype == given[0].dtype
        np.testing.assert_allclose(np.asarray(found, np.float64), wanted, **tolerance)


CAPABILITY = jax.devices()[0].compute_capability if jax.default_backend() == "gpu" else "none"
ON = {"9.0": "hopper", "10.0": "blackwell"}.get(CAPABILITY)
SIMULATED = [
    "hopper",
    pytest.param(
        "blackwell",
        marks=pytest.mark.skipif(
            jax.__version_info__ < (0, 12),
            reason="jax 0.10's simulator knows no Blackwell, 0.11's wants each warpgroup to wait for each barrier",
        ),
    ),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"kernel": "hopper", "interpret": True}, id="emulated"),
        pytest.param(
            {"kernel": ON},
            marks=pytest.mark.skipif(ON is None, reason="needs an H100, H200, B200 or GB200"),
            id="on a GPU",
        ),
    ],
)
def test_values_and_gradients_are_those_of_a_loop_over_groups(case, how):
    given = arrays(*CASES[case])
    got = jax.jit(functools.partial(value_and_gradients, **how))(*given)
    check_values_and_gradients(got, given, rtol=2**-7, atol=0.05)


@pytest.mark.parametrize("rows, sizes", [(128, (0, 2, 0, 3, 1, 0)), (200, (70, 0, 1, 57, 64, 3))])
def test_the_kernel_of_few_rows_multiplies_each_group_by_its_own_matrix(rows, sizes, monkeypatch):
    """Matrices of groups without rows are NaN here, and so are rows of no group, which it leaves as they are."""
    monkeypatch.setattr(hopper_tiles, "SMS", 3)
    x, w, _, sizes_G = arrays(rows, 128, 256, sizes)
    filled = np.asarray(sizes) > 0
    w = jnp.where(filled[:, None, None], w, jnp.nan)
    run = functools.partial(mosaic._product_of_few_rows, num_read=int(filled.sum()))
    got = simulated(run, x, w, sizes_G, races=True)
    wanted = by_groups(np.asarray(x, np.float64), np.asarray(w, np.float64), np.asarray(sizes))
    count = sum(sizes)
    np.testing.assert_allclose(np.asarray(got, np.float64)[:count], wanted[:count], rtol=2**-7, atol=0.05)


@pytest.mark.thin(3)
@pytest.mark.parametrize("kernel", SIMULATED)
@pytest.mark.parametrize(
    "rows, sizes, transpose",
    [
        (256, (100, 0, 28, 127), False),
        (256, (100, 0, 28, 127), True),
        (200, (0, 130), False),
        (128, (0, 0), True),
    ],
)
def test_the_kernel_of_many_rows_multiplies_each_group_by_its_own_matrix(
    rows, sizes, transpose, kernel, monkeypatch
):
    """What it reads past the groups is NaN here, where it writes no row. A tile has more steps than there are slots."""
    monkeypatch.setattr(mosaic.TILES[kernel], "SMS", 2)
    x, w, dy, sizes_G = arrays(rows, 384, 384, sizes)
    run = functools.partial(mosaic._product_of_many_rows, tiles=mosaic.TILES[kernel], transpose=transpose)
    got = simulated(run, dy if transpose else x, w, sizes_G, races=True)
    given, matrices = (np.asarray(a, np.float64) for a in (dy if transpose else x, w))
    wanted = by_groups(given, matrices.swapaxes(1, 2) if transpose else matrices, np.asarray(sizes))
    count = sum(sizes)
    np.testing.assert_allclose(np.asarray(got, np.float64)[:count], wanted[:count], rtol=2**-7, atol=0.05)


@pytest.mark.parametrize(
    "rows, width, sizes", [(256, 384, (100, 0, 28, 127)), (200, 256, (0, 130)), (128, 128, (0, 0))]
)
def test_the_kernel_of_eight_bits_scales_what_each_128_numbers_give(rows, width, sizes, monkeypatch):
    """Five blocks of 128 are more than there are slots. What it reads past the groups is NaN in part."""
    monkeypatch.setattr(hopper_tiles, "SMS", 2)
    rng = np.random.default_rng(0)
    shapes = (rows, 640), (len(sizes), width, 640)
    x, w = (np.asarray(rng.normal(size=shape), ml_dtypes.float8_e4m3fn) for shape in shapes)
    x[sum(sizes) :: 3] = np.nan
    scales = (rows, 5), (len(sizes), width // 128, 5)
    x_scales, w_scales = (np.exp2(rng.integers(-9, 9, shape)).astype(np.float32) for shape in scales)
    given = Tiled(x, x_scales), Tiled(w, w_scales), jnp.asarray(sizes, jnp.int32)
    got = simulated(functools.partial(mosaic.scaled_product, dtype=jnp.bfloat16), *given, races=True)
    assert got.dtype == jnp.bfloat16
    wanted, largest = np.zeros((rows, width)), np.zeros((rows, width))
    for group, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        mine = slice(end - size, end)
        for k in range(5):
            block = slice(128 * k, 128 * (k + 1))
            left = x[mine, block].astype(np.float64) * x_scales[mine, k, None]
            right = w[group, :, block].astype(np.float64) * np.repeat(w_scales[group, :, k], 128)[:, None]
            wanted[mine] += left @ right.T
            largest[mine] += np.abs(left) @ np.abs(right).T
    assert np.all(np.abs(np.asarray(got, np.float64) - wanted) <= 2**-8 * np.abs(wanted) + 1e-6 * largest)


def test_a_hopper_multiplies_in_eight_bits_forward_and_for_rows():
    """Equal groups, too; the matrices' gradient alone is a product of 16 bits."""
    types = (
        jax.ShapeDtypeStruct((2, 256, 512), jnp.bfloat16),
        jax.ShapeDtypeStruct((2, 128, 256), jnp.bfloat16),
    )
    plan = split_backward(lambda w, x: float8_matmul(x, w, kernel="hopper")).trace(*types)

    def calls(part):
        kernels = [node for node in getattr(plan.programs, part).equations if node.flops]
        return [(node.outputs[0].shape, str(node.inputs[4].dtype)) for node in kernels]

    assert calls("forward") == [((256, 512), "float8_e4m3fn")]
    assert calls("input") == [((256, 256), "float8_e4m3fn")]
    assert plan.flops[2] == plan.flops[3] == plan.flops[0] == 2 * 256 * 256 * 512


@pytest.mark.parametrize("kernel", SIMULATED)
@pytest.mark.parametrize("rows, sizes", [(256, (100, 0, 28, 127)), (192, (63, 1, 64, 2)), (128, (0, 0))])
def test_the_kernel_of_gradients_adds_to_the_sum_so_far(rows, sizes, kernel, monkeypatch):
    """An odd number of tiles' halves, and NaN in what it reads past the groups."""
    monkeypatch.setattr(mosaic.TILES[kernel], "SMS", 2)
    x, _, dy, sizes_G = arrays(rows, 128, 384, sizes)
    so_far = jnp.asarray(np.random.default_rng(1).normal(size=(len(sizes), 128, 384)), jnp.float32)
    got = simulated(
        functools.partial(mosaic.add_gradient, mosaic.TILES[kernel]), x, dy, sizes_G, so_far, races=True
    )
    ends = np.cumsum(sizes)
    for group, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        mine = slice(end - size, end)
        own = np.asarray(x, np.float64)[mine].T @ np.asarray(dy, np.float64)[mine]
        np.testing.assert_allclose(got[group], so_far[group] + own, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows, sizes", [(6, (1, 0, 2, 0, 3)), (96, (96,)), (3, (0, 0, 0))])
def test_groups_that_have_rows_come_first(rows, sizes):
    most, ends = min(rows, len(sizes)), np.cumsum(sizes)
    found = np.stack(nonempty_groups(jnp.asarray(sizes, jnp.int32), most), axis=1).tolist()
    wanted = [[g, ends[g] - size, ends[g]] for g, size in enumerate(sizes) if size]
    assert found == wanted + [[0, 0, 0]] * (most - len(wanted))


@pytest.mark.parametrize(
    "gradient",
    [
        functools.partial(mosaic.gradient, hopper_tiles, emulate=True),
        functools.partial(triton.gradient, interpret=True),
    ],
    ids=["hopper", "triton"],
)
def test_gradients_of_matrices_are_sums_in_float32(gradient):
    """A bfloat16 keeps 8 bits: 1 + 2^-10 is lost in it."""
    x = jnp.ones((1024, 128), jnp.bfloat16)
    dy = jnp.zeros((1024, 128), jnp.bfloat16).at[0].set(1).at[1].set(2.0**-10)
    found = gradient(x, dy, jnp.asarray([1024], jnp.int32))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, np.full((1, 128, 128), 1 + 2.0**-10))


@pytest.mark.parametrize("kernel", mosaic.TILES)
def test_it_takes_sixteen_bits(kernel):
    rows, w, sizes = jnp.ones((8, 4)), jnp.ones((1, 4, 4)), jnp.asarray([8])
    with pytest.raises(
        TypeError, match=f"kernel '{kernel}' takes bfloat16 and float16, not float32; convert, or use"
    ):
        grouped_matmul(rows, w, sizes, kernel=kernel)


def stage(params, x, kernel):
    """Two groups of rows through a matrix each, and something that dx needs the result of."""
    return jnp.tanh(grouped_matmul(x, params["w"], jnp.asarray([100, 156], jnp.int32), kernel=kernel))


@pytest.mark.parametrize("kernel", ["hopper", "blackwell", "triton"])
def test_a_kernels_weight_gradient_is_w(kernel):
    """Its loops run over axes of their own, which are nobody's collectives; its FLOPs are counted."""
    types = (
        {"w": jax.ShapeDtypeStruct((2, 128, 256), jnp.bfloat16)},
        jax.ShapeDtypeStruct((256, 128), jnp.bfloat16),
    )
    plan = split_backward(functools.partial(stage, kernel=kernel)).trace(*types)
    product = 2 * 256 * 128 * 256
    assert plan.flops == (product, 2 * product, product, product)

    def calls(part):
        return [node for node in getattr(plan.programs, part).equations if node.flops]

    made = {part: [call.outputs[0].shape for call in calls(part)] for part in ("forward", "input", "weight")}
    assert made == {"forward": [(256, 256)], "input": [(256, 128)], "weight": [(2, 128, 256)]}
    assert [value.shape for value in plan.stash] == [
        (256, 256)
    ]  # what W waits with: the gradient of the products


@pytest.mark.parametrize(
    "kernel, primitive, traced",
    [
        ("hopper", "mpmd_map", ("jaxprs", "meshes")),
        ("blackwell", "mpmd_map", ("jaxprs", "meshes")),
        ("triton", "pallas_call", ("jaxpr",)),
    ],
)
def test_a_program_holds_a_kernel_traced_once(kernel, primitive, traced):
    """However often it calls it: one of 64 groups takes a second to lower."""
    x, w, _, sizes = arrays(256, 128, 128, (100, 156))

    def twice(x, w):
        for _ in range(2):
            x = grouped_matmul(x, w, sizes, kernel=kernel)
        return x

    first, second = named(jax.make_jaxpr(twice)(x, w).jaxpr, primitive)
    assert all(first.params[name] is second.params[name] for name in traced)


@pytest.mark.parametrize(
    ("gradient", "primitive"),
    [
        (functools.partial(mosaic.gradient, hopper_tiles), "mpmd_map"),
        (functools.partial(mosaic.gradient, blackwell_tiles), "mpmd_map"),
        (triton.gradient, "pallas_call"),
    ],
    ids=["hopper", "blackwell", "triton"],
)
def test_a_gradient_is_written_in_the_place_of_the_sum_that_it_is_added_to(gradient, primitive):
    """Or a step would hold and copy a second one of all experts."""
    x, _, dy, sizes = arrays(256, 128, 128, (100, 156))
    (call,) = named(jax.make_jaxpr(gradient)(x, dy, sizes).jaxpr, primitive)
    ((operand, result),) = dict(call.params["input_output_aliases"]).items()
    assert call.invars[operand].aval.shape == call.outvars[result].aval.shape == (2, 128, 128)


def test_few_rows_are_not_filled_up_to_a_whole_tile():
    """A product of 64 rows at once is half as high as others."""
    x, w, _, sizes = arrays(12, 128, 256, (2, 0, 7))
    (call,) = named(
        jax.make_jaxpr(functools.partial(mosaic.product, hopper_tiles))(x, w, sizes).jaxpr, "mpmd_map"
    )
    assert (64, 128) in [var.aval.shape for var in call.invars]


def kernels_compiled(target, kernel):
    """How many of ours each case calls."""
    here = jax.sharding.SingleDeviceSharding(Target.parse(target).devices()[0])
    found = []
    for case in ("as they are", "narrow widths", "fewer rows than a tile"):
        given = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here) for a in arrays(*CASES[case])]
        run = jax.jit(functools.partial(value_and_gradients, kernel=kernel))
        found.append(run.lower(*given).compile().as_text().count('custom_call_target="mosaic_gpu'))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("target, kernel", [("h100:1x1", "hopper"), ("b200:1x1", "blackwell")])
def test_they_compile_for_a_gpu_that_is_not_here(target, kernel):
    """In a process of its own: in one, Mosaic's compiler knows the first kind of GPU only."""
    try:
        Target.parse(target).check_compiler()
    except MissingCompiler as error:
        pytest.skip(str(error))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(kernels_compiled, target, kernel).result() == [3, 3, 3]
