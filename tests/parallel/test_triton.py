"""The grouped matmul's kernels in Triton: in Pallas' interpreter, against a loop over groups; and compiled for GPUs
that are not here, where the compiler is installed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dualpipe_jax.inspect import read
from dualpipe_jax.inspect.roofline import flops
from dualpipe_jax.inspect.target import MissingCompiler, Target
from dualpipe_jax.parallel import triton
from dualpipe_jax.parallel.expert_groups import grouped_matmul
from dualpipe_jax.parallel.group_rows import group_tiles
from models.kernels import this_gpu_kind
from tests.jaxprs import named
from tests.parallel import test_mosaic
from tests.parallel.test_mosaic import CASES, arrays, check_values_and_gradients

ON_GPU = jax.default_backend() == "gpu" and float(jax.devices()[0].compute_capability) >= 8

value_and_gradients = functools.partial(test_mosaic.value_and_gradients, kernel="triton")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    "interpreted",
    [True, pytest.param(False, marks=pytest.mark.skipif(not ON_GPU, reason="needs a GPU, from the A100 on"))],
)
def test_values_and_gradients_are_those_of_a_loop_over_groups(case, dtype, interpreted):
    given = arrays(*CASES[case], dtype)
    with jax.default_matmul_precision("highest"):
        got = jax.jit(functools.partial(value_and_gradients, interpret=interpreted))(*given)
    tolerance = dict(rtol=2**-7, atol=0.05) if dtype == jnp.bfloat16 else dict(rtol=1e-5, atol=1e-4)
    check_values_and_gradients(got, given, **tolerance)


def test_values_are_the_same_where_jax_has_64_bits():
    x, w, sizes = jnp.ones((4, 8)), jnp.arange(16.0).reshape(2, 8, 1), jnp.array([1, 2], jnp.int32)
    with jax.enable_x64(True):
        y = triton.product(x, w, sizes, interpret=True)
    np.testing.assert_array_equal(y[:, 0], [28, 92, 92, 0])


@pytest.mark.parametrize("tile", [1, 4, 16])
@pytest.mark.parametrize("sizes", [(3, 0, 5, 4), (0, 0, 0), (12,), (0, 1, 11), (5, 0, 0)])
def test_each_groups_rows_are_walked_once(tile, sizes):
    num_rows, ends = 12, np.cumsum(sizes)
    found = np.stack(group_tiles(jnp.asarray(sizes, jnp.int32), tile, num_rows), axis=1)
    walked = [
        (int(group), row)
        for group, block, start, end in found
        for row in range(block * tile, block * tile + tile)
        if start <= row < end
    ]
    assert sorted(walked) == [
        (g, row) for g, size in enumerate(sizes) for row in range(ends[g] - size, ends[g])
    ]


def test_every_tile_of_the_result_is_made_once():
    for high, wide, most in ((1, 1, 8), (7, 3, 2), (8, 5, 8), (9, 4, 8)):
        places = [
            tuple(map(int, triton._swizzled(jnp.int32(n), high, wide, most))) for n in range(high * wide)
        ]
        assert sorted(places) == [(row, column) for row in range(high) for column in range(wide)]


def test_over_devices_each_multiplies_its_own():
    """Pallas' interpreter does without ``check_vma``; what is compiled has it."""
    mesh, ours = jax.sharding.Mesh(jax.devices()[:2], ("ep",)), PartitionSpec("ep")
    given = arrays(64, 16, 32, (20, 0, 44), jnp.float32)
    two = [jnp.concatenate([a, a[::-1]]) for a in given]

    def everywhere(**how):
        run = functools.partial(value_and_gradients, **how)
        checked = not how
        return jax.shard_map(run, mesh=mesh, in_specs=ours, out_specs=ours, check_vma=checked)

    traced = jax.make_jaxpr(everywhere())(*two).jaxpr
    made = [call.outvars[0].aval for call in named(traced, "pallas_call")]
    assert [one.manual_axis_type.varying for one in made] == 3 * [{"ep"}]
    found = jax.jit(everywhere(interpret=True))(*two)
    for k in range(2):
        wanted = value_and_gradients(*(a[::-1] if k else a for a in given), interpret=True)
        for both, own in zip(found, wanted, strict=True):
            np.testing.assert_allclose(jnp.split(both, 2)[k], own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision, exact", [(None, False), ("tensorfloat32", False), ("highest", True)])
def test_float32_is_multiplied_as_jax_was_told_to(precision, exact):
    x, w, _, sizes = arrays(32, 16, 16, (32,), jnp.float32)
    with jax.default_matmul_precision(precision):
        jaxpr = jax.make_jaxpr(lambda x, w: grouped_matmul(x, w, sizes, kernel="triton"))(x, w).jaxpr
    (call,) = named(jaxpr, "pallas_call")
    (dot,) = named(call.params["jaxpr"], "dot_general")
    assert (dot.params["precision"][0] == jax.lax.Precision.HIGHEST) is exact


def test_without_triton_there_is_a_word_and_another_kernel(monkeypatch):
    monkeypatch.setattr(triton, "plgpu", None)
    x, w, _, sizes = arrays(32, 16, 16, (32,), jnp.float32)
    with pytest.raises(ValueError, match=f"which jax {jax.__version__} has no more; use 'ragged'"):
        grouped_matmul(x, w, sizes, kernel="triton")
    device = jax.sharding.AbstractDevice("NVIDIA A100-SXM4-80GB", 108, "gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        assert this_gpu_kind(jnp.bfloat16) == "old_gpu"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("target", ["a100", "h100", "b200"])
def test_they_compile_for_a_gpu_that_is_not_here(target):
    try:
        devices = Target.parse(f"{target}:1x1").devices()
    except MissingCompiler as error:
        pytest.skip(str(error))
    everywhere = PartitionSpec()
    mesh = jax.sharding.Mesh(devices, ("ep",))  # it tells Pallas for which GPU
    run = jax.jit(jax.shard_map(value_and_gradients, mesh=mesh, in_specs=everywhere, out_specs=everywhere))
    for case in ("as they are", "narrow widths", "fewer rows than a tile"):
        for dtype in (jnp.bfloat16, jnp.float32):
            here = NamedSharding(mesh, everywhere)
            given = [
                jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here) for a in arrays(*CASES[case], dtype)
            ]
            module = read(run.lower(*given).compile())
            entry = module.computations[module.entry]
            calls = [one for one in entry if one.target == "__gpu$xla.gpu.triton"]
            rows, dim, width, _ = CASES[case]
            assert [flops(module, entry, call) for call in calls] == 3 * [2 * rows * dim * width], case
