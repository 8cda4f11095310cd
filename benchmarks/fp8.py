"""What float8 changes: bytes of the experts' all-to-alls, gradients, and the loss of a short run.

The bytes are counted in compiled programs, forward and backward of a dispatch and a combine of DeepSeek-V3's
width, compiled for this machine's CPU. Gradients are those of the default model at its first step; every
group of leaves is compared with that of the plain model in bfloat16. The runs train the default model on the
default text, on one device.

    scripts/bench fp8 [--steps 60]       # 5 minutes of CPU, 10 with the 250 steps of the default run
"""

import argparse
import os
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import models
from benchmarks.on_trainer.runs import run_trainer
from dualpipe_jax import inspect
from dualpipe_jax.engine.reference import reference_value_and_grad
from dualpipe_jax.inspect.collectives import collectives
from dualpipe_jax.parallel import combine, dispatch, make_mesh, plan_capacity
from dualpipe_jax.parallel.wire import Payload
from models.kernels import MatmulKernel

ARMS: dict[str, tuple[Payload, MatmulKernel]] = {
    "plain": ("plain", "auto"),
    "float8 payload": ("float8", "auto"),
    "float8 payload and matmul": ("float8", "float8"),
}
"""Title -> payload and matmul; all arms have activations in bfloat16."""
GROUPS = ("experts", "gate", "shared_experts", "self_attn", "embed_tokens", "lm_head")


def exchanged(payload, tokens=64, dim=7168, experts=16, top_k=8):
    """The dtype of each all-to-all of the compiled program, and its bytes on one device."""

    def loss(x, weights, topk):
        handle = plan_capacity(topk, experts, axis_name="ep", payload=payload)
        return jnp.sum(jnp.sin(combine(jnp.sin(dispatch(x, handle)), weights, handle)))[None]

    mesh = make_mesh(1, 4)
    run = jax.shard_map(loss, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    shapes = (
        jax.ShapeDtypeStruct((4 * tokens, dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((4 * tokens, top_k), jnp.float32),
        jax.ShapeDtypeStruct((4 * tokens, top_k), jnp.int32),
    )
    module = inspect.read(jax.jit(jax.grad(lambda *args: jnp.sum(run(*args)))).lower(*shapes).compile())
    return [
        (pair.issued.arrays[0].dtype, pair.payload)
        for computation in module.computations.values()
        for pair in collectives(module, computation)
        if pair.kind == "all-to-all"
    ]


def gradients(arm):
    """Gradients of the default model at its first step, on 16 sequences of a module's source text; float64 by path."""
    payload, matmul = ARMS[arm]
    config = models.byte(vocab=256, compute_dtype=jnp.dtype("bfloat16"))
    model = models.deepseek(config, 1, payload=payload, kernels=models.Kernels(matmul=matmul))
    text = np.frombuffer(Path(argparse.__file__).read_bytes()[: 16 * 65], np.uint8).astype(np.int32)
    text = text.reshape(1, 16, 65)
    batch = {"inputs": text[..., :-1], "targets": text[..., 1:]}
    _, grads = jax.jit(reference_value_and_grad(model.staged))(model.init(jax.random.key(0)), batch)
    return {
        jax.tree_util.keystr(path): np.asarray(leaf, np.float64).ravel()
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
        if leaf.dtype != jax.dtypes.float0
    }


def group_of(path):
    """The part of the model that a leaf belongs to."""
    return next((group for group in GROUPS if f"'{group}'" in path), "norms")


def compared(found, wanted):
    """Cosine and ratio of norms of each group of leaves."""
    groups: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for path, leaf in found.items():
        groups.setdefault(group_of(path), []).append((leaf, wanted[path]))
    result = {}
    for group, pairs in groups.items():
        ours, plain = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        norms = np.linalg.norm(ours), np.linalg.norm(plain)
        result[group] = ours @ plain / (norms[0] * norms[1]), norms[0] / norms[1]
    return result


def train(arm, steps, folder):
    """Train a run; return the losses of its steps, and the loss of held-out text after it."""
    payload, matmul = ARMS[arm]
    options = [
        *("--steps", str(steps), "--schedule", "gpipe", "--pp", "1", "--ep", "1", "--microbatches", "1"),
        *("--microbatch-size", "16"),
        *("--precision", "bfloat16", "--dispatch-payload", payload, "--matmul", matmul),
        *("--eval-sequences", "128", "--checkpoint-minutes", "1000"),
    ]
    records = run_trainer(arm.replace(" ", "-"), options, folder)
    heldout = [record["heldout_loss"] for record in records if "heldout_loss" in record]
    return [record["loss"] for record in records if "loss" in record], heldout[-1]


def main():
    """Print three tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="number of steps of each run; 0 for no runs")
    asked = parser.parse_args()
    console = Console(width=120)

    table = Table(
        "payload", "all-to-alls, kind and MiB of a device", "MiB", title="compiled program, width 7168"
    )
    for payload in ("plain", "float8"):
        found = exchanged(payload)
        words = ", ".join(f"{kind} {size / 2**20:.2f}" for kind, size in found)
        table.add_row(payload, words, f"{sum(size for _, size in found) / 2**20:.2f}")
    console.print(table)

    wanted = gradients("plain")
    table = Table("arm", "group of leaves", "cosine", "norm over plain", title="gradients at the first step")
    for arm in list(ARMS)[1:]:
        for group, (cosine, ratio) in compared(gradients(arm), wanted).items():
            table.add_row(arm, group, f"{cosine:.5f}", f"{ratio:.4f}")
    console.print(table)

    if asked.steps:
        with tempfile.TemporaryDirectory() as folder:
            runs = {arm: train(arm, asked.steps, Path(folder)) for arm in ARMS}
        table = Table("step", *ARMS, title="loss, nats a byte")
        for mark in sorted({1, *range(10, asked.steps + 1, 10), asked.steps}):
            table.add_row(str(mark), *(f"{losses[mark - 1]:.3f}" for losses, _ in runs.values()))
        table.add_row("held out", *(f"{heldout:.3f}" for _, heldout in runs.values()))
        console.print(table)


if __name__ == "__main__":
    main()
