"""Recommended options: what is recommended, and that compilers take it."""

import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from dualpipe_jax.inspect import compiler
from dualpipe_jax.inspect.compiler import recommended_compiler_options, tpu_generation
from dualpipe_jax.inspect.target import DEVICES, Target

CHIPS = {"v4": "2x2x1", "v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2", "tpu7x": "2x2x1", "h100": "1x4"}
QUICK = "v5e", "h100"
PROGRAM = """
import sys
from dualpipe_jax.inspect.compiler import recommended_compiler_options
from dualpipe_jax.inspect.target import Target
target = Target.parse(sys.argv[1])
devices = target.devices()
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from dualpipe_jax.parallel import make_mesh
mesh = make_mesh(1, 4, devices)

def work(x):
    y = jax.lax.all_to_all(x, "ep", 0, 0, tiled=True)
    return y, x @ x

spec = PartitionSpec("ep")
x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
step = jax.jit(jax.shard_map(work, mesh=mesh, in_specs=spec, out_specs=spec))
options = recommended_compiler_options(devices[0].platform, target.generation, ahead_of_time=True)
print(step.lower(x).compile(options).as_text())
"""


def installed(generation):
    target = Target(generation, (1, 1))
    try:
        target.check_compiler()
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize(
    "generation", [g if g in QUICK else pytest.param(g, marks=pytest.mark.slow) for g in CHIPS]
)
def test_compilers_take_the_options_and_make_the_all_to_all_asynchronous(generation):
    if not installed(generation):
        pytest.skip(f"the compiler for {generation} is not installed")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TPU_", "XLA_FLAGS", "JAX_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"{generation}:{CHIPS[generation]}"],
        capture_output=True, text=True, env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "all-to-all-start" in done.stdout or "async-start" in done.stdout or "sparsecore" in done.stdout


def test_cpu_takes_its_options():
    options = recommended_compiler_options(jax.devices()[0].platform)
    assert options == {}
    assert jax.jit(lambda x: x + 1, compiler_options=options)(jnp.float32(1)) == 2


def test_what_each_platform_gets():
    asynchronous = "xla_tpu_enable_async_all_to_all"
    for generation in (*DEVICES, None):
        assert recommended_compiler_options("tpu", generation)[asynchronous] == "true"
    experimental = "xla_tpu_enable_all_experimental_scheduler_features"
    assert experimental in recommended_compiler_options("tpu", "v5p")
    assert experimental not in recommended_compiler_options("tpu", "v5e")
    memory = "xla_tpu_scoped_vmem_limit_kib"
    assert memory in recommended_compiler_options("tpu", "v5p")
    assert memory not in recommended_compiler_options("tpu")
    assert recommended_compiler_options("tpu", "v4") == recommended_compiler_options("tpu")
    assert recommended_compiler_options("gpu") == {}
    for platform in ("gpu", "cuda", "rocm"):
        assert recommended_compiler_options(platform, ahead_of_time=True) == {"xla_gpu_autotune_level": "0"}


def test_a_platform_that_is_not_known():
    message = r"options: platform 'xpu' is none of cpu, .*; pass jax.devices\(\)\[0\]"
    with pytest.raises(ValueError, match=message):
        recommended_compiler_options("xpu")


def test_a_process_for_each_gpu():
    """JAX itself reads which one from there; NCCL 2.26 and CUDA document the others."""
    environment = compiler.gpu_process_environment(3)
    assert environment["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] != "1"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = f"import jax; jax.distributed.initialize('127.0.0.1:{port}', 1, 0)\n"
    program += "print(jax.config.values['jax_cuda_visible_devices'])"
    environ = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ, timeout=120
    )
    assert done.stdout == "3\n", done.stderr


def test_a_process_of_no_number():
    message = "gpu_process_environment: local is -1, must be this process's number"
    with pytest.raises(ValueError, match=message):
        compiler.gpu_process_environment(-1)


def test_naming_the_environment_loads_no_jax():
    """It is too late once JAX is there."""
    program = "import sys, dualpipe_jax; dualpipe_jax.gpu_process_environment(0); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr


def test_generations_of_devices():
    assert tpu_generation("TPU v4") == "v4" and tpu_generation("TPU v6 lite") == "v6e"
    assert tpu_generation("NVIDIA H100 80GB HBM3") is None
    assert {tpu_generation(f"TPU {name}") for name in ("v5 lite", "v5e")} == {"v5e"}
    assert {tpu_generation(f"TPU {name}") for name in ("v5", "v5p")} == {"v5p"}
