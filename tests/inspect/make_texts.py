"""Compile the small programs whose texts the tests of ``dualpipe_jax.inspect`` read.

    python tests/inspect/make_texts.py tpu      # in an environment with jax[tpu]
    python tests/inspect/make_texts.py cuda     # with jax[cuda13]
    python tests/inspect/make_texts.py cpu

No device is needed. The texts were made with jax 0.10.2 and libtpu 0.0.42.1; what the compiler finds may change
with its version, so after a new run look at the tests that count instructions.
"""

import contextlib
import functools
import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from dualpipe_jax.inspect.gpus import GPUS  # noqa: E402
from dualpipe_jax.inspect.scheduler import STATISTICS_ENVIRONMENT  # noqa: E402

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ.update(
    STATISTICS_ENVIRONMENT,
    TPU_SKIP_MDS_QUERY="1",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_WORKER_ID="0",
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

NUM_EP, TOKENS, WIDTH, SLOTS, TICKS = 4, 1024, 4096, 3, 5
ASYNC = {"xla_tpu_enable_async_all_to_all": "true"}
SPARSE_CORE = {"xla_tpu_enable_sparse_core_collective_offload_dense_all_to_all": "true"}
KEPT = "latency_hiding_scheduler.cc"


def main(platform):
    if platform == "tpu":
        v5e, v5p = tpu_mesh("v5e:4x4"), tpu_mesh("v5p:2x2x4")
        log = HERE / "texts" / "v5e_pair.log"
        with stderr_to(log):
            save("v5e_pair", compiled(pair, v5e, ASYNC))
        said = log.read_text(errors="replace").splitlines()
        lines = [re.sub(r"^\S+ \S+ +\S+ ", "", line) for line in said if KEPT in line]
        log.write_text("\n".join(lines) + "\n")
        save("v5e_sync", compiled(pair, v5e, {}))
        save("v5e_ticks", compiled(ticks, v5e, ASYNC))
        save("v5e_copied_pool", compiled(copied_pool, v5e, {}))
        save("v5p_sparse_core", compiled(pair, v5p, SPARSE_CORE))
    elif platform == "cuda":
        save("h100_pair", compiled(pair, cuda_mesh("1x1x8"), {"xla_gpu_autotune_level": 0}))
    elif platform == "cpu":
        save("cpu_ticks", compiled(ticks, mesh_of(jax.devices()), {}))
    else:
        raise SystemExit(__doc__)


@contextlib.contextmanager
def stderr_to(path):
    """What C++ prints, too."""
    kept = os.dup(2)
    with open(path, "w") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def save(name, program):
    """The text, less its tables of source lines."""
    text = program.as_text()
    text = re.sub(r"\n+(FileNames|FunctionNames|FileLocations|StackFrames)\n(\d+ .*\n)*", "\n", text)
    text = re.sub(r" stack_frame_id=\d+", "", text)
    (HERE / "texts" / f"{name}.hlo").write_text(text)
    print(name, len(text))


def mesh_of(devices):
    return Mesh(np.array(devices).reshape(-1, NUM_EP), ("pp", "ep"))


def tpu_mesh(topology):
    with stderr_to(os.devnull):
        return mesh_of(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)


def cuda_mesh(topology):
    import jax_plugins.xla_cuda13  # noqa: F401

    target = GPUS["h100"].target_config()
    return mesh_of(
        topologies.get_topology_desc("", platform="cuda", target_config=target, topology=topology).devices
    )


def compiled(function, mesh, options):
    """Each device's own arguments stand along a leading dimension over all devices."""
    each = PartitionSpec(("pp", "ep"))
    place = NamedSharding(mesh, each)
    shapes = [jax.ShapeDtypeStruct((mesh.size, *s.shape), s.dtype, sharding=place) for s in function.shapes()]

    def on_device(*arguments):
        results = function(mesh.shape["pp"], *(a[0] for a in arguments))
        return jax.tree.map(lambda a: a[None], results)

    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=each, out_specs=each, check_vma=False)
    return jax.jit(mapped).lower(*shapes).compile(compiler_options=options)


def takes(*shapes):
    """Give a program the shapes of its arguments on one device."""

    def mark(function):
        function.shapes = lambda: [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        return function

    return mark


def exchange(x):
    return lax.all_to_all(x.reshape(NUM_EP, -1, WIDTH), "ep", 0, 0).reshape(x.shape)


def stage(params, x):
    """Dense layer, dispatch, experts, combine: as little of a mixture of experts as can overlap."""
    dense, experts = params
    return exchange(exchange(x @ dense) @ experts)


@takes((WIDTH, WIDTH), (WIDTH, WIDTH), (TOKENS, WIDTH), (TOKENS, WIDTH), (TOKENS, WIDTH), (TOKENS, WIDTH))
def pair(num_pp, dense, experts, x, old_x, old_arrived, dy):
    """Forward of one microbatch, backward of another with what its forward saved, and a send."""
    params = dense, experts
    y = jax.vjp(functools.partial(stage, params), x)[0]
    # The backward reads the saved values, not a forward of its own.
    _, back = jax.vjp(lambda e, a: exchange(a @ e), experts, old_arrived)
    d_experts, d_arrived = back(dy)
    _, back = jax.vjp(lambda d, x: exchange(x @ d), dense, old_x)
    d_dense, dx = back(d_arrived)
    return send(num_pp, y), d_experts, d_dense, dx


def send(num_pp, x):
    return lax.ppermute(x, "pp", [(k, (k + 1) % num_pp) for k in range(num_pp)])


@takes((WIDTH, WIDTH), (TOKENS, WIDTH))
def ticks(num_pp, weight, x):
    """A scan whose ticks send what the last one made, and work behind a guard of zero or one trips."""

    def tick(made, wanted):
        arrived = send(num_pp, made)

        def trip(i, state):
            i, state, w = lax.optimization_barrier((i, state, weight))
            with jax.named_scope("guard"):
                return jax.vjp(lambda x: x @ w, state)[0]

        return lax.fori_loop(0, wanted, trip, made) + arrived, None

    return lax.scan(tick, x, jnp.arange(TICKS, dtype=jnp.int32) % 2)[0]


@takes((SLOTS, TOKENS, WIDTH), (TOKENS, WIDTH))
def copied_pool(num_pp, pool, x):
    """A loop that reads a slot of the old pool after it has written the new one: the pool is copied."""
    del num_pp

    def tick(carry, slot):
        pool, x = carry
        new = lax.dynamic_update_index_in_dim(pool, x, slot, 0)
        x, new = lax.optimization_barrier((x * 2, new))
        later = jnp.where(new[0, 0, 0] > 0, 1, 0)
        return (new, x + lax.dynamic_index_in_dim(pool, later, 0, keepdims=False)), None

    return lax.scan(tick, (pool, x), jnp.arange(TICKS, dtype=jnp.int32) % SLOTS)[0]


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
