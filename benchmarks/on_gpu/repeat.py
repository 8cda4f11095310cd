"""Whether a step gives the same bits when it is run again: a small model of DeepSeek-V2's kind, leaf by leaf."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import models
from benchmarks.on_gpu.bench import Bench
from dualpipe_jax import make_mesh
from dualpipe_jax.engine import Pipeline
from dualpipe_jax.functional import Tree
from dualpipe_jax.schedule import one_f_one_b

TRIES = 4


def repeat(bench: Bench) -> None:
    """Compute the gradients of one step several times, with the flags that this process was started with."""
    import os

    numbers = models.v2_lite(num_layers=3, num_dense_layers=1)
    for dispatch in ("dropless", "capacity"):
        factor = 1.25 if dispatch == "capacity" else None
        model = models.deepseek(numbers, 1, dispatch=dispatch, capacity_factor=factor, platform="gpu")
        mesh = make_mesh(1, 1, devices=[bench.device])
        pipeline = Pipeline(model.staged, one_f_one_b(1, 4), mesh, compute_dtype=jnp.bfloat16)
        params = bench.made(model.init, jax.random.key(0))
        tokens = np.random.default_rng(1).integers(0, 4096, (4, 2, 1025), np.int32)
        batch = bench.given({"inputs": tokens[..., :-1], "targets": tokens[..., 1:]})
        flags = os.environ.get("XLA_FLAGS", "")
        bench.time(f"{dispatch}: step", pipeline.value_and_grad, params, batch, flags=flags)
        if bench.compiles_only:
            continue
        # What was timed is another program, of other compiler options.
        run = jax.jit(pipeline.value_and_grad)
        first = run(params, batch)[1]
        differ: set[str] = set()
        for _ in range(TRIES - 1):
            differ |= _that_differ(first, run(params, batch)[1])
        total = len(jax.tree.leaves(first))
        bench.say(
            f"{dispatch}: leaves that differ",
            number=len(differ),
            of=total,
            names=sorted(differ)[:40],
            flags=flags,
        )


def _that_differ(first: Tree, second: Tree) -> set[str]:
    """The paths of leaves whose bits differ."""
    paths, leaves = zip(*jax.tree.leaves_with_path(first), strict=True)
    pairs = zip(leaves, jax.tree.leaves(second), strict=True)
    told = [a.dtype != jax.dtypes.float0 and not _same_bits(a, b) for a, b in pairs]
    return {jax.tree_util.keystr(path) for path, differs in zip(paths, told, strict=True) if differs}


@jax.jit
def _same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether all bits are equal, compared on the device: copying gigabytes of gradients to the host takes a minute."""
    words = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
    return jnp.all(lax.bitcast_convert_type(a, words) == lax.bitcast_convert_type(b, words))
