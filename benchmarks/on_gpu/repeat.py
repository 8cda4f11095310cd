"""Whether a step gives the same bits when it is run again: a small model of DeepSeek-V2's kind, by leaves."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import models
from benchmarks.on_gpu.bench import Bench
from dualpipe_jax import make_mesh
from dualpipe_jax.engine import Pipeline
from dualpipe_jax.schedule import one_f_one_b

TRIES = 4


def repeat(bench: Bench) -> None:
    """Gradients of one step, again and again, with the flag that this process was started with."""
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
        grads = bench.time(f"{dispatch}: step", pipeline.value_and_grad, params, batch, flags=flags)
        if bench.compiles_only:
            continue
        run = jax.jit(pipeline.value_and_grad)
        seen = [jax.device_get(run(params, batch)[1]) for _ in range(TRIES)]
        del grads
        differ = sorted(
            {
                jax.tree_util.keystr(path)
                for other in seen[1:]
                for (path, a), b in zip(
                    jax.tree_util.tree_leaves_with_path(seen[0]), jax.tree.leaves(other), strict=True
                )
                if a.dtype != jax.dtypes.float0 and not _same(a, b)
            }
        )
        total = len(jax.tree.leaves(seen[0]))
        bench.say(
            f"{dispatch}: leaves that differ", number=len(differ), of=total, names=differ[:40], flags=flags
        )


def _same(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()
